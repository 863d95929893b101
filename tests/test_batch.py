"""Batch mode: client scripts that run inside of their job, and outlive who applied it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import this_host
from monarch.errors import JobError
from monarch.job import BatchJob, JobState, JobTrait, LocalJob, ProcessJob, SlurmJob, SSHJob, job_load, load_current_job
from monarch.testing import TestClient, fresh_client, wait_until_gone
from tests.mesh.actors import Worker
from tests.mesh.workers import LIMIT_S
from tests.ports import free_port
from tests.until import until


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delenv("MONARCH_BATCH_JOB", raising=False)


@pytest.fixture
def client() -> Iterator[TestClient]:
    with fresh_client("shm", cleanup_timeout="1s", process_exit_timeout="3s") as client:
        yield client


class Script:
    """A client script, `train.py`: it tells what it has found, and ends when it is let go."""

    def __init__(self, body: str) -> None:
        text = """
            import json, os, signal
            from pathlib import Path
            from monarch.job import ProcessJob, SlurmJob, load_current_job
            from tests.mesh.actors import Worker

            def tell(**found):
                Path("telling").write_text(json.dumps(found | {"pid": os.getpid()}))
                os.rename("telling", "told")
                Path("go").read_text()

            if __name__ == "__main__":
        """
        Path("train.py").write_text(textwrap.dedent(text) + textwrap.indent(textwrap.dedent(body), "    "))
        os.mkfifo("go")

    def told(self) -> Any:
        until(lambda: os.path.exists("told"), LIMIT_S)
        return json.loads(Path("told").read_text())

    def let_go(self) -> None:
        Path("go").write_text("")


def worker_of(pid: int, job: ProcessJob) -> int:
    """The worker of that job that has launched the process."""
    workers = [worker.pid for worker in job._workers]
    while pid not in workers:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    return pid


@pytest.fixture(autouse=True)
def none_is_left_waiting(in_a_folder: None) -> Iterator[None]:
    yield
    with contextlib.suppress(OSError):  # there is none that waits
        os.close(os.open("go", os.O_WRONLY | os.O_NONBLOCK))


USES_TWO_HOSTS = """
    job = ProcessJob({"hosts": 2}, env={"FLAVOUR": "salt"})
    job.apply()
    workers = job.state(cached_path=None).hosts.spawn_procs({"gpus": 1}).spawn("w", Worker)
    pids = list(workers.pid.call().get(40).values())
    file = os.environ["MONARCH_BATCH_JOB"]
    tell(procs=pids, flavour=os.environ["FLAVOUR"], mode=os.stat(file).st_mode, file=file)
    job.kill()
    again = job.state().hosts.spawn_procs().spawn("w", Worker)
    print(len(again.pid.call().get(40)), "again", flush=True)
"""


def test_a_script_outlives_the_program_that_applied_its_job_and_the_workers_end_with_it() -> None:
    script = Script(USES_TWO_HOSTS)
    program = """
        from monarch.job import ProcessJob
        job = ProcessJob({"hosts": 2}, env={"FLAVOUR": "salt"})
        job.apply(client_script="train.py")
        job.dump("job")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60, check=True)
    found, job = script.told(), job_load("job")
    workers = [worker.pid for worker in job._workers]
    assert {worker_of(pid, job) for pid in found["procs"]} == {*workers}
    assert found["flavour"] == "salt" and stat.S_IMODE(found["mode"]) == 0o600
    assert job.active

    script.let_go()
    for pid in [found["pid"], *workers]:
        wait_until_gone(pid, LIMIT_S)
    until(lambda: not job.active)
    until(lambda: not os.path.exists(found["file"]))
    folder = Path(found["file"]).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(os.listdir(folder)) == ["client.output", "hosts-0.output", "hosts-1.output"]
    assert (folder / "client.output").read_text() == "2 again\n"
    job.kill()
    assert (folder / "client.output").exists()


def test_kill_ends_the_script_also_one_that_would_go_on_and_the_workers() -> None:
    script = Script("signal.signal(signal.SIGTERM, signal.SIG_IGN); tell(file=os.environ['MONARCH_BATCH_JOB'])")
    job = ProcessJob({"hosts": 1})
    job.apply(client_script="train.py")
    found, worker = script.told(), job._workers[0].pid
    job_load(found["file"]).kill()  # as the script sees it: it is not for the script to end it
    assert job.active
    with pytest.raises(JobError, match="do not end with a script"):
        job.apply(client_script="train.py")
    job.kill()
    for pid in (found["pid"], worker):
        wait_until_gone(pid)
    assert not job.active and not os.path.exists(found["file"])


def test_a_local_job_runs_a_script_here_and_ends_with_it() -> None:
    script = Script("tell(names=list(load_current_job().state().meshes)); print('done'); raise SystemExit(3)")
    job = LocalJob(("trainers", "readers"))
    job.apply(client_script="train.py")
    found = script.told()
    assert found["names"] == ["trainers", "readers"] and job.active
    script.let_go()
    until(lambda: not job.active)
    [output] = [file for file in Path(".monarch").rglob("*") if file.is_file()]
    assert output.parent.name.startswith("job_") and output.read_text() == "done\n"
    wait_until_gone(found["pid"])
    job.kill()


