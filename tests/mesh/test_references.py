"""Meshes, slices, endpoints and ports inside messages: references, which work wherever they arrive."""

from __future__ import annotations

import base64
import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    ActorMesh,
    Channel,
    HostMesh,
    Point,
    ProcMesh,
    SupervisionError,
    ValueMesh,
    as_endpoint,
    context,
    endpoint,
    this_host,
    this_proc,
)
from monarch.errors import MeshError
from monarch.testing import TestClient, fresh_client
from tests.mesh.actors import EndlessInit, Parent, Worker
from tests.mesh.conftest import Shared
from tests.until import until

Spawn = Callable[..., Any]


class Holder(Actor):
    """Gets a mesh in its constructor."""

    def __init__(self, other: Any) -> None:
        self.other = other

    @endpoint
    def ask(self, x: int) -> list[int]:
        return list(self.other.echo.call(x).get(10).values())

    @endpoint
    def give(self) -> Any:
        return self.other

    @endpoint
    def places(self) -> tuple[Any, Any, Any]:
        return this_proc(), this_host(), context().actor_instance.proc_mesh

    @endpoint
    def spawn_and_ask(self, procs: Any) -> list[int]:
        return list(procs.spawn("mine", Worker).pid.call().get(10).values())


@pytest.fixture
def alone(shared: Shared) -> Any:
    return shared.procs.slice(hosts=0, gpus=1)


@pytest.fixture
def holder(spawn: Spawn, alone: Any) -> Any:
    return spawn(Holder, spawn(Worker), on=alone)


def test_a_mesh_passed_to_a_constructor_is_called_there(holder: Any) -> None:
    assert holder.ask.call_one(3).get(10) == [3] * 4


def test_a_mesh_comes_back_as_a_result_and_works(holder: Any) -> None:
    back = holder.give.call_one().get(10)

    assert isinstance(back, ActorMesh)
    assert back.extent == {"hosts": 2, "gpus": 2}
    assert back.slice(hosts=1).echo.call(1).get(10).sizes == {"gpus": 2}


def test_slices_travel_as_slices(spawn: Spawn, alone: Any) -> None:
    workers, asker = spawn(Worker), spawn(Worker, on=alone)

    assert asker.size_of.call_one(workers.slice(gpus=1)).get(10) == {"hosts": 2}
    flat = asker.echo.call_one(workers.flatten("all").slice(all=slice(1, 4, 2))).get(10)
    assert [point for _, point, _ in flat.rank.call().get(10).values()] == [{"all": 0}, {"all": 1}]
    assert list(flat.birth.call().get(10).values()) == [{"hosts": 0, "gpus": 1}, {"hosts": 1, "gpus": 1}]


def test_an_endpoint_travels_alone(spawn: Spawn, alone: Any) -> None:
    workers, asker = spawn(Worker), spawn(Worker, on=alone)

    assert asker.use_endpoint.call_one(workers.echo, 5).get(10) == [5] * 4
    assert asker.use_endpoint.call_one(as_endpoint(workers.plain), 5).get(10) == [10] * 4


def test_a_reference_pickled_twice_still_works(spawn: Spawn, holder: Any) -> None:
    workers = spawn(Worker)
    for again in (pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(workers)))), copy.copy(workers)):
        assert list(again.echo.call(1).get(10).values()) == [1] * 4
        assert again == workers
        assert hash(again) == hash(workers)


