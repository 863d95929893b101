"""Jobs on a Slurm cluster: a batch job that runs a worker on each of its nodes."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from monarch.core import duration
from monarch.job.base import JobState, JobTrait
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
        self._log_dir = os.path.abspath(log_dir or ".monarch/logs")
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

    def script(self, secret_file: str) -> str:
        """The batch script."""
        worker = shlex.join([self._python, "-m", "monarch", "worker", "--listen"])
        address = f"tcp://$(hostname):{self._port}@tcp://0.0.0.0:{self._port}"
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {option}" for option in self._options),
                f"export {trust.FILE_VARIABLE}={shlex.quote(secret_file)}",
                f"exec srun --kill-on-bad-exit=0 bash -c {shlex.quote(f'exec {worker} {address}')}",
                "",
            ]
        )

    def _create(self, *, lasting: bool) -> None:
        if self._attach_to is not None:
            self._number = self._attach_to
            return
        folder = Path(self._log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        secret_file = str(folder / f"secret-{os.urandom(4).hex()}")
        trust.write_secret(secret_file, self._secret.decode())
        self._secret_file = secret_file
        said = _run(["sbatch", "--parsable"], self.script(secret_file))
        self._number = said.strip().partition(";")[0]

    def _nodes(self) -> list[str]:
        """The nodes once the job runs, within the time that it may wait."""
        began_s = time.monotonic()
        while True:
            state, _, names = _run(["squeue", "-h", "-j", self._number or "", "-o", "%T %N"]).strip().partition(" ")
            if state == "RUNNING":
                return _run(["scontrol", "show", "hostnames", names]).split()
            if state not in _WAITING:
                raise RuntimeError(
                    f"Slurm job {self._number} does not run: its state is {state or 'not known any more'}"
                )
            if self._timeout_s is not None and time.monotonic() - began_s > self._timeout_s:
                raise TimeoutError(
                    f"Slurm job {self._number} is {state} after {self._timeout_s:g} s (job_start_timeout)"
                )
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
            state = _run(["squeue", "-h", "-j", self._number or "", "-o", "%T"]).strip()
        except RuntimeError:  # a number that Slurm has forgotten
            return False
        return state == "RUNNING" or state in _WAITING

    def can_run(self, spec: JobTrait) -> bool:
        same = isinstance(spec, SlurmJob) and (spec._meshes, spec._options) == (self._meshes, self._options)
        return same and self.active

    def _kill(self) -> None:
        _run(["scancel", self._number or ""])
        with contextlib.suppress(FileNotFoundError, AttributeError):
            os.unlink(self._secret_file)


def _run(command: Sequence[str], text: str | None = None) -> str:
    """What a command of Slurm's prints. Raises: RuntimeError, with what it complained of."""
    try:
        found = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not installed here: this is no node of a Slurm cluster") from None
    if found.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {found.stderr.strip() or found.returncode}")
    return found.stdout
