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
from typing import TYPE_CHECKING, Final

from monarch.log import get_logger
from monarch.transports import ring
from monarch.wake import Wake

if TYPE_CHECKING:
    from monarch.transports.ring import Reader

log = get_logger("monarch.poller")

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT
_SPIN_S: Final = 200e-6
_PREEMPTED_S: Final = 200e-6  # one round of looking takes 2 us; who has something to do takes the CPU for longer
_FEWEST_SKIPS: Final = 8
_MOST_SKIPS: Final = 512
_ROUNDS_BETWEEN: Final = 8
"""As long as rings have something, descriptors are looked at in every so-manieth round only."""
_LONGEST_POLL_S: Final = 3600.0  # epoll counts milliseconds in an int


class Spin:
    """Whether to look for a while before sleeping. To wake a CPU that sleeps takes 25 us and more, each way, and one
    that looks is there at once; but who looks in vain takes the time of those who have something to do.

    So after a look in vain, or one that was interrupted for somebody else, the next waits sleep at once: 8 of them,
    then 16, up to 512, until a look finds something. Where looking never pays, that is less than a microsecond for
    each wait. Where each side has a virtual CPU of its own, a call over sockets takes 105 us, and not 142.
    """

    def __init__(self, time_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.time_s, self._clock = time_s, clock
        self._skips = 0  # waits that are still to sleep at once
        self._penalty = _FEWEST_SKIPS

    def look(self, poll: Callable[[float], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        """What `poll(0)` finds within the time for it; an empty list: sleep."""
        if not self.pays():
            return []
        began_s = last_s = self._clock()
        longest_s = 0.0
        while True:
            events = poll(0)
            now_s = self._clock()
            longest_s = max(longest_s, now_s - last_s)
            if events or now_s - began_s >= self.time_s:
                break
            last_s = now_s
        self.learn(bool(events), longest_s)
        return events

    def pays(self) -> bool:
        """Whether to look now. Then `learn` hears what came of it."""
        if self._skips:
            self._skips -= 1
            return False
        return True

    def learn(self, found: bool, longest_s: float) -> None:
        """Something was found, or not; one round of looking took `longest_s` at most."""
        if found and longest_s < _PREEMPTED_S:
            self._penalty = _FEWEST_SKIPS
        else:
            self._skips = self._penalty
            self._penalty = min(2 * self._penalty, _MOST_SKIPS)


class Poller:
    """An epoll with handlers, timers, and a way to end its wait."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._readers: dict[int, Reader] = {}
        self._looked_at: tuple[tuple[int, ...], tuple[Reader, ...]] = (), ()  # the same, in pieces
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._wake = Wake()
        self._spin = Spin(_SPIN_S if len(os.sched_getaffinity(0)) > 1 else 0.0)
        self.closed = False
        self._running = 0  # the thread that runs handlers
        self._rounds = 0
        self.register(self._wake.fileno(), lambda _: self._wake.clear())

    def register(self, fd: int, handler: Callable[[int], None], reader: Reader | None = None) -> None:
        """Call `handler(events)` whenever `fd` is readable, and with 0 when there is something for `reader`.

        Raises:
            OSError, ValueError: the descriptor cannot be polled, or this poller is closed.
        """
        self._handlers[fd] = handler
        self._epoll.register(fd, READABLE)
        if reader is not None:
            reader.attended = True
            self._look_at(fd, reader)

    def _look_at(self, fd: int, reader: Reader | None) -> None:
        with self._lock:
            self._readers.pop(fd, None)
            if reader is not None:
                self._readers[fd] = reader
            self._looked_at = tuple(self._readers), tuple(self._readers.values())

    def replace(self, fd: int, handler: Callable[[int], None]) -> None:
        """Another handler for a descriptor that is registered."""
        self._handlers[fd] = handler

    def unregister(self, fd: int) -> None:
        if fd in self._readers:
            self._look_at(fd, None)
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
        self._wake.set()

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` inside `poll`, after `delay_s`. It must not block."""
        with self._lock:
            heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._count), action))
            first = self._timers[0][2] is action
        if first and self._running != threading.get_ident():  # who runs handlers looks at the timers before it waits
            self._wake.set()

    def poll(self, timeout_s: float | None, *, eager: bool = False) -> None:
        """Wait up to `timeout_s` for something to do, and do it; `eager` when somebody waits for what comes."""
        timers = self._timers
        if timers:
            left_s = max(0.0, timers[0][0] - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        if timeout_s is not None and timeout_s > _LONGEST_POLL_S:
            timeout_s = _LONGEST_POLL_S
        try:
            events = self._wait(timeout_s, eager and timeout_s != 0)
        except ValueError:
            return  # closed meanwhile
        self._running = threading.get_ident()
        try:
            for fd, event in events:
                handler = self._handlers.get(fd)
                if handler is not None:
                    try:
                        handler(event)
                    except Exception:
                        log.exception("poller.handler_failed", fd=fd)
            if timers and timers[0][0] <= (now_s := time.monotonic()):
                self._run_timers(now_s)
        finally:
            self._running = 0

    def _wait(self, timeout_s: float | None, looks: bool) -> list[tuple[int, int]]:
        fds, readers = self._looked_at
        if not readers:
            found = self._spin.look(self._epoll.poll) if looks else []
            return found or self._epoll.poll(timeout_s)
        if looks and self._spin.pays():
            self._spin.learn(*ring.look(readers, self._epoll.fileno(), self._spin.time_s))
        ready = ring.fall_asleep(readers)
        if not ready:
            return self._epoll.poll(timeout_s)
        self._rounds += 1
        found = [(fds[at], 0) for at in ready]
        return found if self._rounds % _ROUNDS_BETWEEN else found + self._epoll.poll(0)

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
