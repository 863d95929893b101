"""What needs real processes: memory of their own, random numbers of their own, and their deaths."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import monarch
from monarch import fetch_shard, inspect, remote
from monarch.actor import ProcMesh, SupervisionError, this_host
from monarch.mesh.tensor.engine import engine_of
from monarch.testing import TestClient, fresh_client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def real_client() -> Iterator[TestClient]:
    with fresh_client("shm", cleanup_timeout="1s") as client:
        yield client


@pytest.fixture(scope="module")
def real(real_client: TestClient) -> ProcMesh:
    return this_host().spawn_procs({"hosts": 2, "gpus": 2}, name="real")


def resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_shards_are_of_their_processes(real):
    with real.activate():
        pid = remote(lambda: torch.tensor(os.getpid()), propagate=lambda: torch.tensor(0))()
        pids = list(inspect(pid.reduce(None, "stack")))
    assert len({int(each) for each in pids} | {os.getpid()}) == 5


def test_each_process_draws_its_own_random_numbers(real):
    from monarch.builtins import set_manual_seed_remote

    with real.activate():
        set_manual_seed_remote(7, by_rank=True)
        drawn = inspect(torch.rand(3).reduce(None, "stack"))

    for rank, numbers in enumerate(drawn):
        assert torch.equal(numbers, torch.rand(3, generator=torch.Generator().manual_seed(7 + rank)))


def test_what_is_computed_a_second_time_gets_the_same_random_numbers(real):
    from monarch.builtins import get_rng_state_remote, same_random_numbers

    with real.activate():
        x = torch.ones(64, requires_grad=True)
        made = checkpoint(torch.nn.functional.dropout, x, use_reentrant=False, context_fn=same_random_numbers)
        before = get_rng_state_remote()
    made.sum().backward()
    with real.activate():
        after = get_rng_state_remote()
    assert torch.equal(*inspect([made, x.grad]))
    assert torch.equal(*inspect([before, after]))


def test_results_have_the_default_dtype_of_the_controller(real):
    with real.activate():
        try:
            torch.set_default_dtype(torch.float64)
            made = [torch.full((1,), 0.5), torch.arange(0, 1, 0.5), torch.arange(2) * 0.5, torch.arange(2) / 2]
        finally:
            torch.set_default_dtype(torch.float32)
        made.append(torch.arange(2) / 2)
        assert [each.dtype for each in inspect(made)] == [each.dtype for each in made]
        assert made[0].dtype != made[-1].dtype


def test_large_shards_move_between_processes(real):
    with real.slice(hosts=0).activate():
        large = torch.arange(4 << 20, dtype=torch.int32) + real.slice(hosts=0).rank_tensor("gpus")
        moved = large.to_mesh(real.slice(hosts=1)) + 1

    assert torch.equal(inspect(moved, gpus=1), torch.arange(4 << 20, dtype=torch.int32) + 2)


def test_ten_thousand_operators_leave_memory_as_it_was(real):
    measure = remote(resident_mb)
    with real.activate():
        x = torch.zeros(1000, 100)

        def work(count: int) -> None:
            nonlocal x
            for _ in range(count):
                x = x + 1

        work(1000)
        inspect(x)
        before, before_there = resident_mb(), max(measure.call().get().values())
        work(10_000)
        inspect(x)
        assert resident_mb() - before < 10
        assert max(measure.call().get().values()) - before_there < 10


def test_the_controller_does_not_run_ahead_for_ever(real):
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return x

    step = remote(slow, propagate=lambda x: x)
    with real.activate():
        x = torch.zeros(1)
        for _ in range(100):
            x = step(x)
        lane = x._ref.place.lane
        assert len(lane._sent) <= monarch.mesh.tensor.lane.AHEAD
        inspect(x)


def test_the_death_of_a_process_ends_what_waits_and_says_so():
    with fresh_client("shm", cleanup_timeout="1s") as client:
        procs = this_host().spawn_procs({"gpus": 2}, name="mortal")
        client.allow_faults()
        with procs.activate():
            x = torch.ones(2)
            inspect(x)
            blocked = remote(lambda x: time.sleep(60) or x, propagate=lambda x: x)(x)
            waiting = fetch_shard(blocked + 1, gpus=0)
            client.kill(procs.slice(gpus=1))
            error = waiting.exception(10)
            assert isinstance(error, monarch.DeviceException) and isinstance(error, SupervisionError)
            with pytest.raises(monarch.DeviceException, match="gone"):
                inspect(x + 1)
        client.kill(procs.slice(gpus=0))


def test_a_worker_that_waits_for_a_shard_of_a_process_that_died_waits_no_longer():
    with fresh_client("shm", cleanup_timeout="1s") as client:
        procs = this_host().spawn_procs({"gpus": 2}, name="mortal")
        survivor, victim = procs.slice(gpus=0), procs.slice(gpus=1)
        client.allow_faults()
        late = remote(lambda x: time.sleep(60) or x, propagate=lambda x: x)
        with victim.activate():
            x = torch.ones(2)
            inspect(x)
            moved = late(x).to_mesh(survivor)
        waiting = fetch_shard(moved)
        client.kill(victim)
        assert isinstance(waiting.exception(10), monarch.DeviceException)
        assert engine_of(procs).workers.slice(gpus=0).holds.call_one().get(20) == 1
        client.kill(survivor)
