"""Another process, as this one sees it: one session, at most one link, and what waits for room on it.

```
            dial, or expect its call          hello of both sides
    NEW  ─────────────────────────────► ... ─────────────────────► UP ──── link breaks ───► BROKEN
                                                                    ▲                          │
                                                                    └───── a new link ─────────┤
    any ──── evidence of its end, or too long without a link ──────────────────────► GONE ◄────┘
```

The transitions are made in `peers`. Here is how frames leave. A lone frame leaves at once, from the thread that sends
it. One who goes on sending without waiting for anything sends the first `_BURST` so, and then `_SEND_EVERY` together;
the rest leaves with the next pump, which an idle side thread makes within some milliseconds. 1000 calls at a time: over
tcp 22 k/s when all go one by one, and 45 k/s so; over ipc 48 and 62 k/s.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

from attrs import define, field

from monarch.core.ids import ProcId
from monarch.core.monitor import Down
from monarch.core.poller import Poller
from monarch.core.protocol import FrameType, Hello, Session
from monarch.errors import TransportError
from monarch.transports.base import Buffer, Frame, Link

if TYPE_CHECKING:
    from monarch.compiled import Lane

_BURST: Final = 8
_SEND_EVERY: Final = 32
_SEND_MOST: Final = 1024


class State(Enum):
    NEW = "new"
    UP = "up"
    BROKEN = "broken"
    GONE = "gone"


@define(eq=False)
class Peer:
    """See the module. `lock` guards all that sending touches: the session's numbers, the link, the outbox. Only
    `compiled.post` does without: while the lane is open, and nothing of ours runs in between."""

    proc: ProcId
    session: Session
    poller: Poller
    send_buffer_bytes: int
    cork: Callable[[Peer], None]
    """Asks the next pump to look at this peer's outbox."""

    state: State = State.NEW
    link: Link | None = None
    lane: Lane | None = None
    """A shorter way for small messages, of this link: see `monarch.compiled`."""
    we_dialed: bool = False
    address: str = ""
    known_as: str = ""
    """What people call it, where they do."""
    pid: int = 0
    host: str = ""
    steady: bool = False
    """It runs no code of users, and answers heartbeats at once."""
    is_far: bool = False
    """Its link goes, or went last, over the network."""
    heard: bool = False
    """Something has come since the last heartbeat."""
    said_goodbye: bool = False
    attach_limit_s: float = 0.0
    """It is the agent of a host, which our first link has made there; for so long its worker may be on its way up."""
    is_on_hold: bool = False
    """Its address is not known yet: it is dialed once somebody says."""
    dialing: object | None = None
    """Who tries to reach it, while there is no link: see `dialer`."""
    ended: Down | None = None
    """Its process has ended, so; the last that it sent may still come."""
    down: Down | None = None
    """It is gone, and nothing comes any more."""
    corked: bool = False
    """The next pump will look at its outbox."""
    torn: bool = False
    """Sending was interrupted in the middle: the pump is to end the link."""
    breaks: int = 0
    """How often its link broke."""
    lock: threading.Lock = field(factory=threading.Lock)
    outbox: deque[Frame] = field(factory=deque)
    """Frames that wait for room on the link."""
    burst: int = 0
    """Frames sent since the pump last had to do with this peer: up to `_BURST`, one by one."""
    waiting_for_room: list[Callable[[], None]] = field(factory=list)
    waiting_for_state: list[Callable[[], None]] = field(factory=list)
    waiting_for_end: list[Callable[[], None]] = field(factory=list)
    _delivered: int = 0  # by the ring of its link itself, as of the last look

    @property
    def key(self) -> int:
        return self.proc.key

    @property
    def title(self) -> str:
        """For people."""
        return self.known_as or f"process {self.proc.uid}"

    @property
    def is_new_host(self) -> bool:
        """Whether it is an agent that has not been made yet."""
        return self.attach_limit_s > 0 and not self.pid

    # ---- sending

    def send(self, parts: list[Buffer]) -> Down | None:
        """Number a message `[head, *parts]` and put it on its way; returns why not, when the peer is gone."""
        size_bytes = sum(map(len, parts))
        try:
            with self.lock:
                if self.down is not None:
                    return self.down
                self._close_lane()
                self._send_now(self.session.wrap(parts, size_bytes))
                self._open_lane()
        except BaseException:
            # A signal's handler raised, and nobody knows how far this got: the session begins again on a new link.
            self.torn = True
            self.cork(self)
            raise
        return None

    def send_together(self, messages: Sequence[list[Buffer]]) -> Down | None:
        """As `send`, for several at a time."""
        with self.lock:
            if self.down is not None:
                return self.down
            self._close_lane()
            for parts in messages:
                frame = self.session.wrap(parts, sum(map(len, parts)))
                if self.link is not None:
                    self.outbox.append(frame)
            if self.link is not None:
                try:
                    self._send_outbox(self.link)
                except TransportError:
                    return None  # the pump will see the break, and the session still has the frames
                if self.outbox or self.link.blocked:
                    self.cork(self)
            self._open_lane()
        return None

    def say(self, kind: FrameType) -> None:
        """Send an ACK, HEARTBEAT or GOODBYE."""
        with self.lock:
            self._close_lane()
            self._send_now(self.session.control(kind))
            self._open_lane()

    def _close_lane(self) -> None:
        """What is sent now may go another way: nothing overtakes it. The lock is held, until `_open_lane`."""
        if self.lane is not None:
            self.lane.open = False

    def _open_lane(self) -> None:
        """Whatever was sent before is on its way: what comes may use the link's lane, if it has one."""
        link = self.link
        if link is not None and not self.outbox and not link.blocked:
            self.lane = link.lane
            if self.lane is not None:
                self.lane.open = True

    def drop_link(self) -> Link | None:
        """Have no link any more; the lock is held."""
        link, self.link = self.link, None
        if self.lane is not None:
            self.lane.close()
            self.lane = None
        return link

    def _send_now(self, frame: Frame) -> None:
        """Give a frame to the link or the outbox. Without a link the session keeps it."""
        link = self.link
        if link is None:
            return
        self._look_for_life()
        if not self.outbox and self.burst < _BURST:
            self.burst += 1
            try:
                taken = link.send_nowait((frame,))
            except TransportError:
                self.outbox.append(frame)  # nothing overtakes it until the pump sees the break; the session has it, too
                return
            if taken:
                if link.blocked:
                    self.poller.watch(link.fileno(), True)
                return
        self.burst += 1
        self.outbox.append(frame)
        waiting = len(self.outbox)
        if waiting == 1:
            self.cork(self)
        elif waiting % _SEND_EVERY == 0:
            # While the sender goes on, nobody may pump: what has queued up travels together.
            try:
                self._send_outbox(link)
            except TransportError:
                pass  # as above

    def _look_for_life(self) -> None:
        """What a ring has delivered itself was told to nobody else."""
        if self._delivered != self.session.delivered:
            self._delivered = self.session.delivered
            self.burst, self.heard = 0, True

    def was_heard(self) -> bool:
        """Whether anything has come since this was asked last."""
        self._look_for_life()
        heard, self.heard = self.heard, False
        return heard

    def _send_outbox(self, link: Link) -> None:
        """Give the link what it has room for."""
        outbox = self.outbox
        while link.flush_nowait() and outbox:
            taken = link.send_nowait([*itertools.islice(outbox, _SEND_MOST)])
            if not taken:
                return
            for _ in range(taken):
                outbox.popleft()

    def flush(self, link: Link) -> None:
        """There may be room again: go on sending what queued up, together.

        Raises:
            TransportError: the link broke.
        """
        with self.lock:
            if self.link is not link:
                return
            self.burst = _BURST - 1 if self.burst > _BURST + 1 else 0  # several queued up: somebody goes on sending
            self._close_lane()
            self._send_outbox(link)
            self._open_lane()
            self.poller.watch(link.fileno(), link.blocked or bool(self.outbox))

    @property
    def is_full(self) -> bool:
        """Whether senders that may wait should: so much has not been confirmed, wherever it waits. A link may take more
        than the other side gets to: what is lent to a process of this host costs it some bytes."""
        return self.session.unacked_bytes > self.send_buffer_bytes

    def wants_room(self, notify: Callable[[], None]) -> bool:
        """Call `notify` once half of the buffer is free or the peer is gone; False when that is so already."""
        with self.lock:
            self.hear_of_room(notify)  # before the look: what is confirmed after it is told
            if self.down is None and self.session.unacked_bytes > self.send_buffer_bytes // 2:
                return True
            self.waiting_for_room.remove(notify)
            return False

    def hear_of_room(self, notify: Callable[[], None]) -> None:
        """Call `notify` once, with those who wait for room. The lock is held."""
        if notify not in self.waiting_for_room:
            self.waiting_for_room.append(notify)
        self.session.room_is_awaited = True

    def tell_of_room(self) -> None:
        """The peer has confirmed something: call those who wait for room, if there is some."""
        with self.lock:
            if self.session.unacked_bytes > self.send_buffer_bytes // 2:
                return
            waiting, self.waiting_for_room = self.waiting_for_room, []
            self.session.room_is_awaited = False
        for notify in waiting:
            notify()

    # ---- transitions; the lock is held, and what is returned is called without it

    def attach(self, link: Link, hello: Hello, *, we_dialed: bool) -> list[Callable[[], None]]:
        """`link` carries the session from now on, beginning with what the peer lacks.

        Raises:
            RemoteProtocolError: the peer claims to have what was never sent.
        """
        frames = self.session.resume(hello.received)
        self.drop_link()
        link.carry(self.session, self.send_buffer_bytes)
        self.link, self.we_dialed = link, we_dialed
        self.address, self.pid, self.host = hello.address, hello.pid, hello.host
        self.steady, self.heard = hello.steady, True
        self.state = State.UP
        self.dialing = None
        self.outbox.clear()
        self.outbox.extend(frames)
        waiting, self.waiting_for_state = self.waiting_for_state, []
        return waiting

    def detach(self) -> None:
        """The link is gone; the session keeps what was not acknowledged."""
        self.drop_link()
        self.outbox.clear()
        self.breaks += 1
        if self.down is None:
            self.state = State.BROKEN

    def abandon(self) -> list[list[Buffer]]:
        """The peer is gone: everything that it did not acknowledge, oldest first, as `[head, *parts]`."""
        self.dialing = None
        undelivered = [parts for _, parts, _ in self.session.unacked]
        self.session.abandon()
        self.outbox.clear()
        return undelivered

    def waiters(self) -> list[Callable[[], None]]:
        """All who wait for this peer, for the last time."""
        waiting = [*self.waiting_for_state, *self.waiting_for_room, *self.waiting_for_end]
        self.waiting_for_state, self.waiting_for_room, self.waiting_for_end = [], [], []
        return waiting
