"""Rings of small frames in memory that two processes share, one way each: the compiled part of the library.

A ring needs fences, a copy without a detour, and a wait that lets go of the interpreter: `_ring.c`, which is built
where a compiler is. Without it, and where the variable `MONARCH_RING` is 0, there are none, and `why_not` says why.
What travels in them, and what beside, is decided in `ring_link`.

A reader sleeps or is awake. Before it sleeps it says so in the ring, and looks once more; a writer that pushed, and
finds it asleep, is to wake it (`rouse`). One that is awake costs its writer no system call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from monarch.transports.segments import Mapping

if TYPE_CHECKING:
    from monarch.transports._ring import Lane as Lane
    from monarch.transports._ring import Reader as Reader
    from monarch.transports._ring import Session as Session
    from monarch.transports._ring import Writer as Writer

_DATA_BYTES: Final = 128 << 10
"""Frames of more than an eighth of it go another way."""
_HEAD_BYTES: Final = 256
_VERSION: Final = 6

FULL: Final = 2
"""What `post` says when it has sent, and who sends is to wait for room."""

Targets = tuple[tuple[Any, Iterator[int] | None, int, int], ...]
"""Receivers of one message, each: (who has its `lane`, where its number comes from, process, rank)."""

try:
    from monarch.transports import _ring as compiled
except ImportError as error:
    compiled = None  # type: ignore[assignment]
    why_not = f"its compiled part is missing ({error}): there was no compiler when the library was installed"
else:
    why_not = ""
    if getattr(compiled, "VERSION", 1) != _VERSION:  # of a checkout that has moved on since
        compiled = None  # type: ignore[assignment]
        why_not = "its compiled part is of another version: install the library again"
if os.environ.get("MONARCH_RING") == "0":
    compiled, why_not = None, "MONARCH_RING is 0"  # type: ignore[assignment]


def offer() -> tuple[int, Reader]:
    """A ring to read from, and its descriptor, for the writer.

    Raises:
        OSError: no memory, or no descriptor.
    """
    fd = os.memfd_create("monarch-ring", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, _HEAD_BYTES + _DATA_BYTES)  # a page that cannot be had later would be a SIGBUS
        return fd, compiled.Reader(*_mapped(os.dup(fd)))
    except BaseException:
        os.close(fd)
        raise


def accept(fd: int) -> Writer:
    """Write to the ring that another offered; owns `fd`.

    Raises:
        OSError: no room in the address space.
        ValueError: this is no ring.
    """
    return compiled.Writer(*_mapped(fd))


def _mapped(fd: int) -> tuple[object, Mapping]:
    """The memory behind `fd`, which is closed, and what keeps it."""
    mapping = Mapping(fd)
    mapping.close_fd()
    return mapping.marks, mapping


def _no_post(*_: object) -> int:
    return 0


post = _no_post if compiled is None else compiled.post
if compiled is not None:  # what every message calls, as it is; see `_ring.pyi`
    look = compiled.look
    fall_asleep = compiled.fall_asleep
    wake_up = compiled.wake_up
    ring_bell = compiled.ring_bell
    take_bell = compiled.take_bell
    lane = compiled.Lane
