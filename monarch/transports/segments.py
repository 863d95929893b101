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

When the user forks, loans become ordinary memory of this process, and end: see `mappings`. As with other memory,
neither parent nor child sees what the other writes. Where there is no memory for that, the slot is KEPT, and never free
again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from types import CodeType
from typing import Any, Final, Protocol

from monarch import compiled, sealed
from monarch.transports.mappings import FREE, KEPT, LENT, POPULATE_WRITE, TAKEN, Hold, Mapping, forking, in_pages, libc
from monarch.transports.memory import Lent, allocate, at_end, forget_loan, in_halves, note_loan

SMALLEST_BYTES: Final = 64 << 10
"""Of a slot. What is smaller is copied on its way; with rings, that costs less up to `base.BIG_BYTES`."""

MARKS_EACH: Final = 256
"""A slot can be lent to so many receivers at a time."""

_SEGMENT_BYTES: Final = 256 << 20  # of address space; pages come when they are needed
_MOST_SLOTS: Final = 256
_RESERVE_BYTES: Final = 64 << 20  # in one call: a signal makes the kernel begin that call again


class Loan(Lent):
    """A receiver's hold on a slot."""

    hold: Hold
    end: CodeType


class TakenBack(Exception):
    """The owner has given up the link over which it had lent this."""


def _swap(marks: Any, mark: int, old: int, new: int) -> bool:
    if compiled.part is not None:
        return compiled.part.swap(marks, mark, old, new)
    if found := marks[mark] == old:  # nobody takes back what one without the compiled part has
        marks[mark] = new
    return found


def _give_back(hold: Hold) -> None:
    forget_loan(hold.address)
    hold.end()


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
    with forking:
        if not _swap(mapping.marks, mark, LENT, TAKEN):
            raise TakenBack
        hold = Hold(mapping, offset, size_bytes, mark)
    end = at_end(_give_back, hold)
    loan = Loan.from_address(hold.address)
    loan.hold, loan.size_bytes, loan.end = hold, size_bytes, end
    note_loan(hold.address, loan)
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
            if os.pread(self._fd, 1, mark)[0] != LENT:  # it may have been used again meanwhile
                raise TakenBack
            return own
        finally:
            os.pwrite(self._fd, bytes((FREE,)), mark)

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
        self.first_mark = index * MARKS_EACH
        self.reserved_bytes = 0
        self.receivers = 1
        self.lent: list[tuple[int, Holder]] = []  # (mark, who), since it was last free
        self.lent_count = 0
        self.taken_back: set[int] = set()  # marks that are not used any more
        self.free_since_s = 0.0

    def place(self) -> tuple[int, object]:
        """Where it is now, and what keeps the memory there."""
        marks = self.segment.mapping.marks
        return ctypes.addressof(marks) + self.offset, marks

    def reserve(self, size_bytes: int) -> None:
        """Have pages for so much; they may be written then.

        Raises:
            OSError: the system has not so much memory.
        """
        reserved = self.reserved_bytes
        address, keeper = self.place()
        refused: list[int] = []

        def populate(start: int, count: int) -> None:
            if libc.madvise(address + reserved + start, count, POPULATE_WRITE):
                refused.append(start)

        # Has them mapped here, too: 256 MiB take 80 ms, and 170 when each is mapped by the first write to it.
        in_halves(populate, size_bytes - reserved, keeper)
        if refused:
            self.discard()
            for start in range(0, size_bytes, _RESERVE_BYTES):
                length = min(_RESERVE_BYTES, size_bytes - start)
                os.posix_fallocate(self.segment.fd, self.offset + start, length)
                self.reserved_bytes = start + length
        self.reserved_bytes = size_bytes

    def discard(self) -> bool:
        """Give the pages back to the system; False where it refuses."""
        address, _keeper = self.place()
        if libc.madvise(address, self.segment.slot_bytes, mmap.MADV_REMOVE):
            return False
        self.reserved_bytes = 0
        return True

    def lend(self, holder: Holder) -> int | None:
        """The mark that `holder` is to clear, or None when it cannot be lent to so many."""
        while self.lent_count < MARKS_EACH:
            mark = self.first_mark + self.lent_count
            self.lent_count += 1
            if mark not in self.taken_back:
                self.segment.mapping.marks[mark] = LENT
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
        if marks[mark] == KEPT:  # also when the holder is gone
            return True
        if not marks[mark] or holder.is_gone:
            return False
        if compiled.part is not None and holder.is_over and compiled.part.swap(marks, mark, LENT, FREE):
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
