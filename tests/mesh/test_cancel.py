"""`Future.cancel`: what is queued does not run, what runs is interrupted or told, and the actor lives on."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import pytest

from monarch.actor import CallCancelled, Channel, MonarchError
from monarch.supervision import Child, Supervisor
from tests.mesh.conftest import Shared
from tests.mesh.knots import Busy, Patient

Spawn = Callable[..., Any]
LIMIT_S = 20.0


def one(shared: Shared) -> Any:
    return shared.procs.slice(hosts=1, gpus=0)


def spinning(busy: Any) -> tuple[Any, Any]:
    """A call that runs until it is cancelled, and what it tells."""
    port, receiver = Channel[Any].open()
    future = busy.spin.call_one(port)
    assert receiver.recv().get(LIMIT_S) == "began"
    return future, receiver


def test_a_queued_call_does_not_run(spawn: Spawn, shared: Shared) -> None:
    busy = spawn(Busy, on=one(shared))
    running, _ = spinning(busy)
    calls = [busy.note.call_one(i) for i in range(4)]

    assert calls[1].cancel() and calls[3].cancel() and not calls[3].cancel()
    running.cancel()

    assert busy.notes.call_one().get(LIMIT_S) == ([0, 2], False)  # it lives on, and its flag was for that call
    assert [each.cancelled() for each in calls] == [False, True, False, True]
    assert calls[0].get(LIMIT_S) is None


def test_every_observer_of_a_cancelled_call_gets_the_error(spawn: Spawn, shared: Shared) -> None:
    busy = spawn(Busy, on=one(shared))
    future, told = spinning(busy)

    async def look() -> None:
        with pytest.raises(CallCancelled):
            await future
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()  # to look at it cancels nobody

    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError, match=r"busy\.spin\(\) was cancelled") as caught:
        future.get(LIMIT_S)
    assert isinstance(caught.value, MonarchError) and future.exception() is caught.value and future.done()
    asyncio.run(look())
    assert told.recv().get(LIMIT_S) is True  # it would fail if nobody received what it says


def test_a_sync_endpoint_reads_a_flag(spawn: Spawn, shared: Shared) -> None:
    busy = spawn(Busy, on=one(shared))
    future, told = spinning(busy)

    future.cancel()

    assert told.recv().get(LIMIT_S) is True


@pytest.mark.parametrize("method", ["wait", "wait_aside", "wait_explicitly", "fail_when_cancelled", "stubborn"])
def test_an_async_endpoint_is_interrupted_at_its_await(spawn: Spawn, shared: Shared, channel: Any, method: str) -> None:
    patient = spawn(Patient, on=one(shared))
    port, receiver = channel
    future = getattr(patient, method).call_one(port)
    assert receiver.recv().get(LIMIT_S) == "began"

    assert future.cancel()

    assert receiver.recv().get(LIMIT_S) == "interrupted, cancelled=True"
    assert isinstance(future.exception(LIMIT_S), CallCancelled)
    assert patient.cancelled.call_one().get(LIMIT_S) is False


def test_of_concurrent_calls_one_is_cancelled_alone(spawn: Spawn, shared: Shared) -> None:
    patient = spawn(Patient, on=one(shared))
    (first_port, first), (second_port, second) = Channel[str].open(), Channel[str].open()
    one_call, other = patient.wait_aside.call_one(first_port), patient.wait_aside.call_one(second_port)
    assert [each.recv().get(LIMIT_S) for each in (first, second)] == ["began", "began"]

    one_call.cancel()
    assert "interrupted" in first.recv().get(LIMIT_S)
    assert not other.done()
    other.cancel()
    assert "interrupted" in second.recv().get(LIMIT_S)


def test_all_members_that_have_not_answered_hear(spawn: Spawn) -> None:
    busy = spawn(Busy)
    port, receiver = Channel[Any].open()
    future = busy.spin.call(port)
    for _ in range(4):
        assert receiver.recv().get(LIMIT_S) == "began"

    assert future.cancel() and future.cancelled()

    assert [receiver.recv().get(LIMIT_S) for _ in range(4)] == [True] * 4


def test_the_calls_of_a_stream_are_cancelled_together(spawn: Spawn) -> None:
    busy = spawn(Busy)
    port, receiver = Channel[Any].open()
    futures = list(busy.spin.stream(port))
    for _ in range(4):
        assert receiver.recv().get(LIMIT_S) == "began"

    assert futures[2].cancel() and not futures[0].cancel()

    assert all(each.cancelled() for each in futures)
    assert [receiver.recv().get(LIMIT_S) for _ in range(4)] == [True] * 4


def test_a_call_that_is_over_is_not_cancelled(spawn: Spawn, shared: Shared) -> None:
    busy = spawn(Busy, on=one(shared))
    future = busy.notes.call_one()
    assert future.get(LIMIT_S) == ([], False)

    assert not future.cancel() and not future.cancelled()
    assert future.get() == ([], False)


def test_only_calls_can_be_cancelled(shared: Shared) -> None:
    _, receiver = Channel[int].open()

    assert not receiver.recv().cancel()


def test_cancelling_a_task_that_awaits_cancels_no_call(spawn: Spawn, shared: Shared) -> None:
    busy = spawn(Busy, on=one(shared))
    running, _ = spinning(busy)
    noted = busy.note.call_one("noted")

    async def give_up_waiting() -> None:
        async def wait() -> None:
            await noted

        for task in (asyncio.create_task(wait()), noted.as_asyncio()):
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(noted, 0.01)

    asyncio.run(give_up_waiting())
    running.cancel()

    assert noted.get(LIMIT_S) is None and busy.notes.call_one().get(LIMIT_S)[0] == ["noted"]


def test_a_call_to_a_supervised_child(spawn: Spawn, shared: Shared) -> None:
    supervisor = spawn(Supervisor, [Child("busy", Busy)], on=one(shared))
    future, told = spinning(supervisor.child("busy"))

    assert future.cancel()

    assert told.recv().get(LIMIT_S) is True
