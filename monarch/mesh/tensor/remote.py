"""Functions of the user's that run on the workers.

Called directly, such a function is one more operator: its result is distributed tensors, whose shapes `propagate`
tells, and nothing waits. By the adverbs of endpoints (`call`, `call_one`, ...) its values come back as futures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, ParamSpec, TypeVar

from torch.utils import _pytree as pytree

from monarch.core import codec
from monarch.core.future import Future
from monarch.errors import ActorError
from monarch.mesh.endpoint import Propagator
from monarch.mesh.shape import Point
from monarch.mesh.tensor.commands import Function, Hole, Op
from monarch.mesh.tensor.dispatch import active_place, plain_torch, refuse_wrong
from monarch.mesh.tensor.engine import Engine
from monarch.mesh.tensor.errors import here
from monarch.mesh.tensor.handle import Tensor, handles
from monarch.mesh.tensor.lane import Lane, Place
from monarch.mesh.tensor.metadata import Meta
from monarch.mesh.tensor.worker import propagated
from monarch.mesh.value_mesh import ValueMesh

P = ParamSpec("P")
R = TypeVar("R")
_MOST_SHAPES: Final = 4096


def lift(what: str, args: Any, kwargs: Any, place: Any) -> tuple[list[Tensor], Any]:
    """The distributed tensors of a call, and the call with holes in their places.

    Raises:
        TypeError: a tensor cannot be used here.
        ValueError: the workers of `place` do not all have it.
    """
    tensors: list[Tensor] = []

    def holed(leaf: Any) -> Any:
        if type(leaf) is not Tensor:
            return leaf
        tensors.append(leaf)
        return Hole(len(tensors) - 1)

    call = pytree.tree_map(holed, (args, kwargs))
    if tensors:
        refuse_wrong(what, tensors, grad=False)
        lane = tensors[0]._ref.place.lane
        if place is not None and not place.lane.is_part_of(lane):
            raise ValueError(
                f"{what} runs on the active mesh, {place.lane.where(lane)}, which is no part of the mesh of its "
                f"arguments, {lane.where(place.lane)}"
            )
    return tensors, call


class Remote(Generic[P, R]):
    """What `remote` gives."""

    def __init__(self, function: Callable[P, R] | str, propagate: Propagator = None) -> None:
        if not callable(function) and not isinstance(function, str):
            raise TypeError(f"remote needs a function, or its dotted path, not {function!r}")
        if isinstance(function, str) and "." not in function:
            raise ValueError(f"remote needs the dotted path of a function, as 'module.function', not {function!r}")
        if not (propagate is None or callable(propagate) or propagate in ("cached", "inspect", "mocked")):
            raise TypeError(f'propagate is {propagate!r}; it can be a function, "cached", "inspect" or "mocked"')
        self._function = function
        self._propagate = propagate
        self._shapes: dict[Any, Any] = {}
        self._name = function if isinstance(function, str) else getattr(function, "__qualname__", repr(function))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on every worker of the active mesh. Returns at once, with distributed tensors in the places of tensors.

        Raises:
            ValueError: no mesh is active, or it is no part of the mesh of the arguments.
            TypeError: an argument cannot be used here.
        """
        return self._issue(args, kwargs, 3)  # type: ignore[no-any-return]

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The same as calling it."""
        return self._issue(args, kwargs, 3)  # type: ignore[no-any-return]

    def _issue(self, args: Any, kwargs: Any, depth: int) -> Any:
        place = active_place()
        tensors, call = lift(self._name, args, kwargs, place)
        lane, engine = place.lane, place.lane.engine
        with plain_torch():
            parts = codec.encode(call)
            number, function = engine.function(self._function)
            result = self._result(lane, function, parts, call, [tensor._ref.meta for tensor in tensors])
        leaves, spec = pytree.tree_flatten(result)
        metas = [leaf for leaf in leaves if isinstance(leaf, Meta)]
        lane.define(number, function)
        if (recorder := engine.recorder) is not None:
            recorder.uses(tensor._ref for tensor in tensors)
        first = engine.new(len(metas)) if metas else 0
        refs = tuple(tensor._ref.number for tensor in tensors)
        lane.append((int(Op.CALL), number, [bytes(part) for part in parts], refs, first, metas), here(depth))
        if not engine.coalescing:
            lane.flush()  # it may do more than return something
        return pytree.tree_unflatten(handles(leaves, place, first), spec)

    def _result(self, lane: Lane, function: Function, parts: Any, call: Any, metas: list[Meta]) -> Any:
        """What it returns, with a Meta for each tensor."""
        how = self._propagate
        if callable(how):
            return propagated(how, call, metas)
        if how == "mocked":
            if isinstance(self._function, str):
                raise TypeError(f'propagate="mocked" runs the function here, and {self._function!r} is the name of one')
            return propagated(self._function, call, metas)
        if how == "inspect":
            return self._ask(lane, function, parts, metas)
        key = (b"".join(bytes(part) for part in parts), *metas)
        if key not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._ask(lane, function, parts, metas)
        return self._shapes[key]

    def _ask(self, lane: Lane, function: Function, parts: Any, metas: list[Meta]) -> Any:
        """A worker runs it on tensors without memory."""
        engine = lane.engine
        engine.flush()
        future = lane.worker_at({}).propagate.call_one(function, [bytes(part) for part in parts], metas)
        try:
            return engine.ask(future, lambda answer: answer).get()
        except ActorError as error:
            error.add_note(
                f"To know the shape of its result, {self._name} was called with tensors that have no memory. One that "
                "needs their elements takes a function as `propagate`."
            )
            raise

    # ---- as endpoints are called

    def _prepared(self, args: Any, kwargs: Any, place: Place | None) -> tuple[Engine, Lane, tuple[Any, ...]]:
        """The arguments of `Worker.run`. Without `place`, on the mesh of the tensors, or the active one."""
        tensors, call = lift(self._name, args, kwargs, place)
        lane = (place or (tensors[0]._ref.place if tensors else active_place())).lane
        engine = lane.engine
        engine.flush_to_ask()
        with plain_torch():
            parts = [bytes(part) for part in codec.encode(call)]
        _, function = engine.function(self._function)
        return engine, lane, (function, parts, [tensor._ref.number for tensor in tensors])

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Run on every worker of the active mesh; the values come back."""
        engine, lane, call = self._prepared(args, kwargs, active_place())

        def values(answers: ValueMesh[Any]) -> ValueMesh[R]:
            return ValueMesh(answers.extent, [engine.value(answer)[0] for answer in answers.values()])

        return engine.ask(lane.workers.run.call(*call), values)

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run on the only worker of the active mesh. Raises: ValueError, when it has more."""
        engine, lane, call = self._prepared(args, kwargs, active_place())
        return engine.ask(lane.workers.run.call_one(*call), lambda answer: engine.value(answer)[0])

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run on a worker drawn at random."""
        engine, lane, call = self._prepared(args, kwargs, active_place())
        rank = random.randrange(len(lane.ranks))
        return self._on_one(engine, lane.workers.slice(**lane_point(lane, rank)), call)

    def _on_one(self, engine: Engine, worker: Any, call: tuple[Any, ...]) -> Future[R]:
        return engine.ask(worker.run.call_one(*call), lambda answer: engine.value(answer)[0])

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Run on every worker; the i-th future is the i-th value to arrive."""
        engine, lane, call = self._prepared(args, kwargs, active_place())
        futures = lane.workers.run.stream(*call)
        return iter([engine.ask(each, lambda answer: engine.value(answer)[0]) for each in futures])

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run on every worker, and drop the values; what it raises is dropped too."""
        _, lane, call = self._prepared(args, kwargs, active_place())
        lane.workers.run.call_settled(*call)

    def __repr__(self) -> str:
        return f"<remote {self._name}>"


