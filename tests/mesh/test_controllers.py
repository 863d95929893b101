"""Named singletons in the client's process."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from monarch.actor import Actor, ActorError, get_or_spawn_controller, this_host
from monarch.testing import TestClient
from tests.mesh.actors import Asker, Counter, FailingInit


def test_concurrent_first_requests_spawn_once(client: TestClient) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: get_or_spawn_controller("counter", Counter).get(10), range(12)))

    counts = sorted(each.count.call_one().get(10) for each in found)
    assert counts == list(range(1, 13))


def test_actors_and_the_client_find_the_same_controller(client: TestClient) -> None:
    askers = this_host().spawn_procs({"gpus": 2}).spawn("askers", Asker)

    counts = sorted(askers.ask.call("shared").get(10).values())
    mine = get_or_spawn_controller("shared", Counter, 0).get(10)

    assert counts == [101, 102]
    assert mine.count.call_one().get(10) == 103


def test_controllers_live_in_the_clients_process_and_spawn_there(client: TestClient) -> None:
    counter = get_or_spawn_controller("counter", Counter).get(10)

    assert counter.pid.call_one().get(10) == os.getpid()
    assert counter.spawn_here.call_one().get(10) == os.getpid()


def test_different_names_are_different_controllers(client: TestClient) -> None:
    first = get_or_spawn_controller("first", Counter, 10).get(10)
    second = get_or_spawn_controller("second", Counter, 20).get(10)

    assert (first.count.call_one().get(10), second.count.call_one().get(10)) == (11, 21)


def test_a_controller_of_another_class_is_refused(client: TestClient) -> None:
    get_or_spawn_controller("one", Counter).get(10)
    assert get_or_spawn_controller("one", Actor).get(10).pid.call_one().get(10)  # it is one

    with pytest.raises(ActorError, match=r"'one' is a tests\.mesh\.actors\.Counter, and not a .*Asker") as caught:
        get_or_spawn_controller("one", Asker).get(10)
    assert isinstance(caught.value.exception, ValueError)


def test_a_failure_is_remembered_for_its_name_only(client: TestClient) -> None:
    counter = get_or_spawn_controller("failing", Counter).get(10)
    other = get_or_spawn_controller("other", Counter).get(10)
    with pytest.raises(Exception, match="SystemExit"):
        counter.leave.call_one().get(10)

    with pytest.raises(ActorError, match="Failure on failing") as caught:
        get_or_spawn_controller("failing", Counter).get(10)
    assert isinstance(caught.value.exception, ValueError)
    assert other.count.call_one().get(10) == 1
    assert client.faults.values == []


def test_a_constructor_that_raises_is_remembered(client: TestClient) -> None:
    broken = get_or_spawn_controller("broken", FailingInit, "cannot start").get(10)
    with pytest.raises(Exception, match="cannot start"):
        broken.ping.call_one().get(10)

    with pytest.raises(ActorError, match=r"Failure on broken.*cannot start"):
        get_or_spawn_controller("broken", FailingInit, "cannot start").get(10)


def test_a_controller_can_be_awaited(client: TestClient) -> None:
    async def work() -> Any:
        counter: Any = await get_or_spawn_controller("counter", Counter, 5)
        return await counter.count.call_one()

    assert asyncio.run(work()) == 6
