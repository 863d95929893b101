"""Another process of this host, and its memory: read and written by the kernel, while that process does what it likes.

Theory of operation. A process is known by its pid only while it lives. So a pidfd is opened first, then the file of
exports is found under /proc and told by its token; as long as the pidfd says that the process lives, the pid has
not become another's. Every piece of a transfer is followed by that look, and a piece after which the process is dead
counts as failed.

Memory of the file of exports is mapped and copied here; the file must be one that cannot be cut off. Any other memory
is copied by `process_vm_readv` and `process_vm_writev`, where the kernel allows it, which is tried once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from monarch import sealed
from monarch.errors import BufferDropped, TransferError
from monarch.onesided.exports import SLOTS, TABLE_BYTES, TOKEN_BYTES, Place, libc, lock_slot, map_shared, unmap
from monarch.onesided.path import NotReachable

_MAPPINGS: Final = 256
_PAGE_MASK: Final = ~(os.sysconf("SC_PAGESIZE") - 1)


class NeighbourGone(Exception):
    """The process has ended."""


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Neighbour:
    """See the module. Thread-safe.

    Attributes:
        no_copying: why memory outside the file of exports cannot be used; "" where it can.
    """

    def __init__(self, place: Place) -> None:
        """Raises: NeighbourGone, NotReachable."""
        self._place = place
        self._lock = threading.Lock()
        self._users: dict[int, int] = {}  # by slot: transfers of this process
        self._mappings: OrderedDict[tuple[int, int], _Mapping] = OrderedDict()
        self._files = _Files(place)
        weakref.finalize(self, self._files.close)
        self._table = (ctypes.c_uint64 * SLOTS).from_address(self._files.table)
        self.no_copying = self._try_copying()
        self.check_alive()

    def _try_copying(self) -> str:
        found = ctypes.create_string_buffer(TOKEN_BYTES)
        try:
            self._copy(libc().process_vm_readv, ctypes.addressof(found), self._place.table, TOKEN_BYTES)
        except TransferError as error:
            return f"{error}{_yama()}"
        return "" if found.raw == self._place.token else "its memory is not where it should be"

    def is_alive(self) -> bool:
        poll = select.poll()  # one object serves one thread
        poll.register(self._files.pidfd, select.POLLIN)
        return not poll.poll(0)

    def check_alive(self) -> None:
        """Raises: NeighbourGone."""
        if not self.is_alive():
            raise NeighbourGone(f"process {self._place.pid} has ended")

    @contextmanager
    def using(self, slot: int, number: int) -> Iterator[None]:
        """Hold a buffer of that process for the block: its memory stays.

        Raises:
            BufferDropped: it is not there any more.
        """
        fd = self._files.exports
        with self._lock:
            if not self._users.get(slot) and not lock_slot(fd, slot, fcntl.F_RDLCK):
                raise BufferDropped("the buffer is being dropped")
            self._users[slot] = self._users.get(slot, 0) + 1
        try:
            if self._table[slot] != number:
                raise BufferDropped("the buffer has been dropped: its memory may be used for other things by now")
            yield
        finally:
            with self._lock:
                self._users[slot] -= 1
                if not self._users[slot]:
                    del self._users[slot]
                    lock_slot(fd, slot, fcntl.F_UNLCK)

    def mapped(self, offset: int, size_bytes: int) -> _Mapping:
        """The pages of its file that have these bytes, mapped here; hold the mapping while its address is used.

        Raises: TransferError, where the file has no such bytes.
        """
        start = offset & _PAGE_MASK
        key = start, offset + size_bytes - start
        with self._lock:
            mapping = self._mappings.get(key)
            if mapping is None:
                if not 0 <= start < offset + size_bytes <= os.fstat(self._files.exports).st_size:
                    raise TransferError(f"process {self._place.pid} shares no {size_bytes} bytes at {offset}")
                mapping = self._mappings[key] = _Mapping(self._files.exports, *key)
                if len(self._mappings) > _MAPPINGS:
                    self._mappings.popitem(last=False)
            else:
                self._mappings.move_to_end(key)
        return mapping

    def read(self, target: int, source: int, size_bytes: int) -> None:
        """Copy from an address of that process to one of this. Raises: TransferError, NeighbourGone."""
        self._copy(libc().process_vm_readv, target, source, size_bytes)

    def write(self, target: int, source: int, size_bytes: int) -> None:
        """Copy from an address of this process to one of that. Raises: TransferError, NeighbourGone."""
        self._copy(libc().process_vm_writev, source, target, size_bytes)

    def _copy(self, call: Any, here: int, there: int, size_bytes: int) -> None:
        done = 0
        while done < size_bytes:
            mine, its = _Iovec(here + done, size_bytes - done), _Iovec(there + done, size_bytes - done)
            count = call(self._place.pid, ctypes.byref(mine), 1, ctypes.byref(its), 1, 0)
            if count < 0 and ctypes.get_errno() == errno.ESRCH:  # known before its pidfd says so
                raise NeighbourGone(f"process {self._place.pid} has ended")
            if count <= 0:
                text = os.strerror(ctypes.get_errno()) if count else "it did not copy anything"
                raise TransferError(f"the kernel does not copy memory of process {self._place.pid}: {text}")
            done += count


class _Mapping:
    """A part of a neighbour's file; unmapped with its last reference."""

    def __init__(self, fd: int, start: int, size_bytes: int) -> None:
        self.start = start
        self.address = map_shared(fd, size_bytes, start)
        weakref.finalize(self, unmap, self.address, size_bytes).atexit = False


class _Files:
    """What is open of a neighbour."""

    def __init__(self, place: Place) -> None:
        self.pidfd = self.exports = -1
        self.table = 0
        try:
            self.pidfd = os.pidfd_open(place.pid)
            self.exports = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
            if os.pread(self.exports, TOKEN_BYTES, 0) != place.token:
                raise ProcessLookupError
            if sealed.sealed_bytes(self.exports) < TABLE_BYTES:
                raise ValueError("it is too short")
            self.table = map_shared(self.exports, TABLE_BYTES, 0)
        except (ProcessLookupError, FileNotFoundError):
            self.close()
            raise NeighbourGone(f"process {place.pid} has ended") from None
        except ValueError as error:
            self.close()
            raise NotReachable(f"the file that process {place.pid} shares is refused: {error}") from None
        except (OSError, AttributeError, MemoryError) as error:
            self.close()
            raise NotReachable(f"process {place.pid} does not let others look into it ({error})") from None

    def close(self) -> None:
        if self.table:
            unmap(self.table, TABLE_BYTES)
        for fd in (self.pidfd, self.exports):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.exports = -1
        self.table = 0


@cache
def no_copying_here() -> str:
    """Why the kernel copies between no two processes, as far as one alone can see it; "" where it may."""
    source, target = ctypes.c_char(b"x"), ctypes.c_char()
    mine, its = (_Iovec(ctypes.addressof(byte), 1) for byte in (target, source))
    if libc().process_vm_readv(os.getpid(), ctypes.byref(mine), 1, ctypes.byref(its), 1, 0) == 1:
        return ""
    return os.strerror(ctypes.get_errno())


def _yama() -> str:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return ""
    return f" (kernel.yama.ptrace_scope is {scope})" if scope != "0" else ""
