"""How much memory can be had: of the machine, and of the control groups that this process is in.

A group's limit holds for all that is below it, so the tightest counts of the process's own group and of those above it,
as far as they can be seen: in a container the topmost is often the container's own, and the path that the kernel tells
begins outside. Pages of files that nobody has used lately count as free, as they do for the machine.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple


class _Kind(NamedTuple):
    """A version of control groups: where its tree is, and what its files are called.

    Attributes:
        unused: in the statistics, the pages of files that nobody has used lately.
    """

    tree: str
    limit: str
    used: str
    unused: bytes


_V1: Final = _Kind("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")
_V2: Final = _Kind("", "memory.max", "memory.current", b"inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """What can be had without swapping. `root`: where `proc` and `sys` are."""
    available = 1 << 62
    with suppress(OSError, ValueError), open(root / "proc/meminfo", "rb") as file:
        available = next(int(line.split()[1]) << 10 for line in file if line.startswith(b"MemAvailable"))
    for folder, kind in _groups(root):
        with suppress(OSError, ValueError):  # it has no limit ("max")
            spare = int((folder / kind.limit).read_bytes()) - int((folder / kind.used).read_bytes())
            if spare < available:  # else the statistics, which take longest, need not be read
                available = min(available, spare + _unused(folder, kind))
    return max(available, 0)


def _unused(folder: Path, kind: _Kind) -> int:
    with suppress(OSError, ValueError), open(folder / "memory.stat", "rb") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(kind.unused + b" ")), 0)
    return 0


@cache
def _groups(root: Path) -> list[tuple[Path, _Kind]]:
    """Those that this process is in, with the version of each."""
    found: list[tuple[Path, _Kind]] = []
    text = ""
    with suppress(OSError):
        text = os.fsdecode((root / "proc/self/cgroup").read_bytes())
    for line in text.splitlines():
        # Source: cgroups(7), /proc/pid/cgroup. Version 2 has the number 0, and names no controllers.
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        kind = _V1 if "memory" in controllers.split(",") else _V2 if number == "0" else None
        if kind is not None:
            tree = root / "sys/fs/cgroup" / kind.tree
            parts = PurePosixPath(path).parts[1:]
            if ".." in parts:  # outside of what this process may see
                parts = ()
            folders = [tree.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
            found += [(folder, kind) for folder in folders if (folder / kind.limit).is_file()]
    return found
