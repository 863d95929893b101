"""Actors in process meshes, a supervision tree, and pluggable transports. Start at `monarch.actor`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from monarch.version import __version__ as __version__

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
