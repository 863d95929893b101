"""Rings of small frames in memory that two processes share, one way each, of the compiled part of the library.

A ring needs fences, a copy without a detour, and a wait that lets go of the interpreter: see `compiled`. Without that
there are none, and `why_not` says why. What travels in them, and what beside, is decided in `ring_link`.

A reader sleeps or is awake. Before it sleeps it says so in the ring, and looks once more; a writer that pushed, and
finds it asleep, is to wake it (`rouse`). One that is awake costs its writer no system call.

What wakes is the *bell*: an eventfd that all readers of a process have together, and that their writers get with the
ring. It is polled edge-triggered, and never read. Eight processes that are woken, and wake the one who woke them, take
36 us with it, in C, and 50 us with bytes on sockets.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from monarch import compiled, sealed
from monarch.transports.base import BIG_BYTES
from monarch.transports.mappings import Mapping
from monarch.wake import OwnedFd

if TYPE_CHECKING:
    from monarch.compiled import Reader, Writer

_DATA_BYTES: Final = 256 << 10
"""Frames of more than three eighths of it go another way."""
_HEAD_BYTES: Final = 256

assert _DATA_BYTES // 8 * 3 <= BIG_BYTES, "a part that gets memory of its own is in no ring"

why_not = compiled.why_not


_bells: Final = weakref.WeakValueDictionary[int, OwnedFd]()  # by process: a forked child makes its own
_bells_lock = threading.Lock()


def bell() -> OwnedFd:
    """This process's bell, which closes with the last of those who hear it: to be polled edge-triggered."""
    with _bells_lock:
        found = _bells.get(os.getpid())
        if found is None:
            found = _bells[os.getpid()] = OwnedFd(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        return found


def offer() -> tuple[list[int], Reader]:
    """A ring to read from, and its descriptors, for the writer: the memory, and the bell.

    Raises:
        OSError: no memory, or no descriptor.
    """
    heard = bell()
    fds = [sealed.create("monarch-ring")]
    try:
        os.posix_fallocate(fds[0], 0, _HEAD_BYTES + _DATA_BYTES)  # a page that cannot be had later would be a SIGBUS
        sealed.seal(fds[0])
        fds.append(os.dup(heard.fd))
        memory, mapping = _mapped(os.dup(fds[0]))
        return fds, compiled.part.Reader(memory, (mapping, heard))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def accept(fds: Sequence[int]) -> Writer:
    """Write to the ring that another offered; owns `fds`.

    Raises:
        OSError: no room in the address space.
        ValueError: this is no ring, or the other could cut it off.
    """
    owned = [OwnedFd(fd) for fd in fds]
    if len(owned) != 2 or not _is_bell(fds[1]):
        raise ValueError("a ring is a memory and a bell")
    sealed.sealed_bytes(fds[0])
    memory, mapping = _mapped(os.dup(fds[0]))
    return compiled.part.Writer(memory, (mapping, owned[1]), fds[1])


def _is_bell(fd: int) -> bool:
    """Writing to something else might block, or be read by others."""
    return os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventfd]" and not os.get_blocking(fd)


def _mapped(fd: int) -> tuple[object, Mapping]:
    """The memory behind `fd`, which is closed, and what keeps it."""
    mapping = Mapping(fd)
    mapping.close_fd()
    return mapping.marks, mapping


if compiled.part is not None:  # what every message calls, as it is; see `_compiled.pyi`
    look = compiled.part.look
    sleep = compiled.part.sleep
    Lead = compiled.part.Lead
    ring_bell = compiled.part.ring_bell
