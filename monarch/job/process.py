"""A job whose hosts are worker processes of this machine: how programs for many hosts are tested on one."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from monarch.job.base import JobState, JobTrait
from monarch.job.workers import Started, attach, end_all


class ProcessJob(JobTrait):
    """`ProcessJob({"trainers": 2})`: so many workers for each mesh, over unix sockets.

    Args:
        meshes: label → number of hosts.
        env: variables on top of the environment, for the workers and what runs there.
    """

    def __init__(self, meshes: Mapping[str, int], env: Mapping[str, str] | None = None) -> None:
        super().__init__()
        wrong = {name: count for name, count in dict(meshes).items() if not isinstance(count, int) or count < 1}
        if wrong or not meshes:
            raise ValueError(f"meshes is {dict(meshes)!r}; it must have names with a number of hosts, at least 1, each")
        self._meshes = dict(meshes)
        self._env = dict(env or {})
        self._folder: str | None = None
        self._workers: list[Started] = []
        self._ties: list[Any] = []  # what the workers read until this program ends

    def _create(self, *, lasting: bool) -> None:
        """Names in the kernel leave nothing behind. Lasting workers have a folder for what they print, until `kill`."""
        if not self._is_alive():
            self._kill()  # what is left of workers that were started before
        prefix = f"ipc://@monarch-job-{secrets.token_hex(8)}"
        if lasting:
            self._folder = tempfile.mkdtemp(prefix="monarch-job-")  # mode 0700
        for name, count in self._meshes.items():
            for index in range(count):
                label = f"{name}-{index}"
                start = self._start_lasting if lasting else self._start_tied
                process = start(label, [sys.executable, "-m", "monarch", "worker", "--listen", f"{prefix}-{label}"])
                self._ties.append(process)
                output = str(self._output_of(label)) if lasting else ""
                self._workers.append(Started.of(process.pid, f"{prefix}-{label}", output))

    def _start_tied(self, label: str, command: list[str]) -> subprocess.Popen[bytes]:
        """It ends with this program, and prints where this program does."""
        env = {**os.environ, **self._env}
        return subprocess.Popen([*command, "--until-eof"], env=env, stdin=subprocess.PIPE, start_new_session=True)

    def _start_lasting(self, label: str, command: list[str]) -> subprocess.Popen[bytes]:
        with self._output_of(label).open("wb") as output:
            return subprocess.Popen(
                command,
                env={**os.environ, **self._env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _output_of(self, label: str) -> Path:
        assert self._folder is not None
        return Path(self._folder) / f"{label}.output"

    def _state(self) -> JobState:
        workers = iter(self._workers)
        return JobState({name: attach(None, [*islice(workers, count)], name) for name, count in self._meshes.items()})

    def can_run(self, spec: JobTrait) -> bool:
        same = isinstance(spec, ProcessJob) and (spec._meshes, spec._env) == (self._meshes, self._env)
        return same and self.active

    def _is_alive(self) -> bool:
        return bool(self._workers) and all(worker.is_alive() for worker in self._workers)

    def _kill(self) -> None:
        end_all(self._workers)
        for process in self._ties:
            if process.stdin is not None:
                process.stdin.close()
            process.wait()
        self._ties.clear()
        self._workers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ties": []}
