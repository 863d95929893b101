"""What controller and workers say to each other.

A batch is pickled once and goes to all workers of a lane: `(definitions, commands)`. A command is a tuple that starts
with a number: that of a *template* (an operator with all of its arguments that are no tensors), or a negative `Op`.
Tensors are called by their numbers. Results get consecutive numbers, from one that the command names. An operator with
two tensors and one result is therefore four integers: `(template, a, b, result)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from attrs import define

from monarch.mesh.shape import Region


class Op(IntEnum):
    """Commands that are no torch operators, with what follows their number."""

    FREE = -1  # refs...
    CALL = -2  # function, parts of (args, kwargs), refs of its tensors, first result, number of results
    REDUCE = -3  # see `groups.Reduction`
    SEND = -4  # ref, [(receiving rank, slot)] by own rank
    RECEIVE = -5  # slot (None: not for this rank), result
    RANK = -6  # dimensions, result
    ALIAS = -7  # ref, result
    PUBLISH = -8  # slot, refs
    TAKE = -9  # slot, first result, number of results
    REPLAY = -10  # graph, refs of its inputs, first result
    GROUP = -11  # dimensions, name, result
    FORGET = -12  # templates...


class Hole:
    """Stands in the arguments of a template for the i-th tensor, or number that varies."""

    __slots__ = ("i",)

    def __init__(self, i: int) -> None:
        self.i = i

    def __reduce__(self) -> tuple[Any, ...]:
        return Hole, (self.i,)


NEW, NOTHING, ALIASED = range(3)
"""What a result of an operator is: a tensor that gets a number, None, or one of the arguments."""


@define(frozen=True)
class Template:
    """An operator and its arguments.

    Attributes:
        operator: as ("aten", "add", "Tensor").
        default_dtype: the controller's, which results may have.
        holes: how many tensors and varying numbers it takes.
        results: NEW, NOTHING or ALIASED, for each.
        mutates: which holes it writes to.
    """

    operator: tuple[str, str, str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    default_dtype: torch.dtype
    holes: int
    results: tuple[int, ...]
    mutates: tuple[int, ...]

    def function(self) -> Any:
        """Raises: AttributeError, when this process has no such operator."""
        namespace, name, overload = self.operator
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)


@define(frozen=True)
class Graph:
    """Commands that are run again and again with other tensors.

    Attributes:
        inputs, outputs: numbers of tensors as they are in `commands`.
    """

    commands: Sequence[tuple[Any, ...]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@define(frozen=True)
class View:
    """Which workers a lane has."""

    region: Region


@define(frozen=True)
class Function:
    """A function of the user's, encoded by the codec."""

    parts: Sequence[Any]


@define(frozen=True)
class Failure:
    """What a worker keeps in place of a value that could not be computed, and of all that depends on it.

    Attributes:
        lane, number: the command that failed.
        what: type and text of the exception.
        trace: the worker's traceback.
        worker: who failed, as text.
    """

    lane: int
    number: int
    what: str
    trace: str
    worker: str


def fill(template: Any, values: Sequence[Any]) -> Any:
    """`template` with its holes filled. Only lists and tuples are looked into."""
    kind = type(template)
    if kind is Hole:
        return values[template.i]
    if kind is list or kind is tuple:
        return kind([fill(each, values) for each in template])
    return template
