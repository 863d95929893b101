"""Meshes over links that misbehave: nothing is lost, doubled or taken out of order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from monarch.actor import SupervisionError, this_host, this_proc
from monarch.testing import TestClient, fresh_client
from tests.mesh.actors import Worker


@pytest.fixture(params=["caller", "thread"])
def client(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    with fresh_client("inproc", request.param, message_delivery_timeout="2s") as client:
        yield client


@pytest.fixture
def procs(client: TestClient) -> Any:
    procs = this_host().spawn_procs({"gpus": 2})
    procs.initialized.get(10)
    return procs


@pytest.fixture
def worker(procs: Any) -> Any:
    worker = procs.slice(gpus=0).spawn("worker", Worker)
    worker.initialized.get(10)
    return worker


def test_what_is_held_arrives_when_it_is_released(client: TestClient, procs: Any, worker: Any) -> None:
    there = client.faults_between(this_proc(), procs.slice(gpus=0))

    there.hold()
    pending = worker.echo.call_one("held")
    with pytest.raises(TimeoutError):
        pending.get(0.02)
    assert there.held_count >= 1
    there.release()

    assert pending.get(10) == "held"


def test_replies_can_be_held_alone(client: TestClient, procs: Any, worker: Any) -> None:
    back = client.faults_between(procs.slice(gpus=0), this_proc())

    back.hold()
    pending = worker.add.call_one(1)
    with pytest.raises(TimeoutError):
        pending.get(0.02)
    back.release()

    assert pending.get(10) == 1


@pytest.mark.parametrize("direction", ["there", "back"])
def test_a_cut_link_is_replaced_and_nothing_is_lost_or_doubled(
    client: TestClient, procs: Any, worker: Any, direction: str
) -> None:
    ends = (this_proc(), procs.slice(gpus=0))
    for turn in range(5):
        link = client.faults_between(*(ends if direction == "there" else reversed(ends)))
        link.hold()
        pending = [worker.add.call_one(1) for _ in range(10)]
        link.cut()
        link.wait_until_replaced()
        assert [each.get(10) for each in pending] == [turn * 10 + number for number in range(1, 11)]
    assert client.faults.values == []


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_a_link_that_breaks_half_way_resumes_where_it_broke(
    client: TestClient, procs: Any, worker: Any, kept: int
) -> None:
    there = client.faults_between(this_proc(), procs.slice(gpus=0))
    there.hold()
    for number in range(10):
        worker.note.broadcast(number)
    there.release(kept)
    there.wait_until_replaced()

    assert worker.notes.call_one().get(10) == list(range(10))


@pytest.mark.parametrize("seed", range(5))
def test_frames_out_of_order_break_the_link_and_not_the_order(
    client: TestClient, procs: Any, worker: Any, seed: int
) -> None:
    there = client.faults_between(this_proc(), procs.slice(gpus=0), seed)
    there.hold()
    for number in range(10):
        worker.note.broadcast(number)
    there.reorder()
    there.release()

    assert worker.notes.call_one().get(10) == list(range(10))


def test_a_slow_link_delivers_all(client: TestClient, procs: Any, worker: Any) -> None:
    client.faults_between(this_proc(), procs.slice(gpus=0)).slow(1)
    client.faults_between(procs.slice(gpus=0), this_proc()).slow(1)

    for number in range(200):
        worker.note.broadcast(number)

    assert worker.notes.call_one().get(10) == list(range(200))


def test_a_link_between_two_members_is_cut_and_replaced(client: TestClient, procs: Any, worker: Any) -> None:
    other = procs.slice(gpus=1).spawn("other", Worker)
    other.call_other.call_one(worker, 0).get(10)
    for number in range(5):
        link = client.faults_between(procs.slice(gpus=1), procs.slice(gpus=0))
        link.hold()
        other.broadcast_to.call_one(worker, list(range(number * 10, number * 10 + 10))).get(10)
        link.cut()
        link.wait_until_replaced()
    other.call_other.call_one(worker, 0).get(10)

    assert worker.notes.call_one().get(10) == list(range(50))


def test_a_stop_over_a_cut_link_succeeds(client: TestClient, procs: Any, worker: Any) -> None:
    link = client.faults_between(this_proc(), procs.slice(gpus=0))
    link.hold()
    stopping = worker.stop()
    link.cut()

    stopping.get(10)
    client.faults_between(this_proc(), procs.slice(gpus=1)).cut()
    procs.stop().get(10)
    assert client.faults.values == []


def test_a_death_is_seen_while_the_link_is_held(client: TestClient, procs: Any, worker: Any) -> None:
    client.faults_between(this_proc(), procs.slice(gpus=0)).hold()
    pending = worker.echo.call_one(1)
    client.kill(procs.slice(gpus=0))

    with pytest.raises(SupervisionError, match="Killed"):
        pending.get(10)
    client.expect_fault("Killed")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_traffic_between_all_survives_any_series_of_faults(client: TestClient, procs: Any, seed: int) -> None:
    """Four threads call every member, which call others, while links are held, shuffled, cut and slowed."""
    workers = procs.spawn("workers", Worker)
    targets = procs.spawn("targets", Worker)  # others than those who call them: two that call each other deadlock
    workers.slice(gpus=0).call_other.call_one(targets.slice(gpus=1), 0).get(10)
    random, over = Random(seed), threading.Event()

    def traffic(thread: int) -> int:
        for turn in itertools.count():
            if over.is_set():
                return turn
            there = workers.slice(gpus=thread % 2)
            relayed = [
                there.call_other.call_one(targets.slice(gpus=1 - thread % 2), (thread, turn, i)) for i in range(5)
            ]
            everywhere = [workers.echo.call((thread, turn)) for _ in range(3)]
            workers.note.broadcast((thread, turn))
            assert [each.get(10) for each in relayed] == [(thread, turn, i) for i in range(5)]
            assert all(list(each.get(10).values()) == [(thread, turn)] * 2 for each in everywhere)
        raise AssertionError("unreachable")

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(traffic, thread) for thread in range(4)]
        ends = [this_proc(), procs.slice(gpus=0), procs.slice(gpus=1)]
        try:
            for _ in range(100):
                targets.echo.call(0).get(10)
                link = client.faults_between(*random.sample(ends, 2), seed=seed)
                match random.randrange(4):
                    case 0:
                        link.cut()
                    case 1:
                        link.hold()
                        link.reorder()
                        link.release()
                    case 2:
                        link.hold()
                        link.release(random.randrange(4))
                    case 3:
                        link.slow(random.choice([1, 2, None]))
        finally:
            over.set()
        turns = [each.result(30) for each in running]

    for seen in workers.notes.call().get(10).values():
        for thread in range(4):
            assert [turn for t, turn in seen if t == thread] == list(range(turns[thread]))
    assert client.faults.values == []


def test_faults_need_a_mesh_of_threads_and_single_processes(client: TestClient, procs: Any) -> None:
    with pytest.raises(ValueError, match="single"):
        client.faults_between(this_proc(), procs)
    with fresh_client("ipc") as real:
        other = this_host().spawn_procs()
        other.initialized.get(10)
        with pytest.raises(TypeError, match="inproc"):
            real.faults_between(this_proc(), other)
        with pytest.raises(LookupError, match="does not run"):
            real.kill(procs)