def test_a_job_in_a_script_is_the_one_around_it_unless_it_asks_for_others(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ProcessJob({"hosts": 1})
    job.apply()
    try:
        BatchJob(job).dump("around")
        monkeypatch.setenv("MONARCH_BATCH_JOB", "around")
        around = load_current_job()
        assert isinstance(around, BatchJob) and around.active and around.apply_id == job.apply_id
        inside, other = ProcessJob({"hosts": 1}), ProcessJob({"others": 1})
        pid = inside.state(cached_path=None).hosts.spawn_procs().spawn("w", Worker).pid.call_one().get(LIMIT_S)
        assert worker_of(pid, job)
        assert other.state(cached_path=None).others.initialized.get(LIMIT_S) and other.active
        other.kill()
        inside.kill()
        wait_until_gone(pid)
        assert job.active and not inside.active
        inside.apply()
        assert inside.state().hosts.initialized.get(LIMIT_S) and not inside.active
    finally:
        job.kill()
    with pytest.raises(JobError, match="has ended, or some of its hosts have"):
        inside.state(cached_path=None)
    monkeypatch.delenv("MONARCH_BATCH_JOB")
    with pytest.raises(JobError, match="cannot apply the job that it runs in"):
        BatchJob(job).apply()


@pytest.mark.parametrize("job", [LocalJob(), ProcessJob({"hosts": 1}), SlurmJob({"nodes": 1}), SSHJob()])
def test_without_the_script_nothing_is_started(job: JobTrait) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such client script: 'train\.py'"):
        job.apply(client_script="train.py")
    assert not job.active and os.listdir() == []


def test_what_cannot_be_given_a_script_says_so_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").touch()
    over_ssh = SSHJob()
    over_ssh.add_mesh("trainers", ["nowhere"])
    for job, why in (over_ssh, "over logins cannot run scripts"), (SlurmJob({"nodes": 1}, attach_to=7), "attach_to"):
        with pytest.raises(JobError, match=why):
            job.apply(client_script="train.py")
        assert not job.active
    assert os.listdir() == ["train.py"]
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JobError, match="sbatch is not installed"):
        SlurmJob({"nodes": 1}).apply(client_script="train.py")
    assert os.listdir(".monarch/logs") == []


class Borrowed(JobTrait):
    """A user's own kind of job: hosts that are there already."""

    def __init__(self, free: list[str]) -> None:
        super().__init__()
        self.free = free
        self.taken: str | None = None
        self.script: str | None = None

    def _create(self, client_script: str | None) -> None:
        self.taken, self.script = self.free.pop(), client_script

    def _state(self) -> JobState:
        return JobState({str(self.taken): this_host()})

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, Borrowed) and self.active

    def _kill(self) -> None:
        self.free.append(str(self.taken))


def test_a_kind_of_job_of_ones_own(client: TestClient) -> None:
    job = Borrowed(["one", "two"])
    assert job.state(cached_path=None).two == this_host() and job.active
    job.kill()
    assert job.free == ["one", "two"] and not job.active and job.script is None
    Path("train.py").touch()
    job.apply(client_script="train.py")
    assert job.script == os.path.abspath("train.py")
    none_left = Borrowed([])
    with pytest.raises(IndexError):
        none_left.apply()
    assert not none_left.active


def test_a_slurm_job_runs_a_script_on_its_first_node_and_ends_with_it(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With commands that look like Slurm's; what a batch script leaves is ended with its job."""
    commands = {
        "sbatch": "cat > script; (SLURM_JOB_ID=42 setsid run-job > out 2>&1 < /dev/null &); echo 42",
        "run-job": "bash script; echo $? > status; kill 0",
        "squeue": '[ -e status ] || [ "$3" != 42 ] || { [ "$5" = %T ] && echo RUNNING || echo RUNNING node1; }',
        "scontrol": "echo 127.0.0.1",
        "srun": 'shift; exec "$@"',
        "hostname": "echo 127.0.0.1",
        "scancel": "echo $* > cancelled",
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    script = Script("""
        nodes = SlurmJob({"nodes": 1}).state().nodes
        pid = nodes.spawn_procs().spawn("w", Worker).pid.call_one().get(40)
        file = os.environ["MONARCH_BATCH_JOB"]
        tell(worker=pid, mode=os.stat(file).st_mode, file=file)
        raise SystemExit(3)
    """)
    job = SlurmJob({"nodes": 1}, monarch_port=free_port())
    job.apply(client_script="train.py")
    found = script.told()
    assert job.active and stat.S_IMODE(found["mode"]) == 0o600
    lines = Path("script").read_text().splitlines()
    assert [line.startswith("srun ") and line.endswith(" &") for line in lines].count(True) == 1
    assert any(line.startswith("MONARCH_BATCH_JOB=") and line.endswith(f" -u {tmp_path}/train.py") for line in lines)
    script.let_go()
    for pid in (found["pid"], found["worker"]):
        wait_until_gone(pid)
    until(lambda: os.path.exists("status") and Path("status").read_text() == "3\n")
    assert not job.active and not os.path.exists(found["file"]) and os.listdir(".monarch/logs") == []
    job.kill()
    assert Path("cancelled").read_text() == "--quiet 42\n"
