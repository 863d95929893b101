"""Futures of real calls: observed from threads and loops, any number of times."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from monarch.actor import Accumulator, ActorError, Channel, Future
from tests.mesh.actors import AsyncWorker, Worker
from tests.mesh.conftest import Shared
from tests.until import until

Spawn = Callable[..., Any]


class Held:
    """A call that is answered when the test wants."""

    def __init__(self, worker: Any) -> None:
        port, receiver = Channel[Any].open()
        self.future: Future[Any] = worker.hold.call_one(port)
        self.release = receiver.recv().get(10)
        self.release.return_undeliverable = False  # many are released before the end: no news for tests that come later


@pytest.fixture
def worker(spawn: Spawn, shared: Shared) -> Any:
    return spawn(AsyncWorker, on=shared.procs.slice(hosts=1, gpus=1))


@pytest.fixture
def held(worker: Any) -> Iterator[Held]:
    held = Held(worker)
    yield held
    held.release.send("late")


def test_a_timeout_consumes_nothing(held: Held) -> None:
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"asyncworker\.hold"):
            held.future.get(0.01)
    assert isinstance(held.future.exception(0.01), TimeoutError)
    assert isinstance(held.future.exception(0), TimeoutError)
    held.release.send("answer")

    assert held.future.get(10) == held.future.result(10) == held.future.get() == "answer"
    assert held.future.exception() is None


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, math.inf, -math.inf])
def test_a_timeout_that_is_none_is_refused_before_anything_starts(held: Held, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        held.future.get(timeout)
    with pytest.raises(ValueError, match="timeout"):
        held.future.exception(timeout)


def test_threads_and_loops_wait_for_one_future_together(held: Held) -> None:
    async def wait() -> Any:
        return await held.future

    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(held.future.get, 10) for _ in range(3)]
        waiting += [pool.submit(asyncio.run, wait()) for _ in range(3)]
        held.release.send("for all")
        assert [each.result(10) for each in waiting] == ["for all"] * 6


def test_cancelling_one_awaiter_leaves_the_others(held: Held) -> None:
    async def work() -> Any:
        async def wait() -> Any:
            return await held.future

        first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        held.release.send("still there")
        return await second, await held.future

    assert asyncio.run(work()) == ("still there", "still there")


def test_wait_for_and_shield_and_gather_work(held: Held, worker: Any) -> None:
    async def work() -> Any:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(held.future, 0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(held.future), 0.01)
        held.release.send(1)
        return await asyncio.gather(held.future, asyncio.ensure_future(held.future), worker.echo.call_one(2))

    assert asyncio.run(work()) == [1, 1, 2]


def test_as_asyncio_needs_a_loop_and_consumes_nothing(held: Held) -> None:
    with pytest.raises(RuntimeError):
        held.future.as_asyncio()

    async def work() -> Any:
        first, second = held.future.as_asyncio(), held.future.as_asyncio()
        second.cancel()
        held.release.send("here")
        done, _ = await asyncio.wait([first], timeout=10)
        return done.pop().result(), await held.future

    assert asyncio.run(work()) == ("here", "here")


def test_awaiting_outside_a_loop_is_a_value_error(held: Held) -> None:
    async def wait() -> Any:
        return await held.future

    coro = wait()
    with pytest.raises(ValueError, match="event loop"):
        coro.send(None)


def test_get_in_a_running_loop_works_and_warns(worker: Any) -> None:
    async def work() -> Any:
        with pytest.warns(UserWarning, match="active event loop"):
            return Held(worker), worker

    async def block() -> Any:
        future = worker.echo_later.call_one("blocking")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = future.get(10)
        return value, [str(each.message) for each in caught]

    value, messages = asyncio.run(block())
    assert value == "blocking"
    assert all("active event loop" in message for message in messages)


def test_a_result_that_is_there_does_not_warn(worker: Any) -> None:
    future = worker.echo.call_one(1)
    future.get(10)

    async def look() -> Any:
        return future.get()

    assert asyncio.run(look()) == 1


def test_errors_are_kept_for_every_observer(spawn: Spawn, shared: Shared) -> None:
    future = spawn(Worker, on=shared.procs.slice(hosts=0, gpus=0)).fail.call_one("kept")

    async def wait() -> BaseException:
        with pytest.raises(ActorError) as caught:
            await future
        return caught.value

    assert asyncio.run(wait()) is asyncio.run(wait()) is future.exception(10)


def test_a_future_cannot_be_constructed() -> None:
    with pytest.raises(TypeError):
        Future()


def test_a_coroutine_becomes_a_future() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 5

    async def fail() -> int:
        raise KeyError("no")

    assert Future._from_coro(work()).get(10) == 5
    assert isinstance(Future._from_coro(fail()).exception(10), KeyError)


def test_a_loop_that_closes_before_the_answer_disturbs_nobody(held: Held) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(held.future, 0.01)

    async def leave() -> None:
        task = asyncio.create_task(give_up())
        await task

    asyncio.run(leave())
    held.release.send("alone")
    assert held.future.get(10) == "alone"


def test_a_future_may_be_read_by_many_threads_at_once(worker: Any) -> None:
    """The value is decoded once."""
    futures = [worker.echo.call_one([number]) for number in range(50)]
    start = threading.Barrier(4)

    def read() -> list[Any]:
        start.wait(10)
        return [future.get(10) for future in futures]

    with ThreadPoolExecutor(4) as pool:
        results = [each.result(20) for each in [pool.submit(read) for _ in range(4)]]

    for number in range(50):
        assert all(result[number] is results[0][number] for result in results)


def test_a_failure_that_nobody_looks_at_is_logged(spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
    workers = spawn(Worker)
    one = workers.slice(hosts=0, gpus=0)
    with caplog.at_level(logging.WARNING, "monarch"):
        for call in (one.fail.call_one, workers.fail.call, workers.fail.call_fail_fast):
            caplog.clear()
            call("unseen")
            until(lambda: "call.failure_unseen" in caplog.text)
            assert ".fail raised ValueError: unseen" in caplog.text

        caplog.clear()
        for call in (one.fail.call_one, workers.fail.call):
            with pytest.raises(ActorError):
                call("seen").get(10)
        workers.fail.call_settled("settled").get(10)
        with pytest.raises(ActorError):
            Accumulator(workers.fail, 0, max).accumulate("folded").get(10)
        cancelled = one.fail.call_one("cancelled")
        if not cancelled.cancel():  # it had failed already: then somebody must look
            assert isinstance(cancelled.exception(10), ActorError)
        del cancelled
        one.pid.call_one()
        workers.pid.call().get(10)
        gc.collect()
        assert caplog.text == ""
