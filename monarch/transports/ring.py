"""Rings of small frames in memory that two processes share, one way each, of the compiled part of the library.

A ring needs fences, a copy without a detour, and a wait that lets go of the interpreter: see `compiled`. Without that
there are none, and `why_not` says why. What travels in them, and what beside, is decided in `ring_link`.

A reader sleeps or is awake. Before it sleeps it says so in the ring, and looks once more; a writer that pushed, and
finds it asleep, is to wake it (`rouse`). One that is awake costs its writer no system call.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from monarch import compiled
from monarch.transports.base import BIG_BYTES
from monarch.transports.segments import Mapping

if TYPE_CHECKING:
    from monarch.compiled import Reader, Writer

_DATA_BYTES: Final = 256 << 10
"""Frames of more than three eighths of it go another way."""
_HEAD_BYTES: Final = 256

assert _DATA_BYTES // 8 * 3 <= BIG_BYTES, "a part that gets memory of its own is in no ring"

why_not = compiled.why_not


def offer() -> tuple[int, Reader]:
    """A ring to read from, and its descriptor, for the writer.

    Raises:
        OSError: no memory, or no descriptor.
    """
    fd = os.memfd_create("monarch-ring", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, _HEAD_BYTES + _DATA_BYTES)  # a page that cannot be had later would be a SIGBUS
        return fd, compiled.part.Reader(*_mapped(os.dup(fd)))
    except BaseException:
        os.close(fd)
        raise


def accept(fd: int) -> Writer:
    """Write to the ring that another offered; owns `fd`.

    Raises:
        OSError: no room in the address space.
        ValueError: this is no ring.
    """
    return compiled.part.Writer(*_mapped(fd))


def _mapped(fd: int) -> tuple[object, Mapping]:
    """The memory behind `fd`, which is closed, and what keeps it."""
    mapping = Mapping(fd)
    mapping.close_fd()
    return mapping.marks, mapping


if compiled.part is not None:  # what every message calls, as it is; see `_compiled.pyi`
    look = compiled.part.look
    sleep = compiled.part.sleep
    ring_bell = compiled.part.ring_bell
