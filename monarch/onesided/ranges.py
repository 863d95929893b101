"""Which use of memory is refused before a byte moves. Pure: numbers in, a ValueError or nothing out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from attrs import define

from monarch.core import duration


@define(frozen=True, slots=True)
class Range:
    """Bytes `start` to `stop` of one address space; `what` names them in errors."""

    space: Hashable
    start: int
    stop: int
    what: str = "the memory"

    def overlaps(self, other: Range) -> bool:
        return self.space == other.space and self.start < other.stop and other.start < self.stop


def check_slice(offset: int, size_bytes: int, whole_bytes: int) -> None:
    """Raises: ValueError where bytes `offset` to `offset + size_bytes` are not inside a buffer of `whole_bytes`."""
    for name, value in (("offset", offset), ("size", size_bytes)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be a whole number of bytes")
    if offset < 0 or size_bytes < 1 or offset + size_bytes > whole_bytes:
        raise ValueError(
            f"a slice of {size_bytes} bytes from byte {offset} on is not inside a buffer of {whole_bytes} bytes"
        )


def check_conflicts(
    reads: Iterable[Range], writes: Iterable[Range], new_reads: Iterable[Range], new_writes: Iterable[Range]
) -> None:
    """Transfers of one batch have no order: what one writes, no other may read or write.

    Raises:
        ValueError: a new range conflicts with another, new or old.
    """
    new_reads, new_writes = list(new_reads), list(new_writes)
    for at, written in enumerate(new_writes):
        for other in [*reads, *writes, *new_reads, *new_writes[:at]]:
            if written.overlaps(other):
                raise _conflict(written, other)
    for read in new_reads:
        for other in writes:
            if read.overlaps(other):
                raise _conflict(read, other)


def _conflict(one: Range, other: Range) -> ValueError:
    common = min(one.stop, other.stop) - max(one.start, other.start)
    return ValueError(
        f"{one.what} and {other.what} overlap by {common} bytes: transfers of one batch have no order, so the result "
        "would be chance"
    )


def check_word(address: int, size_bytes: int) -> None:
    """Raises: ValueError where atomics cannot work on these bytes."""
    if size_bytes != 8 or address % 8:
        raise ValueError(
            f"atomics work on 8 bytes at a multiple of 8, not on {size_bytes} bytes at {address:#x}: take a slice"
        )


def pieces(size_bytes: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of each piece, none larger than `most_bytes`."""
    for offset in range(0, size_bytes, most_bytes):
        yield offset, min(most_bytes, size_bytes - offset)


def check_timeout(timeout: float) -> float:
    """Raises: OverflowError for a negative time; ValueError, TypeError for what is no time."""
    if isinstance(timeout, (int, float)) and timeout < 0:
        raise OverflowError(f"timeout is {timeout!r}; it must not be negative")
    duration.check("timeout", timeout)
    return float(timeout)
