"""A job without workers: every mesh is this host."""

from __future__ import annotations

from collections.abc import Sequence

from monarch.job.base import JobState, JobTrait
from monarch.job.batch import new_log_folder, start_script
from monarch.job.workers import Started, end_all
from monarch.mesh.host_mesh import this_host


class LocalJob(JobTrait):
    """Each named mesh is `this_host()`. There is nothing to reuse, and only a client script to end."""

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        self._names = tuple(hosts)
        self._script: list[Started] = []

    def _create(self, client_script: str | None) -> None:
        """This host is there."""
        self._kill()  # what is left of a script that has ended
        if client_script is not None:
            self._script = [start_script(self, client_script, new_log_folder())]

    def _state(self) -> JobState:
        return JobState({name: this_host() for name in self._names})

    def can_run(self, spec: JobTrait) -> bool:
        return False

    def _is_alive(self) -> bool:
        return all(script.is_alive() for script in self._script)

    def _kill(self) -> None:
        """This host stays."""
        end_all(self._script)
        self._script.clear()