def lane_point(lane: Lane, rank: int) -> dict[str, int]:
    return dict(Point(rank, lane.region.extent))


def remote(function: Callable[P, R] | str | None = None, *, propagate: Propagator = None) -> Any:
    """A function that runs on the workers of the active mesh. Also a decorator.

    It is sent once, with what it refers to as that is at the first call.

    Args:
        function: or its dotted path, which the workers import.
        propagate: how the shapes of the result are known when it is called directly: a function that is called instead,
            with tensors that have no memory; "mocked": the function itself is; "inspect": one worker calls it with such
            tensors each time; "cached", the default: once for each combination of arguments.

    Raises:
        TypeError: one of both is something else.
        ValueError: a path without a dot.
    """
    if function is None:
        return lambda each: Remote(each, propagate)
    return Remote(function, propagate)


def call_on_shard_and_fetch(
    function: Any, *args: Any, shard: dict[str, int] | None = None, **kwargs: Any
) -> Future[Any]:
    """Run a remote function on one worker of the mesh of its arguments, or of the active one; its value comes back.

    Args:
        shard: coordinates of the worker; the first where not given.
    """
    each = function if isinstance(function, Remote) else Remote(function)
    engine, lane, call = each._prepared(args, kwargs, None)
    return each._on_one(engine, lane.worker_at(shard or {}), call)