ANOTHER_PROGRAM = """
import base64, pickle, sys
from tests.mesh.actors import Worker
procs, workers, port = pickle.loads(base64.b64decode(sys.argv[1]))
port.send(list(workers.pid.call().get(20).values()))
theirs = procs.spawn("theirs", Worker)
theirs.echo.call(1).get(20)
print(base64.b64encode(pickle.dumps(theirs)).decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("transport", ["shm", "ipc", "tcp"])
def test_a_reference_works_in_another_program_and_what_that_spawned_ends_with_it(transport: str) -> None:
    with fresh_client(transport):
        procs = this_host().spawn_procs({"gpus": 2})
        workers = procs.spawn("workers", Worker)
        port, received = Channel[list[int]].open()
        sent = base64.b64encode(pickle.dumps((procs, workers, port))).decode()
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MONARCH_TRANSPORT": transport}
        command = [sys.executable, "-c", ANOTHER_PROGRAM, sent]
        with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            theirs = pickle.loads(base64.b64decode(other.stdout.readline()))
            pids = list(workers.pid.call().get(10).values())
            assert received.recv().get(10) == list(theirs.pid.call().get(10).values()) == pids
            other.kill()

        until(lambda: theirs.echo.call(1).exception(10))
        with pytest.raises(SupervisionError, match="its owner's process is gone"):
            theirs.echo.call(1).get(10)
        assert list(workers.pid.call().get(10).values()) == pids


def test_a_reference_to_a_mesh_that_is_still_starting_waits_for_it(client: TestClient) -> None:
    """Nothing waits for the processes before their actors are used by others."""
    first = this_host().spawn_procs({"gpus": 2})
    workers = first.spawn("workers", Worker)
    second = this_host().spawn_procs({"gpus": 2})
    holders = second.spawn("holders", Holder, workers.slice(gpus=1))
    more = second.spawn("more", Holder, holders)

    assert list(holders.ask.call(4).get(10).values()) == [[4], [4]]
    assert more.slice(gpus=0).give.call_one().get(10).slice(gpus=1).ask.call_one(5).get(10) == [5]


def test_a_call_to_an_actor_in_construction_waits(spawn: Spawn, alone: Any, channel: Any) -> None:
    ready, receiver = channel
    slow = spawn(EndlessInit, ready, on=alone)
    asker = spawn(Worker, on=alone)

    pending = slow.ping.call_one()
    release = receiver.recv().get(10)
    back = asker.echo.call_one(slow).get(10)
    again = back.ping.call_one()
    with pytest.raises(TimeoutError):
        pending.get(0.02)
    release.send("go")

    assert (pending.get(10), again.get(10)) == ("pong", "pong")
    slow.initialized.get(10)


def test_the_spawner_on_a_received_mesh_is_the_owner(spawn: Spawn, shared: Shared, channel: Any) -> None:
    """The failure of what an actor spawned on a mesh of the client's goes to that actor."""
    port, receiver = channel
    parent = spawn(Parent, port, "handle", on=shared.procs.slice(hosts=0, gpus=0))

    children = parent.spawn_on.call_one(shared.procs.slice(hosts=1), "children").get(10)
    children.slice(gpus=1).leave.broadcast()

    name, ranks, report, on_thread = receiver.recv().get(10)
    assert (name, ranks, on_thread) == ("children", [1], True)
    assert "SystemExit" in report


def test_references_cannot_be_stopped(spawn: Spawn, alone: Any, shared: Shared) -> None:
    workers, asker = spawn(Worker), spawn(Worker, on=alone)

    assert "NotImplementedError" in asker.stop_it.call_one(workers).get(10)
    assert "ProcMesh is not owned; must be stopped by an owner" in asker.stop_it.call_one(shared.procs).get(10)
    with pytest.raises(NotImplementedError, match="view"):
        workers.slice(gpus=0).stop()
    with pytest.raises(NotImplementedError, match="reference"):
        pickle.loads(pickle.dumps(workers)).stop()
    with pytest.raises(ValueError, match="ProcMesh is not owned"):
        shared.procs.slice(gpus=0).stop()
    with pytest.raises(MeshError, match="cannot shut down `HostMesh` that is a reference instead of owned"):
        this_host().shutdown()
    assert list(workers.echo.call(1).get(10).values()) == [1] * 4


def test_proc_and_host_meshes_travel(spawn: Spawn, holder: Any, shared: Shared) -> None:
    proc, host, mesh = holder.places.call_one().get(10)

    assert (type(proc), type(host), type(mesh)) == (ProcMesh, HostMesh, ProcMesh)
    assert host == this_host()
    assert dict(proc.extent) == {}
    assert proc.host_mesh == this_host()
    assert len(set(holder.spawn_and_ask.call_one(shared.procs).get(10))) == (1 if shared.transport == "inproc" else 4)
    assert holder.spawn_and_ask.call_one(proc).get(10)


def test_values_points_and_ports_travel(spawn: Spawn, alone: Any, channel: Any) -> None:
    worker = spawn(Worker, on=alone)
    values = spawn(Worker).rank.call().get(10)

    back: ValueMesh[Any] = worker.echo.call_one(values).get(10)
    assert list(back.items()) == list(values.items())
    point: Point = next(point for point, _ in values.items())
    assert worker.echo.call_one(point).get(10) == point
    assert spawn(Worker).slice(**point).echo.call_one("by point").get(10) == "by point"


def test_actors_by_value_travel(spawn: Spawn, alone: Any) -> None:
    """A class of a function body, with a closure, used as an argument and spawned."""
    factor = 3

    class Local(Actor):
        @endpoint
        def times(self, x: int) -> int:
            return x * factor

        @endpoint
        def apply(self, function: Callable[[int], int]) -> int:
            return function(factor)

    local = spawn(Local, on=alone)
    assert local.times.call_one(4).get(10) == 12
    assert local.apply.call_one(lambda x: x + factor).get(10) == 6
    assert spawn(Worker, on=alone).echo.call_one(local).get(10).times.call_one(5).get(10) == 15
