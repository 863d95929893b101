"""What `spawn_procs` and `spawn` start, and what goes wrong there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    ActorError,
    BootstrapCommand,
    Point,
    ProcMesh,
    SupervisionError,
    context,
    default_bootstrap_cmd,
    endpoint,
    this_host,
    this_proc,
)
from monarch.core.ids import ProcId, Uid
from monarch.mesh.shape import Region, Slice
from monarch.mesh.starting import LaunchRequest
from monarch.testing import TestClient, fresh_client
from tests.mesh.actors import AsyncWorker, EndlessInit, Worker
from tests.mesh.workers import LIMIT_S
from tests.ports import free_port
from tests.until import until


class State:
    ready = ""


def prepare() -> None:
    State.ready = f"prepared in {os.getpid()}"


async def prepare_async() -> None:
    import asyncio

    await asyncio.sleep(0)
    State.ready = "prepared async"


def prepare_with_actor() -> None:
    helper = this_proc().spawn("helper", Worker)
    State.ready = str(helper.echo.call_one("spawned by the bootstrap").get(10))


def refuse() -> None:
    raise LookupError("no licence")


class Prepared(Actor):
    def __init__(self) -> None:
        self.at_birth = State.ready

    @endpoint
    def state(self) -> str:
        return self.at_birth


class Odd(Actor):
    def __getattr__(self, name: str) -> Any:
        return {"own": "odd"}[name]

    @endpoint
    def name(self) -> str:
        return str(self.own)


class User(Actor):
    """Spawns on processes that it has heard of."""

    @endpoint
    def use(self, procs: ProcMesh) -> str:
        return str(procs.spawn("worker", Worker).echo.call_one("served").get(20))


@pytest.mark.parametrize("who", ["an actor", "the client"])
@pytest.mark.parametrize("transport", ["inproc", pytest.param("ipc", marks=pytest.mark.slow)])
def test_processes_can_be_used_before_their_host_has_heard_of_their_launch(transport: str, who: str) -> None:
    with fresh_client(transport):
        client = context().actor_instance
        runtime = client.proc_runtime
        proc = ProcId(Uid.instance("late"), "", runtime.proc_id)
        procs = ProcMesh("late", [proc], Region((), Slice(0, (), ())))
        if who == "an actor":
            used = this_host().spawn_procs().spawn("user", User).use.call_one(procs)
        else:
            used = procs.spawn("worker", Worker).echo.call_one("served")
        until(lambda: proc.key in runtime.locator.unlaunched)
        runtime.tell(runtime.proc_id, "launch", client.actor_id, [LaunchRequest(proc, "monarch: late")])
        assert used.get(20) == "served"


# Shapes


def test_sizes_are_those_of_the_host_then_per_host(client: TestClient) -> None:
    assert this_host().spawn_procs().sizes == {}
    procs = this_host().spawn_procs({"a": 2, "b": 1})
    assert procs.sizes == {"a": 2, "b": 1}
    assert len(set(procs.spawn("w", Worker).proc_key.call().get(10).values())) == 2


def test_wrong_sizes_and_bindings_are_refused_at_the_call(monarch_client: TestClient) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        this_host().spawn_procs({"gpus": 0})
    with pytest.raises(ValueError, match=r"proc_bind length \(1\) must equal procs_per_host \(4\)"):
        this_host().spawn_procs({"gpus": 4}, proc_bind=[{"cpus": "0"}])
    with pytest.raises(ValueError, match="numa"):
        this_host().spawn_procs(proc_bind=[{"numa": "0"}])
    with pytest.raises(ValueError, match="taskset"):
        this_host().spawn_procs(proc_bind=[{"cpus": "0", "membind": "0"}])


def test_spawn_refuses_what_is_no_actor_and_arguments_that_do_not_fit(monarch_client: TestClient) -> None:
    procs = this_host().spawn_procs({"gpus": 2})

    with pytest.raises(ValueError, match="subclass of Actor"):
        procs.spawn("x", str)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"Worker\.__init__"):
        procs.spawn("x", Worker, 1, 2, 3)
    assert list(procs.spawn("x", Worker, start=5).add.call(0).get(10).values()) == [5, 5]


@pytest.mark.parametrize("monarch_settings", [{"mixed_endpoints": False}])
def test_mixed_classes_are_refused_where_the_setting_says_so(monarch_client: TestClient) -> None:
    procs = this_host().spawn_procs()

    with pytest.raises(ValueError, match="mixes both async and sync"):
        procs.spawn("x", AsyncWorker)
    assert procs.spawn("x", Worker).echo.call_one(1).get(10) == 1


def test_a_class_whose_getattr_raises_is_served(client: TestClient) -> None:
    actor = this_host().spawn_procs().spawn("odd", Odd)

    assert actor.name.call_one().get(10) == "odd"


def test_names_may_be_used_again(client: TestClient) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    first, second = procs.spawn("same", Worker, 1), procs.spawn("same", Worker, 2)

    assert list(first.add.call(0).get(10).values()) == [1, 1]
    assert list(second.add.call(0).get(10).values()) == [2, 2]
    first.stop().get(10)
    assert list(procs.spawn("same", Worker, 3).add.call(0).get(10).values()) == [3, 3]
    assert list(second.add.call(0).get(10).values()) == [2, 2]


def test_initialized_resolves_for_processes_and_actors(client: TestClient) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    workers = procs.spawn("workers", Worker)

    assert procs.initialized.get(10) is True
    assert procs.slice(gpus=1).initialized.get(10) is True
    assert workers.initialized.get(10) is None
    assert this_host().initialized.get(10) is True
    assert this_proc().initialized.get(10) is True


def test_this_proc_is_the_clients_own_process(client: TestClient) -> None:
    local = this_proc().spawn("local", Worker)

    assert local.pid.call_one().get(10) == os.getpid()
    assert local.echo.call_one([1]).get(10) == [1]
    local.stop().get(10)


def test_two_meshes_live_side_by_side(client: TestClient) -> None:
    first, second = this_host().spawn_procs({"gpus": 1}), this_host().spawn_procs({"gpus": 1})
    a, b = first.spawn("a", Worker), second.spawn("b", Worker)

    assert a.slice(gpus=0).call_other.call_one(b.slice(gpus=0), 1).get(10) == 1
    first.stop().get(10)
    assert list(b.echo.call(2).get(10).values()) == [2]


# Bootstrap functions


@pytest.mark.parametrize(
    ("function", "text"),
    [
        pytest.param(prepare, "prepared in", marks=pytest.mark.slow),
        pytest.param(prepare_async, "prepared async", marks=pytest.mark.slow),
        (prepare_with_actor, "spawned by the bootstrap"),
    ],
)
def test_a_bootstrap_function_runs_before_any_actor(real_client: TestClient, function: Any, text: str) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap=function)
    states = procs.spawn("prepared", Prepared).state.call().get(10)

    assert all(text in state for state in states.values())
    assert procs.initialized.get(10) is True
    assert State.ready == ""


def test_a_bootstrap_function_that_raises_fails_the_start_and_what_was_spawned(client: TestClient) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap=refuse)
    workers = procs.spawn("workers", Worker)
    pending = workers.echo.call(1)

    with pytest.raises(ActorError, match="no licence"):
        procs.initialized.get(10)
    with pytest.raises(SupervisionError, match="no licence"):
        pending.get(10)
    ranks = sorted(client.expect_fault("no licence").crashed_ranks[0] for _ in range(2))
    assert ranks == [0, 1]
    late = procs.slice(gpus=0).spawn("late", Worker)
    with pytest.raises(SupervisionError, match="no licence"):
        late.echo.call_one(1).get(10)
    client.expect_fault("no licence")
    procs.stop().get(10)


def test_actors_that_wait_for_a_bootstrap_function_can_be_stopped(client: TestClient, channel: Any) -> None:
    """They are never made then, whatever becomes of the function."""
    ready, receiver = channel

    def wait() -> None:
        from monarch.actor import Channel

        port, inner = Channel[Any].open()
        ready.send(port)
        inner.recv().get(30)

    procs = this_host().spawn_procs(bootstrap=wait)
    release = receiver.recv().get(10)
    born, births = __import__("monarch.actor").actor.Channel.open()
    waiting = procs.spawn("waiting", EndlessInit, born)
    pending = waiting.ping.call_one()
    waiting.stop().get(10)

    with pytest.raises(SupervisionError, match="stopped"):
        pending.get(10)
    release.send("go")
    assert procs.initialized.get(10) is True
    assert procs.spawn("later", Worker).echo.call_one(1).get(10) == 1
    with pytest.raises(TimeoutError):
        births.recv().get(0.02)


# Commands, interpreters, environment, binding


@pytest.mark.slow
def test_the_environment_of_a_command_is_there_per_rank(real_client: TestClient) -> None:
    def command(point: Point) -> Any:
        return default_bootstrap_cmd().with_env({"RANK_OF_TEST": str(point.rank)})

    procs = this_host().spawn_procs({"gpus": 3}, bootstrap_command=command)

    assert list(procs.spawn("w", Worker).environ.call("RANK_OF_TEST").get(10).values()) == ["0", "1", "2"]


def test_a_process_that_cannot_start_is_named(real_client: TestClient) -> None:
    def command(point: Point) -> Any:
        return default_bootstrap_cmd() if point.rank == 0 else BootstrapCommand("/bin/false", None, (), {})

    procs = this_host().spawn_procs({"gpus": 2}, bootstrap_command=command)

    with pytest.raises(SupervisionError, match=r"^error spawning proc mesh: statuses: anon\{'gpus': 1/2\}: .* code 1"):
        procs.initialized.get(20)
    real_client.expect_fault("non-zero code 1")


def test_the_environment_is_there_before_the_first_import_of_a_users_module(
    real_client: TestClient, tmp_path: Any
) -> None:
    (tmp_path / "reads_environment.py").write_text(
        "import os\nfrom monarch.actor import Actor, endpoint\nAT_IMPORT = os.environ.get('RANK_OF_TEST')\n"
        "class Reader(Actor):\n    @endpoint\n    def read(self) -> str:\n        return AT_IMPORT\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import reads_environment  # type: ignore[import-not-found]

        command = default_bootstrap_cmd().with_env({"RANK_OF_TEST": "seen"})
        procs = this_host().spawn_procs(bootstrap_command=command)
        assert procs.spawn("reader", reads_environment.Reader).read.call_one().get(10) == "seen"
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("reads_environment", None)


def test_a_module_that_starts_processes_where_it_is_imported_does_not_do_so_in_these(
    real_client: TestClient, tmp_path: Any
) -> None:
    """Each would import it, too, and start more, and so on."""
    (tmp_path / "starts_processes.py").write_text(
        "from monarch.actor import Actor, endpoint, this_host\n"
        "class Worker(Actor):\n    @endpoint\n    def work(self) -> int:\n        return 1\n"
        "procs = this_host().spawn_procs()\n"
        "workers = procs.spawn('workers', Worker)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import starts_processes  # type: ignore[import-not-found]

        with pytest.raises(SupervisionError, match=r"starts_processes.Worker was imported .* `if __name__ == "):
            starts_processes.workers.work.call_one().get(20)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("starts_processes", None)
    real_client.expect_fault("starts processes where it is imported")


@pytest.mark.slow
def test_another_interpreter_is_run(real_client: TestClient, tmp_path: Any) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nMARK_OF_WRAPPER=yes exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)

    procs = this_host().with_python_executable(str(wrapper)).spawn_procs({"gpus": 2})

    assert list(procs.spawn("w", Worker).environ.call("MARK_OF_WRAPPER").get(20).values()) == ["yes", "yes"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is not installed")
def test_processes_are_bound_to_processors(real_client: TestClient) -> None:
    class Bound(Actor):
        @endpoint
        def cpus(self) -> set[int]:
            return os.sched_getaffinity(0)

    usable = sorted(os.sched_getaffinity(0))
    bindings = [{"cpus": str(usable[0])}, {"cpus": str(usable[-1])}]
    procs = this_host().spawn_procs({"gpus": 2}, proc_bind=bindings)

    assert list(procs.spawn("bound", Bound).cpus.call().get(20).values()) == [{usable[0]}, {usable[-1]}]


@pytest.mark.slow
def test_a_command_that_does_not_exist_is_said_at_the_first_use(real_client: TestClient) -> None:
    procs = this_host().with_python_executable("/no/such/python").spawn_procs({"gpus": 2})
    workers = procs.spawn("workers", Worker)

    with pytest.raises(SupervisionError, match="/no/such/python"):
        workers.echo.call(1).get(10)
    with pytest.raises(SupervisionError, match="/no/such/python"):
        procs.initialized.get(10)
    for _ in range(2):
        real_client.expect_fault("/no/such/python")


def test_what_needs_a_real_process_says_so_over_inproc(monarch_client: TestClient) -> None:
    assert this_host().is_fake_in_process
    procs = this_host().spawn_procs(bootstrap_command=default_bootstrap_cmd().with_env({"A": "b"}))

    with pytest.raises(SupervisionError, match="inproc"):
        procs.spawn("w", Worker).echo.call_one(1).get(10)
    monarch_client.expect_fault("inproc")


def test_settings_reach_the_processes() -> None:
    from monarch.testing import fresh_client

    class Settings(Actor):
        @endpoint
        def read(self) -> tuple[Any, Any]:
            from monarch.config import get_global_config

            config = get_global_config()
            return config["cleanup_timeout"], config["link_driver"]

    with fresh_client("ipc", "thread", cleanup_timeout="7s"):
        assert this_host().spawn_procs().spawn("s", Settings).read.call_one().get(10) == ("7s", "thread")


def nowhere() -> str:
    """An address where processes of this host listen, and that they tell others, who find no way there."""
    port = free_port()
    return f"tcp://255.255.255.255:{port}@tcp://127.0.0.1:{port}"


def test_a_process_that_finds_no_way_to_its_launcher_says_where_that_is_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine whose network has no loopback."""
    monkeypatch.setattr("monarch.core.gateway.Gateway.hand_down", lambda self: [])
    with fresh_client(nowhere(), message_delivery_timeout="100ms") as client:
        error = this_host().spawn_procs().initialized.exception(LIMIT_S)
        client.expect_fault("cannot be reached")

    assert isinstance(error, SupervisionError)
    assert "could not be reached for 0.1 s: LinkSevered: tcp://255.255.255.255:" in str(error)
    assert "cannot be reached: Network is unreachable" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("command", [None, BootstrapCommand(sys.executable, args=("-m", "monarch.launch.bootstrap"))])
