"""Processes that die: who hears of it, how soon, and what goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from monarch.actor import Actor, Channel, SupervisionError, context, endpoint, this_host
from monarch.testing import TestClient, fresh_client, wait_until_gone
from tests.forks import fork
from tests.mesh.actors import Cleaner, Parent, Worker
from tests.until import until

LIMIT_S = 20.0  # for processes to come up on a busy machine; that one died, the kernel tells at once


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGSEGV, marks=pytest.mark.slow),
    ],
)
def test_calls_to_a_killed_process_fail_soon_and_say_why(real_client: TestClient, channel: Any, signum: int) -> None:
    port, receiver = channel
    workers = this_host().spawn_procs({"gpus": 3}).spawn("workers", Worker)
    pid = workers.slice(gpus=1).pid.call_one().get(LIMIT_S)
    held = workers.slice(gpus=1).hold.call_one(port)
    receiver.recv().get(LIMIT_S)
    queued = workers.echo.call(1)

    os.kill(pid, signum)
    for future in (held, queued, workers.echo.call(2), workers.slice(gpus=1).echo.call_one(3)):
        with pytest.raises(SupervisionError, match=rf"failed: Killed\(sig={signum}\)") as caught:
            future.get(LIMIT_S)
        assert "Worker workers{'gpus': 1/3}" in str(caught.value)
        assert f"process {pid}" in str(caught.value)
        assert "at rank 1" in str(caught.value)

    failure = real_client.expect_fault()
    assert (failure.crashed_ranks, failure.signal, failure.pid) == ([1], signum, pid)
    late = workers.slice(gpus=1).echo.call_one(4).exception(LIMIT_S)
    assert isinstance(late, SupervisionError) and late.failure.time_s == failure.time_s
    assert list(workers.slice(gpus=slice(0, 3, 2)).echo.call(1).get(LIMIT_S).values()) == [1, 1]


class Hoarder(Actor):
    @endpoint
    def take_all_threads(self) -> None:
        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        threading.Thread.start = refuse  # type: ignore[method-assign]


@pytest.mark.slow
def test_an_actor_for_which_there_is_no_thread_fails(real_client: TestClient) -> None:
    procs = this_host().spawn_procs()
    procs.spawn("hoarder", Hoarder).take_all_threads.call_one().get(LIMIT_S)

    worker = procs.spawn("worker", Worker)
    with pytest.raises(SupervisionError, match="no thread could be started for it"):
        worker.echo.call_one(1).get(LIMIT_S)
    assert real_client.expect_fault("can't start new thread").actor_name == "worker"


@pytest.mark.parametrize("code", [42, *(pytest.param(code, marks=pytest.mark.slow) for code in (0, 1))])
def test_calls_to_a_process_that_exits_fail_with_the_code(real_client: TestClient, code: int) -> None:
    workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)
    workers.echo.call(1).get(LIMIT_S)

    with pytest.raises(SupervisionError) as caught:
        workers.slice(gpus=0).exit_process.call_one(code).get(LIMIT_S)

    text = f"the process this actor was running on exited with {'non-zero ' if code else ''}code {code}"
    assert text in str(caught.value)
    assert real_client.expect_fault(text).exit_code == code
    with pytest.raises(SupervisionError, match=text):
        workers.echo.call(1).get(LIMIT_S)


@pytest.mark.parametrize(
    ("method", "text"), [("exec_process", "replaced itself by another program"), ("exit_main_thread", "code 70")]
)
def test_a_process_that_has_ended_by_half_is_missed(real_client: TestClient, method: str, text: str) -> None:
    worker = this_host().spawn_procs().spawn("worker", Worker)
    with pytest.raises(SupervisionError, match=text):
        getattr(worker, method).call_one().get(LIMIT_S)
    assert real_client.expect_fault(text).pid


@pytest.mark.slow
def test_a_stream_gets_what_the_living_reply(real_client: TestClient, channel: Any) -> None:
    port, receiver = channel
    workers = this_host().spawn_procs({"gpus": 3}).spawn("workers", Worker)
    pid = workers.slice(gpus=0).pid.call_one().get(LIMIT_S)
    workers.slice(gpus=0).hold.broadcast(port)
    receiver.recv().get(LIMIT_S)
    futures = workers.echo.stream(1)
    first = [next(futures).get(LIMIT_S) for _ in range(2)]

    os.kill(pid, signal.SIGKILL)

    assert first == [1, 1]
    with pytest.raises(SupervisionError, match="Killed"):
        next(futures).get(LIMIT_S)
    real_client.expect_fault("Killed")


def test_every_mesh_with_a_member_there_hears(client: TestClient) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    meshes = {name: procs.spawn(name, Worker) for name in ("one", "two")}
    for mesh in meshes.values():
        mesh.echo.call(1).get(LIMIT_S)

    client.kill(procs.slice(gpus=0))

    failures = [client.expect_fault("Killed") for _ in range(2)]
    assert sorted(failure.mesh_name for failure in failures) == ["one", "two"]
    for mesh in meshes.values():
        with pytest.raises(SupervisionError, match="Killed"):
            mesh.echo.call(1).get(LIMIT_S)
        assert mesh.slice(gpus=1).echo.call_one(1).get(LIMIT_S) == 1


def test_a_process_without_actors_is_missed_too(client: TestClient) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, name="empty")
    procs.initialized.get(LIMIT_S)

    client.kill(procs.slice(gpus=1))

    failure = client.expect_fault("Killed")
    assert (failure.mesh_name, failure.crashed_ranks, failure.coordinates) == ("empty", [1], [{"gpus": 1}])


def test_an_actor_with_pending_calls_to_a_dead_process_hears_soon(client: TestClient, channel: Any) -> None:
    """The two processes talk directly; the client is not on their way."""
    port, receiver = channel
    procs = this_host().spawn_procs({"gpus": 2})
    workers = procs.spawn("workers", Worker)
    dead, alive = workers.slice(gpus=0), workers.slice(gpus=1)
    assert alive.call_other.call_one(dead, 1).get(LIMIT_S) == 1
    dead.hold.broadcast(port)
    receiver.recv().get(LIMIT_S)
    pending = alive.call_other.call_one(dead, 2)

    client.kill(procs.slice(gpus=0))

    with pytest.raises(Exception, match="Killed"):
        pending.get(LIMIT_S)
    with pytest.raises(Exception, match="Killed"):
        alive.call_other.call_one(dead, 3).get(LIMIT_S)
    client.expect_fault("Killed")


def test_a_stop_after_a_death_succeeds_and_new_processes_can_be_spawned(client: TestClient) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    workers = procs.spawn("workers", Worker)
    workers.echo.call(1).get(LIMIT_S)
    client.kill(procs)
    for _ in range(2):
        client.expect_fault("Killed")

    workers.stop().get(LIMIT_S)
    procs.stop().get(LIMIT_S)
    assert list(this_host().spawn_procs({"gpus": 2}).spawn("w", Worker).echo.call(1).get(LIMIT_S).values()) == [1, 1]


def test_a_process_that_dies_while_it_starts_is_reported(real_client: TestClient) -> None:
    from attrs import evolve

    from monarch.actor import default_bootstrap_cmd

    command = evolve(default_bootstrap_cmd(), program="/bin/false", args=())
    workers = this_host().spawn_procs({"gpus": 2}, bootstrap_command=command).spawn("workers", Worker)

    with pytest.raises(SupervisionError, match="code 1"):
        workers.echo.call(1).get(LIMIT_S)
    for _ in range(2):
        real_client.expect_fault("code 1")


def test_the_children_of_an_actor_end_when_its_process_dies(real_client: TestClient, channel: Any) -> None:
    port, _ = channel
    procs = this_host().spawn_procs({"gpus": 2})
    parent = procs.slice(gpus=0).spawn("parent", Parent, port, "handle")
    own = parent.spawn_procs.call_one(2, "own").get(LIMIT_S)
    guests = parent.spawn_on.call_one(procs.slice(gpus=1), "guests").get(LIMIT_S)
    pids = list(own.pid.call().get(LIMIT_S).values())
    guests.echo.call_one(1).get(LIMIT_S)

    with pytest.raises(SupervisionError, match="Killed"):
        parent.kill_process.call_one().get(LIMIT_S)

    for pid in pids:
        wait_until_gone(pid)
    until(lambda: _fails_with("owner", guests))  # their process hears of it on a link of its own
    survivors = procs.slice(gpus=1).spawn("survivor", Worker)
    assert survivors.echo.call_one(1).get(LIMIT_S) == 1  # the process lives on
    real_client.expect_fault("Killed")


def _fails_with(word: str, actors: Any) -> bool:
    try:
        actors.echo.call_one(1).get(LIMIT_S)
    except SupervisionError as error:
        assert word in str(error)
        return True
    return False


@pytest.mark.slow
def test_an_owner_hears_of_the_death_of_its_processes(real_client: TestClient, channel: Any) -> None:
    port, receiver = channel
    parent = this_host().spawn_procs().spawn("parent", Parent, port, "handle")
    own = parent.spawn_procs.call_one(2, "own").get(LIMIT_S)

    own.slice(gpus=1).kill_process.broadcast()

    name, ranks, report, on_thread = receiver.recv().get(LIMIT_S)
    assert (name, ranks, on_thread) == ("own", [1], True)
    assert "Killed(sig=9)" in report
    assert own.slice(gpus=0).echo.call_one(1).get(LIMIT_S) == 1
    assert real_client.faults.values == []


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_client_that_is_killed_leaves_no_process(signum: int) -> None:
    program = (
        "from monarch.actor import this_host\nfrom tests.mesh.actors import Parent, Worker\n"
        "from monarch.actor import Channel\nport, _ = Channel.open()\n"
        "procs = this_host().spawn_procs({'gpus': 2})\n"
        "pids = list(procs.spawn('w', Worker).pid.call().get(10).values())\n"
        "parent = procs.slice(gpus=0).spawn('p', Parent, port, 'handle')\n"
        "pids += parent.spawn_procs.call_one(2, 'own').get(10).pid.call().get(10).values()\n"
        "print(*pids, flush=True)\nimport time; time.sleep(60)\n"
    )
    environ = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "MONARCH_TRANSPORT": "ipc"}
    driver = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 4

    driver.send_signal(signum)
    driver.communicate(timeout=20)

    for pid in pids:
        wait_until_gone(pid)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_of_the_client_gets_a_clear_error(real_client: TestClient) -> None:
    workers = this_host().spawn_procs({"gpus": 1}).spawn("workers", Worker)
    workers.echo.call(1).get(LIMIT_S)
    read, write = os.pipe()

    pid = fork()
    if not pid:
        text = "nothing was raised"
        try:
            workers.echo.call(1)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        try:
            str(context().actor_instance.actor_id)
        except BaseException as error:
            text += f" | {type(error).__name__}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    said = os.read(read, 10_000).decode()
    os.close(read)

    assert said.startswith("RuntimeError: this process was forked")
    assert said.endswith("| RuntimeError")
    assert list(workers.echo.call(2).get(LIMIT_S).values()) == [2]


@pytest.mark.parametrize(
    ("transport", "driver"),
    [
        ("ipc", "caller"),
        pytest.param("ipc", "thread", marks=pytest.mark.slow),
        pytest.param("tcp", "caller", marks=pytest.mark.slow),
        pytest.param("tcp", "thread", marks=pytest.mark.slow),
    ],
)
def test_a_busy_process_is_not_dead(transport: str, driver: str) -> None:
    """An endpoint that holds the interpreter delays its own actor only, and nobody takes it for dead."""

    class Busy(Actor):
        @endpoint
        def spin(self, ready: Any) -> int:
            port, receiver = Channel[Any].open()
            ready.send(port)
            done = receiver.recv()
            turns = 0
            while not done.done():
                turns += 1
            return turns

    with fresh_client(transport, driver):
        port, receiver = Channel[Any].open()
        procs = this_host().spawn_procs({"gpus": 1})
        busy, other = procs.spawn("busy", Busy), procs.spawn("other", Worker)
        spinning = busy.spin.call(port)
        release = receiver.recv().get(LIMIT_S)
        for number in range(50):
            assert list(other.echo.call(number).get(LIMIT_S).values()) == [number]
        release.send("enough")
        assert next(iter(spinning.get(LIMIT_S).values())) > 0


HELD = """
import ctypes, sys
from monarch.actor import Actor, endpoint, this_host
from monarch.testing import fresh_client

