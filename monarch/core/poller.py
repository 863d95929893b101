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
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from monarch.core.spin import LOOK_S, Spin, cpus
from monarch.log import get_logger
from monarch.transports import ring
from monarch.wake import OwnedFd, Wake

if TYPE_CHECKING:
    from monarch._compiled import Lead as CompiledLead
    from monarch.compiled import Reader, Take
    from monarch.core.driver import Lead

log = get_logger("monarch.poller")

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT
_ROUNDS_BETWEEN: Final = 8
"""As long as rings have something, descriptors are looked at in every so-manieth round only."""
_LONGEST_POLL_S: Final = 3600.0  # epoll counts milliseconds in an int


def _leads_not(*_: object) -> None:
    """Without the compiled part."""


class Poller:
    """An epoll with handlers, timers, and a way to end its wait."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._epoll_fd = self._epoll.fileno()
        self._ring_bell: OwnedFd | None = None
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._readers: dict[int, Reader] = {}
        self._looked_at: tuple[tuple[tuple[int, int], ...], tuple[Reader, ...]] = (), ()  # the same: events, readers
        self._count = itertools.count()
        self._lock = threading.Lock()
        self.waker = Wake()
        """Makes a running `poll` return soon, or the next one at once."""
        self.wake = self.waker.set
        self._bell = bytearray(1)
        # Of 32 processes that start together, each would look in vain after its first answer, for 0.4 ms of its 12.
        self._spin = Spin(LOOK_S if cpus() > 1 else 0.0)
        self.closed = False
        self._running = 0  # the thread that runs handlers
        self._rounds = 0
        self.register(self.waker.fileno(), lambda _: self.waker.clear())
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._lead: CompiledLead | None = None
        if not ring.why_not:
            self._ring_bell = bell = ring.bell()
            self._epoll.register(bell.fd, select.EPOLLIN | select.EPOLLET)
            looks = self.waker, self._bell, self._spin
            self._lead = ring.Lead(self._epoll_fd, bell.fd, *looks, self._timers, (), self._delivery_failed)

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
            self._looked_at = tuple((each, 0) for each in self._readers), tuple(self._readers.values())
            if self._lead is not None:
                self._lead.readers = self._looked_at[1]

    def lead_by(self, take: Take, proc: int, first: Collection[object]) -> Lead:
        """How to wait until a signal is set, with a lock, if that is free, and to deliver what the rings bring, as does
        `poll` again and again, in one step of the compiled part: handlers of signals run with the lock released. False
        where the time is over, or there is more to do, which `poll` does. None: nothing was waited for.

        Args:
            take: takes the messages for the process `proc`.
            first: as long as there is something in it, nobody is to lead: others do that, before they `poll`.
        """
        if self._lead is None:
            return _leads_not
        self._lead.take, self._lead.proc, self._lead.first = take, proc, first
        return self._lead.until

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

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` inside `poll`, after `delay_s`. It must not block."""
        with self._lock:
            heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._count), action))
            first = self._timers[0][2] is action
        if first and self._running != threading.get_ident():  # who runs handlers looks at the timers before it waits
            self.wake()

    def poll(self, timeout_s: float | None, *, eager: bool = False) -> None:
        """Wait up to `timeout_s` for something to do, and do it; `eager` when somebody waits for what comes."""
        timers = self._timers
        if timers:
            left_s = timers[0][0] - time.monotonic()
            if timeout_s is None or left_s < timeout_s:
                timeout_s = left_s if left_s > 0 else 0.0
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

    def _delivery_failed(self, error: BaseException) -> None:
        log.error("message.failed", exc_info=error)
        if not isinstance(error, Exception):
            raise error

    def _wait(self, timeout_s: float | None, looks: bool) -> list[tuple[int, int]]:
        events, readers = self._looked_at
        spin = self._spin
        if self._ring_bell is None:
            found = spin.look(self._epoll.poll) if looks else []
            return found or self._sleep(timeout_s)
        found = []
        if looks and spin.pays():
            self.waker.bell = self._bell
            try:
                ready, longest_s = ring.look(readers, self._epoll_fd, spin.time_s, self._bell)
            finally:
                self.waker.bell = None
            spin.learn(ready is not None, longest_s)
            if self._bell[0]:
                self._bell[0] = 0
                return []
            found = list(map(events.__getitem__, ready or ()))
        if not found:
            found, slept_s = ring.sleep(readers, events, self._epoll_fd, self._ring_bell.fd, timeout_s)
            if slept_s is not None:
                spin.slept(slept_s)
                return found
        self._rounds += 1
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

    def _sleep(self, timeout_s: float | None) -> list[tuple[int, int]]:
        began_s = time.monotonic()
        found = self._epoll.poll(timeout_s if timeout_s is None or timeout_s < _LONGEST_POLL_S else _LONGEST_POLL_S)
        self._spin.slept(time.monotonic() - began_s)
        return found

    def shut(self) -> None:
        """Wait for nothing more; registering fails from now on."""
        with self._lock:
            self.closed = True
            self._epoll_fd = -1
            if self._lead is not None:
                self._lead.take = None
        self._epoll.close()

    def close(self) -> None:
        """Let go of everything. `shut` comes first."""
        self._handlers.clear()
        self._timers.clear()
        self._ring_bell = None
        self.waker.close()
