"""A job without workers: every mesh is this host."""

from __future__ import annotations

from collections.abc import Sequence

from monarch.job.base import JobState, JobTrait
from monarch.mesh.host_mesh import this_host


class LocalJob(JobTrait):
    """Each named mesh is `this_host()`. There is nothing to end and nothing to reuse."""

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        self._names = tuple(hosts)

    def _create(self, *, lasting: bool) -> None:
        """This host is there."""

    def _state(self) -> JobState:
        return JobState({name: this_host() for name in self._names})

    def can_run(self, spec: JobTrait) -> bool:
        return False

    def _kill(self) -> None:
        """This host stays."""
