"""Large arguments and results: they arrive as they were, and belong to whoever received them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from typing import Any

import pytest

from monarch.actor import Actor, endpoint, this_host
from monarch.config import configured
from monarch.testing import fresh_client
from monarch.transports import registry

numpy = pytest.importorskip("numpy")

MIB = 1 << 20
LIMIT_S = 30


class _Cycle:
    def __init__(self, array: Any) -> None:
        self.array, self.me = array[:1], self


class Keeper(Actor):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.kept: Any = None

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def add_to(self, value: Any, number: int) -> Any:
        """In place."""
        value += number
        return value

    @endpoint
    def echo_and_keep(self, value: Any, how: str) -> Any:
        """Keeps it, or something that shows the same memory."""
        self.kept = {
            "itself": lambda: value,
            "a part": lambda: value[:1],
            "a view": lambda: memoryview(value),
            "its base": lambda: numpy.asarray(value.base),
            "a cycle": lambda: _Cycle(value).array,
        }[how]()
        return value

    @endpoint
    def echo_twice(self, value: Any) -> Any:
        return value, value[:]

    @endpoint
    def reserved(self) -> int:
        """Of this process's shared memory."""
        return registry.get("shm").memory.statistics()["reserved_bytes"]

    @endpoint
    def keep(self, value: Any) -> None:
        self.kept = value

    @endpoint
    def add(self, number: int) -> int:
        """Write to what was kept."""
        self.kept += number
        return int(self.kept[0])

    @endpoint
    def first(self) -> int:
        return int(self.kept[0])

    @endpoint
    def work_on_it(self, value: Any, number: int) -> list[int]:
        """What a process that is forked, as the workers of a data loader are, sees of the value while it is changed."""
        forks = multiprocessing.get_context("fork")
        go, said = forks.Event(), forks.Queue()
        worker = forks.Process(target=_look, args=(value, go, said))
        worker.start()
        value += number
        go.set()
        seen = said.get(timeout=20)
        worker.join(20)
        return [seen, int(value[0])]

    @endpoint
    def return_forked(self, value: Any, number: int) -> Any:
        self.kept = value
        self._start_worker()
        value += number
        return value

    @endpoint
    def start_worker(self) -> None:
        self._start_worker()

    def _start_worker(self) -> None:
        """One that looks, when it is told to, at what was kept, and that nobody keeps here from now on."""
        forks = multiprocessing.get_context("fork")
        self.go, self.said = forks.Event(), forks.Queue()
        self.worker = forks.Process(target=_look, args=(self.kept, self.go, self.said))
        self.worker.start()
        self.kept = None

    @endpoint
    def ask_worker(self) -> int:
        self.go.set()
        seen = self.said.get(timeout=20)
        self.worker.join(20)
        return int(seen)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def _look(value: Any, go: Any, said: Any) -> None:
    if go.wait(20):
        said.put(int(value[len(value) // 2]))


class Later(Actor):
    @endpoint
    async def add_to(self, value: Any, number: int) -> Any:
        await asyncio.sleep(0)
        value += number
        return value

    @endpoint
    async def reserved(self) -> int:
        return registry.get("shm").memory.statistics()["reserved_bytes"]


def test_arrays_of_all_sizes_come_back_as_they_were_and_can_be_written(spawn):
    one = spawn(Keeper).slice(hosts=0, gpus=0)
    for size in (10, 70_000, MIB, 5 * MIB):
        array = numpy.arange(size, dtype=numpy.uint8)
        back = one.echo.call_one({"deep": [array, (array[::2],)]}).get()
        assert (back["deep"][0] == array).all() and (back["deep"][1][0] == array[::2]).all()
        back["deep"][0][0] += 1
        assert array[0] == 0


def test_what_is_cast_is_private_to_each_receiver(spawn):
    keepers = spawn(Keeper)
    array = numpy.zeros(MIB, numpy.int32)
    keepers.keep.call(array).get()
    array += 100
    sums = [keepers.slice(hosts=i // 2, gpus=i % 2).add.call_one(i + 1).get() for i in range(4)]
    assert sums == [1, 2, 3, 4]
    assert [value for _, value in keepers.first.call().get().items()] == [1, 2, 3, 4]


def test_the_sender_may_write_at_once(spawn):
    one = spawn(Keeper).slice(hosts=0, gpus=0)
    array = numpy.zeros(MIB, numpy.uint8)
    futures = []
    for i in range(20):
        array[:] = i
        futures.append(one.echo.call_one(array))
    assert [int(future.get()[-1]) for future in futures] == list(range(20))


def test_memory_that_is_given_back_is_not_that_of_a_value_still_used(spawn):
    one = spawn(Keeper).slice(hosts=0, gpus=0)
    kept = [one.echo.call_one(numpy.full(MIB, i, numpy.uint8)).get() for i in range(10)]
    for i in range(30):
        one.echo.call_one(numpy.full(MIB, 100 + i, numpy.uint8)).get()
    assert [(int(a.min()), int(a.max())) for a in kept] == [(i, i) for i in range(10)]


@pytest.mark.parametrize("how", ["itself", "a part", "a view", "its base", "a cycle"])
def test_an_answer_is_private_whatever_the_actor_keeps(spawn, how):
    one = spawn(Keeper).slice(hosts=0, gpus=0)
    back = one.echo_and_keep.call_one(numpy.full(MIB, 7, numpy.uint8), how).get()
    back[:] = 9
    one.echo.call_one(numpy.full(MIB, 8, numpy.uint8)).get()
    assert one.first.call_one().get() == 7
    assert (back == 9).all()


def test_arrays_over_the_same_memory_come_back_apart(spawn):
    one = spawn(Keeper).slice(hosts=0, gpus=0)
    whole, again = one.echo_twice.call_one(numpy.full(MIB, 7, numpy.uint8)).get()
    whole[:] = 9
    assert (again == 7).all()


@pytest.mark.parametrize("kind", [Keeper, Later])
def test_what_comes_back_changed_in_place_needs_no_memory_of_the_actor(real_client, kind):
    one = this_host().spawn_procs({"gpus": 1}).spawn("keeper", kind)
    array = numpy.zeros((MIB, 2), order="F")
    for _ in range(5):
        changed = one.add_to.call_one(array, 1).get()
        assert changed.flags.f_contiguous and (changed == array + 1).all()
        array = changed
    assert one.reserved.call_one().get() == 0


def test_results_outlive_the_process_that_sent_them(real_client):
    keepers = this_host().spawn_procs({"gpus": 1}).spawn("keeper", Keeper)
    back = keepers.echo.call_one(numpy.full(MIB, 7, numpy.uint8)).get()
    os.kill(keepers.pid.call_one().get(), signal.SIGKILL)
    real_client.expect_fault()
    back += 1
    assert (back == 8).all()


@pytest.mark.parametrize("limit_bytes", [0, pytest.param(3 * MIB, marks=pytest.mark.slow)])
def test_what_has_no_room_in_shared_memory_arrives_all_the_same(limit_bytes):
    with fresh_client("shm", shared_memory_bytes=limit_bytes):
        keepers = this_host().spawn_procs({"gpus": 1}).spawn("keeper", Keeper)
        futures = [keepers.echo.call_one(numpy.full(MIB + i, i, numpy.uint8)) for i in range(8)]
        assert [int(future.get(20)[-1]) for future in futures] == list(range(8))


def test_how_much_shared_memory_there_may_be_can_be_set_at_any_time():
    pool = registry.get("shm").memory
    array = numpy.full(2 * MIB, 7, numpy.uint8)
    with fresh_client("shm"):
        keepers = this_host().spawn_procs({"gpus": 1}).spawn("keeper", Keeper)
        with configured(shared_memory_bytes=MIB):
            pool.trim(idle_s=0)
            before = pool.statistics()["reserved_bytes"]
            assert (keepers.echo.call_one(array).get(20) == array).all()
            assert pool.statistics()["reserved_bytes"] <= before
        back = keepers.echo.call_one(array).get(20)
        assert (back == array).all() and pool.statistics()["reserved_bytes"] >= 2 * MIB


def test_a_forked_worker_sees_what_its_parent_had_received(spawn):
    one = spawn(Keeper).slice(hosts=0, gpus=0)
    assert one.work_on_it.call_one(numpy.full(MIB, 1, numpy.uint8), 5).get(LIMIT_S) == [1, 6]


def test_a_forked_worker_sees_what_its_parent_let_go_of(spawn):
    one = spawn(Keeper).slice(hosts=0, gpus=0)
    one.keep.call_one(numpy.full(MIB, 1, numpy.uint8)).get(LIMIT_S)
    one.start_worker.call_one().get(LIMIT_S)
    for number in range(2, 12):
        one.echo.call_one(numpy.full(MIB, number, numpy.uint8)).get(LIMIT_S)
    assert one.ask_worker.call_one().get(LIMIT_S) == 1


def test_what_a_forked_worker_has_too_may_be_changed_and_returned(spawn):
    one = spawn(Keeper).slice(hosts=0, gpus=0)
    back = one.return_forked.call_one(numpy.full(MIB, 1, numpy.uint8), 5).get(LIMIT_S)
    assert (back == 6).all()
    back += 1
    others = [one.add_to.call_one(numpy.full(MIB, number, numpy.uint8), 1).get(LIMIT_S) for number in range(5)]
    assert one.ask_worker.call_one().get(LIMIT_S) == 1
    assert (back == 7).all() and all((other == number + 1).all() for number, other in enumerate(others))
