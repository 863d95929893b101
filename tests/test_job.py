"""Jobs: hosts that are had, found again and given back."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from monarch import cli
from monarch.actor import hosts_from_config, this_host
from monarch.errors import JobError, MeshError
from monarch.job import (
    JobTrait,
    LocalJob,
    LoginJob,
    ProcessJob,
    ProcessState,
    SlurmJob,
    SSHJob,
    job_load,
    job_loads,
)
from monarch.testing import TestClient, fresh_client, wait_until_gone
from tests.mesh.actors import Worker
from tests.mesh.workers import LIMIT_S
from tests.ports import free_port


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def client() -> Iterator[TestClient]:
    with fresh_client("shm", cleanup_timeout="1s", process_exit_timeout="3s") as client:
        yield client


def test_the_hosts_of_a_local_job_are_this_host(client: TestClient) -> None:
    state = LocalJob(("trainers", "generators")).state(cached_path=None)
    assert state.trainers == state.generators == this_host()
    with pytest.raises(AttributeError, match="it has trainers, generators"):
        _ = state.readers


def test_a_process_job_has_hosts_to_spawn_on_until_it_is_killed(client: TestClient) -> None:
    job = ProcessJob({"trainers": 2, "others": 1}, env={"FLAVOUR": "salt"})
    assert not job.active and job.apply_id is None
    state = job.state(cached_path=None)
    assert job.active and job.apply_id
    workers = state.trainers.spawn_procs({"gpus": 1}).spawn("w", Worker)
    assert list(workers.environ.call("FLAVOUR").get(LIMIT_S).values()) == ["salt", "salt"]
    pids = list(workers.pid.call().get(LIMIT_S).values())
    again = job.state(cached_path=None)
    assert len(again.trainers.spawn_procs().spawn("w", Worker).pid.call().get(LIMIT_S)) == 2
    job.kill()
    for pid in pids:
        wait_until_gone(pid)
    assert not job.active and os.listdir() == []


def test_a_job_that_was_applied_is_found_by_another_of_the_same_kind(client: TestClient) -> None:
    first = ProcessJob({"hosts": 1})
    assert first.state().hosts.initialized.get(LIMIT_S)
    assert stat.S_IMODE(os.stat(".monarch/job_state.pkl").st_mode) == 0o600
    try:
        second, other = ProcessJob({"hosts": 1}), ProcessJob({"hosts": 2})
        assert job_loads(first.dumps()).can_run(second) and not first.can_run(other)
        assert second.state().hosts.initialized.get(LIMIT_S)
        assert not second.active  # it uses the workers of the first
        second.kill()
        assert not first.active and not os.path.exists(".monarch/job_state.pkl")
    finally:
        first.kill()


def test_a_job_that_is_active_starts_no_other_workers() -> None:
    job = ProcessJob({"hosts": 1})
    try:
        job.apply()
        applied, workers = job.apply_id, list(job._workers)
        job.apply()
        assert (job.apply_id, job._workers) == (applied, workers)
    finally:
        job.kill()
    job.state(cached_path=None)
    with pytest.raises(JobError, match=r"end with this program: kill\(\) it first"):
        job.apply()
    job.kill()
    assert not job.active


@pytest.mark.slow
def test_hosts_for_demonstrations(client: TestClient) -> None:
    hosts = hosts_from_config("demo")
    assert len(hosts.spawn_procs().spawn("w", Worker).pid.call().get(LIMIT_S)) == 2
    monarch.actor._demos.pop().kill()


def test_a_job_file_that_others_can_write_is_not_loaded() -> None:
    LocalJob().dump("job.pkl")
    assert isinstance(job_load("job.pkl"), LocalJob)
    os.chmod("job.pkl", 0o666)
    with pytest.raises(PermissionError, match="others can write"):
        job_load("job.pkl")


def test_workers_end_with_the_program_that_has_no_cache(tmp_path: Path) -> None:
    script = """
        import os
        from monarch.job import ProcessJob
        job = ProcessJob({"hosts": 2})
        job.state(cached_path=None).hosts.initialized.get(20)
        print(*[worker.pid for worker in job._workers], flush=True)
        os.kill(os.getpid(), 9)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    pids = [int(each) for each in found.stdout.split()]
    assert len(pids) == 2, found.stderr
    for pid in pids:
        wait_until_gone(pid)


