"""Stopping: what is queued is served, children go first, cleanup runs once, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from monarch.actor import BootstrapCommand, Channel, SupervisionError, context, shutdown_context, this_host, this_proc
from monarch.config import configured
from monarch.errors import MeshError
from monarch.launch.process import Exit
from monarch.mesh.host import _down_of
from monarch.testing import TestClient, fresh_client, wait_until_gone
from tests.mesh.actors import (
    AsyncCleaner,
    AsyncWorker,
    Cleaner,
    CrashingCleaner,
    FailingCleaner,
    HangingCleaner,
    Worker,
)
from tests.mesh.conftest import Shared
from tests.until import until

Spawn = Callable[..., Any]


@pytest.fixture
def alone(shared: Shared) -> Any:
    return shared.procs.slice(hosts=1, gpus=0)


def test_messages_that_are_queued_are_served_before_the_end(shared: Shared, alone: Any, channel: Any) -> None:
    port, receiver = channel
    cleaner = alone.spawn("cleaner", Cleaner, port, "c")
    cleaner.hold.broadcast(port)
    release = receiver.recv().get(10)
    for number in range(20):
        cleaner.serve.broadcast(number)
    last = cleaner.serve.call_one(20)
    stopping = cleaner.stop()
    late = cleaner.serve.call_one(99)
    release.send("go")

    assert last.get(10) is None
    assert receiver.recv().get(10) == ("c", None, list(range(21)))
    assert stopping.get(10) is None
    with pytest.raises(SupervisionError, match="stopped"):
        late.get(10)


def test_calls_after_a_stop_say_so(spawn: Spawn, alone: Any) -> None:
    worker = spawn(Worker, on=alone)
    worker.stop().get(10)

    with pytest.raises(SupervisionError, match="stopped") as caught:
        worker.echo.call_one(1).get(10)
    assert "worker.echo" in str(caught.value)
    with pytest.raises(SupervisionError, match="stopped"):
        next(worker.echo.stream(1)).get(10)
    worker.note.broadcast(1)  # is dropped, and is nobody's failure


def test_a_stop_twice_is_a_stop_once(spawn: Spawn, alone: Any, channel: Any) -> None:
    port, receiver = channel
    cleaner = alone.spawn("cleaner", Cleaner, port, "c")

    first, second = cleaner.stop(), cleaner.stop()
    first.get(10)
    second.get(10)
    cleaner.stop().get(10)

    assert receiver.recv().get(10)[0] == "c"
    with pytest.raises(TimeoutError):
        receiver.recv().get(0.02)


def test_a_stop_can_be_awaited(spawn: Spawn) -> None:
    async def work() -> None:
        await spawn(Worker).stop()

    asyncio.run(work())


def test_children_are_stopped_before_their_owner_cleans_up(shared: Shared, alone: Any, channel: Any) -> None:
    port, receiver = channel
    cleaner = alone.spawn("cleaner", Cleaner, port, "parent", child=True)
    cleaner.serve.call_one(1).get(10)
    cleaner.stop().get(10)

    names = [receiver.recv().get(10)[0] for _ in range(2)]
    assert names == ["child of parent", "parent"]


def test_cleanup_gets_an_exception_after_a_failure_and_none_after_a_stop(
    shared: Shared, alone: Any, channel: Any
) -> None:
    port, receiver = channel
    failing = alone.spawn("failing", Cleaner, port, "f")
    failing.fail.broadcast()
    name, text, _ = receiver.recv().get(10)
    assert name == "f"
    assert "ValueError: no" in text
    shared.client.expect_fault("ValueError: no")

    aborting = alone.spawn("aborting", Cleaner, port, "a")
    aborting.abort.broadcast("because of this")
    assert "actor explicitly aborted due to: because of this" in receiver.recv().get(10)[1]
    shared.client.expect_fault("actor explicitly aborted due to: because of this")

    again = alone.spawn("aborting", Cleaner, port, "a")
    again.abort.broadcast(None)
    shared.client.expect_fault("no reason provided")
    receiver.recv().get(10)

    ending = alone.spawn("ending", Cleaner, port, "e")
    ending.end_yourself.broadcast()
    ending.serve.broadcast(1)
    assert receiver.recv().get(10)[:2] == ("e", None)


def test_concurrent_endpoints_are_cancelled_before_an_async_cleanup(shared: Shared, alone: Any, channel: Any) -> None:
    port, receiver = channel
    cleaner = alone.spawn("cleaner", AsyncCleaner, port)
    pending = [cleaner.wait_for_ever.call_one(port) for _ in range(2)]
    assert [receiver.recv().get(10) for _ in range(2)] == ["waiting"] * 2
    stopping = cleaner.stop()

    assert receiver.recv().get(10) == ["cancelled", "cancelled", "cleanup"]
    stopping.get(10)
    for each in pending:
        with pytest.raises(SupervisionError, match="stopped"):
            each.get(10)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True], ids=["awaits", "blocks"])
def test_a_cleanup_that_hangs_is_cut_off(client: TestClient, blocks: bool) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    hanging = procs.spawn("hanging", HangingCleaner, blocks)
    hanging.ping.call().get(10)

    hanging.stop().get(10)
    told = [client.expect_fault("__cleanup__ has not ended within 1 s") for _ in range(2)]
    assert sorted(failure.crashed_ranks[0] for failure in told) == [0, 1]
    procs.stop().get(10)


def test_a_cleanup_that_raises_is_a_failure(shared: Shared, alone: Any) -> None:
    failing = alone.spawn("failing", FailingCleaner)
    failing.ping.call_one().get(10)
    failing.stop().get(10)

    assert shared.client.expect_fault("cleanup says no").mesh_name == "failing"


def test_who_is_to_stop_and_meets_what_has_been_stopped_has_not_failed(spawn: Spawn, alone: Any, channel: Any) -> None:
    port, receiver = channel
    other, worker = spawn(Worker, on=alone), spawn(Worker, on=alone)
    worker.call_when_told.broadcast(port, other)
    go_on = receiver.recv().get(10)
    last = worker.echo.call_one("served, too")
    stopping = worker.stop()
    with pytest.raises(SupervisionError, match="stopped"):
        worker.echo.call_one(1).get(10)
    other.stop().get(10)
    go_on.send(None)

    assert last.get(10) == "served, too"
    stopping.get(10)  # and the fixture finds no fault


def test_who_meets_what_has_been_stopped_has_failed_when_it_is_to_go_on(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    other, worker = (this_host().spawn_procs().spawn(name, Worker) for name in ("other", "worker"))
    other.stop().get(10)
    worker.call_when_told.broadcast(port, other)
    receiver.recv().get(10).send(None)

    assert client.expect_fault("has status: stopped").mesh_name == "worker"


@pytest.fixture
def cut_short() -> Iterator[Callable[[float], None]]:
    """Ends the process of the client, where its actors are concerned: they have so many seconds left."""
    with fresh_client("inproc"):
        yield partial(context().actor_instance.proc_runtime.agent.cut_short, "it is over")


def test_an_async_endpoint_gives_way_to_the_cleanup_when_the_time_is_short(cut_short: Callable[[float], None]) -> None:
    port, receiver = Channel[Any].open()
    cleaner = this_proc().spawn("cleaner", AsyncCleaner, port)
    pending = cleaner.work_for_ever.call_one(port)
    assert receiver.recv().get(10) == "waiting"
    queued = cleaner.work_for_ever.call_one(port)
    cut_short(60)

    assert receiver.recv().get(10) == ["cancelled", "cleanup"]
    for each in (pending, queued):
        with pytest.raises(SupervisionError, match="it is over"):
            each.get(10)


def test_actors_that_cannot_come_to_their_cleanup_in_time_are_named(
    cut_short: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    port, receiver = Channel[Any].open()
    this_proc().spawn("clean", Cleaner, port, "it was busy").hold.broadcast(port)
    this_proc().spawn("plain", Worker).hold.broadcast(port)
    releases = [receiver.recv().get(10) for _ in range(2)]
    cut_short(0.0)

    until(lambda: "cleanup.cut_off" in caplog.text)

    for release in releases:
        release.send("go on")
    assert receiver.recv().get(10)[0] == "it was busy"
    assert "Cleaner clean (hold has been running for " in caplog.text
    assert "Worker plain (" not in caplog.text  # it has none; its thread may be the one that says so
    assert "process_exit_timeout" in caplog.text


@pytest.mark.parametrize(
    ("exit", "stopping", "signalled", "kind"),
    [
        (Exit(7, code=0), None, False, "exited"),
        (Exit(7, signal=9), None, False, "killed"),
        (Exit(None, error="no such file"), None, False, "exited"),
        (Exit(7, code=0), "asked", False, "stopped"),
        (Exit(7, signal=15), "asked", False, "stopped"),
        (Exit(7, signal=9), "asked", False, "killed"),
        (Exit(7, signal=9), "asked", True, "stopped"),
        (Exit(None, error="no such file"), "asked", False, "stopped"),
        (Exit(7, code=5), "asked", False, "exited"),
        (Exit(7, signal=11), "asked", False, "killed"),
        (Exit(7, code=143), "asked", True, "stopped"),  # a handler of SIGTERM may exit like this
    ],
)
def test_a_process_that_was_told_to_stop_has_stopped_unless_it_crashed(
    exit: Exit, stopping: str | None, signalled: bool, kind: str
) -> None:
    down = _down_of(exit, stopping, signalled)
    assert (down.kind, down.code, down.signal) == (kind, exit.code, exit.signal)
    assert ("while it was being stopped" in down.reason) == (stopping is not None and kind != "stopped")


def test_a_process_that_is_stopped_while_it_starts_is_told_of_as_such(
    real_client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with configured(process_exit_timeout="100ms"):
        this_host().spawn_procs(bootstrap_command=BootstrapCommand("sleep", None, ("60",), {})).stop().get(10)

    assert "it was told to stop, and has not: it is still starting" in caplog.text


@pytest.mark.parametrize("whom", ["actors", "processes", "everything"])
def test_a_process_that_crashes_in_a_cleanup_is_missed(real_client: TestClient, whom: str) -> None:
    procs = this_host().spawn_procs()
    crashing = procs.spawn("crashing", CrashingCleaner)
    crashing.initialized.get(10)
    stopped = {"actors": crashing.stop, "processes": procs.stop, "everything": shutdown_context}[whom]()
    stopped.get(10)
    assert real_client.expect_fault("exited with non-zero code 5").mesh_name == "crashing"


def test_a_stop_of_actors_leaves_their_processes(spawn: Spawn, shared: Shared) -> None:
    spawn(Worker).stop().get(10)

    assert list(spawn(AsyncWorker).echo.call(1).get(10).values()) == [1] * 4


def test_a_proc_mesh_stops_once_and_refuses_afterwards(client: TestClient) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    workers = procs.spawn("workers", Worker)
    pids = set(workers.pid.call().get(10).values())
    workers.stop().get(10)
    procs.stop().get(10)
    procs.stop().get(10)

    if not this_host().is_fake_in_process:
        for pid in pids:
            wait_until_gone(pid)
    with pytest.raises(MeshError, match="`ProcMesh` has already been stopped"):
        procs.spawn("more", Worker)
    with pytest.raises(MeshError, match="`ProcMesh` has already been stopped"):
        _ = procs.initialized
    with pytest.raises(SupervisionError, match="actor mesh is stopped due to proc mesh shutdown: stopped by client"):
        workers.echo.call(1).get(10)
    assert this_host().spawn_procs().spawn("w", Worker).echo.call_one(1).get(10) == 1


def test_a_proc_mesh_with_running_actors_cleans_them_up(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    procs = this_host().spawn_procs({"gpus": 2})
    cleaners = procs.spawn("cleaners", Cleaner, port, "c", child=True)
    cleaners.serve.call(1).get(10)
    procs.stop().get(10)

    ended = sorted(receiver.recv().get(10)[0] for _ in range(4))
    assert ended == ["c", "c", "child of c", "child of c"]
    assert client.faults.values == []


def test_a_stop_right_after_the_spawn_works(client: TestClient) -> None:
    procs = this_host().spawn_procs({"gpus": 3})
    workers = procs.spawn("workers", Worker)
    pending = workers.echo.call(1)
    procs.stop().get(10)

    error = pending.exception(10)
    assert error is None or "stopped" in str(error)
    assert client.faults.values == []


def test_leaving_a_block_stops_its_mesh(client: TestClient) -> None:
    async def work() -> Any:
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            workers = procs.spawn("workers", Worker)
            assert list((await workers.echo.call(1)).values()) == [1, 1]
            return workers

    workers = asyncio.run(work())
    with pytest.raises(SupervisionError, match="stopped"):
        workers.echo.call(1).get(10)


def test_host_mesh_stop_ends_what_was_spawned_there(client: TestClient) -> None:
    workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)
    workers.echo.call(1).get(10)
    this_host().stop().get(10)

    with pytest.raises(SupervisionError, match="stopped"):
        workers.echo.call(1).get(10)
    assert this_host().spawn_procs().spawn("w", Worker).echo.call_one(1).get(10) == 1


@pytest.mark.parametrize("transport", ["inproc", "ipc", pytest.param("tcp", marks=pytest.mark.slow)])
def test_shutdown_is_idempotent_and_ends_everything(transport: str) -> None:
    with fresh_client(transport, cleanup_timeout="1s"):
        port, receiver = Channel[Any].open()
        procs = this_host().spawn_procs({"gpus": 2})
        procs.spawn("cleaners", Cleaner, port, "c").serve.call(1).get(10)
        this_proc().spawn("local", Cleaner, port, "local").serve.call_one(1).get(10)
        first, second = shutdown_context(), shutdown_context()
        assert first.get(20) is second.get(20) is None
        shutdown_context().get(20)
        names = sorted(receiver.recv().get(10)[0] for _ in range(3))
        assert names == ["c", "c", "local"]


def test_shutdown_without_a_client_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.mesh.context._client", None)

    shutdown_context().get(1)


def test_waiting_threads_hear_of_a_stop(client: TestClient, channel: Any) -> None:
    """A call that an endpoint holds up is drained; one to the stopped mesh afterwards fails."""
    port, receiver = channel
    workers = this_host().spawn_procs({"gpus": 1}).spawn("workers", Worker)
    held = workers.slice(gpus=0).hold.call_one(port)
    release = receiver.recv().get(10)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(held.get(10)))
    waiting.start()
    stopping = workers.stop()
    release.send("released")
    waiting.join(10)

    assert got == ["released"]
    stopping.get(10)


def test_a_stop_that_an_endpoint_holds_up_fails_at_its_limit_and_can_be_tried_again(channel_in_time: Any) -> None:
    port, receiver = channel_in_time
    worker = this_host().spawn_procs().spawn("busy", Worker)
    held = worker.hold.call_one(port)
    release = receiver.recv().get(10)

    with pytest.raises(TimeoutError, match=r"Worker busy has not stopped within 0\.1"):
        worker.stop().get(10)
    again = worker.stop()
    release.send("late")

    assert held.get(10) == "late"
    again.get(10)


@pytest.fixture(params=["inproc", "ipc"])
def channel_in_time(request: pytest.FixtureRequest) -> Any:
    with fresh_client(request.param, stop_actor_timeout="100ms"):
        yield Channel[Any].open()
