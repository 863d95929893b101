"""What an actor is doing: the calls that it serves now, and a picture of them that can be sent and shown."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from attrs import define

from monarch.core.chain import ServedKey, link, pruned
from monarch.core.envelope import CallKey, Envelope

if TYPE_CHECKING:
    from monarch.core.instance import Instance


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
        message_rank: where the receiver stands in the view that was called; the layer above says how.
        call: who waits for the answer; a port 0, where nobody does.
        exclusive: the actor takes no other call before this one is through.
        number: from the first call on that the endpoint makes itself, else 0.
        task: where an async endpoint runs.
    """

    __slots__ = (
        "_before",
        "_chain",
        "actor_instance",
        "call",
        "endpoint",
        "exclusive",
        "message_rank",
        "number",
        "since_s",
        "task",
    )

    def __init__(
        self,
        actor_instance: Instance,
        message_rank: Any,
        endpoint: str = "",
        envelope: Envelope | None = None,
        exclusive: bool = True,
    ) -> None:
        self.actor_instance, self.message_rank = actor_instance, message_rank
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
        return self.actor_instance.proc_runtime.key, self.actor_instance.actor_id.number, self.number

    @property
    def awaited(self) -> bool:
        """Whether anybody may wait for the answer."""
        return bool(self.call[1])

    @property
    def going_on(self) -> bool:
        return self in self.actor_instance.serving

    @property
    def cancelled(self) -> bool:
        """Whether the caller has given up the call that is being served, with `Future.cancel`. For sync endpoints that
        take long, to look at from time to time; what they return is dropped."""
        return self.awaited and self.actor_instance.is_cancelled(self.call)

    def running(self) -> Running:
        return Running(self.endpoint, self.since_s, time.time() - self.since_s)

    def chain(self) -> bytes:
        """The calls that led to what this endpoint calls now, the oldest first and this one last, for their messages.

        Whoever is in it may wait for the next; nobody waits for a call without a reply port, and for one that is over.
        """
        if not self._chain:
            self.number = self.actor_instance.next_served()
            running = {each.number for each in self.actor_instance.serving}
            before = pruned(self._before, self.key, running) if self._before else b""
            self._chain = before + link(self.key, f"{self.actor_instance.member}.{self.endpoint}")
        return self._chain


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
