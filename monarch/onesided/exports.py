"""What this process lets others read and write. One per process of the operating system, in one anonymous file.

The file (a memfd) has a table first, and behind it the memory that `allocate` gives out. Another process of this host
finds the file under /proc, maps it, and needs nobody's help from then on:

    [token | slot 0 | slot 1 | ...]  [memory of the first allocation]  [of the second] ...

A slot holds the number of the buffer that it stands for, and 0 once that is dropped. Who uses a buffer holds a shared
lock on the byte `_LOCKS + slot` of the file, and looks at the slot under it; who drops a buffer clears the slot and
then waits for the exclusive lock. So memory is never given back under a running transfer, and the kernel drops the
locks of a process that dies. They belong to open files, not to processes: no other lock of the program is in their way.

Places in the file are never used twice. What is freed is punched out, so that memory mapped by a late reader is zeros.
The file is `sealed`: it grows, and never gets shorter.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from monarch import sealed
from monarch.core.address import host_identity
from monarch.errors import BufferDropped, TransferError
from monarch.log import get_logger
from monarch.onesided.local import Allocation, Local

log = get_logger("monarch.rdma")

TABLE_BYTES: Final = 1 << 20
TOKEN_BYTES: Final = 16
FIRST_SLOT: Final = TOKEN_BYTES // 8
SLOTS: Final = TABLE_BYTES // 8
_LOCKS: Final = 1 << 48
_FLOCK: Final = struct.Struct("hhqqi4x")  # Source: fcntl(2), `struct flock` with a 64-bit off_t
_PAGE: Final = mmap.PAGESIZE
_PUNCH_HOLE: Final = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_PR_SET_PTRACER: Final = 0x59616D61
_ANYBODY: Final = ctypes.c_ulong(-1).value


def lock_slot(fd: int, slot: int, kind: int, *, wait: bool = False) -> bool:
    """Lock or unlock a slot for the open file description of `fd`; False when another one is in the way."""
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    try:
        fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, _LOCKS + slot, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


@define(frozen=True)
class Place:
    """Where the exports of a process are. It travels in every reference.

    Attributes:
        host: see `core.address`; "" where processes cannot reach each other's memory.
        fd: descriptor of the file, in that process.
        token: the first bytes of the file, by which it is told from any other.
        table: address of the table in that process.
    """

    host: str
    pid: int
    fd: int = -1
    token: bytes = b""
    table: int = 0


@define(eq=False)
class Export:
    """One buffer of this process. It keeps the memory until it is withdrawn."""

    number: int
    slot: int
    local: Local
    users: int = 0  # transfers of this process that use it
    withdrawn: bool = False
    on_withdraw: list[Callable[[], None]] = field(factory=list)


class Exports:
    """See the module. Thread-safe."""

    def __init__(self) -> None:
        self.fd = -1
        self.place = Place("", os.getpid())
        self._table: Any = None
        self._end = TABLE_BYTES
        self._exports: dict[int, Export] = {}
        self._numbers = itertools.count(1)
        self._free_slots: list[int] = []
        self._next_slot = FIRST_SLOT
        self._addresses: list[int] = []  # of live allocations, sorted
        self._allocated: dict[int, tuple[int, int]] = {}  # by address: size, place in the file
        self._changed = threading.Condition(threading.RLock())  # finalizers run anywhere, also while it is held
        if hasattr(os, "memfd_create"):
            self._open()

    def _open(self) -> None:
        self.fd = sealed.create("monarch-exports")
        os.ftruncate(self.fd, TABLE_BYTES)
        sealed.seal(self.fd, may_grow=True)
        token = secrets.token_bytes(TOKEN_BYTES)
        address = map_shared(self.fd, TABLE_BYTES, 0)
        ctypes.memmove(address, token, TOKEN_BYTES)
        self._table = (ctypes.c_uint64 * SLOTS).from_address(address)
        self.place = Place(host_identity(), os.getpid(), self.fd, token, address)
        _allow_neighbours()

    # ---- memory that others can map

    def allocate(self, size_bytes: int) -> memoryview:
        """Zeroed memory in the file; it is freed with the last reference to the view or to what was made of it."""
        if self.fd < 0:
            return memoryview(mmap.mmap(-1, size_bytes))
        length = -(-size_bytes // _PAGE) * _PAGE
        with self._changed:
            offset = self._end
            os.ftruncate(self.fd, offset + length)
            self._end += length
            address = map_shared(self.fd, length, offset)
            bisect.insort(self._addresses, address)
            self._allocated[address] = (length, offset)
        allocation = Allocation.from_address(address)
        weakref.finalize(allocation, self._free, address).atexit = False
        return memoryview(allocation).cast("B")[:size_bytes]

    def _free(self, address: int) -> None:
        with self._changed:
            length, offset = self._allocated.pop(address)
            self._addresses.remove(address)
        libc().munmap(address, length)
        libc().fallocate(self.fd, _PUNCH_HOLE, offset, length)

    def place_of(self, local: Local) -> int | None:
        """Where in the file this memory is; None for any other memory."""
        with self._changed:
            at = bisect.bisect_right(self._addresses, local.address) - 1
            if at < 0:
                return None
            address = self._addresses[at]
            length, offset = self._allocated.get(address, (0, 0))
        return offset + local.address - address if local.stop <= address + length else None

    # ---- buffers

    def add(self, local: Local) -> Export:
        """Let others use this memory, until `withdraw`."""
        with self._changed:
            number = next(self._numbers)
            slot = 0
            if self._table is not None:
                slot = self._free_slots.pop() if self._free_slots else self._next_slot
                if slot >= SLOTS:
                    raise TransferError(
                        f"this process has {len(self._exports)} buffers, and can have no more: drop some"
                    )
                self._next_slot = max(self._next_slot, slot + 1)
                self._table[slot] = number
            export = self._exports[number] = Export(number, slot, local)
        return export

    def __len__(self) -> int:
        return len(self._exports)

    @contextmanager
    def using(self, number: int) -> Iterator[Export]:
        """Hold a buffer of this process for the block.

        Raises:
            BufferDropped: it is not there any more.
        """
        with self._changed:
            export = self._exports.get(number)
            if export is None:
                raise BufferDropped("the buffer has been dropped: its memory may be used for other things by now")
            export.users += 1
        try:
            yield export
        finally:
            with self._changed:
                export.users -= 1
                if not export.users and export.withdrawn:
                    self._changed.notify_all()

    def withdraw(self, number: int, done: Callable[[], object] = lambda: None) -> None:
        """Refuse all use from now on, wait for what runs, let go of the memory, and call `done`. Does not block."""
        with self._changed:
            export = self._exports.pop(number, None)
            if export is not None:
                export.withdrawn = True
                if self._table is not None:
                    self._table[export.slot] = 0
        if export is None:
            done()
            return
        if not export.users and (self.fd < 0 or lock_slot(self.fd, export.slot, fcntl.F_WRLCK)):
            self._let_go(export, done)
        else:
            wait = threading.Thread(target=self._await_users, args=(export, done), daemon=True, name="monarch-drop")
            wait.start()

    def _await_users(self, export: Export, done: Callable[[], object]) -> None:
        with self._changed:
            while export.users:
                self._changed.wait()
        if self.fd >= 0:
            lock_slot(self.fd, export.slot, fcntl.F_WRLCK, wait=True)
        self._let_go(export, done)

    def _let_go(self, export: Export, done: Callable[[], object]) -> None:
        for action in export.on_withdraw:
            action()
        if self.fd >= 0:
            lock_slot(self.fd, export.slot, fcntl.F_UNLCK)
            with self._changed:
                self._free_slots.append(export.slot)
        done()


_of_process: Exports | None = None
_lock = threading.Lock()


def exports() -> Exports:
    """Those of this process; made at first use. A fork has its own."""
    global _of_process
    with _lock:
        if _of_process is None or _of_process.place.pid != os.getpid():
            _of_process = Exports()
        return _of_process


def libc() -> Any:
    global _functions
    if _functions is None:
        found = ctypes.CDLL(None, use_errno=True)
        found.mmap.restype = ctypes.c_void_p
        found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        found.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        found.process_vm_readv.restype = found.process_vm_writev.restype = ctypes.c_ssize_t
        found.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
        _functions = found
    return _functions


_functions: Any = None


def map_shared(fd: int, size_bytes: int, offset: int) -> int:
    """Map a shared file. Python's own mappings each keep a descriptor open."""
    address = libc().mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise MemoryError(f"cannot map {size_bytes} bytes of shared memory: {os.strerror(number)}")
    return int(address)


def unmap(address: int, size_bytes: int) -> None:
    libc().munmap(address, size_bytes)


def _allow_neighbours() -> None:
    """Where Yama lets only a parent look into a process, let all of this user do so: they may be asked to read."""
    try:
        restricted = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "1"
    except OSError:
        return
    if restricted:
        libc().prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)
