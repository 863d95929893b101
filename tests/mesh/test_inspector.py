"""What a program says of itself while its actors block, wait, or hold their interpreter."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from monarch import debug
from monarch.actor import ActorMesh, this_host, this_proc
from monarch.debug import Process, ProcessState, Snapshot
from monarch.supervision import Child, Supervisor
from monarch.testing import TestClient
from monarch.testing.events import LIMIT_S
from tests.mesh.stuck import Stuck, Unborn
from tests.until import until


def endpoints(snapshot: Snapshot) -> dict[str, list[str]]:
    return {a.name: [each.endpoint for each in a.running] for p in snapshot.processes for a in p.actors}


def the_process(snapshot: Snapshot, name: str) -> Process:
    (found,) = [process for process in snapshot.processes if process.name == name]
    return found


@pytest.fixture
def stuck(real_client: TestClient) -> Iterator[ActorMesh[Any]]:
    """Two actors: one blocks for ever, with a call in its queue, the other waits for ever."""
    real_client.allow_faults()
    procs = this_host().spawn_procs({"gpus": 2}, name="work")
    stuck = procs.spawn("stuck", Stuck)
    stuck.ready.call().get(LIMIT_S)
    stuck.slice(gpus=0).wait_for_lock.broadcast()
    stuck.slice(gpus=0).ready.broadcast()
    stuck.slice(gpus=1).wait_at_await.broadcast()
    until(lambda: all(endpoints(debug.ps()).values()))
    yield stuck
    real_client.kill(procs)


def test_the_tree_has_processes_and_actors_with_what_they_do(stuck):
    snapshot = debug.ps()
    (blocked,) = the_process(snapshot, "work{'gpus': 0/2}").actors

    assert endpoints(snapshot) == {"stuck{'gpus': 0/2}": ["wait_for_lock"], "stuck{'gpus': 1/2}": ["wait_at_await"]}
    assert [process.name for process in snapshot.processes] == ["client", "work{'gpus': 0/2}", "work{'gpus': 1/2}"]
    assert {process.state for process in snapshot.processes} == {ProcessState.UP}
    assert all((process.memory_bytes or 0) > 1 << 20 for process in snapshot.processes)
    assert (blocked.class_name.rpartition(".")[2], blocked.queued, blocked.stacks) == ("Stuck", 1, ())


def test_stacks_end_where_an_actor_blocks_or_waits(stuck):
    snapshot = debug.stacks(stuck)
    actors = {actor.name: actor for process in snapshot.processes for actor in process.actors}
    busy = {name: [s.frames[-1].function for s in actor.stacks if not s.is_idle] for name, actor in actors.items()}

    assert busy == {"stuck{'gpus': 0/2}": ["wait_for_lock"], "stuck{'gpus': 1/2}": ["wait"]}
    assert [process.name for process in snapshot.processes] == ["work{'gpus': 0/2}", "work{'gpus': 1/2}"]
    assert "in wait_for_lock\n" in str(snapshot)
    assert "in wait_at_await\n" in str(snapshot)


def test_an_actor_may_ask_for_the_whole_program(monarch_client):
    procs = this_host().spawn_procs(name="work")
    asking = procs.spawn("asking", Stuck)

    snapshot = asking.look.call_one().get(LIMIT_S)

    assert [process.name for process in snapshot.processes] == ["client", "work"]
    assert endpoints(snapshot) == {"asking": ["look"]}


def test_a_constructor_that_blocks_is_seen(monarch_client):
    monarch_client.allow_faults()
    procs = this_host().spawn_procs(name="work")
    procs.spawn("unborn", Unborn)
    until(lambda: "    threading.Event().wait()\n" in str(debug.stacks(procs)))

    (unborn,) = the_process(debug.ps(), "work").actors

    assert (unborn.phase, [each.endpoint for each in unborn.running]) == ("born", ["__init__"])
    monarch_client.kill(procs)


def test_restarts_are_counted(monarch_client):
    spec = Child("worker", Stuck)
    supervisor = this_proc().spawn("supervisor", Supervisor, [spec])
    worker = supervisor.child(spec)
    worker.ready.call_one().get(LIMIT_S)
    worker.fail.broadcast()
    until(lambda: restarts() == {"supervisor": 0, "worker": 1})


def restarts() -> dict[str, int]:
    return {actor.name: actor.restarts for process in debug.ps().processes for actor in process.actors}


def test_a_supervised_child_has_no_processes_of_its_own(monarch_client):
    spec = Child("worker", Stuck)
    worker = this_proc().spawn("supervisor", Supervisor, [spec]).child(spec)

    with pytest.raises(TypeError, match=r"use stacks\(\).matching\('worker'\)"):
        debug.stacks(worker)


def test_over_inproc_the_threads_of_actors_are_not_also_the_clients(monarch_client):
    procs = this_host().spawn_procs(name="work")
    procs.spawn("stuck", Stuck).ready.call_one().get(LIMIT_S)

    snapshot = debug.stacks()

    assert [actor.name for actor in the_process(snapshot, "work").actors] == ["stuck"]
    assert the_process(snapshot, "work").threads == ()
    assert "MainThread" in {thread.name for thread in the_process(snapshot, "client").threads}
    assert not {t.name for t in the_process(snapshot, "client").threads if "stuck" in t.name}


@pytest.mark.parametrize("mesh", ["work", 7, Stuck])
def test_stacks_of_what_is_no_mesh_are_refused(monarch_client, mesh):
    with pytest.raises(TypeError, match="stacks takes a mesh of actors or processes"):
        debug.stacks(mesh)


@pytest.mark.slow
def test_a_process_whose_interpreter_is_held_shows_its_stacks_and_is_not_disturbed(real_client):
    procs = this_host().spawn_procs(name="work")
    holder = procs.spawn("holder", Stuck)
    holder.ready.call_one().get(LIMIT_S)
    left_s = holder.hold.call_one(4)
    until(lambda: the_process(debug.ps(), "work").state is ProcessState.HELD)

    held = the_process(debug.stacks(), "work")
    (stack,) = [stack for stack in held.threads if not stack.is_idle]

    assert held.state is ProcessState.HELD
    assert "holder" in stack.name
    assert stack.frames[-1].function == "hold"
    assert left_s.get(LIMIT_S) == 0


@pytest.mark.slow
def test_a_stopped_process_is_said_to_be_stopped(real_client):
    procs = this_host().spawn_procs(name="work")
    procs.spawn("stuck", Stuck).ready.call_one().get(LIMIT_S)
    pid = the_process(debug.ps(), "work").pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    until(lambda: the_process(debug.ps(), "work").state is ProcessState.STOPPED)
    os.kill(pid, signal.SIGCONT)
    until(lambda: the_process(debug.ps(), "work").state is ProcessState.UP)
