"""Hosts with workers: attaching, spawning and calling there, leaving, and who outlives whom."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, HostMesh, SupervisionError, attach_to_workers, context, endpoint, this_host
from monarch.cli import main
from monarch.config import configured
from monarch.core import protocol, settings
from monarch.core.future import Future
from monarch.debug import ps
from monarch.errors import MeshError
from monarch.testing import TestClient, fresh_client, wait_until_gone
from tests.mesh.actors import Worker
from tests.mesh.workers import LIMIT_S, worker
from tests.until import until


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two workers that no test kills: one over a socket in the file system, one over loopback."""
    path = tmp_path_factory.mktemp("workers") / "one"
    with socket.create_server(("127.0.0.1", 0)) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        port = inherited.getsockname()[1]
        urls = f"ipc://{path}", f"tcp://127.0.0.1:fd{inherited.fileno()}"
        with worker(urls[0]), worker(urls[1]):
            at = [urls[0], f"tcp://127.0.0.1:{port}"]
            with fresh_client("shm"):  # no test waits for them to come up
                attach_to_workers(workers=at).initialized.get(LIMIT_S)
            yield at


@pytest.fixture
def client() -> Iterator[TestClient]:
    with fresh_client("shm", cleanup_timeout="1s", process_exit_timeout="3s") as client:
        yield client


@pytest.fixture
def hosts(client: TestClient, workers: list[str]) -> HostMesh:
    return attach_to_workers(ca="trust_all_connections", workers=workers)


class Teller(Actor):
    @endpoint
    def setting(self, name: str) -> Any:
        return settings.get(name)  # type: ignore[call-overload]


class Caller(Worker):
    """Calls others from where it runs."""

    @endpoint
    def pids_of(self, mesh: Any) -> list[int]:
        return list(mesh.pid.call().get(LIMIT_S).values())

    @endpoint
    def host(self) -> HostMesh:
        return this_host()

    @endpoint
    def spawned(self) -> int:
        return int(this_host().spawn_procs({"x": 1}).spawn("inner", Worker).pid.call_one().get(LIMIT_S))


def test_processes_of_hosts_are_a_mesh_like_any_other(hosts: HostMesh) -> None:
    assert hosts.initialized.get(LIMIT_S) is True
    assert dict(hosts.extent) == {"hosts": 2}
    procs = hosts.spawn_procs({"gpus": 2})
    mesh = procs.spawn("worker", Worker)
    pids = mesh.pid.call().get(LIMIT_S)
    assert dict(pids.extent) == {"hosts": 2, "gpus": 2} and len(set(pids.values())) == 4
    assert mesh.slice(hosts=1).birth.call().get(LIMIT_S).item(gpus=1) == {"hosts": 1, "gpus": 1}
    hosts.stop().get(LIMIT_S)
    for pid in pids.values():
        wait_until_gone(pid)
    with pytest.raises(MeshError, match="HostMesh has already been stopped"):
        hosts.spawn_procs()


def test_processes_call_each_other_whatever_hosts_they_are_on(hosts: HostMesh) -> None:
    there = hosts.spawn_procs().spawn("there", Caller)
    here = this_host().spawn_procs({"x": 1}).spawn("here", Caller)
    pids = list(there.pid.call().get(LIMIT_S).values())
    (own,) = here.pid.call().get(LIMIT_S).values()
    assert here.pids_of.call_one(there).get(LIMIT_S) == pids
    assert there.slice(hosts=0).pids_of.call_one(here).get(LIMIT_S) == [own]
    assert there.slice(hosts=0).pids_of.call_one(there.slice(hosts=1)).get(LIMIT_S) == [pids[1]]


def test_large_arguments_and_results_arrive(hosts: HostMesh) -> None:
    there = hosts.spawn_procs().spawn("there", Worker)
    data = os.urandom(3 << 20)
    assert [bytes(each) for each in there.echo.call(data).get(LIMIT_S).values()] == [data, data]


def test_this_host_of_an_actor_is_the_host_in_the_mesh(hosts: HostMesh) -> None:
    there = hosts.spawn_procs({"gpus": 1}).spawn("there", Caller)
    for i in range(2):
        assert there.slice(hosts=i, gpus=0).host.call_one().get(LIMIT_S) == hosts.slice(hosts=i)
    assert there.slice(hosts=1, gpus=0).spawned.call_one().get(LIMIT_S) != os.getpid()


