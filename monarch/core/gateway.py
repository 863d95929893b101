"""The broker of a process: where it listens, what it sends to others, and what it passes on between them.

A process may listen at several places: those of its host reach it at the first, others over the network (`address`).
Who the others are, and how they come and go, is in `peers`; what arrives from them goes through `intake`.

`pump` is called by the thread that drives (see `driver`); everything else may be called from any thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from attrs import evolve

from monarch.core import goodbye
from monarch.core.address import Place, joined
from monarch.core.driver import Driver, Signal
from monarch.core.envelope import Envelope
from monarch.core.ids import ProcId
from monarch.core.intake import Intake
from monarch.core.limits import Limits
from monarch.core.monitor import Down
from monarch.core.peer import Peer, State
from monarch.core.peers import Peers
from monarch.core.poller import WRITABLE, Poller
from monarch.core.protocol import Hello
from monarch.core.router import Bounce, Forward, route
from monarch.core.ways import Ways
from monarch.transports.base import Buffer, Listener, Missing, Transport

_LINGER_S: Final = 0.001  # a side thread leaves the outboxes to those who fill them for so long; epoll counts in ms


class Gateway:
    """See the module.

    Args:
        deliver: takes the messages for this process.
        forward: sends those for others on, or says why that cannot be.
        bounce: takes those that cannot go on.
        on_gone, locate: see `Peers`.
    """

    def __init__(
        self,
        proc: ProcId,
        transport: Transport,
        secret: bytes,
        driver: Driver,
        *,
        deliver: Callable[[Envelope], None],
        forward: Callable[[Envelope], Down | None],
        bounce: Callable[[Envelope, Down], None],
        on_gone: Callable[[Peer, Down], None],
        locate: Callable[[ProcId, Callable[[str | Down], None]], None],
        limits: Limits | None = None,
    ) -> None:
        self.proc = proc
        self.key = proc.key
        self.transport = transport
        self.driver = driver
        self.limits = limits if limits is not None else Limits()
        self._secret = secret
        self._forward, self._bounce = forward, bounce
        self.is_steady = False  # set by who knows that no code of users runs here
        self.ways = Ways(transport)
        self._listeners: dict[Place, Listener] = {}
        self._elsewhere: list[Place] = []
        self.is_closed = False
        self._poller = Poller()
        self._corked: deque[Peer] = deque()  # those whose outbox the next pump looks at
        self._linger_until_s = 0.0
        self.call_later = self._poller.call_later
        intake = Intake(
            proc, driver, self.limits, deliver=deliver, pass_on=self._pass_on, call_later=self._poller.call_later
        )
        self._lead = self._poller.lead_by(deliver, proc.key, self._corked)
        self.peers = Peers(
            proc,
            self._poller,
            self.ways,
            self.limits,
            intake,
            hello=self._hello,
            cork=self._cork,
            bounce=bounce,
            on_gone=on_gone,
            locate=locate,
        )

    # ---- starting and ending

    def listen(self, url: str) -> ProcId:
        """Accept links at `url`; returns this process's id with the address in it. Then start the driver."""
        self.open(url, self._secret)
        self.driver.start(self.pump, self._lead, self._poller.waker, str(self.proc.uid))
        return self.proc

    def open(self, url: str, secret: bytes) -> Place:
        """Accept links at `url` from those who prove `secret`. Thread-safe, as the rest.

        Raises:
            NotViable, ValueError, OSError: nobody can listen there.
        """
        listener = self.ways.transport(url).listen(url, secret)
        place = self.ways.join(listener.url, secret)
        self._listeners[place] = listener
        self._poller.register(listener.fileno(), lambda _: self.peers.accept(listener))
        self._tell_address()
        return place

    def answer_at(self, place: Place) -> None:
        """This process is reached at `place` too, where another listens and hands on what is for it: `Peers.adopt`."""
        self._elsewhere.append(place)
        self._tell_address()

    def _tell_address(self) -> None:
        if self.proc.keeper is None:
            self.proc = evolve(self.proc, address=self.address)

    @property
    def places(self) -> list[Place]:
        return [*self._listeners, *self._elsewhere]

    @property
    def address(self) -> str:
        """All its places, as others are told."""
        return joined(self.places)

    @property
    def url(self) -> str:
        """Where it listens first."""
        return next((listener.url for listener in self._listeners.values()), "")

    @property
    def starved(self) -> OSError | None:
        """Why those who come cannot be linked now: as `Listener.starved`."""
        return next((listener.starved for listener in self._listeners.values() if listener.starved is not None), None)

    def hand_down(self) -> list[int]:
        """Descriptors of a connection to this process, for one that is about to be started and `inherit`s them; the
        caller owns them. Empty: it must dial."""
        for listener in self._listeners.values():  # the first: where those of this host reach it
            with contextlib.suppress(OSError):
                return listener.hand_down()
        return []

    def inherit(self, proc: ProcId, fds: Sequence[int]) -> Peer:
        """As `Peers.connect`, over what it has handed down, if that is a connection. Blocks until there is a link."""
        inherit = self.transport.inherit
        if fds and inherit is not None:
            self.peers.inherit(proc, lambda timeout_s: inherit(fds, str(proc.uid), timeout_s))
        return self.peers.connect(proc)

    def _hello(self, peer: Peer) -> Hello:
        received, to = peer.session.received, str(peer.proc.uid)
        kind = (to, peer.is_new_host, self.is_steady)
        return Hello(str(self.proc), self.address, received, os.getpid(), socket.gethostname(), *kind)

    def close(self, timeout_s: float = 2.0) -> None:
        """Wait until peers have what was sent to them, say goodbye, and end. Blocks up to `timeout_s`; with 0 the
        process ends without a word, as if it had been killed."""
        if self.is_closed:
            return
        deadline_s = time.monotonic() + timeout_s
        goodbye.settle(self.peers, self.driver, self.call_later, deadline_s)
        self.is_closed = True
        self.peers.stop()
        self.driver.stop()
        for listener in self._listeners.values():
            listener.close()
        self._poller.shut()  # first: a link dialed at this moment fails to register, and is dropped by its thread
        self.peers.part(deadline_s if timeout_s > 0 else None)
        self._poller.close()

    # ---- the pump

    def pump(self, timeout_s: float | None) -> None:
        """Take in what has arrived and do what is due; waits up to `timeout_s` when there is nothing."""
        if self._corked:
            if self.driver.leads_aside and time.monotonic() < self._linger_until_s:
                timeout_s = _LINGER_S if timeout_s is None else min(timeout_s, _LINGER_S)
            else:
                timeout_s = 0.0  # what comes of it may be what the caller waits for
                self._uncork()
        self._poller.poll(timeout_s, eager=self.driver.is_eager)

    def _uncork(self) -> None:
        while self._corked:
            peer = self._corked.popleft()
            peer.corked = False  # first: what is sent from here on asks anew
            link = peer.link
            if link is not None and peer.torn:
                peer.torn = False
                self.peers.lost(peer, link, RuntimeError("sending was interrupted"))
            elif link is not None:
                self.peers.on_link(peer, link, WRITABLE)

    def add_pollable(self, fd: int, action: Callable[[], None]) -> None:
        """Run `action` on the driving thread whenever `fd` is readable."""
        self._poller.register(fd, lambda _: action())

    def remove_pollable(self, fd: int) -> None:
        self._poller.unregister(fd)

    def _cork(self, peer: Peer) -> None:
        if peer.corked:
            return
        peer.corked = True
        if not self._corked:
            self._linger_until_s = time.monotonic() + _LINGER_S
        self._corked.append(peer)
        self.driver.soon()
        self._poller.wake()

    # ---- sending

    def send(self, envelope: Envelope, proc: ProcId | None = None, *, may_wait: bool = False) -> Down | None:
        """Put `envelope` on its way to the process it names.

        Args:
            proc: who that is, in case this gateway has no link to it yet.
            may_wait: whether the calling thread may block while the peer's buffer is full. Never from the pump.

        Returns:
            None, or why it cannot be delivered: the peer is gone, or unknown.
        """
        key = envelope.via or envelope.dst_proc
        peer = self.peers.get(key)
        if self.is_closed:
            return Down("stopped", f"process {self.proc.uid}, which sends this, has closed its links")
        if peer is None:
            if proc is None or self.peers.keeps(proc):
                return Down("unreachable", "no gateway on its way knows the destination process")
            peer = self.peers.connect(proc)
        down = peer.send(envelope.frame())
        if down is not None:
            return down
        if peer.link is None and peer.state is State.NEW and peer.dialing is None:
            self.peers.connect(peer.proc)  # it is known, and nobody has dialed it yet
        if may_wait and peer.is_full:
            self.wait_for_room((key,))
        return None

    def send_together(self, peer: Peer, frames: Sequence[list[Buffer]]) -> None:
        """Several messages for one process, as its link would carry them."""
        if peer.send_together(frames) is None and peer.state is State.NEW and peer.dialing is None:
            self.peers.connect(peer.proc)

    def wait_for_room(self, keys: Iterable[int]) -> None:
        """Block while the buffer of any of these peers is full. Never from the pump."""
        for key in keys:
            peer = self.peers.get(key)
            if peer is not None and peer.is_full:
                signal = Signal()
                while not self.is_closed and peer.wants_room(signal.notify):
                    self.driver.wait(signal, 1.0)
                    signal.clear()

    def _pass_on(self, envelope: Envelope) -> None:
        """What has arrived for another process."""
        step = route(self.key, self.peers, envelope)
        if isinstance(step, Forward):
            envelope.ttl -= 1
            if Missing in map(type, envelope.parts):
                text = f"process {self.proc.uid}, which relays it, has no memory for the message"
                down: Down | None = Down("failed", text)
            else:
                down = self._forward(envelope)
            if down is not None:
                self._bounce(envelope, down)
        elif isinstance(step, Bounce):
            self._bounce(envelope, Down("unreachable", step.reason))
