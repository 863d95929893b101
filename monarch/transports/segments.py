"""Segments of memory that the processes of a host share, and the objects that hold a place in one.

A segment is an anonymous file of one process, mapped by it and by those that it lends to. First come the *marks*, then
slots of one size. A receiver's hold on a slot is a *loan*: an object that exports the memory as a buffer, so that
arrays and tensors which are built over it keep it alive. Of each receiver, one byte tells whether it has the slot, its
mark; so no lock is needed, and no message. The owner looks at the marks when it needs room.

```
            lend (owner)          borrow (receiver)         the loan has ended (receiver)
    FREE ─────────────────► LENT ───────────────────► TAKEN ──────────────────────────► FREE
                             └── the link is over, and what it carried was not read (owner) ──► FREE, for ever
```

Where both could come, one who has given a link up, and one who still reads it, only one step is taken: the compiled
part swaps the byte (`swap`). So what was in flight over a link that broke is lent no longer, where both processes have
that part; else it is until the receiver's process ends. A mark that was taken back is never used again, for whoever
comes late with its description must find it free.

A mapping keeps the memory that it shows, so a loan outlives the owner of the segment. Two things would be a SIGBUS: a
write to memory that cannot be had, so pages are reserved before they are written; and a file that another process cuts
off, so segments are `sealed`, and those of others are refused where they are not.

In a child that the user forks, mappings become private: as with other memory, neither sees what the other writes, and
the end of the child's loans changes nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any, Final, Protocol

from monarch import compiled, sealed
from monarch.transports.memory import Lent, allocate, at_end, forget_loan, in_halves, note_loan

SMALLEST_BYTES: Final = 64 << 10
"""Of a slot. What is smaller is copied on its way; with rings, that costs less up to `base.BIG_BYTES`."""

MARKS_EACH: Final = 256
"""A slot can be lent to so many receivers at a time."""

_FREE, _LENT, _TAKEN = range(3)  # what a mark says
_SEGMENT_BYTES: Final = 256 << 20  # of address space; pages come when they are needed
_MOST_SLOTS: Final = 256
_RESERVE_BYTES: Final = 64 << 20  # in one call: a signal makes the kernel begin that call again
_PAGE: Final = mmap.PAGESIZE
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MAP_FIXED: Final = 0x10
_POPULATE_WRITE: Final = 23  # not in `mmap`; kernels before 5.14 refuse it


class Mapping:
    """A file of shared memory in this process's address space, until the last reference is gone."""

    __slots__ = ("__weakref__", "address", "fd", "marks", "size_bytes")

    def __init__(self, fd: int) -> None:
        """Owns `fd`, also when it raises.

        Raises:
            OSError: no room in the address space.
        """
        self.fd = fd
        self.address = 0
        self.size_bytes = os.fstat(fd).st_size
        self.address = self._map(mmap.MAP_SHARED)
        self.marks = (ctypes.c_ubyte * self.size_bytes).from_address(self.address)
        _mappings.add(self)

    def _map(self, flags: int) -> int:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found: int = _libc.mmap(self.address, self.size_bytes, access, flags, self.fd, 0)
        if found == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {self.size_bytes} bytes of shared memory: {os.strerror(code)}")
        return found

    def close_fd(self) -> None:
        """Do without the descriptor from now on; a forked child then has zeros here."""
        fd, self.fd = self.fd, -1
        os.close(fd)

    def make_private(self) -> None:
        self._map(mmap.MAP_PRIVATE | _MAP_FIXED | (mmap.MAP_ANONYMOUS if self.fd < 0 else 0))

    def __del__(self, munmap: Any = _libc.munmap, close: Any = os.close) -> None:
        if self.address:
            munmap(self.address, self.size_bytes)
        if self.fd >= 0:
            close(self.fd)


_mappings: Final[weakref.WeakSet[Mapping]] = weakref.WeakSet()


def _in_forked_child() -> None:
    for mapping in list(_mappings):
        mapping.make_private()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


class Loan(Lent):
    """A receiver's hold on a slot."""

    mapping: Mapping
    mark: int
    end: CodeType


class TakenBack(Exception):
    """The owner has given up the link over which it had lent this."""


def _swap(marks: Any, mark: int, old: int, new: int) -> bool:
    if compiled.part is not None:
        return compiled.part.swap(marks, mark, old, new)
    if found := marks[mark] == old:  # nobody takes back what one without the compiled part has
        marks[mark] = new
    return found


def _give_back(mapping: Mapping, mark: int, address: int) -> None:
    forget_loan(address)
    mapping.marks[mark] = _FREE


def _check_place(file_bytes: int, offset: int, size_bytes: int, mark: int) -> None:
    if offset + size_bytes > file_bytes or mark >= file_bytes:
        raise ValueError(f"{size_bytes} bytes at {offset} of a segment of {file_bytes}")


def borrow(mapping: Mapping, offset: int, size_bytes: int, mark: int) -> memoryview:
    """The memory at `offset`, writable; the mark is cleared when the last object that uses it is gone.

    Raises:
        ValueError: it is not inside the mapping.
        TakenBack: it is not lent any more.
    """
    _check_place(mapping.size_bytes, offset, size_bytes, mark)
    address = mapping.address + offset
    if not _swap(mapping.marks, mark, _LENT, _TAKEN):
        raise TakenBack
    end = at_end(_give_back, mapping, mark, address)
    loan = Loan.from_address(address)
    loan.mapping, loan.mark, loan.size_bytes, loan.end = mapping, mark, size_bytes, end
    note_loan(address, loan)
    return memoryview(loan).cast("B")[:size_bytes]


