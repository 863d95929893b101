"""The broker of a process: it owns the links to other processes, and hands on what arrives.

Theory of operation. Every other process is a `Peer`, which has one `Session` (numbering, resending) and at most one
link at a time:

```
            dial, or expect its call          hello of both sides
    NEW  ─────────────────────────────► ... ─────────────────────► UP ──── link breaks ───► BROKEN
                                                                    ▲                          │
                                                                    └───── a new link ─────────┤
    any ──── evidence of its end, or too long without a link ──────────────────────► GONE ◄────┘
```

Frames that are given to a peer without a link wait in its session. A peer that is GONE stays so: what was not
acknowledged goes back to its senders, and it is never accepted again. Both sides may dial at once; the link that was
dialed by the one with the smaller key stays.

Who knows why a process is gone: its keeper, which launched it and sees it end. So a process that loses the link to a
peer asks the peer's keeper (`locate`), and a keeper waits for the exit report; for a process without a keeper, an
address where nobody listens any more is the evidence.

`pump` is called by the thread that drives (see `driver`); everything else may be called from any thread.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Final

from attrs import define, field

from monarch.core.driver import Driver, Signal, WakeFd
from monarch.core.envelope import Envelope, Kind, parse
from monarch.core.ids import ProcId
from monarch.core.monitor import Down
from monarch.core.protocol import FrameType, Hello, Session, frame_type
from monarch.core.router import Deliver, Forward, route
from monarch.errors import LinkClosed, MonarchError, ProtocolError, TransportError
from monarch.log import get_logger
from monarch.transports.base import Buffer, Frame, Link, Listener, Transport

log = get_logger("monarch.gateway")

_HELLO_LIMIT_S: Final = 10.0
_REDIAL_FIRST_S: Final = 0.005
_REDIAL_MOST_S: Final = 0.5


class State(Enum):
    NEW = "new"
    UP = "up"
    BROKEN = "broken"
    GONE = "gone"


@define(frozen=True)
class Limits:
    """The times and sizes a gateway keeps to; see the settings of the same names."""

    message_delivery_timeout_s: float = 30.0
    ack_interval_s: float = 0.5
    ack_every_n: int = 1000
    send_buffer_bytes: int = 256 << 20


@define(eq=False)
class Peer:
    """Another process, as this one sees it."""

    proc: ProcId
    session: Session
    state: State = State.NEW
    link: Link | None = None
    we_dialed: bool = False
    address: str = ""
    pid: int = 0
    host: str = ""
    said_goodbye: bool = False
    connecting: bool = False
    down: Down | None = None
    lock: threading.Lock = field(factory=threading.Lock)
    outbox: deque[Frame] = field(factory=deque)
    outbox_bytes: int = 0
    waiting_for_room: list[Signal] = field(factory=list)
    waiting_for_state: list[Callable[[], None]] = field(factory=list)

    @property
    def key(self) -> int:
        return self.proc.key


class Gateway:
    """See the module. `deliver` takes the messages for this process, `on_gone` hears of peers that are gone, `locate`
    asks a keeper, blocking, and returns an address or raises `PeerGone`."""

    def __init__(
        self,
        proc: ProcId,
        transport: Transport,
        secret: bytes,
        driver: Driver,
        *,
        deliver: Callable[[Envelope], None],
        on_gone: Callable[[Peer, Down], None],
        locate: Callable[[ProcId, float], str],
        limits: Limits | None = None,
    ) -> None:
        self.proc = proc
        self.key = proc.key
        self.transport = transport
        self.driver = driver
        self.limits = limits if limits is not None else Limits()
        self.peers: dict[int, Peer] = {}
        self._secret = secret
        self._deliver, self._on_gone, self._locate = deliver, on_gone, locate
        self._listener: Listener | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._wake = WakeFd()
        self._add(self._wake.fileno(), lambda _: self._wake.drain())
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = itertools.count()
        self._owing_acks: set[Peer] = set()
        self._acks_due_s = 0.0

    # ---- starting and ending

    def listen(self, url: str) -> ProcId:
        """Accept links at `url`; returns this process's id with the address in it. Then start the driver."""
        self._listener = self.transport.listen(url, self._secret)
        if self.proc.keeper is None:
            self.proc = ProcId(self.proc.uid, self._listener.url)
        self._add(self._listener.fileno(), self._on_listener)
        self.driver.start(self.pump, self._wake.wake, str(self.proc.uid))
        return self.proc

    @property
    def address(self) -> str:
        return self._listener.url if self._listener is not None else ""

    def close(self, timeout_s: float = 2.0) -> None:
        """Wait until peers have what was sent to them, say goodbye, and end. Blocks up to `timeout_s`."""
        if self._closed:
            return
        deadline_s = time.monotonic() + timeout_s
        signal = Signal()
        for peer in list(self.peers.values()):
            with peer.lock:
                if peer.link is not None:
                    self._send_now(peer, peer.session.control(FrameType.GOODBYE))

        def settled() -> bool:
            return not any(p.state is State.UP and (p.session.unacked or p.outbox) for p in list(self.peers.values()))

        while not settled() and time.monotonic() < deadline_s:
            # Acknowledgements come in through the pump; look again after each.
            signal.clear()
            self.call_later(0.005, signal.notify)
            self.driver.wait(signal, deadline_s - time.monotonic())
        self._closed = True
        self.driver.stop()
        if self._listener is not None:
            self._listener.close()
        for peer in list(self.peers.values()):
            link, peer.link = peer.link, None
            if link is not None:
                link.abort()
        self._epoll.close()
        self._wake.close()

    # ---- the pump

    def pump(self, timeout_s: float | None) -> None:
        """Take in what has arrived and do what is due; waits up to `timeout_s` when there is nothing."""
        now_s = time.monotonic()
        due_s = self._next_deadline_s()
        if due_s is not None:
            left_s = max(0.0, due_s - now_s)
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
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
                    log.exception("gateway.handler_failed", proc=str(self.proc.uid))
        if due_s is not None or self._timers or self._owing_acks:
            self._do_due(time.monotonic())

    def _next_deadline_s(self) -> float | None:
        due_s = self._acks_due_s if self._owing_acks else None
        if self._timers:
            first_s = self._timers[0][0]
            due_s = first_s if due_s is None else min(due_s, first_s)
        return due_s

    def _do_due(self, now_s: float) -> None:
        while self._timers and self._timers[0][0] <= now_s:
            with self._lock:
                if not self._timers or self._timers[0][0] > now_s:
                    break
                _, _, action = heapq.heappop(self._timers)
            action()
        if self._owing_acks and now_s >= self._acks_due_s:
            owing, self._owing_acks = self._owing_acks, set()
            for peer in owing:
                if peer.session.next_deadline_s() is not None:
                    self._acknowledge(peer)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` on the driving thread, after `delay_s`. It must not block."""
        with self._lock:
            heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_count), action))
            first = self._timers[0][2] is action
        if first:
            self._wake.wake()

    def add_pollable(self, fd: int, action: Callable[[], None]) -> None:
        """Run `action` on the driving thread whenever `fd` is readable."""
        self._add(fd, lambda _: action())

    def remove_pollable(self, fd: int) -> None:
        self._remove(fd)

    def _add(self, fd: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def _remove(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None and not self._closed:
            try:
                self._epoll.unregister(fd)
            except (OSError, ValueError):
                pass  # it was closed, which unregisters it

    # ---- sending

    def send(self, envelope: Envelope, proc: ProcId | None = None, *, may_wait: bool = False) -> Down | None:
        """Put `envelope` on its way to the process it names.

        Args:
            proc: who that is, in case this gateway has no link to it yet.
            may_wait: whether the calling thread may block while the peer's buffer is full. Never from the pump.

        Returns:
            None, or why it cannot be delivered: the peer is gone, or unknown.
        """
        peer = self.peers.get(envelope.dst_proc)
        if peer is None:
            if proc is None:
                return Down("unreachable", "no gateway on its way knows the destination process")
            peer = self.connect(proc)
        parts: list[Buffer] = [envelope.head(), *envelope.parts]
        size_bytes = sum(map(len, parts))
        with peer.lock:
            if peer.down is not None:
                return peer.down
            self._send_now(peer, peer.session.wrap(parts, size_bytes), size_bytes)
        if may_wait and self._backlog(peer) > self.limits.send_buffer_bytes:
            self._wait_for_room(peer)
        return None

    def _send_now(self, peer: Peer, frame: Frame, size_bytes: int = 64) -> None:
        """Give a frame to the link or the outbox; the peer's lock is held. Without a link the session keeps it."""
        link = peer.link
        if link is None:
            return
        if not peer.outbox:
            try:
                taken = link.send_nowait((frame,))
            except TransportError:
                return  # the pump will see the break, and the session still has the frame
            if taken:
                if link.blocked:
                    self._watch(link, True)
                return
        peer.outbox.append(frame)
        peer.outbox_bytes += size_bytes
        if len(peer.outbox) == 1:
            self._watch(link, True)

    def _watch(self, link: Link, writable: bool) -> None:
        try:
            self._epoll.modify(link.fileno(), select.EPOLLIN | (select.EPOLLOUT if writable else 0))
        except (OSError, ValueError):
            pass  # the link is going; its end will be noticed by the pump

    def _flush(self, peer: Peer, link: Link) -> None:
        """There may be room again: go on sending what queued up, together."""
        with peer.lock:
            if peer.link is not link:
                return
            if link.flush_nowait() and peer.outbox:
                taken = link.send_nowait(tuple(peer.outbox))
                for _ in range(taken):
                    peer.outbox.popleft()
                if taken:
                    peer.outbox_bytes = sum(sum(map(len, frame)) for frame in peer.outbox) if peer.outbox else 0
            self._watch(link, link.blocked or bool(peer.outbox))
            waiting = peer.waiting_for_room if self._backlog(peer) <= self.limits.send_buffer_bytes // 2 else []
            if waiting:
                peer.waiting_for_room = []
        for signal in waiting:
            signal.notify()

    def _backlog(self, peer: Peer) -> int:
        return peer.outbox_bytes if peer.link is not None else peer.session.unacked_bytes

    def _wait_for_room(self, peer: Peer) -> None:
        signal = Signal()
        while peer.down is None and self._backlog(peer) > self.limits.send_buffer_bytes // 2:
            with peer.lock:
                peer.waiting_for_room.append(signal)
            if peer.down is None:
                self.driver.wait(signal, 1.0)
            signal.clear()

    # ---- receiving

    def _on_link(self, peer: Peer, link: Link, event: int) -> None:
        try:
            if event & select.EPOLLOUT or link.blocked or peer.outbox:
                self._flush(peer, link)
            frames = link.recv_nowait()
            self._take(peer, link, frames)
        except (LinkClosed, TransportError) as error:
            self._lost(peer, link, error)
        except ProtocolError as error:
            log.error("peer.protocol_error", peer=str(peer.proc.uid), error=str(error))
            self._lost(peer, link, error)

    def _take(self, peer: Peer, link: Link, frames: Sequence[Frame]) -> None:
        if not frames:
            return
        now_s = time.monotonic()
        session = peer.session
        for frame in frames:
            inner = session.accept(frame, now_s)
            if inner is not None:
                self._route(parse(inner))
            elif frame_type(frame) == FrameType.GOODBYE:
                peer.said_goodbye = True
                self._acknowledge(peer)
        if session.ack_due(now_s):
            self._acknowledge(peer)
        elif session.next_deadline_s() is not None:
            if not self._owing_acks:
                self._acks_due_s = now_s + self.limits.ack_interval_s
            self._owing_acks.add(peer)

    def _acknowledge(self, peer: Peer) -> None:
        with peer.lock:
            self._send_now(peer, peer.session.control(FrameType.ACK))

    def _route(self, envelope: Envelope) -> None:
        if envelope.dst_proc == self.key:
            self._deliver(envelope)
            return
        step = route(self.key, self.peers, envelope)
        if isinstance(step, Deliver):
            self._deliver(envelope)
        elif isinstance(step, Forward):
            envelope.ttl -= 1
            down = self.send(envelope)
            if down is not None:
                self._bounce(envelope, down)
        else:
            self._bounce(envelope, Down("unreachable", step.reason))

    def _bounce(self, envelope: Envelope, down: Down) -> None:
        """Send a message that cannot go on back to where it came from; a bounce itself is dropped."""
        if envelope.kind == Kind.BOUNCE:
            log.debug("bounce.dropped", reason=down.reason)
            return
        from monarch.core.codec import encode

        back = envelope.bounce(encode(down))
        if back.dst_proc == self.key:
            self._deliver(back)
        else:
            self.send(back)

    # ---- links: how peers come and go

    def peer(self, proc: ProcId) -> Peer:
        """The peer of that name, made if there is none; nothing is dialed."""
        key = proc.key
        with self._lock:
            peer = self.peers.get(key)
            if peer is None:
                session = Session(self.limits.ack_every_n, self.limits.ack_interval_s)
                peer = self.peers[key] = Peer(proc, session)
            return peer

    def connect(self, proc: ProcId) -> Peer:
        """The peer of that name, with a link to it on the way. A process that we keep dials us itself."""
        peer = self.peer(proc)
        if peer.state in (State.NEW, State.BROKEN) and not self._keeps(proc):
            self._start_connecting(peer)
        return peer

    def _keeps(self, proc: ProcId) -> bool:
        return proc.keeper is not None and proc.keeper.key == self.key

    def _start_connecting(self, peer: Peer) -> None:
        with peer.lock:
            if peer.connecting or peer.state in (State.UP, State.GONE) or self._closed:
                return
            peer.connecting = True
        threading.Thread(target=self._dial_until_up, args=(peer,), daemon=True, name="monarch-dial").start()

    def _dial_until_up(self, peer: Peer) -> None:
        """Dial until there is a link, the peer is known to be gone, or the delivery time is over."""
        deadline_s = time.monotonic() + self.limits.message_delivery_timeout_s
        pause_s = _REDIAL_FIRST_S
        trouble = "nothing was tried"
        up = Signal()
        with peer.lock:
            peer.waiting_for_state.append(up.notify)
        try:
            while peer.state not in (State.UP, State.GONE) and not self._closed:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    text = (
                        f"process {peer.proc.uid} could not be reached for {self.limits.message_delivery_timeout_s:g} s"
                    )
                    self.declare_gone(peer.proc, Down("unreachable", f"{text}: {trouble}", peer.pid, peer.host))
                    return
                up.clear()
                try:
                    address = self._address_of(peer, left_s)
                    link = self.transport.dial(address, self._secret, min(left_s, _HELLO_LIMIT_S))
                    self._greet(peer, link)
                    self.driver.wait(up, min(left_s, _HELLO_LIMIT_S))
                    trouble = "it accepted the connection and did not answer"
                    continue
                except PeerGone as error:
                    self.declare_gone(peer.proc, error.down)
                    return
                except ConnectionRefusedError as error:
                    if peer.proc.keeper is None:
                        text = f"process {peer.proc.uid} is gone: nobody listens at {peer.address or peer.proc.address}"
                        self.declare_gone(peer.proc, Down("unreachable", text, peer.pid, peer.host))
                        return
                    trouble = str(error)
                except (OSError, MonarchError) as error:
                    trouble = f"{type(error).__name__}: {error}"
                self.driver.wait(up, min(left_s, pause_s))
                pause_s = min(2 * pause_s, _REDIAL_MOST_S)
        finally:
            with peer.lock:
                peer.connecting = False
            if peer.state is State.BROKEN and not self._closed:
                self._start_connecting(peer)

    def _address_of(self, peer: Peer, left_s: float) -> str:
        if peer.proc.keeper is None:
            return peer.proc.address
        return self._locate(peer.proc, left_s)

    def _hello(self, peer: Peer | None) -> Hello:
        received = peer.session.received if peer is not None else 0
        return Hello(str(self.proc), self.address, received, os.getpid(), socket.gethostname())

    def _greet(self, peer: Peer, link: Link) -> None:
        """A link that we dialed: say hello, and wait for the answer in the pump."""
        link.send_nowait([self._hello(peer).encode()])
        fd = link.fileno()

        def on_event(event: int) -> None:
            if link.blocked:
                link.flush_nowait()
            self._on_hello(link, peer)

        self._add(fd, on_event)
        if link.blocked:
            self._watch(link, True)

    def _on_listener(self, event: int) -> None:
        assert self._listener is not None
        for link in self._listener.accept_nowait():
            self._add(link.fileno(), partial(self._on_first_event, link))
            self.call_later(_HELLO_LIMIT_S, partial(self._drop_if_silent, link))
            self._on_hello(link, None)

    def _on_first_event(self, link: Link, event: int) -> None:
        self._on_hello(link, None)

    def _drop_if_silent(self, link: Link) -> None:
        if not any(peer.link is link for peer in list(self.peers.values())):
            self._drop(link)

    def _drop(self, link: Link) -> None:
        try:
            self._remove(link.fileno())
        except (OSError, ValueError):
            pass
        link.abort()

    def _on_hello(self, link: Link, dialed: Peer | None) -> None:
        """The first frames of a new link: who is there, and what it has of the session."""
        try:
            frames = link.recv_nowait()
            if not frames:
                return
            hello = Hello.decode(frames[0])
            peer = dialed if dialed is not None else self.peer(ProcId.from_string(hello.proc))
            if peer.down is not None or ProcId.from_string(hello.proc) != peer.proc:
                self._drop(link)
                return
            if dialed is None:
                # Our own hello goes first on this link, before any frame of the session.
                link.send_nowait([self._hello(peer).encode()])
            if not self._attach(peer, link, hello, we_dialed=dialed is not None):
                self._drop(link)
                return
            self._take(peer, link, frames[1:])
        except (TransportError, ProtocolError, ValueError) as error:
            log.warning("link.refused", peer=link.peer, error=str(error))
            self._drop(link)

    def _attach(self, peer: Peer, link: Link, hello: Hello, *, we_dialed: bool) -> bool:
        """Let `link` carry the peer's session; False when another link has precedence."""
        with peer.lock:
            if peer.down is not None:
                return False
            old = peer.link
            if old is not None and peer.we_dialed != we_dialed and we_dialed != (self.key < peer.key):
                return False  # both dialed: the link of the smaller key stays
            peer.link, peer.we_dialed = link, we_dialed
            peer.address, peer.pid, peer.host = hello.address, hello.pid, hello.host
            peer.state = State.UP
            frames = peer.session.resume(hello.received)
            peer.outbox.clear()
            peer.outbox.extend(frames)
            peer.outbox_bytes = sum(sum(map(len, frame)) for frame in frames)
            self._handlers[link.fileno()] = lambda event: self._on_link(peer, link, event)
            waiting, peer.waiting_for_state = peer.waiting_for_state, []
        if old is not None:
            self._drop(old)
        log.debug("link.up", peer=str(peer.proc.uid), via=link.peer, transport=self.transport.scheme)
        self._flush(peer, link)
        for notify in waiting:
            notify()
        return True

    def _lost(self, peer: Peer, link: Link, error: Exception) -> None:
        """A peer's link ended. Find out whether the peer did, too."""
        self._drop(link)
        with peer.lock:
            if peer.link is not link:
                return  # another has taken its place
            peer.link = None
            peer.outbox.clear()
            peer.outbox_bytes = 0
            if peer.down is None:
                peer.state = State.BROKEN
        log.debug("link.lost", peer=str(peer.proc.uid), error=str(error))
        if peer.down is not None or self._closed:
            return
        if self._keeps(peer.proc):
            # Its exit will be reported; if it lives, it dials us again.
            self.call_later(self.limits.message_delivery_timeout_s, lambda: self._give_up_broken(peer, link))
        elif peer.said_goodbye and peer.proc.keeper is None:
            self.declare_gone(peer.proc, Down("stopped", f"process {peer.proc.uid} has ended", peer.pid, peer.host))
        else:
            self._start_connecting(peer)

    def _give_up_broken(self, peer: Peer, link: Link) -> None:
        if peer.state is State.BROKEN:
            text = f"the connection to process {peer.proc.uid} broke and did not come back"
            self.declare_gone(peer.proc, Down("unreachable", text, peer.pid, peer.host))

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
            self._drop(link)
        with peer.lock:
            undelivered = [parts for _, parts, _ in peer.session.unacked]
            peer.session.unacked.clear()
            peer.session.unacked_bytes = 0
            peer.outbox.clear()
            peer.outbox_bytes = 0
            waiting, peer.waiting_for_state = peer.waiting_for_state, []
            room, peer.waiting_for_room = peer.waiting_for_room, []
        for parts in undelivered:
            envelope = parse(parts)
            if envelope.kind != Kind.BOUNCE:
                self._bounce(envelope, down)
        self._on_gone(peer, down)
        for notify in waiting:
            notify()
        for signal in room:
            signal.notify()

    def when_settled(self, peer: Peer, notify: Callable[[], None]) -> None:
        """Call `notify` once, when the peer is up or gone; at once if it is."""
        with peer.lock:
            if peer.state not in (State.UP, State.GONE):
                peer.waiting_for_state.append(notify)
                return
        notify()


class PeerGone(MonarchError):
    """A keeper's answer: the process that was asked for is gone."""

    def __init__(self, down: Down) -> None:
        super().__init__(down)
        self.down = down