def test_settings_of_the_client_count_on_its_hosts(hosts: HostMesh, workers: list[str]) -> None:
    with configured(actor_spawn_max_idle="17s"):
        others = attach_to_workers(workers=workers[:1])
    tellers = [mesh.spawn_procs().spawn("teller", Teller) for mesh in (others, hosts)]
    told = [mesh.setting.call("actor_spawn_max_idle").get(LIMIT_S) for mesh in tellers]
    assert [list(each.values()) for each in told] == [[17.0], [30.0, 30.0]]


def test_a_stopped_mesh_leaves_other_meshes_on_the_same_workers_alone(client: TestClient, workers: list[str]) -> None:
    one, two = (attach_to_workers(workers=workers) for _ in range(2))
    first, second = one.spawn_procs().spawn("w", Worker), two.spawn_procs().spawn("w", Worker)
    gone = list(first.pid.call().get(LIMIT_S).values())
    assert len(second.pid.call().get(LIMIT_S)) == 2
    one.stop().get(LIMIT_S)
    for pid in gone:
        wait_until_gone(pid)
    assert len(second.pid.call().get(LIMIT_S)) == 2
    with pytest.raises(SupervisionError, match="stopped"):
        first.pid.call().get(LIMIT_S)
    assert len(attach_to_workers(workers=workers).spawn_procs().spawn("w", Worker).pid.call().get(LIMIT_S)) == 2


def test_what_processes_of_all_hosts_do_is_seen(hosts: HostMesh) -> None:
    there = hosts.spawn_procs().spawn("there", Worker)
    pids = set(there.pid.call().get(LIMIT_S).values())
    shown = ps()
    assert [host.processes[0].name for host in shown.hosts] == ["client", "worker", "worker"]
    seen = {process.pid: process for host in shown.hosts for process in host.processes}
    names = sorted(actor.name for pid in pids for actor in seen[pid].actors)
    assert names == ["there{'hosts': 0/2}", "there{'hosts': 1/2}"]


def test_views_and_references_of_hosts_cannot_be_shut_down(hosts: HostMesh) -> None:
    for mesh in (hosts.slice(hosts=0), pickle.loads(pickle.dumps(hosts)), this_host()):
        with pytest.raises(MeshError, match="cannot shut down `HostMesh` that is a reference instead of owned"):
            mesh.shutdown()


def test_addresses_may_be_futures(client: TestClient, workers: list[str]) -> None:
    later: Future[str] = Future._pending(None)
    hosts = attach_to_workers(workers=[later, workers[1]])
    mesh = hosts.spawn_procs().spawn("w", Worker)
    pids = mesh.pid.call()
    later._complete(lambda: workers[0])
    assert len(pids.get(LIMIT_S)) == 2


def test_a_worker_that_ends_while_it_is_left_fails_nothing(client: TestClient, tmp_path: Path) -> None:
    with worker(f"ipc://{tmp_path}/w") as served:
        hosts = attach_to_workers(workers=[served.url])
        assert hosts.spawn_procs().spawn("w", Worker).pid.call_one().get(LIMIT_S)
        os.kill(served.pid, signal.SIGSTOP)
        left = hosts.stop()
        served.kill()
        left.get(LIMIT_S)
    client.check_faults()


def test_shutdown_ends_processes_and_workers(client: TestClient, tmp_path: Path) -> None:
    with worker(f"ipc://{tmp_path}/w", log=tmp_path / "output") as served:
        hosts = attach_to_workers(workers=[served.url])
        view, reference, procs = hosts.slice(hosts=0), pickle.loads(pickle.dumps(hosts)), hosts.spawn_procs()
        pid = procs.spawn("w", Worker).pid.call_one().get(LIMIT_S)
        hosts.shutdown().get(LIMIT_S)
        wait_until_gone(pid)
        assert served.process.wait(LIMIT_S) == 0
        assert (tmp_path / "output").read_text() == f"monarch worker: listening at {served.url}\n"
        for use in (hosts.shutdown, hosts.slice, view.spawn_procs, view.stop, lambda: view.initialized):
            with pytest.raises(MeshError, match="HostMesh has already been shut down"):
                use()
        with pytest.raises(SupervisionError, match="a host of the mesh is gone"):
            reference.initialized.get(LIMIT_S)
        with pytest.raises(SupervisionError, match=r"^error spawning proc mesh: statuses: anon\{'hosts': 0/1\}: "):
            reference.spawn_procs().initialized.get(LIMIT_S)
        assert procs.stop().get(LIMIT_S) is None


