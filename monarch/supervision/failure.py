"""Failures as values: what happened to which member of which mesh, and why."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

from attrs import define, field

from monarch.core.monitor import Down
from monarch.errors import SupervisionError


@define(frozen=True)
class Member:
    """A member of a mesh, as reports name it: `module.Class name{'gpus': 1/2}`.

    Attributes:
        class_name: `module.Class` of an actor; "process" where it is one.
        name: given at the spawn.
        coordinates: where it stands in its mesh, by label.
        place: the same for people, with the sizes.
    """

    class_name: str
    name: str
    coordinates: Mapping[str, int] = field(factory=dict, hash=False)
    place: str = ""

    def __str__(self) -> str:
        return f"{self.class_name} {self.name}{self.place}"


@define(frozen=True)
class MeshFailure:
    """A member of a mesh has failed. A plain value: it pickles, and prints as one paragraph.

    Attributes:
        mesh_name: name given at the spawn.
        crashed_ranks: base ranks of the members that failed; one event has one rank.
        member: which one that is, or the text by which people know it.
        down: why it is gone.
        mesh: None, for programs that look at it; a failure travels, and holds no mesh.
    """

    mesh_name: str
    crashed_ranks: list[int]
    member: Member | str
    down: Down
    mesh: object = None

    @property
    def kind(self) -> str:
        """ "failed" (an actor's own error), "exited" or "killed" (its process), "unreachable"."""
        return self.down.kind

    @property
    def coordinates(self) -> list[dict[str, int]]:
        """Where `crashed_ranks` stand in the mesh, by label."""
        return [dict(self.member.coordinates)] if isinstance(self.member, Member) else [{}]

    @property
    def actor_class(self) -> str:
        """`module.Class`; "process" where a process without actors has ended, "" where it is not known."""
        return self.member.class_name if isinstance(self.member, Member) else ""

    @property
    def actor_name(self) -> str:
        return self.member.name if isinstance(self.member, Member) else self.member

    @property
    def pid(self) -> int:
        """Of the process in which it happened, 0 where unknown."""
        return self.down.pid

    @property
    def host(self) -> str:
        return self.down.host

    @property
    def exit_code(self) -> int | None:
        """Of the process, where it has exited."""
        return self.down.code

    @property
    def signal(self) -> int | None:
        """That ended the process, where one did."""
        return self.down.signal

    @property
    def time_s(self) -> float:
        """When it was noticed, in seconds since the epoch."""
        return self.down.time_s

    @property
    def exception_type(self) -> str:
        """Qualified name, or "" where no exception is behind it."""
        return self.down.error.partition(": ")[0]

    @property
    def exception_text(self) -> str:
        return self.down.error.partition(": ")[2]

    @property
    def causes(self) -> list[Down]:
        """What brought this about, what brought that about, and so on."""
        found: list[Down] = []
        down = self.down
        while down.cause is not None:
            down = down.cause
            found.append(down)
        return found

    def report(self) -> str:
        """One paragraph, with the remote traceback where there is one."""
        when = datetime.fromtimestamp(self.time_s).isoformat(sep=" ", timespec="seconds")
        lines = [f"{self.member} at rank {self.crashed_ranks[0]} failed at {when}: {self.down.reason}"]
        if self.down.pid:
            lines[0] += f" (process {self.down.pid}{' on ' + self.down.host if self.down.host else ''})"
        if self.down.traceback:
            lines.append(self.down.traceback.rstrip())
        for cause in self.causes:
            lines.append(f"caused by: {cause.reason}" + (f" (process {cause.pid})" if cause.pid else ""))
            if cause.traceback:
                lines.append(cause.traceback.rstrip())
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
    member: Member | str, rank: int, mesh_name: str, down: Down, endpoint: str | None, fate: Fate
) -> SupervisionError:
    """The error of a call to a member that is gone."""
    if down.stopped:
        text = f"Supervision event: actor {member} has status: stopped ({down.reason}). {fate}"
        return SupervisionError(text, endpoint)
    failure = MeshFailure(mesh_name, [rank], member, down)
    text = f"The actor {member} and all its descendants have failed. {fate} {failure.report()}"
    return SupervisionError(text, endpoint, failure)
