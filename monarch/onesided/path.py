"""What a path is: a way for bytes between memory of this process and a buffer of another.

And what a buffer is, as everybody may know it.
"""

from __future__ import annotations

import time
from typing import Protocol

from attrs import define, evolve

from monarch.core.ids import ActorId
from monarch.onesided.exports import Place
from monarch.onesided.local import Local


class NotReachable(Exception):
    """A path does not lead to a buffer; the text says why."""


@define(frozen=True)
class Remote:
    """A part of a buffer: all that is needed to use it from anywhere. A plain value.

    Attributes:
        number, slot: which buffer of its process it is (see `exports`).
        address: where the part begins, in its process.
        in_file: where the buffer begins in the file of exports; None for memory that is not in it.
        whole_bytes, offset, size_bytes: the size of the buffer, and the part of it that is meant.
        device: "cpu", or the CUDA device that the memory is on.
    """

    owner: ActorId
    place: Place
    number: int
    slot: int
    address: int
    in_file: int | None
    whole_bytes: int
    offset: int
    size_bytes: int
    writable: bool
    device: str = "cpu"

    def part(self, offset: int, size_bytes: int) -> Remote:
        return evolve(self, address=self.address + offset, offset=self.offset + offset, size_bytes=size_bytes)

    def __str__(self) -> str:
        whole = f"the buffer of {self.whole_bytes} bytes of {self.owner}"
        if self.size_bytes == self.whole_bytes:
            return whole
        return f"bytes {self.offset} to {self.offset + self.size_bytes} of {whole}"


class Path(Protocol):
    """A way to the buffers of one process. The methods block, and raise when `deadline_s` (`time.monotonic()`) is over.

    All raise: BufferDropped, TransferError; SupervisionError when the owner's process is gone; TimeoutError.
    """

    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str:
        """In words, why this one."""
        ...

    @property
    def helped(self) -> bool:
        """Whether a transfer waits for another process; if not, it takes no longer than its copy."""
        ...

    def read(self, remote: Remote, target: Local, deadline_s: float) -> None:
        """Copy all of `remote` to the beginning of `target`."""
        ...

    def write(self, remote: Remote, source: Local, deadline_s: float) -> None:
        """Copy from `source`, which is as large, to all of `remote`."""
        ...

    def fetch_add(self, remote: Remote, add: int, deadline_s: float) -> int:
        """Add to an unsigned number of 8 bytes, as one step; the value before."""
        ...

    def compare_and_swap(self, remote: Remote, expected: int, desired: int, deadline_s: float) -> int:
        """Where it is `expected`, replace it by `desired`, as one step; the value before."""
        ...


def left_of(deadline_s: float, what: object) -> float:
    """Seconds left. Raises: TimeoutError."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise late(what)
    return left_s


def late(what: object) -> TimeoutError:
    return TimeoutError(f"the transfer from or to {what} did not end in time; its bytes are undefined")
