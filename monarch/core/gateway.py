"""The broker of a process: it owns the links to other processes, and hands on what arrives.

Theory of operation. Every other process is a `Peer`, with the states drawn there; all transitions are made here. Frames
that are given to a peer without a link wait in its session. A peer that is GONE stays so: what was not
acknowledged goes back to its senders, and it is never accepted again. Both sides may dial at once; the link that was
dialed by the one with the smaller key stays.

A process may listen at several places: those of its host reach it at the first, others over the network (`address`).

Who knows why a process is gone: its keeper, which launched it and sees it end. So a process that loses the link to a
peer asks the peer's keeper (`locate`), and a keeper waits for the exit report; for a process without a keeper, an
address where nobody listens any more is the evidence.

`pump` is called by the thread that drives (see `driver`); everything else may be called from any thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from attrs import define, evolve

from monarch.core import goodbye
from monarch.core.address import EVERYWHERE, Place, joined
from monarch.core.dialer import Dialer
from monarch.core.driver import Driver, Signal
from monarch.core.envelope import Envelope, Flag, parse
from monarch.core.heartbeats import Heartbeats
from monarch.core.ids import ProcId
from monarch.core.links import Links, Refused
from monarch.core.monitor import Down
from monarch.core.peer import Peer, State
from monarch.core.poller import WRITABLE, Poller
from monarch.core.protocol import FrameType, Hello, Session, frame_type, refused_because
from monarch.core.router import Bounce, Deliver, Forward, route
from monarch.core.ways import Ways
from monarch.errors import LinkClosed, ProtocolError, TransportError
from monarch.log import get_logger
from monarch.transports.base import Buffer, Frame, Link, Listener, Missing, Transport

log = get_logger("monarch.gateway")

_LAST_WORDS_LIMIT_S: Final = 0.25
_LINGER_S: Final = 0.001  # a side thread leaves the outboxes to those who fill them for so long; epoll counts in ms
_GONE_KEPT: Final = 256


@define(frozen=True)
class Limits:
    """The times and sizes that a process keeps to with others; see the settings of the same names."""

    message_delivery_timeout_s: float = 30.0
    ack_interval_s: float = 0.5
    ack_every_n: int = 1000
    send_buffer_bytes: int = 256 << 20
    mailbox_bytes: int = 256 << 20
    hello_timeout_s: float = 10.0
    host_timeout_s: float = 7.0


class Gateway:
    """See the module. `deliver` takes the messages for this process, `forward` sends those for others on, `bounce`
    takes those that cannot go on, `on_gone` hears of peers that are gone; for `locate` see `Dialer`."""

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
        self.peers: dict[int, Peer] = {}
        self._gone: deque[int] = deque()  # keys of the last peers that are GONE; older ones are forgotten
        self._secret = secret
        self._deliver, self._forward, self._bounce, self._on_gone = deliver, forward, bounce, on_gone
        self.on_lost_child: Callable[[int], None] = lambda key: None  # the link to a process that we keep broke
        self.is_steady = False  # set by who knows that no code of users runs here
        self.ways = Ways(transport)
        self._listeners: dict[Place, Listener] = {}
        self._elsewhere: list[Place] = []
        self._lock = threading.Lock()
        self.is_closed = False
        self._poller = Poller()
        self._links = Links(self._poller, self.limits.hello_timeout_s)
        self._owing_acks: set[Peer] = set()
        self._corked: deque[Peer] = deque()  # those whose outbox the next pump looks at
        self._linger_until_s = 0.0
        self.call_later = self._poller.call_later
        self._dialer = Dialer(
            self.ways,
            self.limits.message_delivery_timeout_s,
            self.limits.hello_timeout_s,
            locate=locate,
            greet=self._greet,
            give_up=lambda peer, down: self.declare_gone(peer.proc, down),
            call_later=self.call_later,
        )

        self._heartbeats = Heartbeats(
            self.limits.host_timeout_s, self.call_later, lambda peer, down: self.declare_gone(peer.proc, down)
        )

    # ---- starting and ending

    def listen(self, url: str) -> ProcId:
        """Accept links at `url`; returns this process's id with the address in it. Then start the driver."""
        self.open(url, self._secret)
        self.driver.start(self.pump, self._poller.wake, str(self.proc.uid))
        return self.proc

    def open(self, url: str, secret: bytes) -> Place:
        """Accept links at `url` from those who prove `secret`. Thread-safe, as the rest.

        Raises:
            NotViable, ValueError, OSError: nobody can listen there.
        """
        listener = self.ways.transport(url).listen(url, secret)
        place = self.ways.join(listener.url, secret)
        self._listeners[place] = listener
        hear = partial(self._on_hello, None)
        self._poller.register(listener.fileno(), lambda _: self._links.accept(listener, hear))
        self._tell_address()
        return place

    def answer_at(self, place: Place) -> None:
        """This process is reached at `place` too, where another listens and hands on what is for it: `adopt`."""
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

    def close(self, timeout_s: float = 2.0) -> None:
        """Wait until peers have what was sent to them, say goodbye, and end. Blocks up to `timeout_s`; with 0 the
        process ends without a word, as if it had been killed."""
        if self.is_closed:
            return
        deadline_s = time.monotonic() + timeout_s
        goodbye.settle(self.peers, self.driver, self.call_later, deadline_s)
        self.is_closed = True
        self._dialer.close()
        self.driver.stop()
        for listener in self._listeners.values():
            listener.close()
        self._poller.shut()  # first: a link dialed at this moment fails to register, and is dropped by its thread
        for peer in list(self.peers.values()):
            goodbye.part(peer, deadline_s if timeout_s > 0 else None)
        self._links.abort()
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
                self._lost(peer, link, RuntimeError("sending was interrupted"))
            elif link is not None:
                self._on_link(peer, link, WRITABLE)

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
            if proc is None or self.keeps(proc):
                return Down("unreachable", "no gateway on its way knows the destination process")
            peer = self.connect(proc)
        down = peer.send(envelope.frame())
        if down is not None:
            return down
        if peer.link is None and peer.state is State.NEW and peer.dialing is None:
            self.connect(peer.proc)  # it is known, and nobody has dialed it yet
        if may_wait:
            self.wait_for_room((key,))
        return None

    def send_together(self, peer: Peer, frames: Sequence[list[Buffer]]) -> None:
        """Several messages for one process, as its link would carry them."""
        if peer.send_together(frames) is None and peer.state is State.NEW and peer.dialing is None:
            self.connect(peer.proc)

    def wait_for_room(self, keys: Iterable[int]) -> None:
        """Block while the buffer of any of these peers is full. Never from the pump."""
        for key in keys:
            peer = self.peers.get(key)
            # What waits is a part of what is not acknowledged, and that is quick to tell.
            if peer is not None and peer.session.unacked_bytes > peer.send_buffer_bytes and peer.is_full:
                signal = Signal()
                while not self.is_closed and peer.wants_room(signal):
                    self.driver.wait(signal, 1.0)
                    signal.clear()

    # ---- receiving

    def _on_link(self, peer: Peer, link: Link, event: int) -> None:
        try:
            if event & WRITABLE or (event and (link.blocked or peer.outbox)):
                try:
                    peer.flush(link)
                except TransportError:
                    while frames := link.recv_nowait():  # what it sent before its end still counts
                        self._take(peer, link, frames)
                    raise
            frames = link.recv_nowait()
            self._take(peer, link, frames)
        except (LinkClosed, TransportError) as error:
            self._lost(peer, link, error)
        except ProtocolError as error:
            log.error("peer.protocol_error", peer=str(peer.proc.uid), error=str(error))
            self._lost(peer, link, error)
        except BaseException as error:
            # A KeyboardInterrupt in the thread that leads. What was read and is not taken in yet, the message that was
            # being delivered included, comes again on a new link; whoever has it by then knows it by its number.
            self._lost(peer, link, RuntimeError(f"interrupted: {error!r}"))
            raise

    def _take(self, peer: Peer, link: Link, frames: Sequence[Frame]) -> None:
        if not frames:
            return
        now_s = time.monotonic()
        peer.heard = True
        if not self.driver.leads_aside:
            peer.burst = 0
        session = peer.session
        received = session.received
        try:
            for frame in frames:
                received = session.received
                inner = session.accept(frame, now_s)
                if inner is not None:
                    envelope = parse(inner)
                    try:
                        if envelope.dst_proc == self.key:
                            self._deliver(envelope)  # as `route` says, without the call
                        else:
                            self._pass_on(envelope, route(self.key, self.peers, envelope))
                    except Exception:  # a bug above must not cost the messages behind this one
                        log.exception("message.failed", proc=str(self.proc.uid), kind=envelope.kind)
                elif frame_type(frame) == FrameType.GOODBYE:
                    peer.said_goodbye = True
                    peer.say(FrameType.ACK)
                elif frame_type(frame) == FrameType.HEARTBEAT:
                    peer.say(FrameType.ACK)
        except BaseException:
            session.received = received  # an interrupt: this frame comes again on the next link
            raise
        if session.ack_due(now_s):
            peer.say(FrameType.ACK)
        elif session.owes_ack:
            if not self._owing_acks:
                self.call_later(self.limits.ack_interval_s, self._acknowledge_all)
            self._owing_acks.add(peer)

    def _acknowledge_all(self) -> None:
        owing, self._owing_acks = self._owing_acks, set()
        for peer in owing:
            if peer.session.owes_ack:
                peer.say(FrameType.ACK)

    def _pass_on(self, envelope: Envelope, step: Deliver | Forward | Bounce) -> None:
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

    # ---- links: how peers come and go

    def peer(self, proc: ProcId) -> Peer:
        """The peer of that name, made if there is none; nothing is dialed."""
        key = proc.key
        with self._lock:
            peer = self.peers.get(key)
            if peer is None:
                session = Session(self.limits.ack_every_n, self.limits.ack_interval_s)
                peer = Peer(proc, session, self._poller, self.limits.send_buffer_bytes, self._cork)
                self.peers[key] = peer
            return peer

    def connect(self, proc: ProcId) -> Peer:
        """The peer of that name, with a link to it on the way. A process that we keep dials us itself."""
        peer = self.peer(proc)
        if peer.state in (State.NEW, State.BROKEN) and not self.keeps(proc) and not peer.is_on_hold:
            self._dialer.start(peer)
        return peer

    def hand_down(self) -> list[int]:
        """Descriptors of a connection to this process, for one that is about to be started and `inherit`s them; the
        caller owns them. Empty: it must dial."""
        for listener in self._listeners.values():  # the first: where those of this host reach it
            with contextlib.suppress(OSError):
                return listener.hand_down()
        return []

    def inherit(self, proc: ProcId, fds: Sequence[int]) -> Peer:
        """As `connect`, over what it has handed down, if that is a connection. Blocks until there is a link."""
        inherit = self.transport.inherit
        if fds and inherit is not None:
            self._dialer.inherit(self.peer(proc), lambda timeout_s: inherit(fds, str(proc.uid), timeout_s))
        return self.connect(proc)

    def attach(self, proc: ProcId, limit_s: float) -> Peer:
        """The agent of a host that is ours from now on: the worker there makes it when our first link comes, for which
        it may take `limit_s`. On hold until `release`."""
        peer = self.peer(proc)
        peer.attach_limit_s = limit_s
        peer.is_on_hold = True
        return peer

    def release(self, peer: Peer, address: str) -> None:
        """Dial one that was on hold: its address is known."""
        peer.address, peer.is_on_hold = address, False
        self.connect(peer.proc)

    def adopt(self, link: Link, frames: list[Frame]) -> None:
        """Take a link that another acceptor of this OS process has accepted, and the frames that it has read."""
        self.call_later(0.0, lambda: self._links.adopt(link, partial(self._on_hello, None), frames))

    def _hello(self, peer: Peer) -> Hello:
        received, to = peer.session.received, str(peer.proc.uid)
        kind = (to, peer.is_new_host, self.is_steady)
        return Hello(str(self.proc), self.address, received, os.getpid(), socket.gethostname(), *kind)

    def _greet(self, peer: Peer, link: Link, refused: Refused) -> None:
        """A link that we dialed: say hello, and expect the answer in the pump. `refused` hears when there is none."""
        try:
            link.send_nowait([self._hello(peer).encode()])
            self._links.expect(link, partial(self._on_hello, peer), refused)
        except BaseException:
            self._links.drop(link)
            raise

    def _on_hello(self, dialed: Peer | None, link: Link, frames: list[Frame]) -> None:
        """The first frames of a new link: who is there, and what it has of the session."""
        reason = refused_because(frames[0])
        if reason:
            log.info("link.refused", peer=link.peer, reason=reason)
            self._links.drop(link, reason=reason)
            return
        hello = Hello.decode(frames[0])
        proc = ProcId.from_string(hello.proc)
        if dialed is None and hello.to and hello.to != str(self.proc.uid):
            self._links.refuse(link, f"{hello.to} is not here; here is {self.proc.uid}")
            return
        peer = dialed if dialed is not None else self.peer(proc)
        if peer.down is not None or proc != peer.proc:
            log.debug("link.unwanted", peer=link.peer, proc=hello.proc)
            self._links.drop(link)
            return
        if dialed is None:
            # Our own hello goes first on this link, before any frame of the session.
            with contextlib.suppress(TransportError):  # what one that has ended since sent before, still counts
                link.send_nowait([self._hello(peer).encode()])
        if not self._attach(peer, link, hello, we_dialed=dialed is not None):
            self._links.drop(link)
            return
        try:
            self._take(peer, link, frames[1:])
        except (TransportError, ProtocolError) as error:
            self._lost(peer, link, error)
        else:
            self._on_link(peer, link, WRITABLE)

    def _attach(self, peer: Peer, link: Link, hello: Hello, *, we_dialed: bool) -> bool:
        """Let `link` carry the peer's session; False when another link has precedence."""
        with peer.lock:
            if peer.down is not None:
                return False
            old = peer.link
            if old is not None and peer.we_dialed != we_dialed and we_dialed != (self.key < peer.key):
                return False  # both dialed: the link of the smaller key stays
            waiting = peer.attach(link, hello, we_dialed=we_dialed)
            self._links.carry(link, lambda event: self._on_link(peer, link, event))
        if old is not None:
            self._links.drop(old)
        log.debug("link.up", peer=str(peer.proc.uid), via=link.peer)
        peer.is_far = bool(self.is_elsewhere(peer.proc))
        if peer.steady and peer.is_far:
            self._heartbeats.watch(peer)
        for notify in waiting:
            notify()
        return True

    def keeps(self, proc: ProcId) -> bool:
        """Whether that process is, was or will be launched by this one."""
        return proc.keeper is not None and proc.keeper.key == self.key

    def is_linked(self, proc: ProcId) -> bool:
        """Whether there is a link to it, or on its way."""
        peer = self.peers.get(proc.key)
        return peer is not None and (peer.link is not None or peer.dialing is not None)

    def is_elsewhere(self, proc: ProcId) -> bool | None:
        """Whether it is reached over the network, where the kernel does not tell who is gone; None: not known yet."""
        peer = self.peers.get(proc.key)
        place = self.ways.find(proc.address if peer is None else peer.address, proc.address)
        return None if place is None else place.domain == EVERYWHERE

    def is_far(self, key: int) -> bool:
        """Whether what goes to that process is known to cross the network."""
        peer = self.peers.get(key)
        if peer is None or peer.is_far:
            return peer is not None
        keeper = peer.proc.keeper
        host = None if keeper is None or keeper.key == key else self.peers.get(keeper.key)
        return host is not None and host.is_far

    def _lost(self, peer: Peer, link: Link, error: Exception) -> None:
        """A peer's link ended. Find out whether the peer did, too."""
        with peer.lock:
            current = peer.link is link
            if current:
                peer.detach()
        self._links.drop(link)
        if not current:
            return  # another has taken its place
        log.debug("link.lost", peer=str(peer.proc.uid), error=str(error))
        if peer.down is not None or self.is_closed:
            return
        if peer.ended is not None:
            self.declare_gone(peer.proc, peer.ended)
        elif self.keeps(peer.proc):
            # Its exit will be reported; if it lives, it dials us again.
            self.on_lost_child(peer.key)
            breaks = peer.breaks
            self.call_later(self.limits.message_delivery_timeout_s, lambda: self._give_up_broken(peer, breaks))
        elif peer.said_goodbye and peer.proc.keeper is None:
            self.declare_gone(peer.proc, Down("stopped", f"process {peer.proc.uid} has ended", peer.pid, peer.host))
        else:
            self._dialer.start(peer)

    def _give_up_broken(self, peer: Peer, breaks: int) -> None:
        if peer.state is State.BROKEN and peer.breaks == breaks:
            text = f"the connection to process {peer.proc.uid} broke and did not come back"
            self.declare_gone(peer.proc, Down("unreachable", text, peer.pid, peer.host))

    def process_ended(self, proc: ProcId, down: Down, then: Callable[[], None] = lambda: None) -> None:
        """The process has ended, its keeper saw it. What it sent before still counts: its link is read to the end,
        which is there at once unless something that it started has inherited the connection. Calls `then` after that.
        """
        peer = self.peer(proc)
        with peer.lock:
            peer.ended = down
            is_read = peer.link is None
            is_gone = peer.down is not None
            if not is_gone:
                peer.waiting_for_end.append(then)
        if is_gone:
            then()
        elif is_read:
            self.declare_gone(proc, down)
        else:
            self.call_later(_LAST_WORDS_LIMIT_S, lambda: self.declare_gone(proc, down))

    def declare_gone(self, proc: ProcId, down: Down) -> None:
        """There is evidence that `proc` has ended: give its messages back and tell everybody, once."""
        peer = self.peer(proc)
        with peer.lock:
            if peer.down is not None:
                return
            peer.down = down
            peer.state = State.GONE
            link, peer.link = peer.link, None
        if link is not None:
            # What it sent before its end still counts.
            try:
                while frames := link.recv_nowait():
                    self._take(peer, link, frames)
            except (TransportError, ProtocolError):
                pass
            self._links.drop(link)
        with peer.lock:
            undelivered = peer.abandon()
            waiting = peer.waiters()
        for parts in undelivered:
            envelope = parse(parts)
            if peer.pid:
                envelope.flags |= Flag.UNSURE  # it was up once: what it took in may have been acknowledged too late
            self._bounce(envelope, down)
        self._on_gone(peer, down)
        for notify in waiting:
            notify()
        with self._lock:
            self._gone.append(peer.key)
            if len(self._gone) > _GONE_KEPT:
                self.peers.pop(self._gone.popleft(), None)
            kept = [each.proc for each in self.peers.values() if each.proc.keeper == proc and each.down is None]
        # Nobody is left who could tell of their ends, and who outlives the agent of its host is ended.
        for each in kept:
            kind = "stopped" if down.stopped else "unreachable"
            text = f"process {each.uid} is lost with its host: {down.reason}"
            self.declare_gone(each, Down(kind, text, host=down.host).because(down))

    def when_settled(self, peer: Peer, notify: Callable[[], None]) -> None:
        """Call `notify` once, when the peer is up or gone; at once if it is."""
        with peer.lock:
            if peer.state not in (State.UP, State.GONE):
                peer.waiting_for_state.append(notify)
                return
        notify()
