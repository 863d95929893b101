"""Drivers that a test starts, ends in some way, and looks after: what have they left?"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from monarch.testing import wait_until_gone

LIMIT_S: Final = 5.0
ROOT: Final = Path(__file__).parents[2]
_ROUND_LIMIT_S: Final = 30.0


class Driver:
    """A driver with a mark in its environment, which everything that it causes inherits."""

    def __init__(self, arguments: Sequence[str], folder: Path, **settings: str) -> None:
        self.arguments = arguments
        self.mark = f"CHAOS_MARK={os.urandom(8).hex()}"
        self.said = folder / "stderr"
        # The path is short: multiprocessing makes unix sockets in there, whose names have at most 107 bytes.
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-"))
        name, _, value = self.mark.partition("=")
        environ = {**os.environ, **settings, name: value, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        with self.said.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *self.arguments], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=stderr
            )

    def lines(self) -> Iterator[str]:
        """What it prints, as it comes; each line within a limit."""
        stdout = self.process.stdout
        assert stdout is not None
        arrived = b""
        while True:
            ready, _, _ = select.select([stdout], [], [], _ROUND_LIMIT_S)
            assert ready, "a round hangs"
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                return
            arrived += data
            *lines, arrived = arrived.split(b"\n")
            yield from (line.decode() for line in lines)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def left(self) -> list[int]:
        """Processes with the mark."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(int(pid))
            except OSError:
                continue
        return found

    def wait_until_nothing_is_left(self) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while left := self.left():
            for pid in left:
                wait_until_gone(pid, max(0.0, deadline_s - time.monotonic()))
        # The workers of a torch DataLoader leave folders of multiprocessing in every program.
        assert [each for each in self.temporary.iterdir() if not each.name.startswith("pymp-")] == []
        assert [name for name in os.listdir("/dev/shm") if "monarch" in name] == []
