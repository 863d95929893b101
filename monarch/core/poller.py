"""Descriptors and timers of a process: what the pump waits for.

`poll` is called by one thread at a time, whichever drives (see `driver`); all else may be called from any thread.
Handlers and timers run inside `poll`; one that raises is logged, and costs no other its turn.
"""

from __future__ import annotations

import heapq
import itertools
import select
import threading
import time
from collections.abc import Callable
from typing import Final

from monarch.core.driver import WakeFd
from monarch.log import get_logger

log = get_logger("monarch.poller")

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT
_LONGEST_POLL_S: Final = 3600.0  # epoll counts milliseconds in an int


class Poller:
    """An epoll with handlers, timers, and a way to end its wait."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._wake = WakeFd()
        self.closed = False
        self.register(self._wake.fileno(), lambda _: self._wake.drain())

    def register(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call `handler(events)` whenever `fd` is readable.

        Raises:
            OSError, ValueError: the descriptor cannot be polled, or this poller is closed.
        """
        self._handlers[fd] = handler
        self._epoll.register(fd, READABLE)

    def replace(self, fd: int, handler: Callable[[int], None]) -> None:
        """Another handler for a descriptor that is registered."""
        self._handlers[fd] = handler

    def unregister(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None and not self.closed:
            try:
                self._epoll.unregister(fd)
            except (OSError, ValueError):
                pass  # it was closed, which unregisters it

    def watch(self, fd: int, writable: bool) -> None:
        """Whether to call the handler for room to write, too."""
        try:
            self._epoll.modify(fd, READABLE | (WRITABLE if writable else 0))
        except (OSError, ValueError):
            pass  # it is going; its end will be noticed by whoever reads it

    def wake(self) -> None:
        """Make a running `poll` return soon, or the next one at once."""
        self._wake.wake()

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` inside `poll`, after `delay_s`. It must not block."""
        with self._lock:
            heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._count), action))
            first = self._timers[0][2] is action
        if first:
            self._wake.wake()

    def poll(self, timeout_s: float | None) -> None:
        """Wait up to `timeout_s` for something to do, and do it."""
        timers = self._timers
        if timers:
            left_s = max(0.0, timers[0][0] - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        if timeout_s is not None and timeout_s > _LONGEST_POLL_S:
            timeout_s = _LONGEST_POLL_S
        try:
            events = self._epoll.poll(timeout_s)
        except ValueError:
            return  # closed meanwhile
        for fd, event in events:
            handler = self._handlers.get(fd)
            if handler is not None:
                try:
                    handler(event)
                except Exception:
                    log.exception("poller.handler_failed", fd=fd)
        if timers:
            self._run_timers(time.monotonic())

    def _run_timers(self, now_s: float) -> None:
        while self._timers and self._timers[0][0] <= now_s:
            with self._lock:
                if not self._timers or self._timers[0][0] > now_s:
                    return
                _, _, action = heapq.heappop(self._timers)
            try:
                action()
            except Exception:
                log.exception("poller.timer_failed")

    def shut(self) -> None:
        """Wait for nothing more; registering fails from now on."""
        self.closed = True
        self._epoll.close()

    def close(self) -> None:
        """Let go of everything. `shut` comes first."""
        self._handlers.clear()
        self._timers.clear()
        self._wake.close()
