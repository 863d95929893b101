"""`SlurmJob` on a real Slurm: that of `SLURM_CONF`, or one of this machine alone, which `setup.sh` starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.errors import JobError
from monarch.job import SlurmJob, job_loads
from monarch.testing import fresh_client, wait_until_gone
from tests.mesh.actors import Worker
from tests.ports import free_port
from tests.until import until

SETUP = Path(__file__).with_name("setup.sh")
LIMIT_S = 60.0
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if "SLURM_CONF" in os.environ:
        yield
        return
    if missing := [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (tests/slurm/setup.sh installs them, as root)")
    if os.getuid() != 0:
        pytest.skip("only root starts the daemons of Slurm")
    folder = tmp_path_factory.mktemp("slurm")
    os.chmod(folder.parent, 0o755)  # munge refuses a folder whose parents only some may enter
    try:
        env = os.environ | {"SLURMCTLD_PORT": str(free_port()), "SLURMD_PORT": str(free_port())}
        found = subprocess.run([SETUP, folder], env=env, capture_output=True, text=True, timeout=120, check=False)
        assert found.returncode == 0, found.stderr
        with pytest.MonkeyPatch.context() as patch:
            name, _, value = found.stdout.strip().rpartition("\n")[2].partition("=")
            patch.setenv(name, value)
            yield
            until(lambda: queue("%i") == "", LIMIT_S)  # daemons that end before leave the workers of a job behind
    finally:
        subprocess.run([SETUP, "stop", folder], timeout=60, check=True)


def queue(format: str) -> str:
    return subprocess.run(["squeue", "-h", "-o", format], capture_output=True, text=True, timeout=30).stdout.strip()


def new_job(folder: Path) -> SlurmJob:
    return SlurmJob(
        {"nodes": 1},
        python_exe=sys.executable,
        monarch_port=free_port(),
        log_dir=str(folder),
        time_limit="5",
        job_start_timeout=LIMIT_S,
    )


def test_a_batch_job_runs_workers_until_it_is_killed(cluster: None, tmp_path: Path) -> None:
    job = new_job(tmp_path)
    with fresh_client("auto", cleanup_timeout="1s") as client:
        nodes = job.state(cached_path=None).nodes
        mesh = nodes.spawn_procs({"gpus": 2}).spawn("worker", Worker)
        pids = list(mesh.pid.call().get(LIMIT_S).values())
        assert len(set(pids)) == 2 and queue("%T %j") == "RUNNING monarch"
        nodes.stop().get(LIMIT_S)
        again = job.state(cached_path=None).nodes.spawn_procs().spawn("worker", Worker)
        pids.append(again.pid.call_one().get(LIMIT_S))
        job.kill()
        client.allow_faults()
        for pid in pids:
            wait_until_gone(pid)
    assert not job.active


def test_a_job_is_found_again_by_a_program_that_has_its_pickle(cluster: None, tmp_path: Path) -> None:
    job = new_job(tmp_path)
    job.apply()
    try:
        with fresh_client("auto", cleanup_timeout="1s"):
            other = job_loads(job.dumps())
            assert other.can_run(job)
            mesh = other.state(cached_path=None).nodes.spawn_procs().spawn("worker", Worker)
            assert mesh.pid.call_one().get(LIMIT_S) != os.getpid()
    finally:
        job.kill()


def test_a_job_that_slurm_refuses_says_what_slurm_says(cluster: None, tmp_path: Path) -> None:
    job = SlurmJob({"nodes": 1}, partition="there-is-none", log_dir=str(tmp_path))
    with pytest.raises(JobError, match="invalid partition specified: there-is-none"):
        job.apply()


def test_a_job_that_waits_for_nodes_in_vain_is_given_up(cluster: None, tmp_path: Path) -> None:
    held = SlurmJob({"nodes": 1}, slurm_args=["--hold"], log_dir=str(tmp_path), job_start_timeout=1)
    try:
        with pytest.raises(TimeoutError, match=r"is PENDING after 1 s \(job_start_timeout\)"):
            held.state(cached_path=None)
    finally:
        held.kill()


@pytest.mark.parametrize("killed", [False, True])
def test_a_client_script_runs_in_the_batch_job_which_ends_with_it(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    script = f"""
        import os, sys
        from pathlib import Path
        from monarch.job import SlurmJob
        from tests.mesh.actors import Worker

        if __name__ == "__main__":
            job = SlurmJob({{"nodes": 1}}, log_dir={str(tmp_path)!r}, time_limit="5")
            worker = job.state().nodes.spawn_procs().spawn("worker", Worker)
            pid = worker.pid.call_one().get(60)
            Path("telling").write_text(f"{{os.getpid()}} {{pid}} {{os.environ['SLURM_JOB_ID']}}")
            os.rename("telling", "told")
            Path("go").read_text()
            sys.exit(3)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    os.mkfifo("go")
    job = new_job(tmp_path)
    job.apply(client_script="train.py")
    try:
        until(lambda: os.path.exists("told"), LIMIT_S)
        *pids, number = (tmp_path / "told").read_text().split()
        assert job.active and number == job._number
        if not killed:
            (tmp_path / "go").write_text("")
            until(lambda: queue("%i") == "", LIMIT_S)
            assert not job.active
            found = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True, timeout=30)
            assert "JobState=FAILED" in found.stdout and "ExitCode=3:0" in found.stdout
    finally:
        job.kill()
    for pid in pids:
        wait_until_gone(int(pid), LIMIT_S)
    until(lambda: queue("%i") == "", LIMIT_S)
    assert sorted(os.listdir()) == ["go", f"slurm-{number}.out", "told", "train.py"]


def test_a_job_that_slurm_has_forgotten_is_given_back_in_silence(cluster: None, tmp_path: Path) -> None:
    job = new_job(tmp_path)
    job.apply()
    subprocess.run(["scancel", str(job._number)], timeout=30, check=True)
    until(lambda: queue("%i") == "", LIMIT_S)
    job._number = "999999"
    job.kill()
    assert not [name for name in os.listdir(tmp_path) if name.startswith("secret")]
