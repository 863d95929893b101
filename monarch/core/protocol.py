"""The conversation of two gateways, sans-IO: hello, numbering, acknowledgement, resending, goodbye.

Theory of operation. Two processes have one `Session`, which outlives the links that carry it. Every data frame gets
the session's next number and is kept until the peer acknowledged it; acknowledgements ride on every frame, and travel
alone when there is nothing else to say. When a link breaks, the session waits for the next one: both sides say in
their hello what they have received, and what the other lacks is sent again. A number that was seen before is dropped.
So a broken and healed connection neither loses nor repeats a message; what stays unacknowledged when the peer is
given up is handed back.

On the wire each frame is `[head, *parts]`, where this layer puts `SESSION` before the head of an envelope. A hello is
JSON, so that peers of other versions can at least understand that they do not understand each other.

This module decides; `gateway` acts. It holds no sockets, threads or clocks: times come in as `now_s`.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import define, field

from monarch import compiled
from monarch.core.envelope import Envelope
from monarch.errors import RemoteProtocolError
from monarch.transports.base import Buffer, Frame
from monarch.version import __version__

SESSION: Final = Struct("<B7xQQ")
WIRE_VERSION: Final = 2
_SESSION_BYTES: Final = SESSION.size
ACK_AT_BYTES: Final = 4 << 20
"""A peer keeps what we have not acknowledged: large frames are acknowledged soon, whatever their number. Not
each at once: an answer mostly follows, and says it, too."""


_HELLO_TYPES: Final = {
    "proc": str,
    "address": str,
    "received": int,
    "pid": int,
    "host": str,
    "to": str,
    "attaches": bool,
    "steady": bool,
    "monarch": str,
}
_HELLO_FIELDS: Final = (*_HELLO_TYPES, "wire", "python")


class FrameType(IntEnum):
    HELLO = 1
    DATA = 2
    ACK = 3
    HEARTBEAT = 4
    """Wants an answer of any kind; see `heartbeats`."""
    GOODBYE = 5
    REFUSAL = 6
    """Instead of a hello: the link is not wanted, and why, in words."""


_DATA: Final = int(FrameType.DATA)  # plain, for every message: a look at a member of an enum costs ten times as much


@define(frozen=True)
class Hello:
    """What each side says first on a new link.

    Attributes:
        proc: text form of the speaker's `ProcId`.
        address: the places where the speaker itself listens, or "".
        received: number of the last frame of the session that has arrived there.
        pid, host: of the speaker, for people.
        to: the uid of the process that a dialer means; "": whoever is there.
        attaches: the worker of a host is to make the process `to`, an agent of the speaker's, if it is not there.
        steady: the speaker runs no code of users, and answers heartbeats at once.
        monarch: the speaker's version of this library.
    """

    proc: str
    address: str
    received: int
    pid: int
    host: str
    to: str = ""
    attaches: bool = False
    steady: bool = False
    monarch: str = __version__
    wire: int = WIRE_VERSION
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"

    def encode(self) -> Frame:
        body = {name: getattr(self, name) for name in _HELLO_FIELDS}
        return [SESSION.pack(FrameType.HELLO, 0, self.received), json.dumps(body).encode()]

    @classmethod
    def decode(cls, frame: Frame) -> Hello:
        """Raises: RemoteProtocolError when the frame is no hello, or the peer speaks another version."""
        try:
            kind, _, _ = SESSION.unpack(frame[0])
            said: Mapping[str, Any] = json.loads(bytes(frame[1])) if kind == FrameType.HELLO else {}
            wire = said["wire"]
            hello = cls(**said) if wire == WIRE_VERSION else None  # another version may say more, or less
            if hello is not None and [type(getattr(hello, name)) for name in _HELLO_TYPES] != [*_HELLO_TYPES.values()]:
                raise TypeError("a field is of another type")
        except Exception as error:
            raise RemoteProtocolError(f"the peer's first frame is no hello: {error}") from None
        if hello is None:
            theirs = said.get("monarch", "another")
            raise RemoteProtocolError(
                f"the peer runs monarch {theirs} (wire version {wire}), this process monarch {__version__} "
                f"(wire version {WIRE_VERSION}): install the same version on both sides"
            )
        ours = cls("", "", 0, 0, "")
        if hello.monarch != ours.monarch:
            raise RemoteProtocolError(
                f"the peer runs monarch {hello.monarch}, this process monarch {ours.monarch}: install the same "
                "version on both sides"
            )
        if hello.python != ours.python:
            raise RemoteProtocolError(
                f"the peer runs Python {hello.python}, this process Python {ours.python}: their pickles differ"
            )
        return hello


@define(eq=False)
class _Numbering:
    """What a `Session` does for every message. The compiled part has the same, for lanes: see `monarch.compiled`."""

    ack_every_n: int = 1000
    ack_interval_s: float = 0.5
    ack_at_bytes: int = ACK_AT_BYTES

    sent: int = field(default=0, init=False)
    """Number of the last message that was kept."""
    received: int = field(default=0, init=False)
    """Number of the last message that was delivered."""
    unacked: deque[tuple[int, list[Buffer], int]] = field(factory=deque, init=False)
    """(number, parts, size in bytes), oldest first."""
    unacked_bytes: int = field(default=0, init=False)

    delivered: int = field(default=0, init=False)
    """Messages that a ring has delivered itself."""
    ack_is_timed: bool = field(default=False, init=False)
    """Whether a timer sends the acknowledgement that is owed."""
    room_is_awaited: bool = field(default=False, init=False)
    """Whether somebody is to hear of what the peer acknowledges."""

    _acknowledged: int = field(default=0, init=False)  # the last number that we told the peer
    _unacknowledged_bytes: int = field(default=0, init=False)
    _ack_due_s: float | None = field(default=None, init=False)

    def keep(self, parts: list[Buffer], size_bytes: int) -> int:
        """The number of a message `[head, *parts]`, which is kept until the peer has it."""
        self.unacked_bytes += size_bytes
        self.sent = number = self.sent + 1
        self.unacked.append((number, parts, size_bytes))
        return number

    def told(self) -> int:
        """What has arrived; the peer is told now."""
        self._acknowledged = received = self.received
        self._ack_due_s = None
        return received

    def accept(self, frame: Frame) -> Frame | None:
        """Take in a frame; returns `[head, *parts]` of a new data frame, or None. Such a one comes next until `took`.

        Raises:
            RemoteProtocolError: no frame of this protocol, or a gap in the numbers.
        """
        if not frame or len(frame[0]) < SESSION.size:
            raise RemoteProtocolError(f"a frame head of {len(frame[0]) if frame else 0} bytes")
        head = frame[0]
        kind, number, acknowledged = SESSION.unpack_from(head)
        if acknowledged > self.sent:
            raise RemoteProtocolError(f"the peer acknowledges frame {acknowledged} of {self.sent}")
        self.acknowledge(acknowledged)
        if kind != _DATA:
            if not FrameType.HELLO <= kind <= FrameType.GOODBYE:
                raise RemoteProtocolError(f"a frame of unknown type {kind}")
            return None
        if number != self.received + 1:
            if number <= self.received:
                return None  # sent again after a break; it is here already
            raise RemoteProtocolError(f"frame {number} arrived after frame {self.received}")
        frame[0] = head[_SESSION_BYTES:]
        return frame

    def took(self, size_bytes: int, now_s: float) -> None:
        """What comes next has been delivered. The peer is not told before that it has arrived: where the link breaks
        meanwhile, it comes again."""
        self.received += 1
        if self._ack_due_s is None:
            self._ack_due_s = now_s + self.ack_interval_s
            self._unacknowledged_bytes = 0
        self._unacknowledged_bytes += size_bytes

    def acknowledge(self, number: int) -> None:
        """The peer has everything up to `number`."""
        unacked = self.unacked
        while unacked and unacked[0][0] <= number:
            size_bytes = unacked.popleft()[2]
            self.unacked_bytes -= size_bytes  # without a call in the line: `keep` adds to it in another thread

    def abandon(self) -> None:
        """Keep nothing any more."""
        self.unacked.clear()
        self.unacked_bytes = 0

    def ack_due(self, now_s: float) -> bool | None:
        """Whether an acknowledgement should travel now, alone; None: there is nothing to acknowledge."""
        due_s = self._ack_due_s  # `told` clears it in another thread
        if self.received == self._acknowledged or due_s is None:
            return None
        return (
            self.received - self._acknowledged >= self.ack_every_n
            or self._unacknowledged_bytes >= self.ack_at_bytes
            or now_s >= due_s
        )

    @property
    def owes_ack(self) -> bool:
        """Whether there is something to acknowledge, now or later."""
        return self.received != self._acknowledged


if not TYPE_CHECKING and compiled.part is not None:
    _Numbering = compiled.part.Session


class Session(_Numbering):
    """One peer's numbering. Whoever calls `wrap` holds the peer's send lock, with its lane closed: `compiled.post`
    takes no lock. `accept` is the driving thread's, and so is the ring that makes messages."""

    __slots__ = ()

    message: ClassVar = Envelope
    """What the compiled part makes of a frame."""

    def wrap(self, parts: list[Buffer], size_bytes: int) -> Frame:
        """Number `parts` (`[head, ...]`) and keep them until they are acknowledged; returns the frame to send."""
        return self._frame(self.keep(parts, size_bytes), parts)

    def _frame(self, number: int, parts: list[Buffer]) -> Frame:
        return [SESSION.pack(_DATA, number, self.told()) + parts[0], *parts[1:]]

    def control(self, kind: FrameType) -> Frame:
        """An ACK, HEARTBEAT or GOODBYE frame; each acknowledges what has arrived."""
        return [SESSION.pack(kind, 0, self.told())]

    def resume(self, peer_received: int) -> list[Frame]:
        """A new link is up and the peer said what it has: the frames to send again, oldest first.

        Raises:
            RemoteProtocolError: the peer claims frames that were never sent: it is not who it says.
        """
        if peer_received > self.sent:
            raise RemoteProtocolError(f"the peer has received {peer_received} frames of {self.sent}")
        self.acknowledge(peer_received)
        return [self._frame(number, parts) for number, parts, _ in self.unacked]

    def check_invariants(self) -> None:
        numbers = [number for number, _, _ in self.unacked]
        assert numbers == list(range(self.sent - len(numbers) + 1, self.sent + 1)), numbers
        assert self.unacked_bytes == sum(size for _, _, size in self.unacked)


def refusal(reason: str) -> Frame:
    return [SESSION.pack(FrameType.REFUSAL, 0, 0), reason.encode()]


def refused_because(frame: Frame) -> str:
    """What a refusal says; "" for other frames. Raises: RemoteProtocolError."""
    if frame_type(frame) != FrameType.REFUSAL:
        return ""
    return bytes(frame[1]).decode(errors="replace") if len(frame) > 1 else "it does not say why"


def frame_type(frame: Frame) -> int:
    """Raises: RemoteProtocolError."""
    if not frame or len(frame[0]) < SESSION.size:
        raise RemoteProtocolError("a frame without a head")
    kind: int = SESSION.unpack_from(frame[0])[0]
    return kind
