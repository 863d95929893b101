"""Of calls of different origins that wait for each other one is refused, and none without need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    DeadlockError,
    Future,
    Port,
    concurrent_endpoint,
    endpoint,
    this_host,
)
from monarch.core import crossing
from monarch.testing import TestClient

LIMIT_S = 30.0


class Crosser(Actor):
    """`cross` begins, says so, and calls `answer` of others only when released: then all of them are busy."""

    def __init__(self) -> None:
        crossing._SCAN_S = 0.05  # type: ignore[misc]  # in a process of its own, too

    @endpoint
    def answer(self) -> str:
        return "answered"

    @endpoint
    def cross(self, others: Any, ready: Port[Any]) -> list[str]:
        self._meet(ready).get(LIMIT_S)
        return list(others.answer.call().get().values())

    @endpoint
    def cross_for_a_while(self, others: Any, ready: Port[Any]) -> str:
        self._meet(ready).get(LIMIT_S)
        try:
            others.answer.call().get(timeout=1)
        except TimeoutError:
            return "gave up"
        return "answered"

    @endpoint
    async def cross_async(self, others: Any, ready: Port[Any]) -> list[str]:
        await self._meet(ready)
        return list((await others.answer.call()).values())

    @endpoint
    async def cross_often(self, others: Any, ready: Port[Any]) -> list[str]:
        await self._meet(ready)
        return await asyncio.gather(*[others.answer.call_one() for _ in range(5)])

    @concurrent_endpoint
    async def cross_beside(self, others: Any, ready: Port[Any]) -> list[str]:
        await self._meet(ready)
        return list((await others.answer.call()).values())

    @endpoint
    def hold(self, ready: Port[Any]) -> str:
        """Busy, and waits for no actor."""
        self._meet(ready).get(LIMIT_S)
        return "let go"

    @staticmethod
    def _meet(ready: Port[Any]) -> Future[Any]:
        port, receiver = Channel[Any].open()
        ready.send(port)
        return receiver.recv()


@pytest.fixture(autouse=True)
def scans_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; in others, see `Crosser`."""
    monkeypatch.setattr(crossing, "_SCAN_S", 0.05)


@pytest.fixture
def trio(client: TestClient) -> list[Any]:
    """Three actors, the last two in one process."""
    procs = this_host().spawn_procs({"gpus": 2})
    return [procs.slice(gpus=at).spawn(f"crosser{i}", Crosser) for i, at in enumerate((0, 1, 1))]


def released(channel: Any, calls: list[Callable[[Port[Any]], Any]]) -> list[Any]:
    """Make the calls, and let all go on once all have begun."""
    port, receiver = channel
    futures = [call(port) for call in calls]
    for go_on in [receiver.recv().get(LIMIT_S) for _ in calls]:
        go_on.send(None)
    return futures


def outcomes(futures: list[Any]) -> Iterator[Any]:
    for future in futures:
        error: Any = future.exception(LIMIT_S)
        while isinstance(error, ActorError):
            error = error.exception
        yield future.get() if error is None else error


@pytest.mark.parametrize("how", ["cross", "cross_async", "cross_often"])
@pytest.mark.parametrize("length", [2, 3])
def test_one_of_the_calls_is_refused_and_the_rest_is_answered(
    trio: list[Any], channel: Any, how: str, length: int
) -> None:
    ring = trio[:length]
    calls = [
        lambda ready, a=a, b=b: getattr(a, how).call_one(b, ready)
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True)
    ]

    ends = list(outcomes(released(channel, calls)))

    (error,) = [end for end in ends if isinstance(end, DeadlockError)]
    assert [set(end) for end in ends if end is not error] == [{"answered"}] * (length - 1)
    assert len(error.cycle) == length and all(name.endswith(f".{how}") for name in error.cycle)
    assert all(f"crosser{i}" in str(error) for i in range(length)) and ".answer" in str(error)
    assert [each.answer.call_one().get(LIMIT_S) for each in trio] == ["answered"] * 3  # they live on


def test_a_call_of_a_mesh_whose_members_cross_back(client: TestClient, channel: Any) -> None:
    procs = this_host().spawn_procs({"gpus": 4})
    mesh, one = procs.spawn("crossers", Crosser), procs.slice(gpus=0).spawn("one", Crosser)
    members = [mesh.slice(gpus=at) for at in range(4)]
    calls = [lambda ready: one.cross.call_one(mesh, ready)]
    calls += [lambda ready, each=each: each.cross.call_one(one, ready) for each in members]

    ends = list(outcomes(released(channel, calls)))

    refused = [end for end in ends if isinstance(end, DeadlockError)]
    assert refused and all(len(error.cycle) == 2 for error in refused)
    assert all(end in refused or set(end) == {"answered"} for end in ends)


def test_a_wait_for_one_that_is_busy_is_no_cycle(trio: list[Any], channel: Any) -> None:
    a, b, c = trio
    port, receiver = channel
    held = c.hold.call_one(port)
    let_go = receiver.recv().get(LIMIT_S)
    waiting = released(channel, [lambda ready: a.cross.call_one(b, ready), lambda ready: b.cross.call_one(c, ready)])
    with pytest.raises(TimeoutError):
        waiting[0].get(timeout=0.5)
    let_go.send(None)

    assert [*outcomes(waiting), held.get(LIMIT_S)] == [["answered"], ["answered"], "let go"]


def test_a_concurrent_endpoint_holds_nobody_up(trio: list[Any], channel: Any) -> None:
    a, b, _ = trio
    ends = released(
        channel,
        [lambda ready: a.cross_beside.call_one(b, ready), lambda ready: b.cross_beside.call_one(a, ready)],
    )
    assert list(outcomes(ends)) == [["answered"]] * 2


def test_a_wait_with_a_limit_is_left_to_it(trio: list[Any], channel: Any) -> None:
    a, b, _ = trio
    ends = released(
        channel,
        [
            lambda ready: a.cross_for_a_while.call_one(b, ready),
            lambda ready: b.cross.call_one(a, ready),
        ],
    )
    assert list(outcomes(ends)) == ["gave up", ["answered"]]