class Unmapped:
    """A file of shared memory for which the address space has no room: what is lent there is read, into own memory."""

    def __init__(self, fd: int) -> None:
        """Owns `fd`, also when it raises. Raises: ValueError, as `attach`."""
        self._fd = fd
        self._size_bytes = sealed.sealed_bytes(fd)

    def read(self, offset: int, size_bytes: int, mark: int) -> memoryview:
        """As `borrow`, and gives the memory back at once."""
        _check_place(self._size_bytes, offset, size_bytes, mark)
        try:
            own = allocate(size_bytes)
            done = 0
            while done < size_bytes:
                done += os.preadv(self._fd, [own[done:]], offset + done)
            if os.pread(self._fd, 1, mark)[0] != _LENT:  # it may have been used again meanwhile
                raise TakenBack
            return own
        finally:
            os.pwrite(self._fd, bytes((_FREE,)), mark)

    def __del__(self, close: Any = os.close) -> None:
        close(self._fd)


def attach(fd: int) -> Mapping | Unmapped:
    """The file of another process; owns `fd`.

    Raises:
        ValueError: its owner could cut it off.
    """
    unmapped = Unmapped(fd)
    try:
        return Mapping(os.dup(fd))
    except OSError:
        return unmapped


class Holder(Protocol):
    """Whom slots are lent to."""

    @property
    def is_gone(self) -> bool:
        """Its process has ended: it will not clear its marks."""
        ...

    @property
    def is_over(self) -> bool:
        """The link to it has been given up by this process; and it swaps its marks, as this one does."""
        ...


class Segment:
    """A file with places for slots of one size: first the marks of all, then the slots."""

    def __init__(self, number: int, slot_bytes: int) -> None:
        """Raises: OSError."""
        self.number = number
        self.slot_bytes = slot_bytes
        self.slot_count = max(1, min(_SEGMENT_BYTES // slot_bytes, _MOST_SLOTS))
        self.head_bytes = in_pages(self.slot_count * MARKS_EACH)
        self.fd = sealed.create("monarch")
        try:
            os.ftruncate(self.fd, self.head_bytes + self.slot_count * slot_bytes)
            sealed.seal(self.fd)
            os.posix_fallocate(self.fd, 0, self.head_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.mapping = Mapping(self.fd)
        self.slots: list[Slot] = []
        """Those that were made so far."""

    def new_slots(self) -> Iterator[Slot]:
        for index in range(self.slot_count):
            self.slots.append(Slot(self, index))
            yield self.slots[index]


class Slot:
    """One place in a segment. Belongs to its pool, then to its lease."""

    __slots__ = (
        "address",
        "first_mark",
        "free_since_s",
        "lent",
        "lent_count",
        "offset",
        "receivers",
        "reserved_bytes",
        "segment",
        "taken_back",
    )

    def __init__(self, segment: Segment, index: int) -> None:
        self.segment = segment
        self.offset = segment.head_bytes + index * segment.slot_bytes
        self.address = segment.mapping.address + self.offset
        self.first_mark = index * MARKS_EACH
        self.reserved_bytes = 0
        self.receivers = 1
        self.lent: list[tuple[int, Holder]] = []  # (mark, who), since it was last free
        self.lent_count = 0
        self.taken_back: set[int] = set()  # marks that are not used any more
        self.free_since_s = 0.0

    def reserve(self, size_bytes: int) -> None:
        """Have pages for so much; they may be written then.

        Raises:
            OSError: the system has not so much memory.
        """
        reserved = self.reserved_bytes
        refused: list[int] = []

        def populate(start: int, count: int) -> None:
            if _libc.madvise(self.address + reserved + start, count, _POPULATE_WRITE):
                refused.append(start)

        # Has them mapped here, too: 256 MiB take 80 ms, and 170 when each is mapped by the first write to it.
        in_halves(populate, size_bytes - reserved, self)
        if refused:
            self.discard()
            for start in range(0, size_bytes, _RESERVE_BYTES):
                length = min(_RESERVE_BYTES, size_bytes - start)
                os.posix_fallocate(self.segment.fd, self.offset + start, length)
                self.reserved_bytes = start + length
        self.reserved_bytes = size_bytes

    def discard(self) -> bool:
        """Give the pages back to the system; False where it refuses."""
        if _libc.madvise(self.address, self.segment.slot_bytes, mmap.MADV_REMOVE):
            return False
        self.reserved_bytes = 0
        return True

    def lend(self, holder: Holder) -> int | None:
        """The mark that `holder` is to clear, or None when it cannot be lent to so many."""
        while self.lent_count < MARKS_EACH:
            mark = self.first_mark + self.lent_count
            self.lent_count += 1
            if mark not in self.taken_back:
                self.segment.mapping.marks[mark] = _LENT
                self.lent.append((mark, holder))
                return mark
        return None

    @property
    def kind(self) -> int:
        """Exponent of the size."""
        return self.segment.slot_bytes.bit_length() - 1

    @property
    def is_free(self) -> bool:
        """Whether nobody to whom it was lent has it any more. For one whose lease is gone."""
        if self.lent:
            self.lent = [each for each in self.lent if self._is_held(*each)]
        return not self.lent

    def _is_held(self, mark: int, holder: Holder) -> bool:
        marks = self.segment.mapping.marks
        if not marks[mark] or holder.is_gone:
            return False
        if compiled.part is not None and holder.is_over and compiled.part.swap(marks, mark, _LENT, _FREE):
            self.taken_back.add(mark)
            return False
        return True


def can_share() -> str:
    """Why this system cannot share memory as it is done here; empty when it can."""
    if not hasattr(os, "memfd_create") or not hasattr(mmap, "MADV_REMOVE"):
        return "this platform has no anonymous shared files (memfd_create)"
    try:
        Segment(0, SMALLEST_BYTES)
    except OSError as error:
        return f"a file of shared memory cannot be had: {error.strerror or error}"
    return ""


def in_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE
