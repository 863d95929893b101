"""Reductions and moves, against the same on all shards in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import monarch
from monarch import RemoteProcessGroup, inspect, remote
from monarch.actor import this_host

HOSTS, GPUS = 2, 2
FOLDS = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def at(tensor: Any, host: int, gpu: int) -> torch.Tensor:
    return inspect(tensor, hosts=host, gpus=gpu)


def shard(host: int, gpu: int, dtype: torch.dtype, rows: int = 4) -> torch.Tensor:
    base = torch.arange(rows * 3).view(rows, 3)
    return ((base * (gpu + 1) + 5 * host) % 7).to(dtype)


def test_a_rank_of_several_dimensions_is_row_major(procs):
    both, turned = procs.rank_tensor(("hosts", "gpus")), procs.rank_tensor(["gpus", "hosts"])
    sizes = procs.sizes

    assert at(both, 1, 0).item() == sizes["gpus"]
    assert at(turned, 1, 0).item() == 1
    assert at(procs.rank_tensor(None), 1, 1).item() == sizes["gpus"] + 1
    with pytest.raises(KeyError, match="racks"):
        procs.rank_tensor("racks")
    with pytest.raises(ValueError, match="twice"):
        procs.rank_tensor(("gpus", "gpus"))


@pytest.fixture
def make(procs):
    """The tensor whose shards are those of `shard`."""

    def make(dtype: torch.dtype, rows: int = 4) -> Any:
        host, gpu = procs.rank_tensor("hosts"), procs.rank_tensor("gpus")
        with procs.activate():
            return ((torch.arange(rows * 3).view(rows, 3) * (gpu + 1) + 5 * host) % 7).to(dtype)

    return make


def fold(how: str, shards: list[torch.Tensor]) -> torch.Tensor:
    if how == "stack":
        return torch.stack(shards)
    if how == "avg":
        total = functools.reduce(torch.add, shards)
        return total / len(shards) if total.is_floating_point() else total // len(shards)
    return functools.reduce(FOLDS[how], shards)


FLOATING = [torch.float32, torch.float64, torch.bfloat16]
WHOLE = [torch.int64, torch.uint8, torch.bool]
CASES = [
    (how, dtype)
    for how in ("stack", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
    for dtype in FLOATING + WHOLE
    if not (how.startswith("b") and dtype in FLOATING)
    and not (dtype is torch.bool and how in ("sum", "avg", "product"))
]


@pytest.mark.parametrize(("how", "dtype"), CASES)
def test_every_reduction_of_every_kind_of_number(make, how, dtype):
    tensor = make(dtype)
    found = tensor.reduce("gpus", how)
    wanted = fold(how, [shard(1, gpu, dtype) for gpu in range(GPUS)])

    assert found.shape == wanted.shape
    assert torch.equal(at(found, 1, 0), wanted)
    assert torch.equal(at(found, 1, 1), wanted)


@pytest.mark.parametrize("dims", ["hosts", ("gpus",), ("hosts", "gpus"), None])
@pytest.mark.parametrize("how", ["sum", "stack"])
def test_over_one_dimension_or_several_or_all(make, dims, how):
    found = make(torch.int64).reduce(dims, how)
    over = ("hosts", "gpus") if dims is None else dims
    group = [
        (host, gpu)
        for host in (range(HOSTS) if "hosts" in over else [1])
        for gpu in (range(GPUS) if "gpus" in over else [0])
    ]

    assert torch.equal(at(found, 1, 0), fold(how, [shard(host, gpu, torch.int64) for host, gpu in group]))


@pytest.mark.parametrize("how", ["sum", "max", "avg", "bxor", "stack"])
@pytest.mark.parametrize("dims", ["gpus", None])
def test_scatter_gives_each_member_its_piece(make, how, dims):
    size = 2 if dims else 4
    found = make(torch.int64, rows=size).reduce(dims, how, scatter=True)
    group = [(1, gpu) for gpu in range(GPUS)] if dims else [(h, g) for h in range(HOSTS) for g in range(GPUS)]
    for gpu in range(GPUS):
        mine = group.index((1, gpu))
        wanted = fold(how, [shard(host, each, torch.int64, size)[mine] for host, each in group])
        assert torch.equal(at(found, 1, gpu), wanted)


def test_in_place_and_into_another_tensor(make, procs):
    tensor = make(torch.float32)
    view = tensor[0]
    with procs.activate():
        out = torch.zeros(4, 3)
    assert tensor.reduce("gpus", out=out) is out
    assert tensor.reduce_("gpus") is tensor
    wanted = shard(0, 0, torch.float32) + shard(0, 1, torch.float32)

    assert torch.equal(at(tensor, 0, 1), wanted)
    assert torch.equal(at(out, 0, 0), wanted)
    assert torch.equal(at(view, 0, 1), wanted[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("how", ["avg", "max"])
def test_parts_of_a_tensor_are_reduced_in_place_and_nothing_else(make, how, dtype):
    tensor = make(dtype)
    tensor[1:3].reduce_("gpus", how)
    tensor.t()[1:, 3:].reduce_("gpus", how)
    wanted = shard(0, 0, dtype)
    both = fold(how, [shard(0, gpu, dtype) for gpu in range(GPUS)])
    wanted[1:3] = both[1:3]
    wanted[3:, 1:] = both[3:, 1:]

    assert torch.equal(at(tensor, 0, 0), wanted)


def test_what_is_computed_meanwhile_does_not_change_the_result(make):
    tensor = make(torch.float32)
    total = tensor.reduce("gpus")
    tensor.zero_()
    more = total + 1

    assert torch.equal(at(more, 0, 0), shard(0, 0, torch.float32) + shard(0, 1, torch.float32) + 1)


@pytest.fixture
def directly(procs, monkeypatch):
    """Also what is small goes directly."""
    from monarch.mesh.tensor import groups

    monkeypatch.setattr(groups, "DIRECT_BYTES", 0)


@pytest.mark.parametrize(("how", "dtype"), [case for case in CASES if case[0] != "stack"])
def test_direct_reductions_are_those_of_gloo(make, directly, how, dtype):
    tensor = make(dtype)
    total = tensor.reduce(None, how)
    tensor.zero_()
    wanted = fold(how, [shard(host, gpu, dtype) for host in range(HOSTS) for gpu in range(GPUS)])

    assert torch.equal(at(total, 0, 1), wanted)
    assert torch.equal(at(total, 1, 0), wanted)


@pytest.mark.parametrize(("how", "dtype"), [case for case in CASES if case[0] != "stack"])
def test_direct_reductions_in_place_go_part_by_part(make, directly, monkeypatch, how, dtype):
    from monarch.mesh.tensor import groups

    monkeypatch.setattr(groups, "DIRECT_AT_ONCE_BYTES", 40)
    tensor = make(dtype)
    rest = tensor[3]
    tensor[:3].reduce_(None, how)
    wanted = fold(how, [shard(host, gpu, dtype) for host in range(HOSTS) for gpu in range(GPUS)])

    assert torch.equal(at(tensor[:3], 0, 1), wanted[:3])
    assert torch.equal(at(tensor[:3], 1, 0), wanted[:3])
    assert torch.equal(at(rest, 1, 0), shard(1, 0, dtype)[3])


@pytest.mark.parametrize("shape", [(), (3,), (0,), (5, 3)])
def test_pieces_of_direct_reductions_may_be_uneven_or_empty(procs, directly, shape):
    rank = procs.rank_tensor("gpus")
    with procs.activate():
        found = torch.ones(shape) * rank
    assert torch.equal(at(found.t().reduce().t() if len(shape) == 2 else found.reduce(), 1, 1), torch.full(shape, 2.0))


def test_direct_reductions_of_several_groups_keep_their_order(procs, directly):
    total = procs.rank_tensor("hosts") + 2 * procs.rank_tensor("gpus")
    for step in range(8):
        total = total.reduce(("hosts", "gpus")[step % 2]) + step
    alone = torch.tensor([[0, 2], [1, 3]])
    for step in range(8):
        alone = alone.sum(step % 2, keepdim=True).expand(2, 2) + step

    assert [[int(at(total, host, gpu)) for gpu in range(2)] for host in range(2)] == alone.tolist()


@pytest.mark.parametrize("direct_bytes", [0, 1 << 30])
def test_reductions_that_nobody_uses_hold_bounded_memory(tensor_client, monkeypatch, direct_bytes):
    from monarch.mesh.tensor import groups

    held = []

    class Watched(groups.InFlight):
        def add(self, *arguments: Any) -> None:
            super().add(*arguments)
            held.append(self._bytes)

    monkeypatch.setattr(groups, "InFlight", Watched)
    monkeypatch.setattr(groups, "IN_FLIGHT_BYTES", 100)
    monkeypatch.setattr(groups, "DIRECT_BYTES", direct_bytes)
    with this_host().spawn_procs({"gpus": 2}, name="hurried").activate():
        for _ in range(50):
            torch.ones(10).reduce()
        assert inspect(torch.ones(10).reduce()).tolist() == [2.0] * 10
    assert len(held) > 50 and max(held) <= 100


def test_who_reduces_with_a_failed_member_fails_too(procs, directly):
    def fail_at_first(x, rank):
        if rank == 0:
            raise ValueError("spilt")
        return x

    with procs.activate():
        bad = remote(fail_at_first, propagate=lambda x, rank: x)(torch.ones(4), procs.rank_tensor("gpus"))
        for total in (bad.reduce("gpus"), bad.reduce_("gpus")):
            for gpu, reason in ((0, "spilt"), (1, "another member")):
                with pytest.raises(monarch.RemoteException, match=reason):
                    inspect(total, gpus=gpu)
        assert inspect(torch.ones(4).reduce("gpus")).tolist() == [2.0] * 4


def test_wrong_reductions_are_refused(make, procs):
    tensor = make(torch.float32)
    with pytest.raises(KeyError, match="racks"):
        tensor.reduce("racks")
    with pytest.raises(ValueError, match="twice"):
        tensor.reduce(("gpus", "gpus"))
    for dims in (0, ["gpus", 1], {"gpus": 1}):
        with pytest.raises(TypeError, match="by name"):
            tensor.reduce(dims)
    with pytest.raises(ValueError, match="no average"):
        make(torch.bool).reduce("gpus", "avg")
    with pytest.raises(ValueError, match="'median' is not one of"):
        tensor.reduce("gpus", "median")
    with pytest.raises(ValueError, match="integers"):
        tensor.reduce("gpus", "bxor")
    with pytest.raises(TypeError, match="as large as the group, 2"):
        tensor.reduce("gpus", scatter=True)
    with pytest.raises(ValueError, match="changes the shape"):
        tensor.reduce_("gpus", "stack")
    with pytest.raises(ValueError, match="out has shape"):
        tensor.reduce("gpus", out=tensor[0])
    with pytest.raises(NotImplementedError, match="planned"):
        tensor.reduce("gpus", mesh=procs)


def test_a_slice_of_the_mesh_has_the_same_shards(make, procs):
    tensor = make(torch.int64)
    row = tensor.slice_mesh(hosts=1)
    one = tensor.slice_mesh(hosts=1, gpus=1)
    del tensor
    doubled = row * 2

    assert doubled.mesh == procs.slice(hosts=1)
    assert torch.equal(inspect(doubled, gpus=1), shard(1, 1, torch.int64) * 2)
    assert torch.equal(inspect(one + 0), shard(1, 1, torch.int64))
    assert torch.equal(inspect(row.reduce("gpus")), shard(1, 0, torch.int64) + shard(1, 1, torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16])
def test_to_mesh_moves_to_the_same_coordinates(make, procs, dtype):
    first, second = procs.slice(hosts=0), procs.slice(hosts=1)
    moved = make(dtype).slice_mesh(hosts=0).t().to_mesh(second)
    stays = make(dtype).slice_mesh(hosts=0).to_mesh(first)

    assert moved.mesh == second
    for gpu in range(GPUS):
        assert torch.equal(inspect(moved, gpus=gpu), shard(0, gpu, dtype).t())
        assert torch.equal(inspect(stays, gpus=gpu), shard(0, gpu, dtype))


def test_to_mesh_copies_along_new_dimensions_and_moves_structures(make, procs):
    row = make(torch.int64).slice_mesh(hosts=1)
    moved = monarch.to_mesh({"a": row, "b": [row + 1, 3]}, procs)

    assert torch.equal(at(moved["a"], 0, 1), shard(1, 1, torch.int64))
    assert torch.equal(at(moved["b"][0], 1, 0), shard(1, 0, torch.int64) + 1)
    assert moved["b"][1] == 3
    with pytest.raises(ValueError, match="lacks hosts=2"):
        make(torch.int64).to_mesh(procs.slice(hosts=0))
    with pytest.raises(ValueError, match="another one"):
        row.to_mesh(this_host().spawn_procs({"gpus": 2}))
    with pytest.raises(TypeError, match="'gpus' is none"):
        row.to_mesh("gpus")


def test_a_failure_moves_along(procs):
    def fail(x):
        raise ValueError("spilt")

    with procs.slice(hosts=0).activate():
        bad = remote(fail, propagate=lambda x: x)(torch.ones(1))
    with pytest.raises(monarch.RemoteException, match="spilt"):
        inspect(bad.to_mesh(procs.slice(hosts=1)) + 1)


def test_a_pipeline_of_two_stages_goes_back_and_forth(procs):
    stages = [procs.slice(hosts=0), procs.slice(hosts=1)]
    with stages[0].activate():
        x = torch.zeros(3)
    for step in range(20):
        x = (x + step).to_mesh(stages[step % 2 - 1])
        x = x * 1

    assert inspect(x, gpus=1).tolist() == [190.0] * 3


def test_a_group_is_of_a_mesh(procs):
    with pytest.raises(TypeError, match="3 is none"):
        RemoteProcessGroup("gpus", 3)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="racks"):
        RemoteProcessGroup("racks", procs)


def test_workers_have_groups_of_torch_distributed(procs):
    def total(x, group):
        import torch.distributed as dist

        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    with procs.activate():
        group = RemoteProcessGroup("gpus", procs)
        made = remote(total, propagate=lambda x, group: x)(procs.rank_tensor("gpus") + 1, group)
        assert int(inspect(made, hosts=1)) == 3
    with pytest.raises(KeyError, match="racks"):
        RemoteProcessGroup("racks", procs)


@pytest.mark.parametrize("size", [1, 5 << 20])
def test_what_was_issued_is_done_before_a_mesh_stops(tensor_client, tmp_path, size):
    def write(x, rank, folder):
        (folder / str(int(rank))).write_text(str(float(x[0])))

    mesh = this_host().spawn_procs({"gpus": 2})
    with mesh.activate():
        rank = mesh.rank_tensor("gpus")
        total = (torch.ones(size) * rank).reduce()
        remote(write, propagate=lambda *args: None)(total, rank, tmp_path)
    mesh.stop().get(30)

    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"0": "1.0", "1": "1.0"}


def test_structures_are_reduced_and_moved_tensor_by_tensor(procs):
    with procs.activate():
        ranks = procs.rank_tensors()
        into = {label: torch.zeros((), dtype=torch.int64) for label in ranks}
        sums = monarch.reduce({**ranks, "step": 3}, "gpus")
        monarch.reduce(ranks, "hosts", out=into)
        monarch.reduce_([ranks["gpus"]], "gpus", "max")

    assert inspect(sums, hosts=1) == {"hosts": 2, "gpus": 1, "step": 3}
    assert inspect(into, gpus=1) == {"hosts": 1, "gpus": 2}
    assert inspect(ranks["gpus"]) == 1


@pytest.mark.parametrize("verb", ["reduce", "reduce_", "slice_mesh", "to_mesh"])
def test_a_local_tensor_is_refused(procs, verb):
    arguments = {"slice_mesh": {"hosts": 0}, "to_mesh": {"mesh": procs}}.get(verb, {})
    local = torch.ones(2)
    with procs.activate(), pytest.raises(TypeError, match="LOCAL_TENSOR"):
        getattr(monarch, verb)({"weight": local}, **arguments)
