"""Tensors of CUDA devices: a device for each process, and reductions over NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from monarch import RemoteProcessGroup, inspect, remote
from monarch.actor import ProcMesh, this_host
from monarch.mesh.tensor import worker
from monarch.testing import fresh_client


@pytest.fixture(scope="module")
def gpus() -> Iterator[ProcMesh]:
    with fresh_client("shm", cleanup_timeout="1s"):
        yield this_host().spawn_procs({"gpus": torch.cuda.device_count()})


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_operators_reductions_and_moves_run_on_devices(gpus: ProcMesh) -> None:
    count = gpus.size("gpus")
    with gpus.activate():
        rank = gpus.rank_tensor("gpus")
        x = torch.ones(4, count, device="cuda") * rank.to("cuda")
        found = inspect(
            [
                x @ x.t(),
                x.reduce("gpus"),
                x.to(torch.bfloat16).reduce("gpus", "max"),
                x.t().reduce("gpus", "stack"),
                x.t().reduce("gpus", scatter=True),
                x.reduce_("gpus", "avg"),
                x[0].to_mesh(gpus),
            ],
            gpus=count - 1,
        )
    total, last = sum(range(count)), count - 1
    assert found[0].tolist() == [[count * last**2] * 4] * 4
    assert found[1].tolist() == [[total] * count] * 4
    assert found[2].tolist() == [[last] * count] * 4
    assert found[3][:, 0, 0].tolist() == list(range(count))
    assert found[4].tolist() == [total] * 4
    assert found[5][0].tolist() == found[6].tolist() == [total / count] * count


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_process_groups_take_tensors_of_both_kinds(gpus: ProcMesh) -> None:
    def total(group):
        import torch.distributed as dist

        both = torch.ones(2), torch.ones(2, device="cuda")
        for each in both:
            dist.all_reduce(each, group=group)
        return [each.tolist() for each in both]

    with gpus.activate():
        found = remote(total).call(RemoteProcessGroup("gpus", gpus)).get()
    assert all(each == [[gpus.size("gpus")] * 2] * 2 for each in found.values())


@pytest.mark.parametrize(
    ("given", "rank", "wanted"), [("", 1, "1"), ("4,6", 0, "4"), ("4,6", 1, "6"), ("", 2, "0"), ("4,6", 4, "6")]
)
def test_each_process_of_a_host_has_a_device_of_its_own(monkeypatch, given, rank, wanted):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    worker.settle_in(rank, [7, 7, 8, 7, 8])

    assert os.environ["CUDA_VISIBLE_DEVICES"] == wanted
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), "5")
