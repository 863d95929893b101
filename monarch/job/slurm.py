"""Jobs on a Slurm cluster: a batch job that runs a worker on each of its nodes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from monarch.core import duration
from monarch.errors import JobError
from monarch.job.base import BATCH_VARIABLE, JobState, JobTrait
from monarch.job.batch import LOGS, write_job
from monarch.mesh import trust
from monarch.mesh.attach import attach_with

_LOOK_S: Final = 0.5
_LIMIT_S: Final = 60.0
_WAITING: Final = ("PENDING", "CONFIGURING", "REQUEUED", "RESIZING", "SUSPENDED")


class SlurmJob(JobTrait):
    """`SlurmJob({"trainers": 4})`: so many nodes for each mesh, from one batch job, in the order of its node list.

    The nodes share the secret of `MONARCH_SECRET_FILE`, or one that is drawn for this job and written, for its owner
    alone, beside the logs. So `log_dir` is on a file system that the nodes see.

    Args:
        meshes: label → number of nodes.
        python_exe: the interpreter, on each node.
        slurm_args: further options of `sbatch`.
        monarch_port: where workers listen.
        job_start_timeout: how many seconds the job may wait for its nodes; None: for ever.
        attach_to: the number of a job of the same kind that runs already.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        python_exe: str = sys.executable,
        slurm_args: Sequence[str] = (),
        monarch_port: int = 22222,
        job_name: str = "monarch",
        ntasks_per_node: int = 1,
        time_limit: str | None = None,
        partition: str | None = None,
        log_dir: str | None = None,
        exclusive: bool = True,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
        job_start_timeout: float | None = None,
        account: str | None = None,
        qos: str | None = None,
        out_of_cluster: bool = False,
        attach_to: int | str | None = None,
    ) -> None:
        super().__init__()
        if out_of_cluster:
            raise NotImplementedError("a client outside of the cluster is planned, and not part of this version")
        if ntasks_per_node != 1:
            raise ValueError(
                "ntasks_per_node must be 1: one worker serves a node, and spawns what else is wanted there"
            )
        self._meshes = dict(meshes)
        self._python, self._port = python_exe, monarch_port
        if job_start_timeout is not None:
            duration.check("job_start_timeout", job_start_timeout)
        self._timeout_s = job_start_timeout
        self._log_dir = os.path.abspath(log_dir or LOGS)
        options = {
            "job-name": job_name,
            "nodes": sum(self._meshes.values()),
            "ntasks-per-node": 1,
            "time": time_limit,
            "partition": partition,
            "gpus-per-node": gpus_per_node,
            "cpus-per-task": cpus_per_task,
            "mem": mem,
            "account": account,
            "qos": qos,
            "output": os.path.join(self._log_dir, "slurm-%j.out"),
        }
        self._options = [f"--{name}={value}" for name, value in options.items() if value is not None]
        self._options += ["--exclusive"] * exclusive + list(slurm_args)
        self._attach_to = None if attach_to is None else str(attach_to)
        self._number = self._attach_to
        self._secret = trust.configured_or_new()

    def script(self, secret_file: str, client_script: str | None = None, job_file: str = "") -> str:
        """The batch script; with a client script, which finds this job by `job_file`, the batch job ends with that."""
        worker = shlex.join([self._python, "-m", "monarch", "worker", "--listen"])
        address = f"tcp://$(hostname):{self._port}@tcp://0.0.0.0:{self._port}"
        workers = f"srun --kill-on-bad-exit=0 bash -c {shlex.quote(f'exec {worker} {address}')}"
        if client_script is None:
            steps = [f"exec {workers}"]
        else:
            steps = [
                f"{workers} &",
                f"{BATCH_VARIABLE}={shlex.quote(job_file)} {shlex.join([self._python, '-u', client_script])}",
                f"status=$?; {shlex.join(['rm', '-f', secret_file, job_file])}; exit $status",
            ]
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {option}" for option in self._options),
                f"export {trust.FILE_VARIABLE}={shlex.quote(secret_file)}",
                *steps,
                "",
            ]
        )

    def _create(self, client_script: str | None) -> None:
        if self._attach_to is not None:
            if client_script is not None:
                raise JobError(f"attach_to: Slurm job {self._attach_to} runs already, and takes no script any more")
            return
        folder = Path(self._log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = os.urandom(4).hex()
        secret_file = str(folder / f"secret-{name}")
        trust.write_secret(secret_file, self._secret.decode())
        self._files.append(secret_file)
        self._number = None
        job_file = "" if client_script is None else write_job(self, folder / f"job-{name}.pkl")
        said = _run(["sbatch", "--parsable"], self.script(secret_file, client_script, job_file))
        self._number = said.strip().partition(";")[0]

    def _id(self) -> str:
        """The number of the batch job; a script inside may run before `sbatch` has told it."""
        return self._number or os.environ.get("SLURM_JOB_ID", "")

    def _nodes(self) -> list[str]:
        """The nodes once the job runs, within the time that it may wait."""
        began_s = time.monotonic()
        while True:
            state, _, names = _run(["squeue", "-h", "-j", self._id(), "-o", "%T %N"]).strip().partition(" ")
            if state == "RUNNING":
                return _run(["scontrol", "show", "hostnames", names]).split()
            if state not in _WAITING:
                raise JobError(f"Slurm job {self._id()} does not run: its state is {state or 'not known any more'}")
            if self._timeout_s is not None and time.monotonic() - began_s > self._timeout_s:
                raise TimeoutError(f"Slurm job {self._id()} is {state} after {self._timeout_s:g} s (job_start_timeout)")
            time.sleep(_LOOK_S)

    def _state(self) -> JobState:
        nodes = iter(self._nodes())
        return JobState(
            {
                name: attach_with(self._secret, [f"tcp://{next(nodes)}:{self._port}" for _ in range(count)], name)
                for name, count in self._meshes.items()
            }
        )

    def _is_alive(self) -> bool:
        try:
            state = _run(["squeue", "-h", "-j", self._id(), "-o", "%T"]).strip()
        except JobError:  # a number that Slurm has forgotten
            return False
        return state == "RUNNING" or state in _WAITING

    def can_run(self, spec: JobTrait) -> bool:
        same = isinstance(spec, SlurmJob) and (spec._meshes, spec._options) == (self._meshes, self._options)
        return same and self.active

    def _kill(self) -> None:
        _run(["scancel", "--quiet", self._id()])  # one that has ended is no error


def _run(command: Sequence[str], text: str | None = None) -> str:
    """What a command of Slurm's prints. Raises: JobError, with what it complained of."""
    try:
        found = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except FileNotFoundError:
        raise JobError(f"{command[0]} is not installed here: this is no node of a Slurm cluster") from None
    if found.returncode:
        raise JobError(f"{shlex.join(command)} failed: {found.stderr.strip() or found.returncode}")
    return found.stdout
