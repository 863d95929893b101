"""Reaching other processes: finding where they listen, dialing, the pauses between tries, and giving up.

A try has three steps: ask the keeper where the process listens (that of the process, or our own where it has none, and
no address that counts here), dial, and hear the hello of the other side. No thread
waits for the first and the last; dialing blocks, on one of `_AT_ONCE` threads, which end when nobody is left to dial.
So a process that calls hundreds of others buries neither itself nor them in handshakes.

Tries that fail go on for `limit_s`. Silence of a process on this host does not count, nor of one that has a keeper:
whoever says nothing is busy, for if it were gone its keeper would know, and of a host that is gone `heartbeats` tells.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from attrs import define

from monarch.core.address import Place
from monarch.core.ids import ProcId
from monarch.core.links import Refused
from monarch.core.monitor import Down
from monarch.core.peer import Peer, State
from monarch.errors import AuthenticationError
from monarch.transports import url
from monarch.transports.base import Link

_AT_ONCE: Final = 8
_PAUSE_FIRST_S: Final = 0.005
_PAUSE_MOST_S: Final = 0.5


class Reach(Protocol):
    """Which places can be reached, and by what links: `Ways`."""

    def find(self, *addresses: str) -> Place | None: ...

    def dial(self, place: Place, timeout_s: float) -> Link: ...


@define(eq=False)
class Dialing:
    """The tries to reach one peer, until one succeeds or the last has failed; `Peer.dialing` while they go on."""

    peer: Peer
    limit_s: float
    deadline_s: float
    pause_s: float = _PAUSE_FIRST_S

    @property
    def wanted(self) -> bool:
        return self.peer.dialing is self


class Dialer:
    """See the module.

    Args:
        locate: asks who knows a process for its address, and calls back with it, or with why the process is gone.
        greet: takes a new link to a peer, and calls back if it comes to nothing.
        give_up: hears of a peer that could not be reached.
        failed: hears of each try that has failed, and why.
        call_later: calls back on the driving thread.
    """

    def __init__(
        self,
        reach: Reach,
        limit_s: float,
        hello_limit_s: float,
        *,
        locate: Callable[[ProcId, Callable[[str | Down], None]], None],
        greet: Callable[[Peer, Link, Refused], None],
        give_up: Callable[[Peer, Down], None],
        failed: Callable[[Peer, str], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._reach = reach
        self._limit_s, self._hello_limit_s = limit_s, hello_limit_s
        self._locate, self._greet, self._give_up, self._call_later = locate, greet, give_up, call_later
        self._failed = failed
        self._lock = threading.Lock()
        self._queue: deque[tuple[Dialing, Place]] = deque()
        self._threads = 0
        self._closed = False

    def start(self, peer: Peer) -> None:
        """Reach `peer`, unless that goes on already, or there is no need. Returns at once."""
        dialing = self._begin(peer)
        if dialing is not None:
            self._find(dialing)

    def inherit(self, peer: Peer, connect: Callable[[float], Link]) -> None:
        """As `start`; the first try is a connection that is there already. Blocks for that."""
        dialing = self._begin(peer)
        if dialing is not None:
            self._try(dialing, "the connection that it handed down", connect)

    def _begin(self, peer: Peer) -> Dialing | None:
        with peer.lock:
            if peer.dialing is not None or peer.state in (State.UP, State.GONE) or self._closed:
                return None
            limit_s = peer.attach_limit_s if peer.is_new_host else self._limit_s
            dialing = peer.dialing = Dialing(peer, limit_s, time.monotonic() + limit_s)
            return dialing

    def close(self) -> None:
        self._closed = True
        self._queue.clear()

    # ---- the steps of a try

    def _find(self, dialing: Dialing) -> None:
        if not dialing.wanted or self._closed:
            return
        peer = dialing.peer
        place = self._reach.find(peer.address, peer.proc.address) if peer.proc.keeper is None else None
        if place is not None:
            self._enqueue(dialing, place)
        else:
            self._locate(peer.proc, partial(self._found, dialing))

    def _found(self, dialing: Dialing, answer: str | Down) -> None:
        if isinstance(answer, Down):
            self._end(dialing, answer)
            return
        place = self._reach.find(answer)
        if place is not None:
            self._enqueue(dialing, place)
        else:
            text = f"{dialing.peer.title} cannot be reached from here: it listens at {answer or 'no address'}"
            self._end(dialing, self._unreachable(dialing.peer, text))

    def _enqueue(self, dialing: Dialing, place: Place) -> None:
        with self._lock:
            self._queue.append((dialing, place))
            if self._threads == _AT_ONCE:
                return
            self._threads += 1
        threading.Thread(target=self._work, daemon=True, name="monarch-dial").start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads -= 1
                    return
                dialing, place = self._queue.popleft()
            if dialing.wanted and not self._closed:
                self._try(dialing, place.url, partial(self._reach.dial, place))

    def _try(self, dialing: Dialing, address: str, connect: Callable[[float], Link]) -> None:
        peer = dialing.peer
        try:
            link = connect(self._hello_limit_s)
            self._greet(peer, link, partial(self._refused, dialing, address))
        except ConnectionRefusedError as error:
            if peer.proc.keeper is None and not peer.is_new_host:
                self._end(dialing, self._unreachable(peer, f"{peer.title} is gone: nobody listens at {address}"))
            else:
                self._try_again(dialing, str(error))
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE) and not peer.breaks:
                text = f"{peer.title} cannot be reached: {trouble} (see `ulimit -n`)"
                self._end(dialing, self._unreachable(peer, text))
            elif isinstance(error, AuthenticationError) and peer.is_new_host:
                self._end(dialing, self._unreachable(peer, str(error)))
            elif isinstance(error, TimeoutError):
                self._silent(dialing, address, trouble)
            else:
                self._try_again(dialing, trouble)

    def _refused(self, dialing: Dialing, address: str, *, silent: bool, reason: str = "") -> None:
        if reason and dialing.peer.proc.keeper is None:
            text = f"{dialing.peer.title} cannot be reached at {address}: {reason}"
            self._end(dialing, self._unreachable(dialing.peer, text))
        elif silent:
            self._silent(dialing, address, "it accepted the connection and did not answer")
        else:
            self._try_again(dialing, reason or "it accepted the connection and ended it again")

    # ---- between tries

    def _silent(self, dialing: Dialing, address: str, trouble: str) -> None:
        if url.stays_on_host(address) or dialing.peer.proc.keeper is not None:
            dialing.deadline_s = time.monotonic() + dialing.limit_s
            self._failed(dialing.peer, trouble)
            self._pause(dialing)
        else:
            self._try_again(dialing, trouble)

    def _try_again(self, dialing: Dialing, trouble: str) -> None:
        if time.monotonic() < dialing.deadline_s:
            self._failed(dialing.peer, trouble)
            self._pause(dialing)
        else:
            text = f"{dialing.peer.title} could not be reached for {dialing.limit_s:g} s: {trouble}"
            self._end(dialing, self._unreachable(dialing.peer, text))

    def _pause(self, dialing: Dialing) -> None:
        pause_s, dialing.pause_s = dialing.pause_s, min(2 * dialing.pause_s, _PAUSE_MOST_S)
        self._call_later(pause_s, lambda: self._find(dialing))

    def _end(self, dialing: Dialing, down: Down) -> None:
        """On the driving thread, where no link can come up meanwhile."""

        def end() -> None:
            peer = dialing.peer
            with peer.lock:
                if peer.dialing is not dialing:
                    return  # it has dialed us in time
                peer.dialing = None
            self._give_up(peer, down)

        self._call_later(0.0, end)

    def _unreachable(self, peer: Peer, text: str) -> Down:
        return Down("unreachable", text, peer.pid, peer.host)
