"""Actors in process meshes, a supervision tree, and pluggable transports. Start at `monarch.actor`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

__version__ = "0.1.0"

_LAZY = {"ActorFuture": ("monarch.core.future", "Future")}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(importlib.import_module(module), attribute)
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
