"""Processes of this machine that a job has started: known again by a later program, and ended with all they started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from attrs import define

_GRACE_S: Final = 1.0
_LOOK_S: Final = 0.01


@define(frozen=True)
class Started:
    """The leader of a session of its own.

    Attributes:
        born: when the kernel started it: another process may get the same pid.
        url: where it listens.
    """

    pid: int
    born: str
    url: str

    @classmethod
    def of(cls, pid: int, url: str) -> Started:
        return cls(pid, _birth(pid), url)

    def is_alive(self) -> bool:
        return bool(self.born) and _birth(self.pid) == self.born

    def signal(self, signum: int) -> None:
        """To it and to all of its session, if it is the same process still."""
        if self.is_alive():
            for pid in _session(self.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)


def end_all(workers: Sequence[Started]) -> None:
    """SIGTERM, and SIGKILL a second later. What workers have launched ends with them."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    deadline_s = time.monotonic() + _GRACE_S
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    for worker in workers:
        worker.signal(signal.SIGKILL)


def _birth(pid: int) -> str:
    """When a process that has not ended was started; "" for others."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _session(leader: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(name)) == leader:
                    found.append(int(name))
    return found
