"""Casts on their way: an agent of a host passes them on to many processes, and the answers back, several at a time.

Theory of operation. An agent to which somebody has sent a CAST (`caster`) sends the branches below on to theirs, and
the message to the processes of its host, as PASSED_ON, which a process takes as the CALL, SPAWN or SYSTEM message that
it is. Nobody unpickles anything that is the user's on the way.

- *Order.* A message has its sender's number for that receiver from the beginning, and mailboxes restore the order
  whatever way each took. So a message may also be sent twice: the second is dropped.
- *Answers* go by the agent of the host, which holds them back until those to the same port from its other processes
  have come, at most as long as they took themselves, and no longer than `_LINGER_MOST_S`; then they travel together.
  Large ones, and those of a process that has sent values to ports there, go directly.
- *TAKEN.* An agent tells who passed a cast on to it once all below have it: the agents below have said so, and no
  process of its own has more waiting than its buffer should hold.
- *Launches.* Who casts may be ahead of who has the processes launched: an agent keeps what is for one that it has not
  heard of, for a while, and all that comes behind it.
- *Death.* An agent that cannot pass a cast on says so with TAKEN. It tells of the end of a process whoever has cast to
  it.

Threads. `speaks_to` and `choose_way` run on any, all else on the driving thread. `_spoken_to` needs no lock: a thread
that answers has itself told before of what it sent to ports.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import define, field

from monarch.core.cast import Order, cast_of, read_taken, taken_of
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.ids import ProcId
from monarch.core.monitor import Down
from monarch.core.peer import Peer
from monarch.core.tensors import OUT_OF_BAND_BYTES
from monarch.transports import memory
from monarch.transports.base import Buffer, Missing

if TYPE_CHECKING:
    from monarch.core.caster import Caster
    from monarch.core.proc import Proc

ALONE_BYTES: Final = 1 << 16
"""A larger answer goes directly: there is nothing to gain by waiting for others, and its sender shall feel it when the
receiver is slow."""

_LINGER_LEAST_S: Final = 0.001
_LINGER_MOST_S: Final = 0.010
_GATHERED_MOST: Final = 1024
_TAKEN_S: Final = 0.1  # after so long TAKEN travels alone
_TAKEN_BYTES: Final = 1 << 16  # of a cast for which it travels at once
_AWAITED_MOST: Final = 4096


@define(eq=False)
class _Passed:
    """A cast that this process has passed on, until those below have it."""

    parent: int
    origin: int
    number: int
    at_once: bool  # TAKEN is not to wait for company
    waiting: set[int] = field(factory=set)
    lost: list[int] = field(factory=list)


@define(eq=False)
class _Awaited:
    """Answers to a port that are expected to come through here."""

    since_s: float
    left: int = 0


class Relay:
    """See the module; the part of `proc` that has to do with the casts of others."""

    def __init__(self, proc: Proc, caster: Caster) -> None:
        self._proc, self._caster = proc, caster
        self._passed: dict[tuple[int, int], _Passed] = {}
        self._owed: dict[int, list[bytes]] = {}  # TAKEN that is to be told, by whom
        self._telling: set[int] = set()  # those that will be told in a while
        self._awaited: dict[tuple[int, int], _Awaited] = {}  # by process and port
        self._gathered: dict[Peer, list[list[Buffer]]] = {}
        self._callers: dict[int, set[int]] = {}  # by process of this host: those who have cast to it
        self._origins: dict[bytes, ProcId] = {}
        self._spoken_to: set[int] = set()

    # ---- who passes it on

    def _on_cast(self, envelope: Envelope) -> None:
        title, body, *parts = envelope.parts
        order = Order.read(bytes(body))
        _, origin = self._read(title)
        passed = _Passed(order.parent, origin.key, envelope.seq, order.parent != origin.key)
        if Missing in map(type, parts):
            self._refuse(envelope, title, order)
            passed.lost += [host.key for host, _ in order.below]
        else:
            self._pass_on(envelope, title, parts, order, passed)
        if passed.waiting:
            self._passed[origin.key, envelope.seq] = passed
        else:
            self._owe(passed)

    def _pass_on(self, envelope: Envelope, title: Buffer, parts: list[Buffer], order: Order, passed: _Passed) -> None:
        gateway = self._proc.gateway
        size_bytes = sum(map(len, parts))
        passed.at_once = passed.at_once or size_bytes >= _TAKEN_BYTES
        for host, body in order.below:
            cast = cast_of(envelope, host.key, [title, body, *parts], envelope.seq)
            if gateway.send(cast, host) is None:
                passed.waiting.add(host.key)
            else:
                passed.lost.append(host.key)
        if envelope.reply_port and order.members:
            self._await(envelope, len(order.members))
        shared = self._shared(parts, [key for key, _, _ in order.members])
        for key, seq, rank in order.members:
            message = envelope.for_member(key, rank, seq, [title, *shared])
            message.kind = Kind.PASSED_ON
            self._callers.setdefault(key, set()).add(envelope.src_proc)
            passed.waiting.add(key)
            self._proc.locator.when_known(key, partial(self._hand_on, message, passed))

    def _hand_on(self, message: Envelope, passed: _Passed) -> None:
        """To a process of this host, which has it once it has room for more."""
        gateway, key = self._proc.gateway, message.dst_proc
        down = gateway.send(message)
        if down is not None:
            self._proc.bounce(message, down)
        else:
            peer = gateway.peers[key]
            if peer.is_full and peer.wants_room(lambda: self._reached(passed, key, [])):
                return
        self._reached(passed, key, [])

    def _refuse(self, envelope: Envelope, title: Buffer, order: Order) -> None:
        """There is no memory for the message. Its number still counts."""
        text = f"process {self._proc.proc_id.uid}, which relays it, has no memory for the message"
        for key, seq, rank in order.members:
            self._proc.bounce(envelope.for_member(key, rank, seq, []), Down("failed", text))
            if envelope.flags & Flag.SEQUENCED:
                hole = envelope.for_member(key, rank, seq, [title])
                hole.kind, hole.reply_port = Kind.PASSED_ON, 0
                hole.flags |= Flag.SKIP | Flag.SILENT
                self._proc.locator.when_known(key, partial(self._proc.gateway.send, hole))

    def _shared(self, parts: list[Buffer], keys: list[int]) -> list[Buffer]:
        """Large parts, once for all processes of this host where memory can be shared with them."""
        if len(keys) < 2 or max(map(len, parts), default=0) < OUT_OF_BAND_BYTES:
            return parts
        allocate = self._proc.memory_for(keys)
        if allocate is None:
            return parts
        shared: list[Buffer] = []
        for part in parts:
            if len(part) >= OUT_OF_BAND_BYTES:
                room = allocate(len(part))
                memory.copy(room, memoryview(part))
                shared.append(room)
            else:
                shared.append(part)
        return shared

    def _on_taken(self, envelope: Envelope) -> None:
        for origin, number, lost in read_taken(bytes(envelope.parts[0])):
            if origin == self._proc.key:
                self._caster.on_taken(number, envelope.src_proc, lost)
            elif (passed := self._passed.get((origin, number))) is not None:
                self._reached(passed, envelope.src_proc, lost)

    def _reached(self, passed: _Passed, key: int, lost: list[int]) -> None:
        """One below has it, but for the hosts in `lost`."""
        if key not in passed.waiting:
            return
        passed.waiting.discard(key)
        passed.lost += lost
        name = passed.origin, passed.number
        if not passed.waiting and self._passed.get(name) is passed:  # all was passed on, and now all have it
            del self._passed[name]
            self._owe(passed)

    def _owe(self, passed: _Passed) -> None:
        owed = self._owed.setdefault(passed.parent, [])
        owed.append(taken_of(passed.origin, passed.number, passed.lost))
        if passed.at_once or passed.lost:
            self._tell_taken(passed.parent)
        elif passed.parent not in self._telling:
            self._telling.add(passed.parent)
            self._proc.gateway.call_later(_TAKEN_S, lambda: self._tell_taken(passed.parent))

    def _tell_taken(self, parent: int) -> None:
        self._telling.discard(parent)
        if parent in self._owed:
            self._proc.gateway.send(self._taken_of(parent))

    def _taken_of(self, parent: int) -> Envelope:
        said = b"".join(self._owed.pop(parent))
        return Envelope(Kind.TAKEN, parent, 0, 0, self._proc.key, 0, [said], Flag.SILENT)

    # ---- answers

    def _await(self, envelope: Envelope, count: int) -> None:
        port = envelope.src_proc, envelope.reply_port
        awaited = self._awaited.get(port)
        if awaited is None:
            if len(self._awaited) >= _AWAITED_MOST:  # those of answers that went directly, say
                del self._awaited[next(iter(self._awaited))]
            awaited = self._awaited[port] = _Awaited(time.monotonic())
        awaited.left += count

    def forward(self, envelope: Envelope) -> Down | None:
        """Send on what is not for this process; answers to a cast together with others."""
        gateway = self._proc.gateway
        port = envelope.dst_proc, envelope.dst_port
        awaited = self._awaited.get(port) if self._awaited else None
        peer = gateway.peers.get(envelope.dst_proc)
        if awaited is None or peer is None or peer.down is not None:
            return gateway.send(envelope)
        gathered = self._gathered.setdefault(peer, [])
        gathered.append(envelope.frame())
        awaited.left -= 1
        if awaited.left <= 0:
            del self._awaited[port]
            self._let_go(peer)
        elif len(gathered) >= _GATHERED_MOST:
            self._let_go(peer)
        elif len(gathered) == 1:
            took_s = time.monotonic() - awaited.since_s
            linger_s = min(max(took_s, _LINGER_LEAST_S), _LINGER_MOST_S)
            gateway.call_later(linger_s, lambda: self._let_go(peer, gathered))
        return None

    def _let_go(self, peer: Peer, only: list[list[Buffer]] | None = None) -> None:
        """Send the answers that were gathered for `peer`, if they still are those of `only`."""
        gathered = self._gathered.get(peer)
        if gathered is None or (only is not None and gathered is not only):
            return
        del self._gathered[peer]
        if peer.key in self._owed:
            gathered.append(self._taken_of(peer.key).frame())
        self._proc.gateway.send_together(peer, gathered)

    # ---- who is meant

    def _on_passed_on(self, envelope: Envelope) -> None:
        envelope.kind, _ = self._read(envelope.parts.pop(0))
        keeper = self._proc.proc_id.keeper
        envelope.via = keeper.key if keeper is not None else 0
        self._proc.deliver(envelope)

    def _read(self, title: Buffer) -> tuple[int, ProcId]:
        """What a message is, and who cast it; from now on it is known how to reach him."""
        kind, name = title[0], bytes(title[1:])
        origin = self._origins.get(name)
        if origin is None:
            if len(self._origins) >= _AWAITED_MOST:
                self._origins.clear()
            origin = self._origins[name] = ProcId.from_string(name.decode())
        if origin.key not in self._proc.gateway.peers:
            self._proc.gateway.peers.of(origin)
        return kind, origin

    def speaks_to(self, key: int) -> None:
        """A value goes to a port of that process, directly: answers do not overtake it from now on."""
        self._spoken_to.add(key)

    def choose_way(self, answer: Envelope) -> None:
        """Whether an answer goes by the agent of this host or directly."""
        if answer.dst_proc in self._spoken_to or answer.size_bytes > ALONE_BYTES:
            answer.via = 0

    # ---- both

    def deliver(self, envelope: Envelope) -> None:
        """A CAST, PASSED_ON or TAKEN."""
        if envelope.kind == Kind.PASSED_ON:
            self._on_passed_on(envelope)
        elif envelope.kind == Kind.CAST:
            self._on_cast(envelope)
        else:
            self._on_taken(envelope)

    def proc_gone(self, gone: Peer, down: Down) -> None:
        """A process has ended, and all that it sent was delivered."""
        key = gone.key
        for passed in list(self._passed.values()):
            self._reached(passed, key, [key])
        for peer in list(self._gathered):
            self._let_go(peer)  # the last answers of a process come before the news of its end
        for caller in self._callers.pop(key, ()):
            self._proc.tell_known(caller, "proc_gone", gone.proc, down)
        for port in [port for port in self._awaited if port[0] == key]:
            del self._awaited[port]
        self._owed.pop(key, None)
        self._spoken_to.discard(key)
