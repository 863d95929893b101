"""Descriptors and timers of a process: what the pump waits for.

`poll` is called by one thread at a time, whichever drives (see `driver`); all else may be called from any thread.
Handlers and timers run inside `poll`; one that raises is logged, and costs no other its turn.
"""

from __future__ import annotations

import heapq
import itertools
import os
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
_SPIN_S: Final = 100e-6
_PREEMPTED_S: Final = 20e-6  # one round of looking takes 2 us
_FEWEST_SKIPS: Final = 8
_MOST_SKIPS: Final = 512
_LONGEST_POLL_S: Final = 3600.0  # epoll counts milliseconds in an int


class Spin:
    """Whether to look for a while before sleeping. To wake a CPU that sleeps takes 25 us and more, each way, and one
    that looks is there at once; but who looks in vain takes the time of those who have something to do.

    So after a look in vain, or one that was interrupted for somebody else, the next waits sleep at once: 8 of them,
    then 16, up to 512, until a look finds something. Where looking never pays, that is less than a microsecond for
    each wait. Where each side has a virtual CPU of its own, a call takes 105 us, and not 142.
    """

    def __init__(self, time_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._time_s, self._clock = time_s, clock
        self._skips = 0  # waits that are still to sleep at once
        self._penalty = _FEWEST_SKIPS

    def look(self, poll: Callable[[float], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        """What `poll(0)` finds within the time for it; an empty list: sleep."""
        if self._skips:
            self._skips -= 1
            return []
        began_s = last_s = now_s = self._clock()
        longest_s = 0.0
        while not (events := poll(0)) and now_s - began_s < self._time_s:
            now_s = self._clock()
            longest_s = max(longest_s, now_s - last_s)
            last_s = now_s
        if events and longest_s < _PREEMPTED_S:
            self._penalty = _FEWEST_SKIPS
        else:
            self._skips = self._penalty
            self._penalty = min(2 * self._penalty, _MOST_SKIPS)
        return events


class Poller:
    """An epoll with handlers, timers, and a way to end its wait."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._wake = WakeFd()
        self._spin = Spin(_SPIN_S if len(os.sched_getaffinity(0)) > 1 else 0.0)
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

    def poll(self, timeout_s: float | None, *, eager: bool = False) -> None:
        """Wait up to `timeout_s` for something to do, and do it; `eager` when somebody waits for what comes."""
        timers = self._timers
        if timers:
            left_s = max(0.0, timers[0][0] - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        if timeout_s is not None and timeout_s > _LONGEST_POLL_S:
            timeout_s = _LONGEST_POLL_S
        try:
            events = self._spin.look(self._epoll.poll) if eager and timeout_s != 0 else []
            if not events:
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
        if timers and timers[0][0] <= (now_s := time.monotonic()):
            self._run_timers(now_s)

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
