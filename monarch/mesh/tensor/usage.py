"""Which uses of distributed tensors are wrong, and why: found here, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from monarch.mesh.tensor.errors import format_stack
from monarch.mesh.tensor.handle import Tensor, refused

if TYPE_CHECKING:
    from monarch.mesh.proc_mesh import ProcMesh
    from monarch.mesh.tensor.lane import Lane
    from monarch.mesh.tensor.streams import Stream


def refuse(
    what: Any,
    tensors: Sequence[Any],
    mutated: Sequence[Any] = (),
    *,
    mesh: ProcMesh | None,
    stream: Stream,
    grad: bool = True,
) -> None:
    """Args:
        mutated: those of the tensors that are written to.
        mesh, stream: which are active.
        grad: whether autograd may follow.

    Raises:
        TypeError: with a reason for each argument that is wrong.
    """
    lanes = [tensor._ref.place.lane for tensor in tensors if type(tensor) is Tensor]
    lane = next((each for each in lanes if mesh is not None and each.mesh == mesh), lanes[0] if lanes else None)
    reasons = []
    for at, tensor in enumerate(tensors):
        reason = _reason(tensor, lane, stream, any(tensor is each for each in mutated), grad)
        if reason:
            reasons.append(f"  tensor {at}, of shape {tuple(tensor.shape)}: {reason}")
    if reasons:
        lines = "\n".join(reasons)
        refused.error = TypeError(f"Incorrect arguments to monarch operation {what}:\n{lines}")
        raise refused.error


def _reason(tensor: Any, lane: Lane | None, stream: Stream, mutated: bool, grad: bool) -> str:
    if type(tensor) is not Tensor:
        return "LOCAL_TENSOR: a tensor of this process alone; send it to the workers by a remote function"
    ref = tensor._ref
    if lane is not None and ref.place.lane is not lane:
        own = ref.place.lane
        if own.engine is lane.engine:
            return f"WRONG_MESH: it is on {own.where(lane)}, others are on {lane.where(own)}; use to_mesh"
        return "WRONG_MESH: its processes were spawned apart from those of others; fetch it, and send it by a function"
    if (dropped := ref.dropped_at()) is not None:
        return f"DROPPED: its shards were freed here:\n{format_stack(dropped)}"
    if ref.place.stream is not stream:
        return f"WRONG_STREAM: it belongs to {ref.place.stream}, active is {stream}; borrow it"
    memory = ref.memory
    if memory is not None and (memory.mutably or (mutated and memory.borrowed)):
        return "BORROWED: another stream has borrowed it; drop the borrow first"
    if mutated and memory is not None and memory.borrow is not None and not memory.borrow.mutable:
        return "MUTATING_BORROW: it was borrowed without mutable=True"
    if not grad and tensor.requires_grad and torch.is_grad_enabled():
        return "REQUIRES_GRAD: autograd cannot follow here; use detach(), torch.no_grad() or grad_function"
    return ""
