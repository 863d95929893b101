"""What an actor is doing: the calls that it serves now, and a picture of it that can be sent and shown."""

from __future__ import annotations

import time

from attrs import define

from monarch.core.envelope import Envelope


class Served:
    """A call while an actor serves it. `envelope` is None for the constructor. Compared by identity."""

    __slots__ = ("endpoint", "envelope", "since_s")

    def __init__(self, endpoint: str, envelope: Envelope | None) -> None:
        self.endpoint = endpoint
        self.envelope = envelope
        self.since_s = time.time()


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
