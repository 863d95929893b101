"""Objects of workers that the controller refers to: results of remote functions that are no tensors; process groups.

On the controller each is a number like that of a tensor: a small tensor, really, to which the worker has tied the
object. So it is kept, passed on and freed as tensors are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch.mesh.shape import check_dimensions
from monarch.mesh.tensor.commands import Op
from monarch.mesh.tensor.engine import engine_of
from monarch.mesh.tensor.errors import here
from monarch.mesh.tensor.handle import Ref, Tensor
from monarch.mesh.tensor.metadata import dense_meta
from monarch.mesh.tensor.streams import get_active_stream

if TYPE_CHECKING:
    from monarch.mesh.proc_mesh import ProcMesh


class OpaqueRef:
    """An object that stays on its worker. A remote function returns `OpaqueRef(object)`; another one, that gets what
    the controller has of it, finds the object as `ref.value`.

    A function that uses `value` cannot run on tensors without memory: give it a function as `propagate`.
    """

    def __init__(self, value: Any = None) -> None:
        self._key = torch.zeros((), dtype=torch.int64)
        self._key.monarch_value = value  # type: ignore[attr-defined]

    @property
    def value(self) -> Any:
        """Raises: AttributeError, anywhere but on the worker."""
        try:
            return self._key.monarch_value  # type: ignore[attr-defined]
        except AttributeError:
            raise AttributeError("an OpaqueRef has its value on its worker only, in a remote function") from None


def _opaque(children: Any, _: Any) -> OpaqueRef:
    self = OpaqueRef.__new__(OpaqueRef)
    (self._key,) = children
    return self


class RemoteProcessGroup:
    """A torch.distributed process group of the workers: as an argument of a remote function, it arrives as the group.

    Args:
        dims: of the mesh; processes that differ in these alone are a group.
        device_mesh: whose workers make it.

    Raises:
        KeyError: the mesh has no such dimension.
        TypeError: `device_mesh` is no mesh.
    """

    def __init__(self, dims: str | Sequence[str], device_mesh: ProcMesh) -> None:
        given = (dims,) if isinstance(dims, str) else tuple(dims)
        engine = engine_of(device_mesh)
        check_dimensions(device_mesh._region, given)
        lane = engine.lane(device_mesh)
        number = lane.engine.new()
        lane.append((int(Op.GROUP), given, f"group{next(_names)}", number), here())
        meta = dense_meta((), torch.int64, torch.device("cpu"))
        self._key: Any = Tensor(Ref(number, lane.place(get_active_stream()), meta))


_names = itertools.count(1)


def _group(children: Any, _: Any) -> Any:
    (key,) = children
    value = getattr(key, "monarch_value", None)
    if value is not None:
        return value
    self = RemoteProcessGroup.__new__(RemoteProcessGroup)
    self._key = key
    return self


pytree.register_pytree_node(OpaqueRef, lambda each: ([each._key], None), _opaque)
pytree.register_pytree_node(RemoteProcessGroup, lambda each: ([each._key], None), _group)
