"""Actors and tensors: distributed tensors as arguments of endpoints, and as their results (`rref`).

An actor gets the shard of its own process. The message goes straight to it, in the order of all other messages of its
sender, with a slot in the place of the tensor; the worker of the process puts the shard there when it comes to that
command. In the same way a result goes from the actor to the worker.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import define
from torch.utils import _pytree as pytree

from monarch.core import codec
from monarch.core.ids import new_number
from monarch.mesh import endpoint as endpoints
from monarch.mesh.context import context
from monarch.mesh.endpoint import describe_call
from monarch.mesh.replies import FailFastReply
from monarch.mesh.tensor.commands import Failure, Op
from monarch.mesh.tensor.dispatch import active_mesh, active_place, refuse_wrong
from monarch.mesh.tensor.errors import here
from monarch.mesh.tensor.handle import Tensor, handles
from monarch.mesh.tensor.lane import Lane
from monarch.mesh.tensor.metadata import Meta
from monarch.mesh.tensor.remote import lift
from monarch.mesh.tensor.slots import slots_here
from monarch.mesh.tensor.worker import propagated

if TYPE_CHECKING:
    from monarch.mesh.endpoint import Endpoint


class _Sending(threading.local):
    keys: Sequence[int] | None = None  # of the processes that the message which is encoded now goes to


_sending = _Sending()


@contextmanager
def _encoding(keys: Sequence[int]) -> Iterator[None]:
    before, _sending.keys = _sending.keys, keys
    try:
        yield
    finally:
        _sending.keys = before


def _reduce(tensor: Tensor, outbox: Any) -> Any:
    """For the codec: the tensor becomes a slot, which its workers will fill.

    Raises:
        TypeError: this is no call of an endpoint, or a process that is called has no shard.
    """
    keys = _sending.keys
    if keys is None:
        return tensor.__reduce_ex__(5)
    refuse_wrong("an endpoint", [tensor], grad=False)
    lane = tensor._ref.place.lane
    ranks = [lane.engine.ranks.get(key, -1) for key in keys]
    if not set(ranks) <= set(lane.ranks):
        raise TypeError(f"{tensor!r} can be an argument of endpoints of actors on its processes only")
    slot = new_number()
    lane.append((int(Op.PUBLISH), dict.fromkeys(ranks, slot), tensor._ref.number), here(3))
    lane.flush()
    return _shard, (lane.engine.number, slot)


def _shard(engine: int, slot: int) -> Any:
    value = slots_here(engine).take(slot)
    if isinstance(value, Failure):
        raise RuntimeError(f"the tensor could not be computed: {value.what}\n{value.trace}")
    return value


@define(frozen=True)
class _Deposit:
    """Wraps the method of an endpoint: its result goes to a slot, and nothing to the caller."""

    engine: int
    slot: int

    def __call__(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> None:
            slots_here(self.engine).put(self.slot, (method(*args, **kwargs),))

        @functools.wraps(method)
        async def run_async(*args: Any, **kwargs: Any) -> None:
            slots_here(self.engine).put(self.slot, (await method(*args, **kwargs),))

        return run_async if inspect.iscoroutinefunction(method) else run


class EndpointFailed(Exception):
    """What the worker finds instead of the result of an endpoint."""


def rref(endpoint: Endpoint[Any, Any], args: Any, kwargs: Any) -> Any:
    """See `Endpoint.rref`.

    Raises:
        ValueError: no mesh is active and no argument is a distributed tensor; or the actors are not just on that mesh.
        NotImplementedError: the endpoint has no function as `propagate`.
    """
    spec, members = endpoint._spec, endpoint._members
    spec.check(args, kwargs)
    tensors, call = lift(spec.name, args, kwargs, None)
    place = active_place() if active_mesh() is not None or not tensors else tensors[0]._ref.place
    lane = place.lane
    if members.keys != [proc.key for proc in lane.mesh._procs]:
        raise ValueError(f"rref of {spec.name!r} needs actors on exactly the processes of {lane.mesh!r}")
    if not callable(spec.propagator):
        raise NotImplementedError(
            f"rref of {spec.name!r} needs @endpoint(propagate=function): a function returning tensors like those that "
            "the endpoint returns, for tensors like those that it gets"
        )
    result = propagated(spec.propagator, call, [tensor._ref.meta for tensor in tensors])
    leaves, tree = pytree.tree_flatten(result)
    metas = [leaf for leaf in leaves if isinstance(leaf, Meta)]
    slot = new_number()
    now = context()
    parts = endpoint._encode(now.actor_instance, args, kwargs)
    extent = endpoint._mesh._region.extent
    extra = {**({"plain": True, "port": False} if endpoint._plain else {}), "wrap": _Deposit(lane.engine.number, slot)}
    parts[0] = describe_call(spec.name, extent._labels, extent._sizes, extra)
    reply: FailFastReply[None] = FailFastReply(now, members)
    endpoint._mesh._cast(now.actor_instance, parts, reply.number, None, reply.chain)
    reply._on_done(lambda: _tell_of_failure(lane, slot, reply))
    first = lane.engine.new(len(metas)) if metas else 0
    lane.append((int(Op.TAKE), slot, first, metas), here(3))
    lane.flush()
    return pytree.tree_unflatten(handles(leaves, place, first), tree)


def _tell_of_failure(lane: Lane, slot: int, reply: FailFastReply[None]) -> None:
    """Where a member failed, no worker shall wait for its result. On the driving thread, which must not block."""
    error = reply.exception(0)
    if error is not None:
        failed = EndpointFailed(str(error))
        depots = lane.engine.depots._with_region(lane.region)
        tell = functools.partial(depots.put.broadcast, slot, failed, if_empty=True)
        threading.Thread(target=tell, name="monarch-rref-failed", daemon=True).start()


endpoints.around_encoding = _encoding
codec.register(Tensor, _reduce)
