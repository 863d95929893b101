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

from monarch.job.base import JobState, JobTrait
from monarch.job.batch import new_log_folder, start_script
from monarch.job.workers import Started, attach, end_all, start


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
        self._script: list[Started] = []

    def _create(self, client_script: str | None) -> None:
        """What lasting workers print is in a folder, until `kill`; with a script, in the folder of its logs."""
        if not self._is_alive():
            self._kill()  # what is left of workers that were started before
        if client_script is not None:
            self._start_with_script(client_script)
        elif self._lasting:
            self._folder = tempfile.mkdtemp(prefix="monarch-job-")  # mode 0700
            self._start_workers(subprocess.DEVNULL, Path(self._folder))
        else:
            self._start_workers(subprocess.PIPE, None)

    def _start_with_script(self, script: str) -> None:
        folder = new_log_folder()
        reads, writes = os.pipe()
        try:
            self._start_workers(reads, folder)
            self._script = [start_script(self, script, folder, env=self._env, held=writes)]
        finally:
            os.close(reads)
            os.close(writes)

    def _start_workers(self, stdin: int, folder: Path | None) -> None:
        """They end when `stdin` does, unless it is DEVNULL. Their names in the kernel leave nothing behind."""
        prefix = f"ipc://@monarch-job-{secrets.token_hex(8)}"
        tie = [] if stdin == subprocess.DEVNULL else ["--until-eof"]
        for name, count in self._meshes.items():
            for index in range(count):
                label = f"{name}-{index}"
                url = f"{prefix}-{label}"
                command = [sys.executable, "-m", "monarch", "worker", "--listen", url, *tie]
                output = None if folder is None else folder / f"{label}.output"
                self._workers.append(start(command, url, env=self._env, stdin=stdin, output=output))

    def _state(self) -> JobState:
        workers = iter(self._workers)
        return JobState({name: attach(None, [*islice(workers, count)], name) for name, count in self._meshes.items()})

    def can_run(self, spec: JobTrait) -> bool:
        same = isinstance(spec, ProcessJob) and (spec._meshes, spec._env) == (self._meshes, self._env)
        return same and self.active

    def _is_alive(self) -> bool:
        return bool(self._workers) and all(each.is_alive() for each in self._workers + self._script)

    def _kill(self) -> None:
        end_all(self._workers + self._script)
        self._workers.clear()
        self._script.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
