"""Memory of a process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def private_bytes(pid: int) -> int:
    """What would be free if that process ended: its pages that no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
