"""Jobs on hosts that one logs in to: a worker is started on each by a command, and ends with that command."""

from __future__ import annotations

import os
import shlex
import subprocess
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from attrs import define

from monarch.errors import JobError
from monarch.job.base import JobState, JobTrait
from monarch.job.workers import Started, attach, end_all
from monarch.mesh import trust

_LIMIT_S: Final = 30.0
_HOLD: Final = '"$@"; exit $?'
"""Runs a command, and holds what it has inherited until that ends: the other end of the command's input, say."""


@define(frozen=True)
class ProcessState:
    """A command that runs a worker: its process here, and where the worker listens."""

    pid: int
    address: str


class LoginJob(JobTrait):
    """Hosts by name, each with a worker that `_start_host` starts.

    What clients and workers prove to each other is the secret of `MONARCH_SECRET_FILE`, or on this host that of the
    user. A kind of job that tells its workers another one has it as `_secret`.
    """

    _secret: bytes | None = None

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, tuple[str, ...]] = {}
        self._started: dict[str, Started] = {}  # by host: it may be of several meshes

    def add_mesh(self, name: str, hosts: Sequence[str]) -> None:
        """A mesh of those hosts, in this order.

        Raises:
            JobError: this job is active, and has its hosts.
        """
        if self.active:
            raise JobError(f"mesh {name!r}: this job is active, and has its hosts: kill() it first")
        if isinstance(hosts, str) or not hosts:
            raise ValueError(f"mesh {name!r}: hosts is {hosts!r}; it must be a list with the name of at least one host")
        self._names[name] = tuple(hosts)

    @abstractmethod
    def _start_host(self, name: str) -> ProcessState:
        """Start a worker on the host `name`, by a process that leads a session of its own."""

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise JobError(
                "a job over logins cannot run scripts in batch mode: its workers are held by commands on this machine. "
                "Run the script itself on a machine that stays (with nohup, say), and call state() there"
            )
        if not self._names:
            raise ValueError("this job has no hosts: add_mesh(NAME, [HOST, ...]) first")
        if not self._is_alive():
            self._kill()  # what is left of workers that were started before
        for hosts in self._names.values():
            for host in hosts:
                if host not in self._started:
                    state = self._start_host(host)
                    self._started[host] = Started.of(state.pid, state.address)

    def _state(self) -> JobState:
        return JobState(
            {
                name: attach(self._secret, [self._started[host] for host in hosts], name)
                for name, hosts in self._names.items()
            }
        )

    def _is_alive(self) -> bool:
        return bool(self._started) and all(each.is_alive() for each in self._started.values())

    def can_run(self, spec: JobTrait) -> bool:
        return type(spec) is type(self) and isinstance(spec, LoginJob) and spec._names == self._names and self.active

    def _kill(self) -> None:
        end_all([*self._started.values()])
        self._started.clear()


class SSHJob(LoginJob):
    """Workers started by ssh, at `tcp://HOST:PORT`. What one needs on a host: the Python of `python_exe` with this
    library, and a way for TCP from here to its port, and among the hosts.

    The hosts share the secret of `MONARCH_SECRET_FILE`, or one that is drawn for this job; it goes through ssh's input.

    Args:
        python_exe: the interpreter, on each host.
        ssh_args: options of `ssh`, such as `("-i", "key")`.
        monarch_port: where workers listen.
        transport: "tcp".
    """

    _secret: bytes

    def __init__(
        self,
        python_exe: str = "python3",
        ssh_args: Sequence[str] = (),
        monarch_port: int = 22222,
        transport: str = "tcp",
    ) -> None:
        if transport != "tcp":
            raise ValueError(f"transport is {transport!r}; workers behind ssh are reached over 'tcp'")
        super().__init__()
        self._secret = trust.configured_or_new()
        self._python, self._ssh, self._port = python_exe, ("ssh", *ssh_args), monarch_port
        self._ties: list[subprocess.Popen[bytes]] = []

    def can_run(self, spec: JobTrait) -> bool:
        same = isinstance(spec, SSHJob) and (spec._python, spec._ssh, spec._port) == (
            self._python,
            self._ssh,
            self._port,
        )
        return same and super().can_run(spec)

    def _start_host(self, name: str) -> ProcessState:
        host = self._host_of(name)
        address = f"tcp://[{host}]:{self._port}" if ":" in host else f"tcp://{host}:{self._port}"
        worker = ["worker", "--listen", f"{address}@tcp://0.0.0.0:{self._port}", "--secret-from-stdin", "--until-eof"]
        command = [*self._ssh, "-T", name, shlex.join([self._python, "-m", "monarch", *worker])]
        reads, writes = os.pipe()
        try:
            os.write(writes, self._secret + b"\n")
            if self._lasting:
                held = ["/bin/sh", "-c", _HOLD, "sh", *command]
                process = subprocess.Popen(held, stdin=reads, pass_fds=[writes], start_new_session=True)
            else:
                process = subprocess.Popen(command, stdin=reads, start_new_session=True)
                process.stdin = os.fdopen(os.dup(writes), "wb")
        finally:
            os.close(reads)
            os.close(writes)
        self._ties.append(process)
        return ProcessState(process.pid, address)

    def _host_of(self, name: str) -> str:
        """The name to dial; `name` may be an alias in ssh's configuration."""
        command = [*self._ssh, "-G", name]
        found = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        lines = dict(line.partition(" ")[::2] for line in found.stdout.splitlines())
        return lines.get("hostname", name.rpartition("@")[2])

    def _kill(self) -> None:
        super()._kill()
        for process in self._ties:
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
            process.wait()
        self._ties.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ties": []}
