"""Many operators as one: `coalescing` sends a block of them as one batch; `compile` records a function, and then runs
it on the workers by a single command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final, ParamSpec, TypeVar

import torch
from attrs import define
from torch.utils import _pytree as pytree

from monarch.mesh.tensor.commands import NEW, Graph, Op
from monarch.mesh.tensor.dispatch import active_place, refuse_wrong
from monarch.mesh.tensor.engine import next_number
from monarch.mesh.tensor.errors import here
from monarch.mesh.tensor.handle import Ref, Tensor, handles
from monarch.mesh.tensor.lane import Lane, Place

P = ParamSpec("P")
R = TypeVar("R")

_REPLAYABLE: Final = frozenset((Op.CALL, Op.REDUCE, Op.RANK, Op.ALIAS))


@contextmanager
def coalescing() -> Iterator[None]:
    """Operators of the block go to the workers of the active mesh in one batch, at its end.

    Raises:
        ValueError: no mesh is active.
        NotImplementedError: something is fetched inside.
    """
    with active_place().lane.engine.coalesced():
        yield


class Recorder:
    """Takes down the commands of one lane, and of the thread that makes this, while they are issued.

    Attributes:
        made: numbers of the tensors that they make.
        used: the tensors that they use and do not make, by number.
    """

    def __init__(self, place: Place) -> None:
        self.commands: list[tuple[Any, ...]] = []
        self.made: set[int] = set()
        self.used: dict[int, Ref] = {}
        self.thread = get_ident()
        self._place = place

    def uses(self, refs: Iterable[Ref]) -> None:
        if get_ident() != self.thread:
            return
        for ref in refs:
            if ref.number not in self.made:
                self.used[ref.number] = ref

    def takes(self, lane: Lane, command: tuple[Any, ...]) -> None:
        """Raises: NotImplementedError, for what cannot be recorded."""
        op = command[0]
        if op == Op.FREE:
            own = [number for number in command[1:] if number in self.made]
            if own:
                self.commands.append((op, *own))
            return
        if get_ident() != self.thread:
            return
        if lane is not self._place.lane:
            raise NotImplementedError("a compiled function that uses more than one mesh is planned")
        if op < 0 and op not in _REPLAYABLE:
            raise NotImplementedError(f"{Op(op).name} in a compiled function is planned")
        self.commands.append(command)
        self.made.update(_made(lane, command))


def _made(lane: Lane, command: tuple[Any, ...]) -> range:
    op = command[0]
    if op == Op.CALL:
        return range(command[4], command[4] + len(command[5]))
    count = lane.templates[op].results.count(NEW) if op > 0 else 1
    return range(command[-1], command[-1] + count)


@define(eq=False)
class _Recorded:
    """A graph and what comes out of it: for each leaf of the result the Meta of an output, or the leaf itself."""

    number: int
    graph: Graph
    arguments: tuple[int, ...]  # as recorded
    captured: tuple[Ref, ...]
    results: list[Any]
    spec: Any


def compile(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose operators are recorded at its first call, and run by one command at the next ones.

    It is recorded once for each mesh, stream and set of shapes and other arguments. Its Python code, numbers in it
    included, does not run again: it should have no effect but its result and what it writes into tensors in place.
    Tensors that it uses from outside are kept. Autograd may be used inside; results are detached.

    Raises (a call):
        TypeError: an argument is neither a tensor nor hashable.
        NotImplementedError: it moves tensors between meshes, or fetches.
    """
    known: dict[Any, _Recorded] = {}

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        place = active_place()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if type(leaf) is Tensor]
        refuse_wrong(function.__qualname__, tensors)
        numbers = [tensor._ref.number for tensor in tensors]
        key = (place, torch.get_default_dtype(), str(spec), *map(_token, leaves), *map(numbers.index, numbers))
        found = known.get(key)
        if found is not None:
            return _replay(found, place, tensors)
        result, known[key] = _record(function, args, kwargs, place, tensors)
        return result  # type: ignore[no-any-return]

    return run


def _token(leaf: Any) -> Any:
    if type(leaf) is Tensor:
        return leaf._ref.meta
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf  # -0.0 equals 0.0


def _record(function: Any, args: Any, kwargs: Any, place: Place, tensors: list[Tensor]) -> tuple[Any, _Recorded]:
    engine = place.lane.engine
    if (running := engine.recorder) is not None and running.thread == get_ident():  # others may end theirs meanwhile
        raise NotImplementedError("a compiled function inside of another is planned")
    with engine.recording:
        recorder = engine.recorder = Recorder(place)
        try:
            with engine.coalesced():
                result = function(*args, **kwargs)
        finally:
            engine.recorder = None
    leaves, spec = pytree.tree_flatten(result)
    leaves = [leaf.detach() if type(leaf) is Tensor else leaf for leaf in leaves]
    outputs, results = [], []
    for leaf in leaves:
        made = type(leaf) is Tensor and leaf._ref.number in recorder.made
        if made:
            outputs.append(leaf._ref.number)
        results.append(leaf._ref.meta if made else leaf)
    arguments = tuple(dict.fromkeys(tensor._ref.number for tensor in tensors))
    captured = tuple(ref for number, ref in recorder.used.items() if number not in arguments)
    inputs = (*arguments, *(ref.number for ref in captured))
    graph = Graph(tuple(recorder.commands), inputs, tuple(outputs))
    recorded = _Recorded(next_number(), graph, arguments, captured, results, spec)
    uses = (each[0] if each[0] > 0 else each[1] for each in graph.commands if each[0] > 0 or each[0] == Op.CALL)
    engine.keep(recorded.number, recorded, uses)
    return pytree.tree_unflatten(leaves, spec), recorded


def _replay(found: _Recorded, place: Place, tensors: list[Tensor]) -> Any:
    lane = place.lane
    lane.define(found.number, found.graph)
    first = lane.engine.new(len(found.graph.outputs)) if found.graph.outputs else 0
    distinct = _distinct(tensors)
    now = dict(zip(found.arguments, distinct, strict=True))
    refs = (*(tensor._ref.number for tensor in distinct), *(ref.number for ref in found.captured))
    lane.append((int(Op.REPLAY), found.number, refs, first), here(3))
    # An argument that it returned is the one of now.
    leaves = [now.get(each._ref.number, each) if type(each) is Tensor else each for each in found.results]
    return pytree.tree_unflatten(handles(leaves, place, first), found.spec)


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """Each once."""
    return list({tensor._ref.number: tensor for tensor in tensors}.values())