def test_a_worker_that_ends_before_it_listens_is_not_waited_for(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "monarch.py").write_text("raise SystemExit(3)")
    job = ProcessJob({"hosts": 2}, env={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(MeshError, match=r"attach failed: .* ended with exit code 3 before that answered"):
        job.state(cached_path=None).hosts.initialized.get(LIMIT_S)
    assert not job.active
    job.kill()


def test_of_a_lasting_worker_that_ends_before_it_listens_the_last_words_are_told(
    client: TestClient, tmp_path: Path
) -> None:
    (tmp_path / "monarch.py").write_text("raise SystemExit('there is no licence')")
    job = ProcessJob({"hosts": 1}, env={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(MeshError, match=r"ended with exit code 1 before that .*; its last words: there is no licence"):
        job.state().hosts.initialized.get(LIMIT_S)
    job.kill()


def test_a_job_whose_workers_have_ended_starts_others(client: TestClient, tmp_path: Path) -> None:
    broken = tmp_path / "monarch.py"
    broken.write_text("raise SystemExit(3)")
    job = ProcessJob({"hosts": 1}, env={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(MeshError, match="attach failed"):
        job.state(cached_path=None).hosts.initialized.get(LIMIT_S)
    broken.unlink()
    assert job.state(cached_path=None).hosts.initialized.get(LIMIT_S) and job.active
    job.kill()


@pytest.mark.parametrize("meshes", [{}, {"hosts": 0}, {"hosts": "two"}])
def test_bad_numbers_of_hosts_are_refused(meshes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ProcessJob(meshes)


def _program(folder: Path, name: str, text: str) -> None:
    """A command that stands for one that is not installed here."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("cached_path", [None, ".monarch/job_state.pkl"])
def test_an_ssh_job_starts_workers_on_the_hosts_it_logs_in_to(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_path: str | None
) -> None:
    """With an ssh that runs the command right here."""
    fake = """
        echo "$*" >> "$CALLS"
        case " $* " in *" -G "*) echo hostname 127.0.0.1; exit;; esac
        exec bash -c "${@: -1}"
    """
    _program(tmp_path, "ssh", textwrap.dedent(fake))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    port = free_port()
    job = SSHJob(sys.executable, ("-o", "BatchMode=yes"), port)
    job.add_mesh("workers", ["user@far"])
    state = job.state(cached_path)
    pid = state.workers.spawn_procs().spawn("w", Worker).pid.call_one().get(LIMIT_S)
    calls = (tmp_path / "calls").read_text()
    assert "-o BatchMode=yes -T user@far" in calls and f"tcp://127.0.0.1:{port}@tcp://0.0.0.0:{port}" in calls
    assert job._secret.decode() not in calls
    with pytest.raises(JobError, match="this job is active, and has its hosts"):
        job.add_mesh("more", ["user@farther"])
    job.kill()
    wait_until_gone(pid)
    with pytest.raises(ValueError, match="over 'tcp'"):
        SSHJob(transport="ipc")


class HereJob(LoginJob):
    """Its hosts are workers of this machine that are told nothing."""

    def _start_host(self, name: str) -> ProcessState:
        address = f"ipc://{os.getcwd()}/{name}"
        code = "import sys; from monarch.actor import run_worker_loop_forever as run; "
        command = [sys.executable, "-c", f"{code} run(ca='trust_all_connections', address=sys.argv[1])", address]
        self.workers = [*getattr(self, "workers", []), subprocess.Popen(command, start_new_session=True)]
        return ProcessState(self.workers[-1].pid, address)


def test_workers_of_a_login_job_on_this_host_need_no_secret(client: TestClient) -> None:
    job = HereJob()
    job.add_mesh("both", ["first", "second"])
    job.add_mesh("one", ["second"])
    state = job.state(cached_path=None)

    pids = list(state.both.spawn_procs().spawn("w", Worker).pid.call().get(LIMIT_S).values())
    assert len({*pids, state.one.spawn_procs().spawn("w", Worker).pid.call_one().get(LIMIT_S)}) == 3

    job.kill()
    for pid in pids:
        wait_until_gone(pid)
    for worker in job.workers:
        worker.wait(10)


def test_a_slurm_job_asks_for_nodes_and_gives_them_back(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With commands that look like Slurm's: a job that pends once, then runs on this machine."""
    _program(tmp_path, "sbatch", 'cat > script; (setsid bash script > out 2>&1 & echo $! > pid); echo "42;cluster"')
    _program(
        tmp_path,
        "squeue",
        '[ -e cancelled ] && exit 0; [ "$5" = %T ] && { echo RUNNING; exit; }; '
        '[ -e asked ] && echo "RUNNING node1" || { touch asked; echo "PENDING "; }',
    )
    _program(tmp_path, "scontrol", "echo 127.0.0.1")
    _program(tmp_path, "srun", 'shift; exec "$@"')
    _program(tmp_path, "hostname", "echo 127.0.0.1")
    _program(tmp_path, "scancel", "touch cancelled; kill $(cat pid)")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    port = free_port()
    job = SlurmJob({"nodes": 1}, monarch_port=port, partition="debug", gpus_per_node=2, job_start_timeout=30)
    pid = job.state(None).nodes.spawn_procs().spawn("w", Worker).pid.call_one().get(LIMIT_S)
    script = (tmp_path / "script").read_text()
    for option in ("--nodes=1", "--partition=debug", "--gpus-per-node=2", "--exclusive", "--job-name=monarch"):
        assert f"#SBATCH {option}\n" in script
    assert job._secret.decode() not in script
    job.kill()
    wait_until_gone(pid)
    assert not job.active


def test_without_slurm_a_slurm_job_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="job_start_timeout is -1; it must be a number of seconds"):
        SlurmJob({"nodes": 1}, job_start_timeout=-1)
    monkeypatch.setenv("PATH", "/nowhere")
    job: JobTrait = SlurmJob({"nodes": 1})
    with pytest.raises(JobError, match="sbatch is not installed here"):
        job.apply()
    assert not job.active


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs `monarch` in a folder with a module that describes a job."""
    (tmp_path / "jobs.py").write_text("from monarch.job import ProcessJob\njob = ProcessJob({'a': 2, 'b': 1})\n")

    def run(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "monarch", *words]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)

    yield run
    run("kill")


@pytest.mark.slow
def test_the_command_line_applies_uses_and_kills_a_job(commands: Any, tmp_path: Path) -> None:
    assert "monarch apply" in commands("exec", "true").stderr
    assert commands("apply", "jobs.job").returncode == 0
    assert "active; `monarch kill` ends it" in commands("apply", "jobs.job").stderr
    job = job_load(".monarch/job_state.pkl")
    assert job.active

    found = commands("exec", "-e", "WORD=salt", "--", "bash", "-c", "echo $WORD $MONARCH_RANK_hosts; exit 3")
    assert (found.returncode, found.stdout, found.stderr) == (3, "salt 0\n", "")
    found = commands("exec", "--mesh", "a", "--point", "hosts=1", "--script", "-", text="echo $MONARCH_SIZE_hosts; pwd")
    assert found.stdout.split() == ["2", str(tmp_path)]
    found = commands("exec", "--all", "--per-host", "gpus=2", "echo", "hello")
    assert found.returncode == 0, found.stderr
    assert len([file for file in Path(".monarch/exec").rglob("*.out") if file.read_text() == "hello\n"]) == 6
    assert "it has a, b" in commands("exec", "--mesh", "c", "true").stderr

    assert commands("kill").returncode == 0
    assert not job.active and not os.path.exists(".monarch/job_state.pkl")
    assert commands("kill").returncode == 1


@pytest.mark.parametrize(
    "words",
    [
        ("apply", "nonesuch.job"),
        ("apply", "job"),
        ("exec",),
        ("exec", "--point", "x", "true"),
        ("exec", "-e", "x", "true"),
    ],
)
def test_what_the_command_line_cannot_do_it_says(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert cli.main(words) == 1
    except SystemExit as end:
        assert end.code == 2
    assert capsys.readouterr().err.startswith(("monarch ", "usage: "))
