"""Tensors as arguments and results of actors' endpoints."""

from __future__ import annotations

import pytest
import torch

import monarch
from monarch import inspect
from monarch.actor import Actor, ActorError, ProcMesh, endpoint, this_proc


class Keeper(Actor):
    def __init__(self) -> None:
        self.seen: list[float] = []

    @endpoint
    def note(self, x: torch.Tensor, more: float = 0.0) -> float:
        assert type(x) is torch.Tensor
        self.seen.append(float(x.sum()) + more)
        return self.seen[-1]

    @endpoint
    def all(self) -> list[float]:
        return self.seen

    @endpoint(propagate=lambda x: (torch.empty_like(x), 3))
    def scaled(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.seen.append(-1.0)
        return x * 10, 3

    @endpoint(propagate=torch.empty_like)
    async def broken(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")


@pytest.fixture
def keepers(procs):
    keepers = procs.spawn("keepers", Keeper)
    yield keepers
    keepers.stop().get(10)


def test_each_actor_gets_its_shard(procs, keepers):
    with procs.activate():
        x = torch.ones(2) * (procs.rank_tensor("gpus") + 1)
        assert list(keepers.note.call(x).get(10).values()) == [2, 4, 2, 4]
        assert list(keepers.note.call(x=x * 2, more=0.5).get(10).values()) == [4.5, 8.5, 4.5, 8.5]
        assert keepers.slice(hosts=1, gpus=1).note.call_one(x).get(10) == 4


def test_calls_with_and_without_tensors_keep_their_order(procs, keepers):
    with procs.activate():
        for step in range(30):
            x = torch.full((2,), float(step))
            if step % 3 == 0:
                keepers.note.broadcast(x)
            elif step % 3 == 1:
                keepers.scaled.rref(x)
            else:
                keepers.note.call(torch.tensor([step * 2.0]))
        seen = keepers.all.call().get(10).item(hosts=1, gpus=0)

    assert seen == [-1.0 if step % 3 == 1 else step * 2.0 for step in range(30)]


def test_rref_gives_distributed_tensors(procs, keepers):
    with procs.activate():
        x = torch.ones(2) * procs.rank_tensor("gpus")
        made, number = keepers.scaled.rref(x)
        assert isinstance(made, monarch.Tensor) and number == 3
        assert inspect(made + 1, gpus=1).tolist() == [11, 11]


def test_a_failing_endpoint_poisons_the_result(procs, keepers):
    with procs.activate():
        bad = keepers.broken.rref(torch.ones(1))
        with pytest.raises(monarch.RemoteException, match="not today"):
            inspect(bad + 1)
        assert inspect(torch.ones(1)).tolist() == [1]


def test_a_tensor_that_could_not_be_computed_fails_the_call(procs, keepers):
    def fail(x):
        raise ValueError("spilt")

    with procs.activate():
        bad = monarch.remote(fail, propagate=lambda x: x)(torch.ones(1))
        with pytest.raises(ActorError, match="spilt"):
            keepers.note.call(bad).get(10)


class Trainer(Actor):
    @endpoint
    def train(self, procs: ProcMesh) -> float:
        with procs.activate():
            x = torch.ones(2) + procs.rank_tensor("gpus")
            total = x.reduce("gpus").sum()
        return float(inspect(total, hosts=1))


def test_an_actor_can_be_the_controller(procs):
    trainer = this_proc().spawn("trainer", Trainer)

    assert trainer.train.call_one(procs).get(20) == 6
    trainer.stop().get(10)


def test_this_process_is_a_mesh_too(procs):
    with this_proc().activate():
        x = torch.ones(2)
    with this_proc().activate():
        assert inspect(x + torch.ones(2)).tolist() == [2, 2]
        assert int(inspect(x.reduce().sum())) == 2


def test_what_cannot_be_is_refused(procs, keepers):
    with procs.slice(hosts=0).activate():
        part = torch.ones(1)
    with pytest.raises(TypeError, match="actors on its processes only"):
        keepers.note.call(part)
    with procs.activate():
        with pytest.raises(NotImplementedError, match="propagate=function"):
            keepers.note.rref(torch.ones(1))
        with pytest.raises(ValueError, match="exactly the processes"):
            keepers.slice(hosts=0).scaled.rref(torch.ones(1))
        with pytest.raises(TypeError, match="stays with its controller"):
            import pickle

            pickle.dumps(torch.ones(1))
