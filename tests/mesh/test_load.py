"""Many calls at once, and long ones: nothing is used up, and nothing runs twice."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import psutil
import pytest

from monarch.actor import Actor, endpoint, this_host
from monarch.testing import fresh_client
from tests.mesh.actors import AsyncWorker

pytestmark = pytest.mark.slow


class Echo(Actor):
    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Counter(Actor):
    def __init__(self) -> None:
        self.runs = 0

    @endpoint
    def run_for(self, seconds: float) -> int:
        self.runs += 1
        threading.Event().wait(seconds)
        return self.runs


@pytest.mark.parametrize("transport", ["ipc", "tcp", "shm"])
def test_thousands_of_calls_in_flight_use_few_threads_and_descriptors(transport: str) -> None:
    with fresh_client(transport):
        workers: Any = this_host().spawn_procs({"gpus": 4}).spawn("workers", AsyncWorker)
        payload = b"x" * 1000

        async def many() -> list[Any]:
            calls = [workers.slice(gpus=i % 4).echo_later.call_one((i, payload)) for i in range(20_000)]
            used = threading.active_count(), len(os.listdir("/proc/self/fd"))
            assert used[0] < 100 and used[1] < 256
            return [i for i, _ in await asyncio.gather(*calls)]

        assert asyncio.run(many()) == list(range(20_000))


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_call_that_takes_longer_than_any_limit_of_the_links_runs_once(transport: str) -> None:
    with fresh_client(transport, message_delivery_timeout="200ms", message_ack_time_interval="50ms"):
        counter: Any = this_host().spawn_procs({"gpus": 1}).spawn("counter", Counter)

        assert counter.run_for.call_one(1.0).get(30) == 1
        assert counter.run_for.call_one(0).get(30) == 2


@pytest.mark.timeout(240)
def test_memory_stays_as_it_is_over_many_calls() -> None:
    with fresh_client("shm"):
        echo: Any = this_host().spawn_procs({"gpus": 1}).spawn("echo", Echo)
        processes = psutil.Process(), psutil.Process(echo.pid.call_one().get(30))
        large = os.urandom(1 << 20)

        def call(small_count: int, large_count: int) -> list[int]:
            for _ in range(small_count // 100):
                for future in [echo.echo.call_one(i) for i in range(100)]:
                    future.get(30)
            for _ in range(large_count):
                assert echo.echo.call_one(large).get(30) == large
            # How much shared memory goes around depends on how busy the machine is; `test_pool` sees to its bound.
            return [info.rss - info.shared for info in (process.memory_info() for process in processes)]

        warm = call(5_000, 50)
        small = call(100_000, 0)
        assert [b <= 1.05 * a for a, b in zip(warm, small, strict=True)] == [True, True], (warm, small)
        after = call(0, 1_000)
        assert [b <= a + (16 << 20) for a, b in zip(small, after, strict=True)] == [True, True], (small, after)
