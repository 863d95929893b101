"""Actors in process meshes, a supervision tree, and pluggable transports. Start at `monarch.actor`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from monarch.version import __version__ as __version__

if TYPE_CHECKING:
    from monarch.mesh.tensor.collectives import reduce as reduce
    from monarch.mesh.tensor.collectives import reduce_ as reduce_
    from monarch.mesh.tensor.collectives import slice_mesh as slice_mesh
    from monarch.mesh.tensor.collectives import to_mesh as to_mesh
    from monarch.mesh.tensor.dispatch import get_active_mesh as get_active_mesh
    from monarch.mesh.tensor.dispatch import no_mesh as no_mesh
    from monarch.mesh.tensor.errors import DeviceException as DeviceException
    from monarch.mesh.tensor.errors import RemoteException as RemoteException
    from monarch.mesh.tensor.fetch import fetch_shard as fetch_shard
    from monarch.mesh.tensor.fetch import inspect as inspect
    from monarch.mesh.tensor.fetch import show as show
    from monarch.mesh.tensor.gradients import grad_function as grad_function
    from monarch.mesh.tensor.gradients import grad_generator as grad_generator
    from monarch.mesh.tensor.graphs import coalescing as coalescing
    from monarch.mesh.tensor.graphs import compile as compile
    from monarch.mesh.tensor.handle import Tensor as Tensor
    from monarch.mesh.tensor.opaque import OpaqueRef as OpaqueRef
    from monarch.mesh.tensor.opaque import RemoteProcessGroup as RemoteProcessGroup
    from monarch.mesh.tensor.remote import call_on_shard_and_fetch as call_on_shard_and_fetch
    from monarch.mesh.tensor.remote import remote as remote
    from monarch.mesh.tensor.streams import Stream as Stream
    from monarch.mesh.tensor.streams import get_active_stream as get_active_stream

_MODULES = ("actor", "builtins", "config")
_LAZY = {
    "ActorFuture": ("monarch.core.future", "Future"),
    "Extent": ("monarch.mesh.shape", "Extent"),
    "NDSlice": ("monarch.mesh.shape", "Slice"),
    "Shape": ("monarch.mesh.shape", "Shape"),
    **dict.fromkeys(
        ("configure", "configured", "get_global_config", "get_runtime_config", "clear_runtime_config"),
        ("monarch.config", ""),
    ),
}
_TENSORS = {
    "collectives": "reduce reduce_ slice_mesh to_mesh",
    "dispatch": "get_active_mesh no_mesh",
    "errors": "DeviceException RemoteException",
    "fetch": "fetch_shard inspect show",
    "gradients": "grad_function grad_generator",
    "graphs": "coalescing compile",
    "handle": "Tensor",
    "opaque": "OpaqueRef RemoteProcessGroup",
    "remote": "call_on_shard_and_fetch remote",
    "streams": "Stream get_active_stream",
}
_LAZY.update(
    {name: (f"monarch.mesh.tensor.{module}", name) for module, names in _TENSORS.items() for name in names.split()}
)
_PLANNED = frozenset("Future Selection Simulator function_resolvers mast_reserve set_meta timer world_mesh".split())


def __getattr__(name: str) -> Any:
    """Loads what is asked for: `import monarch` alone is quick."""
    if name in _MODULES:
        return importlib.import_module(f"monarch.{name}")
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(importlib.import_module(module), attribute or name)
    if name in _PLANNED:
        raise AttributeError(f"monarch.{name} is planned; this version has none")
    raise AttributeError(f"module 'monarch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_LAZY})


def _refuse_torchmonarch() -> None:
    """Two distributions own the top-level name `monarch`; where both are installed, their files are mixed up."""
    for folder in (os.path.dirname(os.path.dirname(__file__)), *sys.path):
        if os.path.exists(os.path.join(folder, "monarch", "_rust_bindings")):
            raise ImportError(
                f"torchmonarch is installed beside monarch-actors (in {folder}), and both own the package `monarch`. "
                "Remove torchmonarch, and install this one again: pip uninstall torchmonarch && "
                "pip install --force-reinstall monarch-actors"
            )


_refuse_torchmonarch()
