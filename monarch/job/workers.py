"""Processes of this machine that a job has started: attached to, known again by a later program, and ended with all
they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from monarch.mesh.attach import attach_with
from monarch.mesh.host_mesh import HostMesh

_GRACE_S: Final = 1.0
_LOOK_S: Final = 0.01
_LAST_BYTES: Final = 2048


@define(frozen=True)
class Started:
    """The leader of a session of its own.

    Attributes:
        born: when the kernel started it: another process may get the same pid.
        url: where it listens.
        output: the file that has what it prints; "" where it prints to this program's output, or elsewhere.
        process: in the program that has started it, by `start`.
    """

    pid: int
    born: str
    url: str
    output: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None, eq=False)

    @classmethod
    def of(cls, pid: int, url: str) -> Started:
        return cls(pid, _birth(pid), url)

    def __reduce__(self) -> tuple[Any, ...]:
        return Started, (self.pid, self.born, self.url, self.output)

    def is_alive(self) -> bool:
        return bool(self.born) and _birth(self.pid) == self.born

    def signal(self, signum: int) -> None:
        """To it and to all of its session, if it is the same process still."""
        if self.is_alive():
            for pid in members_of_session(self.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)


def start(
    command: Sequence[str], url: str = "", *, env: Mapping[str, str], stdin: int, output: Path | None = None
) -> Started:
    """Start a process that leads a session of its own.

    Args:
        env: variables on top of the environment.
        output: where it prints to; None: where this program does.
    """
    with contextlib.nullcontext() if output is None else output.open("wb") as file:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdin=stdin, stdout=file, stderr=file, start_new_session=True
        )
    return Started(process.pid, _birth(process.pid), url, str(output or ""), process)


def attach(secret: bytes | None, workers: Sequence[Started], name: str) -> HostMesh:
    """As `attach_with`; a worker that ends before it has answered is not waited for."""
    mesh = attach_with(secret, [worker.url for worker in workers], name)
    for worker, attachment in zip(workers, mesh._attachments or (), strict=True):
        with contextlib.suppress(OSError):  # a kernel that does not tell of ends, or a process that has been reaped
            pidfd = os.pidfd_open(worker.pid)
            attachment.depend_on(pidfd, partial(_end_of, worker, pidfd))
    return mesh


def _end_of(worker: Started, pidfd: int) -> str:
    """How a process has ended, which stays to be reaped."""
    how = ""
    with contextlib.suppress(ChildProcessError):  # an earlier program has started it
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            kind = "exit code" if found.si_code == os.CLD_EXITED else "signal"
            how = f" with {kind} {found.si_status}"
    words = _last_words(worker.output)
    said = f"; its last words: {words}" if words else ""
    return f"process {worker.pid}, which runs the worker, ended{how} before that answered{said}"


def _last_words(output: str) -> str:
    """The end of what is in that file."""
    try:
        with open(output, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def end_all(workers: Sequence[Started]) -> None:
    """SIGTERM, and SIGKILL a second later. What workers have launched ends with them."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    deadline_s = time.monotonic() + _GRACE_S
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    for worker in workers:
        worker.signal(signal.SIGKILL)
        if worker.process is not None:
            if worker.process.stdin is not None:
                worker.process.stdin.close()
            worker.process.wait()


def _birth(pid: int) -> str:
    """When a process that has not ended was started; "" for others."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def members_of_session(leader: int) -> list[int]:
    """The processes of that session which have not ended."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(name)) == leader and _birth(int(name)):
                    found.append(int(name))
    return found
