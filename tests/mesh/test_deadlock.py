"""Calls that wait for themselves are refused by name; calls that will be answered are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from monarch.actor import ActorError, DeadlockError
from tests.mesh.conftest import Shared
from tests.mesh.knots import AsyncKnot, Knot, Newborn

Spawn = Callable[..., Any]
LIMIT_S = 20.0


def knots(spawn: Spawn, shared: Shared, count: int, cls: type = Knot) -> list[Any]:
    """Actors, two of them in one process from the fifth on."""
    places = [shared.procs.slice(hosts=i // 2 % 2, gpus=i % 2) for i in range(count)]
    return [spawn(cls, on=place, name=f"knot{i}") for i, place in enumerate(places)]


def refused(call: Any) -> DeadlockError:
    """The error at the end of the errors of all that waited."""
    error: Any = call.exception(LIMIT_S)
    while isinstance(error, ActorError):
        error = error.exception
    assert isinstance(error, DeadlockError), repr(error)
    return error


def test_a_call_to_itself_is_refused_by_name(spawn: Spawn, shared: Shared) -> None:
    (a,) = knots(spawn, shared, 1)

    error = refused(a.go_without_limit.call_one([a]))

    assert len(error.cycle) == 1 and "Knot knot0" in error.cycle[0] and error.cycle[0].endswith(".go_without_limit")
    assert "knot0" in str(error) and ".go_without_limit calls " in str(error) and "self.method()" in str(error)
    assert a.go.call_one([]).get(LIMIT_S) == "end"  # it lives on


@pytest.mark.parametrize("cls", [Knot, AsyncKnot])
@pytest.mark.parametrize("length", [2, 3, 5])
def test_a_cycle_is_refused_by_its_names_in_order(spawn: Spawn, shared: Shared, length: int, cls: type) -> None:
    ring = knots(spawn, shared, length, cls)

    error = refused(ring[0].go.call_one([*ring[1:], ring[0]]))

    assert [name.split("knot")[-1][0] for name in error.cycle] == [str(i) for i in range(length)]
    assert all(name.endswith(".go") for name in error.cycle)
    assert str(error).count("knot0") == 3  # where it begins, where it ends, and what is busy
    assert [each.go.call_one([]).get(LIMIT_S) for each in ring] == ["end"] * length


def test_a_cycle_that_the_first_caller_is_not_part_of(spawn: Spawn, shared: Shared) -> None:
    before, a, b = knots(spawn, shared, 3)

    error = refused(before.go.call_one([a, b, a]))

    assert [name.split("knot")[-1][0] for name in error.cycle] == ["1", "2"]


@pytest.mark.parametrize("how", ["await", "as_asyncio", "gather", "task", "get"])
def test_every_way_to_wait_counts(spawn: Spawn, shared: Shared, how: str, recwarn: pytest.WarningsRecorder) -> None:
    a, b = knots(spawn, shared, 2, AsyncKnot)

    assert "knot1" in str(refused(a.go.call_one([b, a], how)))


def test_a_wait_that_begins_long_after_the_call(spawn: Spawn, shared: Shared, channel: Any) -> None:
    a, b = knots(spawn, shared, 2)
    port, receiver = channel

    future = a.wait_later.call_one([b, a], port)
    release = receiver.recv().get(LIMIT_S)
    assert not future.done()  # b waits for a, and nobody for b
    release.send(None)

    assert "wait_later" in str(refused(future))


def test_a_wait_for_the_call_of_an_endpoint_that_is_through(spawn: Spawn, shared: Shared, channel: Any) -> None:
    a, b = knots(spawn, shared, 2)
    port, receiver = channel
    held = b.wait_later.call_one([a], port)
    release = receiver.recv().get(LIMIT_S)
    assert a.send_only.call_one([b, a]).get(LIMIT_S) == "sent"  # b is busy: this waits in its queue
    waits = a.sent_answers.call_one(port)
    assert receiver.recv().get(LIMIT_S) == "began"
    release.send(None)

    assert held.get(LIMIT_S) == "end"
    error = refused(waits)
    assert "before tests.mesh.knots.Knot knot0" in str(error) and ".sent_answers is through" in str(error)


def test_a_call_to_a_mesh_that_the_caller_is_part_of(spawn: Spawn, shared: Shared) -> None:
    mesh = spawn(Knot, name="whole")

    error = refused(mesh.slice(hosts=1, gpus=0).go_to_all.call_one(mesh))

    assert "'hosts': 1/2, 'gpus': 0/2" in error.cycle[0]


def test_a_call_to_itself_from_the_constructor(spawn: Spawn, shared: Shared, channel: Any) -> None:
    port, receiver = channel
    newborn = spawn(Newborn, port, on=shared.procs.slice(hosts=0, gpus=1))
    receiver.recv().get(LIMIT_S).send(newborn)

    told, initialized = newborn.told.call_one().get(LIMIT_S)
    assert "DeadlockError" in told and "newborn.__init__ calls" in told.replace("newborn{}", "newborn")
    assert "DeadlockError" in initialized and ".initialized and waits for it" in initialized


# What looks like a cycle, and is none


def test_a_call_that_nobody_waits_for_is_served_in_its_turn(spawn: Spawn, shared: Shared) -> None:
    a, b = knots(spawn, shared, 2)

    assert a.send_only.call_one([a]).get(LIMIT_S) == "sent"
    assert a.send_only.call_one([b, a]).get(LIMIT_S) == "sent"  # b waits for a, which does not wait for b
    assert any(a.answered.call_one().get(LIMIT_S) == 2 for _ in range(10_000))
    assert a.sent_answers.call_one().get(LIMIT_S) == ["end", "end"]


def test_the_first_of_a_stream_may_be_anybody(spawn: Spawn, shared: Shared) -> None:
    pair = spawn(Knot, on=shared.procs.slice(hosts=0), name="pair")
    me = pair.slice(gpus=1)

    assert me.stream_first.call_one(pair, me).get(LIMIT_S) == "end"
    assert me.sent_answers.call_one().get(LIMIT_S) == ["end"]


def test_a_task_that_the_endpoint_does_not_await(spawn: Spawn, shared: Shared) -> None:
    a, b = knots(spawn, shared, 2, AsyncKnot)

    assert a.go_in_background.call_one([b, a]).get(LIMIT_S) == "sent"
    assert a.background.call_one().get(LIMIT_S) == ["end"]


def test_a_concurrent_endpoint_takes_calls_meanwhile(spawn: Spawn, shared: Shared) -> None:
    a, b = knots(spawn, shared, 2, AsyncKnot)

    assert a.go_aside.call_one([b, a]).get(LIMIT_S) == "end"
    assert a.go_aside.call_one([a]).get(LIMIT_S) == "end"


def test_a_way_that_comes_to_an_actor_twice_at_different_times(spawn: Spawn, shared: Shared) -> None:
    a, b, c = knots(spawn, shared, 3)

    assert a.go.call_one([b, c]).get(LIMIT_S) == "end"
    assert b.go.call_one([a]).get(LIMIT_S) == "end"
    assert c.go.call_one([b, a]).get(LIMIT_S) == "end"
