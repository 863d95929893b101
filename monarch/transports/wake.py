"""A wake-up for a thread that polls descriptors."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from attrs import define, field


@define(eq=False)
class Wake:
    """An eventfd that any thread may set or clear, also after it was closed, when its number may be
    another file's."""

    fd: int = field(factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    _lock: threading.Lock = field(factory=threading.Lock)
    _is_closed: bool = False

    def set(self) -> None:
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with self._lock, suppress(BlockingIOError):
            if not self._is_closed:
                os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)
