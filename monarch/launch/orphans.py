"""What dead processes leave behind, in the processes that adopt it: the template, and above it the guardian.

Both are subreapers, so that every child of theirs which they did not start is the orphan of a dead one, whatever
session it made for itself. It is killed, with two exceptions. A process that was started with `MONARCH_OUTLIVE=1` in
its environment is meant to stay. And those that tidy up after others, the resource trackers of `multiprocessing` and
the shared memory manager of torch, end by themselves when their users are gone, after they have removed what those
have left in /dev/shm: they get a moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Container
from pathlib import Path
from typing import Final

from attrs import define, field

from monarch.launch import linux

OUTLIVE: Final = b"MONARCH_OUTLIVE=1"

_TIDIERS: Final = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
_TIDYING_LIMIT_S: Final = 3.0  # a moment, also on a busy machine: they are woken by the end of their users


@define(eq=False)
class Orphans:
    """The orphans that this process has adopted."""

    _until_s: dict[int, float] = field(factory=dict)  # by pid of those that tidy up

    def end(self, own: Container[int]) -> bool:
        """Kill those there are. Call again after each exit, and while it returns True: some are still there.

        Args:
            own: children that this process has started.
        """
        here = [pid for pid in linux.children_of(os.getpid()) if pid not in own]
        self._until_s = {pid: until_s for pid, until_s in self._until_s.items() if pid in here}
        left = False
        for pid in here:
            if OUTLIVE in _words(pid, "environ"):
                continue
            left = True
            if not self._may_tidy_up(pid):
                kill(pid, signal.SIGKILL)
        return left

    def _may_tidy_up(self, pid: int) -> bool:
        if pid not in self._until_s:
            if not any(tidier in b" ".join(_words(pid, "cmdline")) for tidier in _TIDIERS):
                return False
            self._until_s[pid] = time.monotonic() + _TIDYING_LIMIT_S
        return time.monotonic() < self._until_s[pid]


def kill(pid: int, signum: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(OSError):
        os.kill(pid, signum)


def _words(pid: int, name: str) -> list[bytes]:
    """The environment or the command line of a process, empty if it is a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    return []