def test_leaving_a_block_of_hosts_that_have_been_shut_down_there(client: TestClient, tmp_path: Path) -> None:
    async def work(url: str) -> None:
        async with attach_to_workers(workers=[url]) as hosts:
            await hosts.shutdown()

    with worker(f"ipc://{tmp_path}/w") as served:
        asyncio.run(work(served.url))
        assert served.process.wait(LIMIT_S) == 0


@pytest.mark.slow
def test_shutdown_right_after_a_spawn_that_is_not_finished(client: TestClient, tmp_path: Path) -> None:
    with worker(f"ipc://{tmp_path}/w") as served:
        hosts = attach_to_workers(workers=[served.url])
        hosts.spawn_procs({"gpus": 2})
        assert hosts.shutdown().get(LIMIT_S) is None


def test_an_unreachable_worker_is_named_in_time(client: TestClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    with configured(mesh_attach_config_timeout="300ms"):
        hosts = attach_to_workers(workers=[url])
        with pytest.raises(MeshError, match=f"attach failed: config push failed during attach to {url}"):
            hosts.initialized.get(LIMIT_S)


def test_an_address_that_never_comes_is_given_up(client: TestClient) -> None:
    with configured(mesh_attach_config_timeout="100ms"):
        hosts = attach_to_workers(workers=[Future._pending(None)])
        with pytest.raises(MeshError, match=r"attach failed.*its address was not known in 0\.1 s"):
            hosts.initialized.get(LIMIT_S)


def test_an_address_that_cannot_be_had_is_told_by_whoever_drives_the_links(client: TestClient) -> None:
    told_on: list[str] = []
    runtime = context().actor_instance.proc_runtime
    runtime.on_proc_gone.append(lambda key, down: told_on.append(threading.current_thread().name))
    address: Future[str] = Future._pending(None)
    hosts = attach_to_workers(workers=[address])
    address._fail(LookupError("no such worker"))
    with pytest.raises(MeshError, match=r"attach failed.*LookupError: no such worker"):
        hosts.initialized.get(LIMIT_S)
    until(lambda: told_on)
    assert "monarch-attach" not in told_on


def test_a_worker_that_is_killed_is_the_failure_of_its_processes(client: TestClient, tmp_path: Path) -> None:
    with worker(f"ipc://{tmp_path}/w") as served:
        hosts = attach_to_workers(workers=[served.url])
        mesh = hosts.spawn_procs().spawn("w", Worker)
        pid = mesh.pid.call_one().get(LIMIT_S)
        served.kill()
        client.expect_fault("w")
        with pytest.raises(SupervisionError, match=f"the worker at ipc://{tmp_path}/w is gone"):
            mesh.pid.call_one().get(LIMIT_S)
        wait_until_gone(pid)


class _Mourner(Actor):
    """Writes down why it ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @endpoint
    def parents(self) -> list[int]:
        template = os.getppid()
        status = Path(f"/proc/{template}/status").read_text()
        return [template, int(status.partition("PPid:")[2].split()[0])]

    def __cleanup__(self, exc: Exception | None) -> None:
        self._path.write_text(repr(exc))


def test_an_actor_that_outlives_its_worker_for_a_moment_has_failed_and_was_not_stopped(
    client: TestClient, tmp_path: Path
) -> None:
    with worker(f"ipc://{tmp_path}/w") as served, ExitStack() as after:
        mesh = attach_to_workers(workers=[served.url]).spawn_procs().spawn("w", _Mourner, tmp_path / "why")
        for pid in mesh.parents.call_one().get(LIMIT_S):  # both would end it
            os.kill(pid, signal.SIGSTOP)
            after.callback(os.kill, pid, signal.SIGCONT)
        client.allow_faults()
        served.kill()
        until(lambda: (tmp_path / "why").exists() and (tmp_path / "why").read_text())
    assert "is lost with its host" in (tmp_path / "why").read_text()


def test_a_worker_says_where_it_listens_and_leaves_no_socket_when_it_is_told_to_end(tmp_path: Path) -> None:
    path, output = tmp_path / "w", tmp_path / "output"
    with worker(f"ipc://{path}", log=output) as served:
        until(lambda: output.read_text() == f"monarch worker: listening at ipc://{path}\n")
        assert path.is_socket()
        served.process.terminate()
        assert served.process.wait(LIMIT_S) == -signal.SIGTERM
        assert not path.exists()


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_client_that_is_killed_leaves_nothing_on_its_hosts(workers: list[str], signum: int) -> None:
    pids = _pids_of_client(workers, f"os.kill(os.getpid(), {int(signum)})")
    for pid in pids:
        wait_until_gone(pid)


def test_a_client_that_ends_leaves_nothing_on_its_hosts(workers: list[str]) -> None:
    for pid in _pids_of_client(workers, ""):
        wait_until_gone(pid)


def _pids_of_client(workers: list[str], end: str) -> list[int]:
    """Run a client that spawns on the workers, and ends in that way; the processes that it had there."""
    script = f"""
        import os
        from monarch.actor import attach_to_workers
        from tests.mesh.actors import Worker

        if __name__ == "__main__":
            mesh = attach_to_workers(workers={workers!r}).spawn_procs({{"gpus": 2}}).spawn("w", Worker)
            print(*mesh.pid.call().get({LIMIT_S}).values(), flush=True)
            {end}
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    pids = [int(each) for each in found.stdout.split()]
    assert len(pids) == 4, found.stderr
    assert found.stderr == ""
    return pids


def test_a_peer_of_another_version_is_refused_in_plain_words(
    client: TestClient, workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = protocol.Hello.encode
    monkeypatch.setattr(
        protocol.Hello, "encode", lambda self: _with_python(encode(self), "3.7") if self.attaches else encode(self)
    )
    hosts = attach_to_workers(workers=workers[:1])
    with pytest.raises(MeshError, match=r"the peer runs Python 3\.7, this process Python 3\.\d+"):
        hosts.initialized.get(LIMIT_S)


def _with_python(frame: Any, version: str) -> Any:
    return [frame[0], json.dumps(json.loads(frame[1]) | {"python": version}).encode()]


@pytest.mark.parametrize(
    ("workers", "error", "match"),
    [
        ([], ValueError, "empty"),
        ("tcp://127.0.0.1:1", TypeError, "list of addresses"),
        (["nowhere"], ValueError, "is no address"),
        (["tcp://192.0.2.1:1"], Exception, "MONARCH_SECRET_FILE"),
    ],
)
def test_bad_addresses_are_refused_at_once(
    client: TestClient, workers: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        attach_to_workers(workers=workers)
    with pytest.raises(NotImplementedError, match=r"HYPERACTOR_TLS_CERT.*tls\+tcp"):
        attach_to_workers(ca=b"PEM", workers=["tcp://127.0.0.1:1"])


def test_a_worker_refuses_the_network_without_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(url: str, **env: str) -> str:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        assert main(["worker", "--listen", url]) == 1
        for name in env:
            monkeypatch.delenv(name)
        return capsys.readouterr().err

    assert "there is no secret that tells friends from strangers" in refusal("tcp://192.0.2.1:1")
    open_to_all = "tcp://127.0.0.1:1@tcp://0.0.0.0:1"
    assert "there is no secret that tells friends from strangers" in refusal(open_to_all)
    assert "can be guessed" in refusal("tcp://192.0.2.1:1", MONARCH_SECRET="abc")
    readable = tmp_path / "secret"
    readable.write_text("s" * 64)
    readable.chmod(0o644)
    assert "can be read by others" in refusal("tcp://192.0.2.1:1", MONARCH_SECRET_FILE=str(readable))
    assert "* is no host" in refusal("tcp://*:1")
