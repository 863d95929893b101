"""Members of meshes as people know them: `module.Class name{'gpus': 1/2}`.

A message names an actor by numbers. What those mean, this process knows of the actor meshes that it has met last: which
it has spawned, or was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import define

from monarch.core.ids import ProcId
from monarch.errors import MonarchError
from monarch.mesh.shape import Point, Region
from monarch.supervision.failure import Member

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
