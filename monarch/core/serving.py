"""What an actor is doing: the calls that it serves now, what led to them, and a picture that can be sent and shown."""

from __future__ import annotations

import asyncio
import time
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from attrs import define

from monarch.core.envelope import CallKey, Envelope

if TYPE_CHECKING:
    from monarch.core.instance import Instance

_LINK: Final = Struct("<QQQH")  # process, actor, number of the call that it serves; then the size of the text
_LINKS: Final = 64  # of longer chains, the end is kept
_TEXT_BYTES: Final = 500
_ACTOR: Final = Struct("<QQ")

ServedKey = tuple[int, int, int]
"""(process, actor, number) of a call that an actor serves. The numbers are the actor's own, from 1."""


@define(frozen=True)
class Running:
    """An endpoint that an actor runs.

    Attributes:
        endpoint: its name; `__init__` while the actor is constructed.
        since_s: when it began, in seconds of the epoch, by the clock of the actor's host.
        for_s: how long it had been running when the picture was taken, in seconds.
    """

    endpoint: str
    since_s: float
    for_s: float


class Served:
    """A call while an actor serves it; also its constructor. Compared by identity. It outlives the call where a task of
    the endpoint does, so it holds none of the message's data.

    Attributes:
        call: who waits for the answer; a port 0, where nobody does.
        exclusive: the actor takes no other call before this one is through.
        number: from the first call on that the endpoint makes itself, else 0.
        task: where an async endpoint runs.
    """

    __slots__ = ("_before", "_chain", "call", "endpoint", "exclusive", "instance", "number", "since_s", "task")

    def __init__(
        self, instance: Instance, endpoint: str, envelope: Envelope | None = None, exclusive: bool = True
    ) -> None:
        self.instance = instance
        self.endpoint = endpoint
        self.exclusive = exclusive
        self.since_s = time.time()
        self.number = 0
        self.task: asyncio.Task[Any] | None = None
        self.call: CallKey = (0, 0)
        self._before = b""
        if envelope is not None:
            self.call = envelope.src_proc, envelope.reply_port
            self._before = envelope.chain
        self._chain = b""

    @property
    def key(self) -> ServedKey:
        return self.instance.proc_runtime.key, self.instance.actor_id.number, self.number

    @property
    def awaited(self) -> bool:
        """Whether anybody may wait for the answer."""
        return bool(self.call[1])

    @property
    def going_on(self) -> bool:
        return self in self.instance.serving

    @property
    def cancelled(self) -> bool:
        """Whether its caller has given it up."""
        return self.awaited and self.instance.is_cancelled(self.call)

    def running(self) -> Running:
        return Running(self.endpoint, self.since_s, time.time() - self.since_s)

    def chain(self) -> bytes:
        """The calls that led to what this endpoint calls now, the oldest first and this one last, for their messages.

        Whoever is in it may wait for the next; nobody waits for a call without a reply port, and for one that is over.
        """
        if not self._chain:
            self.number = self.instance.next_served()
            before = self._pruned(self._before) if self._before else b""
            self._chain = before + _link(self.key, f"{self.instance.member}.{self.endpoint}")
        return self._chain

    def _pruned(self, chain: bytes) -> bytes:
        """Without what came before a call to this very actor that is over; endless rounds do not grow it."""
        links = links_of(chain)
        own, running = self.key[:2], {each.number for each in self.instance.serving}
        begin = 0
        for position, ((proc, actor, number), _) in enumerate(links):
            if (proc, actor) == own and number not in running:
                begin = position + 1
        kept = links[max(begin, len(links) + 1 - _LINKS) :]
        return b"".join(_link(key, text) for key, text in kept)


def _link(key: ServedKey, text: str) -> bytes:
    encoded = text.encode()[-_TEXT_BYTES:]
    return _LINK.pack(*key, len(encoded)) + encoded


def comes_from(chain: bytes, proc: int, actor: int) -> ServedKey | None:
    """The last call of a chain that this actor served; None, quickly, when there is none."""
    if _ACTOR.pack(proc, actor) not in chain:
        return None
    return next((key for key, _ in reversed(links_of(chain)) if key[:2] == (proc, actor)), None)


def links_of(chain: bytes) -> list[tuple[ServedKey, str]]:
    """The calls of a chain, with their texts: `module.Class name{'gpus': 1/2}.endpoint`."""
    links: list[tuple[ServedKey, str]] = []
    at = 0
    while at < len(chain):
        proc, actor, number, size = _LINK.unpack_from(chain, at)
        at += _LINK.size
        links.append(((proc, actor, number), chain[at : at + size].decode(errors="replace")))
        at += size
    return links


@define(frozen=True)
class ActorState:
    """An actor at one moment. Taken without asking the actor's thread: one that is busy or stuck is seen as well.

    Attributes:
        name: as it was spawned.
        number: within its process.
        phase: "born" (until it is constructed), "serving", "ending" or "ended".
        running: the oldest first. Several only with concurrent endpoints; none when it is idle.
        queued: calls that wait for their turn.
    """

    name: str
    number: int
    phase: str
    running: tuple[Running, ...]
    queued: int

    def __str__(self) -> str:
        doing = " and ".join(f"has been running {each.endpoint} for {each.for_s:.1f} s" for each in self.running)
        return f"{self.name} {doing or 'is idle'}, {self.queued} call(s) queued"
