"""Failures as values: what happened to which member of which mesh, and why."""

from __future__ import annotations

import time
from datetime import datetime
from enum import StrEnum

from attrs import define, field

from monarch.core.monitor import Down
from monarch.errors import SupervisionError


@define(frozen=True)
class MeshFailure:
    """A member of a mesh has failed. A plain value: it pickles, and prints as one paragraph.

    Attributes:
        mesh_name: name given at the spawn.
        crashed_ranks: base ranks of the members that failed; one event has one rank.
        member: the member as people know it, `module.Class name{'gpus': 1/2}`.
        down: why it is gone, with process, exit code or signal, exception and cause.
        time_s: when the owner's process heard of it, in seconds since the epoch.
    """

    mesh_name: str
    crashed_ranks: list[int]
    member: str
    down: Down
    time_s: float = field(factory=time.time)
    mesh: object = None

    @property
    def kind(self) -> str:
        return self.down.kind

    def report(self) -> str:
        """One paragraph, with the remote traceback where there is one."""
        when = datetime.fromtimestamp(self.time_s).isoformat(sep=" ", timespec="seconds")
        lines = [f"{self.member} at rank {self.crashed_ranks[0]} failed at {when}: {self.down.reason}"]
        if self.down.pid:
            lines[0] += f" (process {self.down.pid}{' on ' + self.down.host if self.down.host else ''})"
        if self.down.traceback:
            lines.append(self.down.traceback.rstrip())
        cause = self.down.cause
        while cause is not None:
            lines.append(f"caused by: {cause.reason}" + (f" (process {cause.pid})" if cause.pid else ""))
            if cause.traceback:
                lines.append(cause.traceback.rstrip())
            cause = cause.cause
        return "\n".join(lines)

    def __str__(self) -> str:
        event = f"{self.member}: {self.down}"
        return f"MeshFailure(mesh_name={self.mesh_name!r}, crashed_ranks={self.crashed_ranks}, event={event!r})"

    __repr__ = __str__


class Fate(StrEnum):
    """What became of a call whose member is gone."""

    UNSERVED = "The call was not served."
    BEGUN = "The call had begun."
    UNKNOWN = "Whether the call had run is not known."


def call_failed(
    member: str, rank: int, mesh_name: str, down: Down, endpoint: str | None, fate: Fate
) -> SupervisionError:
    """The error of a call to a member that is gone."""
    if down.stopped:
        text = f"Supervision event: actor {member} has status: stopped ({down.reason}). {fate}"
        return SupervisionError(text, endpoint)
    failure = MeshFailure(mesh_name, [rank], member, down)
    text = f"The actor {member} and all its descendants have failed. {fate} {failure.report()}"
    return SupervisionError(text, endpoint, failure)
