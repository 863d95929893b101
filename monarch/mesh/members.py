"""Members of meshes: those that a call is for, and each as people know it: `module.Class name{'gpus': 1/2}`.

A message names an actor by numbers. What those mean, this process knows of the actor meshes that it has met last: which
it has spawned, or was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from attrs import define

from monarch.core import exceptions
from monarch.core.envelope import Envelope
from monarch.core.ids import ProcId
from monarch.core.monitor import Down
from monarch.errors import MonarchError
from monarch.mesh.shape import Point, Region
from monarch.supervision.failure import Fate, Member, call_failed

_KEPT: Final = 256


@define(frozen=True)
class _Met:
    class_name: str
    name: str
    procs: Sequence[ProcId]  # [position in the region]
    region: Region
    whole: Region


_met: dict[int, _Met] = {}  # by number, the oldest first


def describe_member(class_name: str, name: str, whole: Region, base: int) -> Member:
    """The member of that base rank."""
    try:
        point = whole.point_of_base_rank(base)
    except (ValueError, MonarchError):
        point = Point(0, whole.extent)
    return Member(class_name, name, dict(point), str(point) if len(point) else "")


def meet(number: int, name: str, class_name: str, procs: Sequence[ProcId], region: Region, whole: Region) -> None:
    """Remember an actor mesh, or the part of it that `region` is. The largest part counts."""
    known = _met.get(number)
    if known is None or len(known.procs) < len(procs):
        _met[number] = _Met(class_name, name, procs, region, whole)
        while len(_met) > _KEPT:
            _met.pop(next(iter(_met)), None)


def find(number: int, proc_key: int) -> Member | None:
    """The actor of that number in that process, if it has been met."""
    met = _met.get(number)
    if met is None:
        return None
    for proc, base in zip(met.procs, met.region._slice, strict=True):
        if proc.key == proc_key:
            return describe_member(met.class_name, met.name, met.whole, base)
    return None


class Members:
    """Who a call is for: what one who waits for them must know to put a failure into words, and to reach them again."""

    __slots__ = ("describe", "keys", "mesh_name", "method", "number", "procs", "region")

    def __init__(
        self,
        number: int,
        targets: Sequence[tuple[int, ProcId | None]],
        describe: Callable[[int], Member | str],
        mesh_name: str,
        method: str,
        region: Region,
    ) -> None:
        self.number = number  # of the actor, in each process
        self.keys = [key for key, _ in targets]  # [rank in the view] -> process key
        self.procs = [proc for _, proc in targets]  # [rank in the view]; None: the call has not been sent yet
        self.describe = describe  # rank in the view -> who that is
        self.mesh_name = mesh_name
        self.method = method
        self.region = region

    def like(self, other: Members) -> None:
        """Be as `other`, for subclasses."""
        for name in Members.__slots__:
            setattr(self, name, getattr(other, name))

    def endpoint_text(self, rank: int) -> str:
        return f"{self.describe(rank)}.{self.method}"

    def call_text(self, rank: int) -> str:
        return f"Actor call {self.mesh_name}.{self.method} failed. It ran in {self.describe(rank)}."

    def trouble(self, reply: Envelope) -> str:
        """What a reply with an error says."""
        return f"{self.endpoint_text(reply.rank)} raised {exceptions.summary_of_sent(reply.parts)}"

    def error(self, rank: int, down: Down, fate: Fate = Fate.UNKNOWN) -> Exception:
        base = self.region.slice()[rank]
        return call_failed(self.describe(rank), base, self.mesh_name, down, f"{self.mesh_name}.{self.method}", fate)
