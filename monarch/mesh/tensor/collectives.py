"""Tensors across processes, as users call it: reductions, and moves between meshes.

Reductions start at once and the workers go on; a worker waits for one where its result is first used. So what is
computed meanwhile overlaps with the communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch.core.ids import new_number
from monarch.mesh.shape import check_dimensions
from monarch.mesh.tensor.commands import Op
from monarch.mesh.tensor.dispatch import refuse_wrong
from monarch.mesh.tensor.engine import engine_of
from monarch.mesh.tensor.errors import here
from monarch.mesh.tensor.groups import REDUCTIONS, Reduction, result_meta
from monarch.mesh.tensor.handle import Ref, Tensor
from monarch.mesh.tensor.lane import Lane
from monarch.mesh.tensor.metadata import dense_meta
from monarch.mesh.tensor.streams import Stream, get_active_stream

if TYPE_CHECKING:
    from monarch.mesh.proc_mesh import ProcMesh

_CPU = torch.device("cpu")
Dims = str | Sequence[str] | None


def _dims(lane: Lane, dims: Dims) -> tuple[str, ...]:
    labels = lane.region._labels
    given = labels if dims is None else (dims,) if isinstance(dims, str) else dims
    if not isinstance(given, (tuple, list)) or not all(isinstance(dim, str) for dim in given):
        raise TypeError(f"dims is {dims!r}; it can be a dimension of the mesh, by name, several, or None for all")
    given = tuple(given)
    check_dimensions(lane.region, given, "the mesh of the tensor")
    if len(set(given)) != len(given):
        raise ValueError(f"a dimension is there twice: {list(given)}")
    return given or labels


def _of_each(function: Callable[..., Any], tensors: Any, *others: Any) -> Any:
    """The structure `tensors` with what `function` makes of each tensor in it."""

    def applied(leaf: Any, *more: Any) -> Any:
        return function(leaf, *more) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(applied, tensors, *others)


def _check(tensor: Any, dims: Dims, how: str, scatter: bool, mesh: Any) -> tuple[Reduction, int]:
    """The reduction, and how many members its groups have."""
    if mesh is not None:
        raise NotImplementedError("reducing to another mesh is planned: reduce, then to_mesh")
    refuse_wrong("reduce", [tensor], grad=False)
    lane = tensor._ref.place.lane
    which = _dims(lane, dims)
    if how not in REDUCTIONS:
        raise ValueError(f"reduction {how!r} is not one of {', '.join(REDUCTIONS)}")
    size = lane.mesh.size(list(which)) if which else 1
    if scatter and (not tensor.dim() or tensor.shape[0] != size):
        raise TypeError(
            f"scatter needs a tensor whose first dimension is as large as the group, {size}; "
            f"the shape is {tuple(tensor.shape)}"
        )
    if how in ("band", "bor", "bxor") and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"reduction {how!r} works on integers and booleans, not on {tensor.dtype}")
    if how == "avg" and tensor.dtype == torch.bool:
        raise ValueError("booleans have no average")
    if how in ("min", "max") and tensor.is_complex():
        raise ValueError(f"complex numbers have no order for {how!r}")
    return Reduction(which, how, scatter, tensor._ref.meta), size


def _issue(tensor: Tensor, reduction: Reduction, target: int, result: int) -> None:
    lane = tensor._ref.place.lane
    engine = lane.engine
    if (recorder := engine.recorder) is not None:
        recorder.uses([tensor._ref])
    stack = here(3)
    number = lane.append((int(Op.REDUCE), tensor._ref.number, reduction, target, result), stack)
    engine.remember(lane.number, number, stack)


def reduce(
    tensors: Any,
    dims: Dims = None,
    reduction: str = "sum",
    scatter: bool = False,
    mesh: Any = None,
    out: Any = None,
) -> Any:
    """The reduction of the shards of a tensor: each member of a group has its result as a shard.

    Args:
        tensors: a tensor, or a structure of some, each of which is reduced.
        dims: dimensions of the mesh; processes that differ in these alone are a group. None means all.
        reduction: "sum", "avg", "product", "min", "max", "band", "bor", "bxor"; or "stack": all shards, in a new first
            dimension (all-gather). Members are in row-major order.
        scatter: the first dimension has a piece for each member, which gets the reduction of that piece alone
            (reduce-scatter; with "stack", the pieces that the members have for it: all-to-all).
        out: a tensor on the same mesh that takes the result; for a structure, one of such tensors.

    Raises:
        KeyError: no such dimension.
        ValueError: a dimension is there twice, the reduction is unknown or not for this dtype, `out` does not fit.
        TypeError: a tensor cannot be used here; with `scatter`, its first dimension is not as large as the group;
            `dims` are no names.
    """

    def reduced(tensor: Any, into: Any = None) -> Any:
        wanted, size = _check(tensor, dims, reduction, scatter, mesh)
        place = tensor._ref.place
        meta = dense_meta(result_meta(wanted, size), tensor.dtype, tensor.device)
        if into is None:
            number = place.lane.engine.new()
            _issue(tensor, wanted, 0, number)
            return Tensor(Ref(number, place, meta))
        if tuple(into.shape) != meta.shape or into.dtype != meta.dtype:
            raise ValueError(
                f"out has shape {tuple(into.shape)} and {into.dtype}; the result has {meta.shape} and {meta.dtype}"
            )
        refuse_wrong("reduce", [tensor, into], [into], grad=False)
        _issue(tensor, wanted, into._ref.number, 0)
        return into

    return _of_each(reduced, tensors) if out is None else _of_each(reduced, tensors, out)


def reduce_(tensors: Any, dims: Dims = None, reduction: str = "sum", scatter: bool = False, mesh: Any = None) -> Any:
    """As `reduce`, into the tensors themselves.

    Raises:
        ValueError: also, when the result has another shape.
    """

    def reduced(tensor: Any) -> Any:
        wanted, size = _check(tensor, dims, reduction, scatter, mesh)
        if result_meta(wanted, size) != tuple(tensor.shape) or scatter:
            more = " and scatter" if scatter else ""
            raise ValueError(f"reduce_ with reduction {reduction!r}{more} changes the shape")
        refuse_wrong("reduce_", [tensor], [tensor], grad=False)
        _issue(tensor, wanted, tensor._ref.number, 0)
        return tensor

    return _of_each(reduced, tensors)


def rank_tensor(mesh: ProcMesh, dims: Dims) -> Tensor:
    """See `ProcMesh.rank_tensor`."""
    lane = engine_of(mesh).lane(mesh)
    labels = _dims(lane, dims)
    number = lane.engine.new()
    lane.append((int(Op.RANK), labels, number), here())
    return Tensor(Ref(number, lane.place(get_active_stream()), dense_meta((), torch.int64, _CPU)))


def slice_mesh(tensors: Any, **dims: Any) -> Any:
    """The same shards, of fewer workers: those at these coordinates of the mesh. Moves nothing.

    Args:
        tensors: a tensor, or a structure of some.
        dims: as for `mesh.slice`.
    """

    def sliced(tensor: Any) -> Any:
        refuse_wrong("slice_mesh", [tensor], grad=False, stream=tensor.stream if type(tensor) is Tensor else None)
        ref = tensor._ref
        mesh = ref.place.lane.mesh.slice(**dims)
        lane = ref.place.lane.engine.lane(mesh)
        return Tensor(Ref(ref.number, lane.place(ref.place.stream), ref.meta, ref, ref.shared()))

    return _of_each(sliced, tensors)


def to_mesh(tensors: Any, mesh: ProcMesh, stream: Stream | None = None) -> Any:
    """Send shards to another mesh: from each process to that at the same coordinates.

    Dimensions that only the other mesh has get a copy for each coordinate.

    Args:
        tensors: a tensor, or a structure of some.
        mesh: a view of the same processes.
        stream: that the result belongs to; the tensor's own where not given.

    Raises:
        TypeError: a tensor cannot be used here, or `mesh` is none.
        ValueError: the other mesh lacks a dimension, has it in another size, or belongs to other processes.
    """

    def moved(tensor: Any) -> Any:
        refuse_wrong("to_mesh", [tensor], grad=False)
        place = tensor._ref.place
        source, engine = place.lane, place.lane.engine
        if engine_of(mesh) is not engine:
            raise ValueError("to_mesh moves tensors between views of one process mesh, and this is another one")
        target = engine.lane(mesh)
        for label, size in source.mesh.sizes.items():
            if target.mesh.sizes.get(label) != size:
                raise ValueError(
                    f"to_mesh: the tensor is on {dict(source.mesh.sizes)}, and {dict(mesh.sizes)} lacks {label}={size}"
                )
        sends: dict[int, list[tuple[int, int]]] = {}
        receives: dict[int, int] = {}
        labels = source.region._labels
        for base in target.ranks:
            at = dict(zip(target.region._labels, target.region._slice.coordinates(base), strict=True))
            sender = source.region._slice.nditem([at[label] for label in labels])
            slot = receives[base] = new_number()
            sends.setdefault(sender, []).append((base, slot))
        stack = here(3)
        source.append((int(Op.SEND), tensor._ref.number, sends), stack)
        number = engine.new()
        target.append((int(Op.RECEIVE), receives, number), stack)
        meta = dense_meta(tensor._ref.meta.shape, tensor.dtype, tensor.device)
        return Tensor(Ref(number, target.place(stream or place.stream), meta))

    return _of_each(moved, tensors)


for _verb in (reduce, reduce_, to_mesh, slice_mesh):
    setattr(Tensor, _verb.__name__, _verb)
