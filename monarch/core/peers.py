"""The other processes, as this one knows them: how they come and go.

Theory of operation. Every other process is a `Peer`, with the states drawn there; all transitions are made here. Frames
that are given to a peer without a link wait in its session. A peer that is GONE stays so: what was not
acknowledged goes back to its senders, and it is never accepted again. Both sides may dial at once; the link that was
dialed by the one with the smaller key stays.

Who knows why a process is gone: its keeper, which launched it and sees it end. So a process that loses the link to a
peer asks the peer's keeper (`locate`), and a keeper waits for the exit report; for a process without a keeper, an
address where nobody listens any more is the evidence.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from monarch.core import goodbye
from monarch.core.address import EVERYWHERE
from monarch.core.dialer import Dialer
from monarch.core.envelope import Envelope, Flag
from monarch.core.heartbeats import Heartbeats
from monarch.core.ids import ProcId
from monarch.core.intake import Intake
from monarch.core.limits import Limits
from monarch.core.links import Links, Refused
from monarch.core.monitor import Down
from monarch.core.peer import Peer, State
from monarch.core.poller import WRITABLE, Poller
from monarch.core.protocol import ACK_AT_BYTES, Hello, Session, refused_because
from monarch.core.ways import Ways
from monarch.errors import LinkClosed, ProtocolError, TransportError
from monarch.log import get_logger
from monarch.transports.base import Frame, Link, Listener

log = get_logger("monarch.peers")

_LAST_WORDS_LIMIT_S: Final = 0.25
_GONE_KEPT: Final = 256


class Peers:
    """See the module. Events of links come on the driving thread; everything else may be called from any thread.

    Args:
        intake: takes what the links of peers bring.
        hello: what this process says first on a link to a peer.
        cork: asks the next pump to look at a peer's outbox.
        bounce: takes the messages that a peer which is gone has not acknowledged.
        on_gone: hears of peers that are gone.
        locate: see `Dialer`.
    """

    def __init__(
        self,
        proc: ProcId,
        poller: Poller,
        ways: Ways,
        limits: Limits,
        intake: Intake,
        *,
        hello: Callable[[Peer], Hello],
        cork: Callable[[Peer], None],
        bounce: Callable[[Envelope, Down], None],
        on_gone: Callable[[Peer, Down], None],
        locate: Callable[[ProcId, Callable[[str | Down], None]], None],
    ) -> None:
        self._uid, self._key = proc.uid, proc.key
        self._poller, self._ways, self._limits = poller, ways, limits
        self._intake = intake
        self._hello, self._cork, self._bounce, self._on_gone = hello, cork, bounce, on_gone
        self.on_lost_child: Callable[[int], None] = lambda key: None  # the link to a process that we keep broke
        self.on_failed_try: Callable[[Peer, str], None] = lambda peer, why: None  # to dial a peer; on any thread
        self._by_key: dict[int, Peer] = {}
        self._gone: deque[int] = deque()  # keys of the last peers that are GONE; older ones are forgotten
        self._lock = threading.Lock()
        self._is_closed = False
        self.get: Callable[[int], Peer | None] = self._by_key.get  # as it is: every message asks
        self._links = Links(poller, limits.hello_timeout_s)

        def give_up(peer: Peer, down: Down) -> None:
            self.declare_gone(peer.proc, down)

        self._dialer = Dialer(
            ways,
            limits.message_delivery_timeout_s,
            limits.hello_timeout_s,
            locate=locate,
            greet=self._greet,
            give_up=give_up,
            failed=lambda peer, why: self.on_failed_try(peer, why),
            call_later=poller.call_later,
        )
        self._heartbeats = Heartbeats(limits.host_timeout_s, poller.call_later, give_up)

    # ---- who there is

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __getitem__(self, key: int) -> Peer:
        return self._by_key[key]

    def __iter__(self) -> Iterator[Peer]:
        """Those that there are now."""
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def attached(self) -> list[ProcId]:
        """The agents of other hosts, as far as they are up."""
        return [peer.proc for peer in self if peer.attach_limit_s and peer.down is None and peer.pid]

    def of(self, proc: ProcId) -> Peer:
        """The peer of that name, made if there is none; nothing is dialed."""
        key = proc.key
        with self._lock:
            peer = self._by_key.get(key)
            if peer is None:
                limits = self._limits
                soon_bytes = min(ACK_AT_BYTES, limits.send_buffer_bytes // 4)  # others wait for room, too
                session = Session(limits.ack_every_n, limits.ack_interval_s, soon_bytes)
                peer = Peer(proc, session, self._poller, limits.send_buffer_bytes, self._cork)
                self._by_key[key] = peer
            return peer

    def keeps(self, proc: ProcId) -> bool:
        """Whether that process is, was or will be launched by this one."""
        return proc.keeper is not None and proc.keeper.key == self._key

    def is_linked(self, proc: ProcId) -> bool:
        """Whether there is a link to it, or on its way."""
        peer = self._by_key.get(proc.key)
        return peer is not None and (peer.link is not None or peer.dialing is not None)

    def is_elsewhere(self, proc: ProcId) -> bool | None:
        """Whether it is reached over the network, where the kernel does not tell who is gone; None: not known yet."""
        peer = self._by_key.get(proc.key)
        place = self._ways.find(proc.address if peer is None else peer.address, proc.address)
        return None if place is None else place.domain == EVERYWHERE

    def is_far(self, key: int) -> bool:
        """Whether what goes to that process is known to cross the network."""
        peer = self._by_key.get(key)
        if peer is None or peer.is_far:
            return peer is not None
        keeper = peer.proc.keeper
        host = None if keeper is None or keeper.key == key else self._by_key.get(keeper.key)
        return host is not None and host.is_far

    # ---- how they come

    def connect(self, proc: ProcId) -> Peer:
        """The peer of that name, with a link to it on the way. A process that we keep dials us itself."""
        peer = self.of(proc)
        if peer.state in (State.NEW, State.BROKEN) and not self.keeps(proc) and not peer.is_on_hold:
            self._dialer.start(peer)
        return peer

    def inherit(self, proc: ProcId, connect: Callable[[float], Link]) -> None:
        """As `connect`, over a connection that is there already. Blocks until there is a link."""
        self._dialer.inherit(self.of(proc), connect)

    def attach(self, proc: ProcId, limit_s: float) -> Peer:
        """The agent of a host that is ours from now on: the worker there makes it when our first link comes, for which
        it may take `limit_s`. On hold until `release`."""
        peer = self.of(proc)
        peer.attach_limit_s = limit_s
        peer.is_on_hold = True
        return peer

    def release(self, peer: Peer, address: str) -> None:
        """Dial one that was on hold: its address is known."""
        peer.address, peer.is_on_hold = address, False
        self.connect(peer.proc)

    def accept(self, listener: Listener) -> None:
        """Expect the hello of those who have dialed `listener`."""
        self._links.accept(listener, partial(self._on_hello, None))

    def adopt(self, link: Link, frames: list[Frame]) -> None:
        """Take a link that another acceptor of this OS process has accepted, and the frames that it has read."""
        self._poller.call_later(0.0, lambda: self._links.adopt(link, partial(self._on_hello, None), frames))

    def when_settled(self, peer: Peer, notify: Callable[[], None]) -> None:
        """Call `notify` once, when the peer is up or gone; at once if it is."""
        with peer.lock:
            if peer.state not in (State.UP, State.GONE):
                peer.waiting_for_state.append(notify)
                return
        notify()

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
        if dialed is None and hello.to and hello.to != str(self._uid):
            self._links.refuse(link, f"{hello.to} is not here; here is {self._uid}")
            return
        peer = dialed if dialed is not None else self.of(proc)
        if peer.down is not None or proc != peer.proc:
            log.debug("link.unwanted", peer=link.peer, proc=hello.proc)
            self._links.drop(link)
            return
        if dialed is None:
            # Our own hello goes first on this link, before any frame of the session.
            with contextlib.suppress(TransportError):  # what one that has ended since sent before, still counts
                link.send_nowait([self._hello(peer).encode()])
        if not self._carry(peer, link, hello, we_dialed=dialed is not None):
            self._links.drop(link)
            return
        try:
            self._intake.take(peer, frames[1:])
        except (TransportError, ProtocolError) as error:
            self.lost(peer, link, error)
        else:
            self.on_link(peer, link, WRITABLE)

    def _carry(self, peer: Peer, link: Link, hello: Hello, *, we_dialed: bool) -> bool:
        """Let `link` carry the peer's session; False when another link has precedence."""
        with peer.lock:
            if peer.down is not None:
                return False
            old = peer.link
            if old is not None and peer.we_dialed != we_dialed and we_dialed != (self._key < peer.key):
                return False  # both dialed: the link of the smaller key stays
            waiting = peer.attach(link, hello, we_dialed=we_dialed)
            self._links.carry(link, partial(self.on_link, peer, link))
        if old is not None:
            self._links.drop(old)
        log.debug("link.up", peer=str(peer.proc.uid), via=link.peer)
        peer.is_far = bool(self.is_elsewhere(peer.proc))
        if peer.steady and peer.is_far:
            self._heartbeats.watch(peer)
        for notify in waiting:
            notify()
        return True

    # ---- what their links bring

    def on_link(self, peer: Peer, link: Link, event: int) -> None:
        """The poller has `event` of a link that carries the peer's session."""
        try:
            lane = peer.lane  # while it is open, nothing waits for room
            if event & WRITABLE or (event and (lane is None or not lane.open) and (link.blocked or peer.outbox)):
                try:
                    peer.flush(link)
                except TransportError:
                    while frames := link.recv_nowait():  # what it sent before its end still counts
                        self._intake.take(peer, frames)
                    raise
            self._intake.take_from(peer, link)
        except (LinkClosed, TransportError) as error:
            self.lost(peer, link, error)
            error.__traceback__ = None  # the link keeps the error, whose frames keep the link, and its descriptors
        except ProtocolError as error:
            log.error("peer.protocol_error", peer=str(peer.proc.uid), error=str(error))
            self.lost(peer, link, error)
        except BaseException as error:
            # A KeyboardInterrupt in the thread that leads. What was read and is not taken in yet, the message that was
            # being delivered included, comes again on a new link; whoever has it by then knows it by its number.
            self.lost(peer, link, RuntimeError(f"interrupted: {error!r}"))
            raise

    # ---- how they go

    def lost(self, peer: Peer, link: Link, error: Exception) -> None:
        """A peer's link ended. Find out whether the peer did, too."""
        with peer.lock:
            current = peer.link is link
            if current:
                peer.detach()
        self._links.drop(link)
        if not current:
            return  # another has taken its place
        log.debug("link.lost", peer=str(peer.proc.uid), error=str(error))
        if peer.down is not None or self._is_closed:
            return
        if peer.ended is not None:
            self.declare_gone(peer.proc, peer.ended)
        elif self.keeps(peer.proc):
            # Its exit will be reported; if it lives, it dials us again.
            self.on_lost_child(peer.key)
            give_up = partial(self._give_up_broken, peer, peer.breaks)
            self._poller.call_later(self._limits.message_delivery_timeout_s, give_up)
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
        peer = self.of(proc)
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
            self._poller.call_later(_LAST_WORDS_LIMIT_S, lambda: self.declare_gone(proc, down))

    def declare_gone(self, proc: ProcId, down: Down) -> None:
        """There is evidence that `proc` has ended: give its messages back and tell everybody, once."""
        peer = self.of(proc)
        with peer.lock:
            if peer.down is not None:
                return
            peer.down = down
            peer.state = State.GONE
            link = peer.drop_link()
        if link is not None:
            # What it sent before its end still counts.
            try:
                while frames := link.recv_nowait():
                    self._intake.take(peer, frames)
            except (TransportError, ProtocolError):
                pass
            self._links.drop(link)
        with peer.lock:
            undelivered = peer.abandon()
            waiting = peer.waiters()
        for parts in undelivered:
            envelope = Envelope.parse(parts)
            if peer.pid:
                envelope.flags |= Flag.UNSURE  # it was up once: what it took in may have been acknowledged too late
            self._bounce(envelope, down)
        self._on_gone(peer, down)
        for notify in waiting:
            notify()
        with self._lock:
            self._gone.append(peer.key)
            if len(self._gone) > _GONE_KEPT:
                self._by_key.pop(self._gone.popleft(), None)
            kept = [each.proc for each in self._by_key.values() if each.proc.keeper == proc and each.down is None]
        # Nobody is left who could tell of their ends, and who outlives the agent of its host is ended.
        for each in kept:
            self.declare_gone(each, down.loss_of(each.uid))

    # ---- the end of this process

    def stop(self) -> None:
        """Dial nobody any more, and look for none that is lost."""
        self._is_closed = True
        self._dialer.close()

    def part(self, deadline_s: float | None) -> None:
        """End all links, after `stop`, when nothing is polled any more. None: at once, without a word."""
        for peer in self:
            goodbye.part(peer, deadline_s)
        self._links.abort()
