"""Actors in process meshes, a supervision tree, and pluggable transports. Start at `monarch.actor`."""

from __future__ import annotations

import importlib
from importlib import metadata, util
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _refuse_torchmonarch() -> None:
    """Two distributions own the top-level name `monarch`: installed together, their files are mixed up."""
    try:
        version = metadata.version("torchmonarch")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"torchmonarch {version} is installed beside monarch-actors, and both own the package `monarch`. Remove one, "
        "and reinstall the other: pip uninstall torchmonarch && pip install --force-reinstall monarch-actors"
    )


_LAZY = {"ActorFuture": ("monarch.core.future", "Future")}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'monarch' has no attribute {name!r}")


if (Path(__file__).parent / "_rust_bindings").exists() or util.find_spec("torchmonarch") is not None:
    _refuse_torchmonarch()