class Held(Actor):
    @endpoint
    def hold(self, seconds):
        return ctypes.PyDLL(None).sleep(seconds)
    @endpoint
    def size(self, data):
        return len(data)

class Owner(Actor):  # a process besides the keeper that loses nothing
    @endpoint
    def watch(self, seconds):
        self.held = this_host().spawn_procs().spawn("held", Held)
        holding = self.held.hold.call_one(seconds)
        sizes = [self.held.size.call_one(bytes(8 << 20)) for _ in range(4)]  # more than the system buffers
        return self.held, holding.get(), [size.get() for size in sizes]

with fresh_client(sys.argv[1]):
    owner = this_host().spawn_procs().spawn("owner", Owner)
    held, left, sizes = owner.watch.call_one(60).get()
    assert (left, sizes) == (0, [8 << 20] * 4)
    assert held.size.call_one(b"x").get() == 1
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_interpreter_that_native_code_holds_for_a_minute_is_not_dead() -> None:
    command = [sys.executable, "-W", "error", "-c", HELD]
    names = ("tcp", "ipc", "shm")
    runs = [subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in names]
    ends = [(run.communicate(timeout=150)[1], run.returncode) for run in runs]
    assert ends == [("", 0)] * 3


def test_a_death_during_a_stop_ends_it_and_is_missed_by_nobody(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    procs = this_host().spawn_procs({"gpus": 2})
    cleaners = procs.spawn("cleaners", Cleaner, port, "c")
    cleaners.hold.broadcast(port)  # both, or the other would end before it is killed
    for _ in range(2):
        receiver.recv().get(LIMIT_S)
    stopping = procs.stop()
    client.kill(procs)

    stopping.get(LIMIT_S)
    told = [client.expect_fault(r"Killed\(sig=9\).*, while it was being stopped") for _ in range(2)]
    assert sorted(failure.crashed_ranks[0] for failure in told) == [0, 1]


@pytest.mark.slow
def test_many_threads_with_pending_calls_all_hear(real_client: TestClient, channel: Any) -> None:
    port, receiver = channel
    worker = this_host().spawn_procs().spawn("worker", Worker)
    pid = worker.pid.call_one().get(LIMIT_S)
    worker.hold.broadcast(port)
    receiver.recv().get(LIMIT_S)
    errors: list[BaseException | None] = []
    started = threading.Barrier(9)

    def wait() -> None:
        future = worker.echo.call_one(1)
        started.wait(10)
        errors.append(future.exception(10))

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    started.wait(10)
    os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join(10)

    assert [type(error) for error in errors] == [SupervisionError] * 8
    real_client.expect_fault("Killed")
