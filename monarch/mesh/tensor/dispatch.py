"""Operators under an active mesh: what goes to its workers, what stays here, and what is wrong.

An operator with distributed tensors among its arguments goes to their workers. One with no tensor at all, a factory,
makes a distributed tensor on the active mesh. One that has only local tensors is ordinary torch, and stays local.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from monarch.mesh.tensor.commands import Hole
from monarch.mesh.tensor.engine import engine_of, forget_templates, next_number
from monarch.mesh.tensor.errors import stack_of
from monarch.mesh.tensor.handle import Ref, Tensor, operators_are_issued_by
from monarch.mesh.tensor.lane import Place
from monarch.mesh.tensor.propagation import Plan, plan
from monarch.mesh.tensor.streams import Stream, get_active_stream
from monarch.mesh.tensor.usage import refuse

if TYPE_CHECKING:
    from monarch.mesh.proc_mesh import ProcMesh

_MOST_PLANS: Final = 16384
_plans: dict[tuple[Any, ...], Plan] = {}
_DETACH: Final = torch.ops.aten.detach.default
_FULL: Final = torch.ops.aten.full.default
_FILLING: Final = (_FULL, torch.ops.aten.scalar_tensor.default)
"""Factories whose number is the value of elements alone; of others, shapes may depend on it."""
_SETTING: Final = frozenset(
    f"aten::{name}" for name in ("copy_", "fill_", "index_put", "index_put_", "_index_put_impl_")
)
"""What assignments to parts of a tensor become."""
_META: Final = torch.device("meta")
_PLAIN: Final = frozenset((int, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Of an argument that is surely no tensor: `isinstance` of one takes 1 us."""
_RESHAPING: Final = frozenset(
    f"aten::{name}_" for name in ("as_strided", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")
)
"""Operators that change the shape of a tensor in place, and nothing else."""


class _Active(threading.local):
    """What is active in this thread, innermost last; None stands for `no_mesh`."""

    def __init__(self) -> None:
        self.meshes: list[Activation] = []
        self.mode: _Mode | None = None


_active = _Active()


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    """Hands every operator of the thread to `dispatch`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would put a wrapper of 8 us around each operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class Activation:
    """What `activate()` gives: in force since the call, ended by leaving the `with` block."""

    def __init__(self, mesh: ProcMesh | None) -> None:
        self.mesh = mesh
        self._engine = None if mesh is None else engine_of(mesh)
        self.lane = None
        if mesh is not None and self._engine is not None:
            self._engine.refuse_lost()
            self.lane = self._engine.lane(mesh)
        if not _active.meshes:
            _active.mode = _Mode()
            _active.mode.__enter__()
        _active.meshes.append(self)

    def __enter__(self) -> ProcMesh | None:
        return self.mesh

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self not in _active.meshes:
            raise RuntimeError("this activation has ended already, or belongs to another thread: call activate() again")
        _active.meshes.remove(self)
        if not _active.meshes:
            mode, _active.mode = _active.mode, None
            assert mode is not None
            mode.__exit__(None, None, None)
        engine = self._engine
        if engine is not None and kind is None and not engine.coalescing and engine.lost is None:
            engine.flush()


class NoMesh:
    """`with no_mesh.activate():` torch is ordinary torch inside."""

    def activate(self) -> Activation:
        return Activation(None)


no_mesh = NoMesh()


def activate(mesh: ProcMesh) -> Activation:
    """See `ProcMesh.activate`."""
    return Activation(mesh)


def active_mesh() -> ProcMesh | None:
    return _active.meshes[-1].mesh if _active.meshes else None


def get_active_mesh() -> ProcMesh:
    """Raises: ValueError, when no mesh is active."""
    mesh = active_mesh()
    if mesh is None:
        raise ValueError("no mesh is active: use `with mesh.activate():`")
    return mesh


def active_place() -> Place:
    """Where factories and remote functions run. Raises: ValueError, when no mesh is active."""
    get_active_mesh()
    lane = _active.meshes[-1].lane
    assert lane is not None
    return lane.place(get_active_stream())


@contextmanager
def plain_torch() -> Iterator[None]:
    """Torch is ordinary torch inside, for code of ours."""
    if not _active.meshes:
        yield
        return
    activation = Activation(None)
    try:
        yield
    finally:
        activation.__exit__(None)


# ---- the way of an operator


def dispatch(func: Any, args: Any, kwargs: dict[str, Any], where: Place | None = None) -> Any:
    """Issue an operator; returns handles for its results. A factory makes them on the active mesh, or `where`."""
    key: list[Any] = [id(func), torch.get_default_dtype()]  # a function has a slow hash; the plan keeps it alive
    refs: list[Ref] = []
    varying: list[float] = []
    tensors: list[Any] = []  # all of them, local ones too
    _survey(args, key, refs, varying, tensors)
    if kwargs:
        key += kwargs
        _survey(kwargs.values(), key, refs, varying, tensors)
    if not refs:
        if tensors or (where is None and (not _makes_tensors(func) or _stays_here(kwargs))):
            return func(*args, **kwargs)
        place = where or active_place()
        if func not in _FILLING:
            key += map(repr, varying)
            varying = []
    else:
        place = refs[0].place
        suspect = len(refs) != len(tensors) or place.stream is not get_active_stream()
        for ref in refs:
            memory = ref.memory
            if (
                ref.place is not place
                or ref.dropped is not None
                or ref.base is not None
                or (memory is not None and (memory.borrowed or memory.ended is not None))
            ):
                suspect = True
        if suspect:
            if len(refs) != len(tensors) and func._schema.name in _SETTING:
                args = _lift_numbers(args, place)
                tensors = [each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
                if all(type(each) is Tensor for each in tensors):
                    return dispatch(func, args, kwargs)
            refuse_wrong(func, tensors)
        if func is _DETACH:
            return _handle(refs[0], tensors)
    found = _plans.get(tuple(key))
    if found is None:
        if func._schema.name in _RESHAPING and refs:
            return _reshape(func, args, kwargs)
        found = _planned(tuple(key), func, args, kwargs, refs, varying)
    if found.mutates:
        for at in found.mutates:
            memory = refs[at].memory
            if memory is not None and (memory.borrow is not None or memory.borrowed):
                refuse_wrong(func, tensors, [tensors[each] for each in found.mutates])
    lane = place.lane
    engine = lane.engine
    with engine.lock:
        if found.number not in lane.templates:
            lane.define_template(found.number, found.template)
        if (recorder := engine.recorder) is not None:
            recorder.uses(refs)
        number = engine.new(found.new) if found.new else 0
        command: list[Any] = [found.number]
        for ref in refs:
            command.append(ref.number)
        for value in varying:
            command.append((value,))
        command.append(number)
        lane.append(tuple(command), stack_of(sys._getframe(1)))
    if found.single is not None:
        if found.is_view:
            return _handle(Ref(number, place, found.single, None, refs[0].shared()), tensors)
        return Tensor(Ref(number, place, found.single))
    results: list[Any] = []
    for each in found.results:
        if each is None:
            results.append(None)
        elif isinstance(each, int):
            results.append(tensors[each])
        else:
            if found.is_view:
                results.append(_handle(Ref(number, place, each, None, refs[0].shared()), tensors))
            else:
                results.append(Tensor(Ref(number, place, each)))
            number += 1
    return pytree.tree_unflatten(results, found.spec)


def _handle(ref: Ref, tensors: list[Any]) -> Tensor:
    """Of a view. Also in inference mode, one of a tensor that was made outside of it is none that was made inside."""
    if torch.is_inference_mode_enabled() and not tensors[0].is_inference():
        with torch.inference_mode(False):
            return Tensor(ref)
    return Tensor(ref)


def _survey(
    args: Iterable[Any], key: list[Any], refs: list[Ref], varying: list[float] | None, tensors: list[Any]
) -> None:
    """Add to `key` what the plan depends on; numbers that it does not depend on go to `varying`."""
    for arg in args:
        kind = type(arg)
        if kind is Tensor:
            ref = arg._ref
            refs.append(ref)
            tensors.append(arg)
            key.append(ref.meta)
        elif kind is float and varying is not None:
            varying.append(arg)
            key.append(float)
        elif kind in _PLAIN:
            key.append(kind)
            key.append(arg)
        elif kind is list or kind is tuple:
            key.append(len(arg))
            _survey(arg, key, refs, None, tensors)
        elif kind is float or kind is complex:
            key.append(repr(arg))  # which tells -0.0 from 0.0, and no NaN from another
        elif isinstance(arg, torch.Tensor):
            tensors.append(arg)
        elif isinstance(arg, torch.Generator):
            raise TypeError("a Generator of the controller is no use to the workers: seed them by a remote function")
        else:
            key.append(kind)
            key.append(arg)


def _lift_numbers(args: Any, place: Place) -> Any:
    """Of `x[...] = 2` torch makes a local tensor of 2, which becomes one of the workers."""

    def lifted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or type(value) is Tensor or value.dim() or value.requires_grad:
            return value
        return dispatch(_FULL, ([], value.item()), {"dtype": value.dtype}, place)

    return pytree.tree_map(lifted, args)


def _reshape(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The handle becomes one of a view: the workers' tensor may have other handles, which keep their shape."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    view = getattr(torch.ops.aten, name)(*args, **kwargs)
    handle: Tensor = args[0]
    with no_dispatch():
        func(*args, **kwargs)  # the shape of the handle itself
    handle._ref = view._ref
    return handle


@functools.cache
def _makes_tensors(func: Any) -> bool:
    """Whether an operator gives tensors; those of the profiler, for instance, do not."""
    return any("Tensor" in str(result.type) for result in func._schema.returns)


def _stays_here(kwargs: dict[str, Any]) -> bool:
    return active_mesh() is None or kwargs.get("device") == _META


def _planned(
    key: tuple[Any, ...], func: Any, args: Any, kwargs: dict[str, Any], refs: list[Ref], varying: list[float]
) -> Plan:
    tensors, numbers = itertools.count(), itertools.count(len(refs))

    def holed(value: Any, inside: bool = False) -> Any:
        """In the order of `_survey`."""
        kind = type(value)
        if kind is Tensor:
            return Hole(next(tensors))
        if kind is float and varying and not inside:
            return Hole(next(numbers))
        if kind is list or kind is tuple:
            return kind([holed(each, True) for each in value])
        return value

    holed_args = [holed(each) for each in args]
    holed_kwargs = {name: holed(each) for name, each in kwargs.items()}
    found = plan(next_number(), func, holed_args, holed_kwargs, [ref.meta for ref in refs], len(varying))
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
        forget_templates()
    _plans[key] = found
    return found


def refuse_wrong(
    what: Any,
    tensors: Sequence[Any],
    mutated: Sequence[Any] = (),
    *,
    grad: bool = True,
    stream: Stream | None = None,
) -> None:
    """See `usage.refuse`. `stream`: the active one, where not given."""
    refuse(what, tensors, mutated, mesh=active_mesh(), stream=stream or get_active_stream(), grad=grad)


operators_are_issued_by(dispatch)
