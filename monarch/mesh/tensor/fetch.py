"""Values from the workers: what the controller waits for."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from monarch.core.future import Future
from monarch.mesh.tensor.dispatch import plain_torch, refuse_wrong
from monarch.mesh.tensor.handle import Tensor
from monarch.mesh.tensor.remote import call_on_shard_and_fetch


def fetch_shard(
    obj: Any, shard: dict[str, int] | None = None, preprocess: Any = None, **coordinates: int
) -> Future[Any]:
    """One worker's shards, as tensors of the CPU of this process.

    Args:
        obj: a distributed tensor, or a structure (lists, dicts, ...) of some, all on one mesh.
        shard: coordinates of the worker; those that are not given, here or by keyword, are 0.
        preprocess: a remote function that is applied to `obj` there, first.

    Raises:
        TypeError: wrong tensors, or no such dimension.
        NotImplementedError: inside a coalescing block.
        The future: RemoteException, when it could not be computed; DeviceException, when a worker is gone.
    """
    if preprocess is not None:
        return call_on_shard_and_fetch(preprocess, obj, shard={**(shard or {}), **coordinates})
    leaves, spec = pytree.tree_flatten(obj)
    places = [at for at, leaf in enumerate(leaves) if type(leaf) is Tensor]
    tensors = [leaves[at] for at in places]
    if not tensors:
        return Future._completed(obj)
    refuse_wrong("fetch_shard", tensors, stream=tensors[0]._ref.place.stream)
    lane = tensors[0]._ref.place.lane
    engine = lane.engine
    worker = lane.worker_at({**(shard or {}), **coordinates})
    engine.flush_to_ask()

    def arrange(answer: Any) -> Any:
        for at, value in zip(places, engine.value(answer), strict=True):
            leaves[at] = value
        return pytree.tree_unflatten(leaves, spec)

    with plain_torch():
        return engine.ask(worker.fetch.call_one([tensor._ref.number for tensor in tensors]), arrange)


def inspect(obj: Any, shard: dict[str, int] | None = None, **coordinates: int) -> Any:
    """The result of `fetch_shard`: waits for it."""
    future = fetch_shard(obj, shard, **coordinates)
    with plain_torch():
        return future.result()


def show(obj: Any, shard: dict[str, int] | None = None, **coordinates: int) -> None:
    """Print `inspect`, with the coordinates of the shard."""
    where = {**(shard or {}), **coordinates} or "the first worker"
    print(f"{where}: {inspect(obj, shard, **coordinates)}")
