"""`SSHJob` over a real ssh: the hosts are network namespaces, each with an `sshd`, keys and ports of these tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from monarch.errors import MeshError
from monarch.job import SSHJob, job_loads
from monarch.testing import fresh_client, wait_until_gone
from tests.mesh import netns
from tests.mesh.actors import Worker

LIMIT_S = 30.0
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    *netns.needed(),
    pytest.mark.skipif(SSHD is None, reason="sshd is not installed (on Debian: openssh-server)"),
]
_SERVER = """
    Port 2222
    HostKey {folder}/host
    AuthorizedKeysFile {folder}/user.pub
    PermitRootLogin prohibit-password
    StrictModes no
    UsePAM no
    PidFile none
"""
_CLIENT = """
    Host *
    User root
    Port 2222
    IdentityFile {folder}/user
    IdentitiesOnly yes
    BatchMode yes
    StrictHostKeyChecking accept-new
    UserKnownHostsFile {folder}/known
    LogLevel ERROR
"""


@contextmanager
def served(host: netns.Host, configuration: Path) -> Iterator[None]:
    """With an sshd that listens there."""
    command = [*host.prefix, str(SSHD), "-D", "-e", "-f", str(configuration)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            said = server.stderr.readline()
            assert "Server listening" in said, said + server.stderr.read()
            yield
        finally:
            server.kill()


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Options of `ssh` with which `node0` and `node1` are hosts."""
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd_config").write_text(textwrap.dedent(_SERVER).format(folder=folder))
    with ExitStack() as stack:
        # Where sshd locks up the part of it that listens to strangers. It stays, empty, as after an sshd of the system:
        # without it, those of tests that run beside these would turn everybody away.
        Path("/run/sshd").mkdir(exist_ok=True)
        hosts = stack.enter_context(netns.network(2))
        names = ""
        for i, host in enumerate(hosts):
            stack.enter_context(served(host, folder / "sshd_config"))
            names += f"Host node{i}\n    HostName {host.address}\n"
        (folder / "config").write_text(names + textwrap.dedent(_CLIENT).format(folder=folder))
        yield ("-F", str(folder / "config"))


def new_job(ssh: tuple[str, ...], python: str = sys.executable) -> SSHJob:
    job = SSHJob(python, ssh, netns.PORT)
    job.add_mesh("trainers", ["node0", "node1"])
    job.add_mesh("generators", ["node1"])
    return job


def test_workers_run_where_ssh_leads_until_the_job_is_killed(ssh: tuple[str, ...]) -> None:
    job = new_job(ssh)
    with fresh_client("auto", cleanup_timeout="1s"):
        state = job.state(cached_path=None)
        trainers = state.trainers.spawn_procs({"gpus": 2}).spawn("worker", Worker)
        generator = state.generators.spawn_procs().spawn("worker", Worker)
        where = [*trainers.environ.call("SSH_CONNECTION").get(LIMIT_S).values()]
        assert where[0] == where[1] != where[2] == where[3] == generator.environ.call_one("SSH_CONNECTION").get(LIMIT_S)
        pids = [*trainers.pid.call().get(LIMIT_S).values(), generator.pid.call_one().get(LIMIT_S)]
        job.kill()
        for pid in pids:
            wait_until_gone(pid)
    assert not job.active


def test_workers_wait_for_the_next_program_that_has_the_job(ssh: tuple[str, ...]) -> None:
    job = new_job(ssh)
    job.apply()
    try:
        with fresh_client("auto", cleanup_timeout="1s"):
            other = job_loads(job.dumps())
            assert other.can_run(job)
            mesh = other.state(cached_path=None).trainers.spawn_procs().spawn("worker", Worker)
            assert len(mesh.pid.call().get(LIMIT_S)) == 2
    finally:
        job.kill()
    assert not job.active and not other.active


def test_workers_of_a_program_that_is_killed_end(ssh: tuple[str, ...]) -> None:
    script = f"""
        import os
        from tests.mesh.actors import Worker
        from tests.test_ssh import new_job
        job = new_job({ssh!r})
        mesh = job.state(cached_path=None).trainers.spawn_procs({{"gpus": 2}}).spawn("worker", Worker)
        print(*mesh.pid.call().get({LIMIT_S}).values(), flush=True)
        os.kill(os.getpid(), 9)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)
    pids = [int(each) for each in found.stdout.split()]
    assert len(pids) == 4, found.stderr
    for pid in pids:
        wait_until_gone(pid)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_host_where_no_worker_can_start_is_not_waited_for(
    ssh: tuple[str, ...], lasting: bool, tmp_path: Path
) -> None:
    job = new_job(ssh, "/nowhere/python")
    with fresh_client("auto", cleanup_timeout="1s", mesh_attach_config_timeout="300s"):
        hosts = job.state(cached_path=tmp_path / "job" if lasting else None).trainers
        with pytest.raises(MeshError, match=r"attach failed: .* ended with exit code 127 before that answered"):
            hosts.initialized.get(LIMIT_S)
        assert not job.active
        job.kill()
