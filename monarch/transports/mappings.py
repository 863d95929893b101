"""Files of shared memory in this process's address space, what it holds of them, and what becomes of both in a fork.

What an object of this process shows of the memory of others is a *hold*. Before this process forks, each becomes memory
of its own, at the same address, with what is in it:

```
    SHARED ─────► PRIVATE ─────► COPIED: the place is given back
                     └── no memory for copies ─────► KEPT: the place is never used again
```

- The kernel puts a private view of the file in the place of the shared one, in a single step, and then copies the pages
  (`MADV_POPULATE_WRITE`; where it does not know that, the compiled part swaps a byte of each for itself). Neither
  changes any: what other threads write meanwhile is not lost.
- So a fork is one of ordinary memory, which parent and child share until one of them writes. Of several forks only the
  first one copies.
- The owner may use the place again at once. What it lends there is not to be seen in the old memory, so the file is
  mapped anew, elsewhere; the old range goes with the last hold in it.
- A private view without copies shows what is in the file, where nobody has written. That stays right while nobody else
  writes there, also when the parent is gone, so the owner is told to never use it again.
- What cannot be made private at all, as there is no address space, and what an RDMA device has registered, stays shared
  and is not in the child, which dies of SIGSEGV when it looks there. A log line says so. Nor is there what has been
  passed on with a message, at which nobody here looks any more.
- All else of these files is private in the child, too, which can disturb nobody.

Holds begin, and are passed on, under the lock `forking`, which a fork takes. They end anywhere, and without it: whoever
takes a hold out of `_holds` decides what becomes of its place. When nothing is held, a fork costs nothing more.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from typing import Any, Final

from monarch import compiled
from monarch.log import get_logger
from monarch.transports.available import available_bytes
from monarch.transports.memory import forget_loan
from monarch.verbs import pins
from monarch.wake import OwnedFd

log = get_logger("monarch.shm")

FREE, LENT, TAKEN, KEPT = range(4)
"""What a mark says: see `segments`. KEPT: by more than the process that it was lent to, and for ever."""

_PAGE: Final = mmap.PAGESIZE
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MAP_FIXED: Final = 0x10
_REMAP: Final = 3  # MREMAP_MAYMOVE | MREMAP_FIXED
_NO_ACCESS: Final = 0
_ACCESS: Final = mmap.PROT_READ | mmap.PROT_WRITE
POPULATE_WRITE: Final = 23  # not in `mmap`; kernels before 5.14 refuse it

libc: Final = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if hasattr(libc, "mremap"):
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

forking: Final = threading.RLock()
"""No thread forks while it is held."""


def in_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


class _Range:
    """Some of the address space, until the last reference is gone."""

    __slots__ = ("__weakref__", "address", "file", "private", "size_bytes")

    def __init__(self, address: int, size_bytes: int, file: OwnedFd) -> None:
        self.address, self.size_bytes = address, size_bytes
        self.file: OwnedFd | None = file
        self.private: list[tuple[int, int]] = []  # (offset, bytes) of holds that are
        _ranges.add(self)

    def leave(self) -> None:
        """In a child: disturb nobody."""
        at = 0
        for start, size in [*sorted(self.private), (self.size_bytes, 0)]:
            if start > at:
                self._make_private(at, start - at)
            at = max(at, start + size)

    def _make_private(self, offset: int, size_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | (0 if self.file is not None else mmap.MAP_ANONYMOUS)
        fd, start = (self.file.fd, offset) if self.file is not None else (-1, 0)
        if libc.mmap(self.address + offset, size_bytes, _ACCESS, flags, fd, start) == _MAP_FAILED:
            _close_off(self.address + offset, size_bytes)

    def __del__(self, munmap: Any = libc.munmap) -> None:
        munmap(self.address, self.size_bytes)


def _close_off(address: int, size_bytes: int) -> None:
    """Who looks there dies of SIGSEGV."""
    libc.mmap(address, size_bytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)


_ranges: Final[weakref.WeakSet[_Range]] = weakref.WeakSet()


class Mapping:
    """A file of shared memory in this process's address space, until the last reference is gone.

    Attributes:
        marks: all of it, as an array that keeps the memory where it is; after a fork it may be another.
    """

    __slots__ = ("file", "marks", "size_bytes")

    def __init__(self, fd: int) -> None:
        """Owns `fd`, also when it raises.

        Raises:
            OSError: no room in the address space.
        """
        self.file: OwnedFd | None = OwnedFd(fd)
        self.size_bytes = os.fstat(fd).st_size
        self.marks = self._map()

    def _map(self) -> Any:
        assert self.file is not None
        found = libc.mmap(None, self.size_bytes, _ACCESS, mmap.MAP_SHARED, self.file.fd, 0)
        if found == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {self.size_bytes} bytes of shared memory: {os.strerror(code)}")
        marks: Any = (ctypes.c_ubyte * self.size_bytes).from_address(found)
        marks.range = _Range(found, self.size_bytes, self.file)
        return marks

    def move(self) -> bool:
        """Map it anew, elsewhere. What has been taken from `marks` stays as it is."""
        try:
            self.marks = self._map()
        except OSError:
            return False
        return True

    def close_fd(self) -> None:
        """Do without the descriptor from now on; a forked child then has zeros here."""
        self.file = self.marks.range.file = None


class Hold:
    """One place in a mapping, as this process shows it."""

    __slots__ = ("address", "is_passed_on", "is_private", "mapping", "mark", "marks", "offset", "size_bytes")

    def __init__(self, mapping: Mapping, offset: int, size_bytes: int, mark: int) -> None:
        """Under `forking`."""
        self.mapping: Mapping | None = mapping
        self.marks, self.mark = mapping.marks, mark  # the range stays, too
        self.offset, self.size_bytes = offset, in_pages(size_bytes)
        self.address = ctypes.addressof(self.marks) + offset
        self.is_private = self.is_passed_on = False
        _holds.add(self)

    def end(self) -> None:
        """Nothing shows the place any more. Takes no lock."""
        if self._taken_out():
            self.marks[self.mark] = FREE
        elif self.is_private:
            libc.madvise(self.address, self.size_bytes, mmap.MADV_DONTNEED)

    def _taken_out(self) -> bool:
        try:
            _holds.remove(self)
        except KeyError:
            return False
        return True

    def show_privately(self, fd: int) -> bool:
        """From now on, nobody else sees what is written here."""
        size = self.size_bytes
        # Where memory is refused, it is refused here. To map it over the place at once could leave a hole there.
        found = libc.mmap(None, size, _ACCESS, mmap.MAP_PRIVATE, fd, self.offset)
        if found == _MAP_FAILED:
            return False
        if libc.mremap(found, size, size, _REMAP, self.address) == _MAP_FAILED:
            libc.munmap(found, size)
            return False
        self.marks.range.private.append((self.offset, size))
        return True

    def copy_pages(self) -> bool:
        """Have this process's own copies of what is shown privately. Not in two threads: one that helps might have to
        wait for the fork."""
        if not libc.madvise(self.address, self.size_bytes, POPULATE_WRITE):
            return True
        return ctypes.get_errno() == errno.EINVAL and self._touch_pages()

    def _touch_pages(self) -> bool:
        """On kernels before 5.14."""
        if compiled.part is None:
            return False
        swap, marks = compiled.part.swap, self.marks
        for at in range(self.offset, self.offset + self.size_bytes, _PAGE):
            while not swap(marks, at, found := marks[at], found):
                pass  # another thread has written there
        return True

    def leave_place(self, mark: int) -> None:
        """What is here is private. `mark`: what is to become of the place."""
        self.is_private = True
        forget_loan(self.address)
        if self._taken_out():
            self.marks[self.mark] = mark


_holds: Final[set[Hold]] = set()  # those that are shared
_left_bytes = _kept_bytes = 0  # by the fork that takes place: what is not in the child, what was not copied
_one_fork: Final = threading.RLock()  # at a time


def _show_privately() -> list[Hold]:
    """Those that can be shown so. Under `forking`."""
    global _left_bytes
    _left_bytes = 0
    shown: list[Hold] = []
    moved: dict[Mapping, bool] = {}
    with pins.none_new:
        for hold in list(_holds):
            mapping = hold.mapping
            if mapping is None or mapping.file is None or hold.is_passed_on:
                continue
            if pins.pinned(hold.address, hold.size_bytes):
                _left_bytes += hold.size_bytes
                continue
            if mapping not in moved:
                moved[mapping] = mapping.move()
            hold.mapping = None  # whatever interrupts this, it is not passed on
            if moved[mapping] and hold.show_privately(mapping.file.fd):
                shown.append(hold)
            else:
                hold.mapping = mapping
                _left_bytes += hold.size_bytes
    return shown


def _copy(shown: list[Hold]) -> None:
    global _kept_bytes
    room_bytes = available_bytes() // 2 if shown else 0  # a kernel without memory kills before it refuses
    for hold in shown:
        is_copied = hold.size_bytes <= room_bytes and hold.copy_pages()
        if is_copied:
            room_bytes -= hold.size_bytes
        else:
            _kept_bytes += hold.size_bytes
        hold.leave_place(FREE if is_copied else KEPT)


def _before_fork() -> None:
    _one_fork.acquire()
    try:
        if _holds:
            with forking:
                shown = _show_privately()
            _copy(shown)  # which takes a second for a GiB: what arrives meanwhile need not wait
    finally:
        forking.acquire()
    if _holds:
        _copy(_show_privately())


def _after_in_parent() -> None:
    global _left_bytes, _kept_bytes
    left, kept = _left_bytes, _kept_bytes
    _left_bytes = _kept_bytes = 0
    forking.release()
    _one_fork.release()
    # Logged here: before, a handler of logs could wait for a thread that waits for the fork.
    if kept:
        log.info("shm.kept", size_bytes=kept, reason="a fork had no memory for copies; its places are not used again")
    if left:
        log.warning("shm.not_forked", size_bytes=left, reason="it was received, and is not in the child process")


def _after_in_child() -> None:
    for mapped in list(_ranges):
        mapped.leave()
    for hold in _holds:
        _close_off(hold.address, hold.size_bytes)
    _holds.clear()
    forking.release()
    _one_fork.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