def test_a_process_that_is_given_up_before_it_has_found_a_way_to_its_launcher_has_said_why(
    command: BootstrapCommand | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch.core.gateway.Gateway.hand_down", lambda self: [])
    with fresh_client(nowhere(), mesh_proc_spawn_max_idle="8s") as client:
        error = this_host().spawn_procs(bootstrap_command=command).initialized.exception(LIMIT_S)
        client.expect_fault("did not come up")

    assert "did not come up within 8 s; it was to connect to tcp://255.255.255.255:" in str(error)
    assert "cannot reach its launcher" in str(error)
    assert "cannot be reached: Network is unreachable" in str(error)


FEW_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
import monarch.actor
from tests.mesh.actors import Worker
monarch.actor.unhandled_fault_hook = lambda failure: None
workers = monarch.actor.this_host().spawn_procs({"gpus": 16}).spawn("workers", Worker)
print(workers.pid.call().exception(25))  # they would be given up after 30 s
"""


@pytest.mark.slow
def test_where_descriptors_are_too_few_for_the_links_the_error_says_so_soon() -> None:
    environ = {"MONARCH_TRANSPORT": "tcp", "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)

    assert "no descriptor left for a link to it" in done.stdout, done.stdout + done.stderr
    assert "RLIMIT_NOFILE is 100, the limit of open files, `ulimit -n`" in done.stdout
    assert "Raise that limit before the program starts" in done.stdout
    assert "Traceback" not in done.stderr
