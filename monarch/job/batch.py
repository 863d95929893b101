"""Batch mode: a client script that runs inside of its job, and goes on when the program that applied the job has ended.

The script finds the job around it by a file, a pickle of a `BatchJob`, that the variable `MONARCH_BATCH_JOB` names.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from monarch.errors import JobError
from monarch.job.base import BATCH_VARIABLE, JobState, JobTrait
from monarch.job.workers import Started, start
from monarch.log import get_logger

log = get_logger("monarch.job")

LOGS: Final = Path(".monarch/logs")

_HOLD: Final = f'trap : TERM; "$@" </dev/null; status=$?; rm -f "${BATCH_VARIABLE}"; exit $status'
"""Runs a script, and holds what it has as its input until that ends. Of a SIGTERM to both it lives on, to wait for one
that does not end at once."""


class BatchJob(JobTrait):
    """The job around a client script, as the script finds it: its hosts last until the script ends, and `kill` ends
    what the script has spawned there, no more."""

    def __init__(self, job: JobTrait) -> None:
        super().__init__()
        self._job = job
        self._applied, self._lasting = job._applied, True

    def _create(self, client_script: str | None) -> None:
        raise JobError("this job has been applied, and has ended: a script cannot apply the job that it runs in")

    def _state(self) -> JobState:
        return self._job._state()

    def can_run(self, spec: JobTrait) -> bool:
        return self._job.can_run(spec)

    def _is_alive(self) -> bool:
        return self._job._is_alive()

    def _kill(self) -> None:
        """The hosts are given back when the script ends."""


def write_job(job: JobTrait, path: Path) -> str:
    """Write what a script finds `job` by, until that is killed; returns the absolute path."""
    BatchJob(job).dump(path)
    name = str(path.absolute())
    job._files.append(name)
    return name


def new_log_folder() -> Path:
    """For one script, and what its user alone can read."""
    LOGS.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=time.strftime("job_%Y%m%d-%H%M%S-"), dir=LOGS.absolute()))


def start_script(
    job: JobTrait, script: str, folder: Path, *, env: Mapping[str, str] | None = None, held: int = subprocess.DEVNULL
) -> Started:
    """Run a client script on this machine; it prints into `client.output`.

    Args:
        held: a descriptor that is open, elsewhere than here, until the script ends.
    """
    output = folder / "client.output"
    variables = {**(env or {}), BATCH_VARIABLE: write_job(job, folder / "job.pkl")}
    command = ["/bin/sh", "-c", _HOLD, "sh", sys.executable, "-u", script]
    started = start(command, env=variables, stdin=held, output=output)
    log.info("job.script", script=script, pid=started.pid, output=str(output))
    return started
