"""A wake-up for a thread that polls descriptors, and descriptors that close with their last reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch import compiled


class _Wake:
    """What the compiled part knows of it; so it is there, too."""

    __slots__ = ("_fd", "_owned", "bell")

    bell: bytearray | None
    _owned: OwnedFd | None
    _fd: int


if not TYPE_CHECKING and compiled.part is not None:
    _Wake = compiled.part.Wake


class Wake(_Wake):
    """A descriptor that any thread can make readable, to end a poll. A closed one does nothing.

    Attributes:
        bell: a byte at which whoever polls looks now, and which is set instead, without a call of the system; or None.
    """

    __slots__ = ()

    def __init__(self) -> None:
        self.bell = None
        self._owned = owned = OwnedFd(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._fd = owned.fd

    def fileno(self) -> int:
        return self._owned.fd if self._owned is not None else -1

    def set(self) -> None:
        bell, owned = self.bell, self._owned
        if bell is not None:
            bell[0] = 1
        elif owned is not None:
            os.eventfd_write(owned.fd, 1)

    def clear(self) -> None:
        owned = self._owned
        try:
            if owned is not None:
                os.eventfd_read(owned.fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._owned = None


class OwnedFd:
    """Closed with its last reference: a thread that uses it while another closes must not touch a file that got the
    same number meanwhile."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)
