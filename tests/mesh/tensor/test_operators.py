"""Operators on a mesh do what torch does, for each rank."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import monarch
from monarch import fetch_shard, get_active_mesh, inspect, no_mesh, remote
from monarch.actor import ProcMesh, this_host
from monarch.mesh.tensor.errors import DeviceException

RANKS = [(host, gpu) for host in range(2) for gpu in range(2)]


def shards(tensor: Any) -> list[torch.Tensor]:
    """All of them, in order of rank."""
    return [inspect(tensor, hosts=host, gpus=gpu) for host, gpu in RANKS]


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and bool(torch.equal(found, wanted))


def test_factories_make_tensors_on_the_active_mesh(procs):
    with procs.activate():
        made = {
            "ones": torch.ones(2, 3),
            "full": torch.full((2,), 7),
            "arange": torch.arange(5, dtype=torch.int16),
            "eye": torch.eye(3, dtype=torch.float64),
        }
        assert all(isinstance(each, monarch.Tensor) for each in made.values())
        found = inspect(made, gpus=1)

    assert same(found["ones"], torch.ones(2, 3))
    assert same(found["full"], torch.full((2,), 7))
    assert same(found["arange"], torch.arange(5, dtype=torch.int16))
    assert same(found["eye"], torch.eye(3, dtype=torch.float64))


def test_activation_holds_from_the_call_on_and_ends_with_the_block(procs):
    active = procs.activate()
    try:
        assert get_active_mesh() is procs
        assert isinstance(torch.ones(1), monarch.Tensor)
        with no_mesh.activate():
            assert type(torch.ones(1)) is torch.Tensor
            with pytest.raises(ValueError, match="no mesh is active"):
                get_active_mesh()
    finally:
        with active:
            pass

    assert type(torch.ones(1)) is torch.Tensor
    with pytest.raises(ValueError, match="no mesh is active"):
        get_active_mesh()
    with pytest.raises(RuntimeError, match="ended already"), active:
        pass


def test_each_process_has_its_rank(procs):
    ranks = procs.rank_tensors()

    assert [int(each) for each in shards(ranks["hosts"] * 10 + ranks["gpus"])] == [0, 1, 10, 11]
    with pytest.raises(KeyError, match="racks"):
        procs.rank_tensor("racks")


def test_views_share_memory_and_writes_show_through_them(procs):
    with procs.activate():
        whole = torch.zeros(3, 4)
        row, turned, part = whole[1], whole.t(), whole.view(4, 3)[:, 1:]
        row.add_(1)
        turned[0].fill_(5)
        torch.add(part, 1, out=part)
        found = inspect([whole, row, turned, part])

    plain = torch.zeros(3, 4)
    row, turned, part = plain[1], plain.t(), plain.view(4, 3)[:, 1:]
    row.add_(1)
    turned[0].fill_(5)
    torch.add(part, 1, out=part)
    assert all(same(*pair) for pair in zip(found, [plain, row, turned, part], strict=True))


def test_conjugates_and_negatives_that_torch_puts_off(procs):
    def work(whole: Any) -> list[Any]:
        turned = whole.conj()
        turned[0] = 3 + 4j  # shows in the other, conjugated
        parts = [turned.imag, turned.t().imag[0], torch.view_as_real(turned.resolve_conj()), turned.detach()]
        parts[0].mul_(2)
        return [whole, turned, *parts, turned + whole, turned @ turned.t(), turned.to(torch.complex128), turned.conj()]

    with procs.activate():
        made = work(torch.complex(torch.ones(2, 2), torch.arange(4.0).view(2, 2)))
        assert [each.is_conj() for each in made[:2]] == [False, True] and made[2].is_neg()
        found = inspect(made)
        turned = made[1]
        moved = inspect([turned.to_mesh(procs), turned.reduce("gpus"), turned.reduce("gpus", "stack")])
        swapped = inspect(turned.reduce("gpus", "stack", scatter=True))
        returned = inspect(remote(lambda x: x.conj())(turned))
    plain = work(torch.complex(torch.ones(2, 2), torch.arange(4.0).view(2, 2)))
    assert all(torch.allclose(*pair) for pair in zip(found, plain, strict=True))
    turned = plain[1]
    assert all(torch.equal(*pair) for pair in zip(moved, [turned, turned * 2, torch.stack([turned] * 2)], strict=True))
    assert torch.equal(swapped, torch.stack([turned[0]] * 2)) and torch.equal(returned, turned.conj())


def test_a_shape_is_changed_in_place_for_one_handle(procs):
    with procs.activate():
        base = torch.arange(6).view(2, 3)
        other = base.detach()
        turned = base.t_().unsqueeze_(0)
        turned[0, 0, 0] = 9
        assert turned is base
        assert (base.shape, base.stride(), other.shape) == ((1, 3, 2), (3, 1, 3), (2, 3))
        found = inspect([base, other])
        found.append(inspect(base.squeeze_(0)))

    assert [each.tolist() for each in found] == [
        [[[9, 3], [1, 4], [2, 5]]],
        [[9, 1, 2], [3, 4, 5]],
        [[9, 3], [1, 4], [2, 5]],
    ]


def test_operators_with_lists_and_several_results(procs):
    with procs.activate():
        base = torch.arange(12).view(3, 4) + procs.rank_tensor("gpus")
        top, where = base.max(dim=1)
        first, second = base.split(2, dim=1)
        (whole,) = base.split(9)
        joined = torch.cat([second, first, whole], dim=1)
        found = inspect([top, where, joined, torch.stack([top, where])], gpus=1)

    base = torch.arange(12).view(3, 4) + 1
    top, where = base.max(dim=1)
    wanted = [top, where, torch.cat([base[:, 2:], base[:, :2], base], dim=1), torch.stack([top, where])]
    assert all(same(*pair) for pair in zip(found, wanted, strict=True))


def test_numbers_that_vary_use_one_plan(procs):
    with procs.activate():
        base = torch.ones(3)
        found = inspect([base * factor for factor in (0.5, 1.5, -2.5)])
        total = inspect(base.add(base, alpha=0.25))

    assert [each.tolist() for each in found] == [[0.5] * 3, [1.5] * 3, [-2.5] * 3]
    assert total.tolist() == [1.25] * 3


def test_true_one_and_one_point_oh_are_three_numbers(procs):
    with procs.activate():
        base = torch.zeros(1, dtype=torch.int64)
        found = inspect([base + 1, base + 1.0, torch.zeros(1, dtype=torch.bool) | True, torch.full((1,), True)])

    assert [each.dtype for each in found] == [torch.int64, torch.float32, torch.bool, torch.bool]


def test_zeros_of_both_signs_are_two_numbers(procs):
    def double(number):
        return [torch.full((1,), number), torch.ones(1) * number]

    compiled = monarch.compile(double)
    with procs.activate():
        for made in (double, compiled):
            found = inspect([made(number) for number in (0.0, -0.0)])
            signs = [[math.copysign(1, each.item()) for each in row] for row in found]
            assert signs == [[1, 1], [-1, -1]]


def test_numbers_that_fill_a_tensor_use_one_plan(procs):
    from monarch.mesh.tensor import dispatch

    with procs.activate():
        made = [torch.full((2,), 0.5)]
        before = len(dispatch._plans)
        made += [torch.full((2,), 1.5), torch.full((2,), float("nan"))]
        assert len(dispatch._plans) == before
        found = inspect(made)
        assert torch.arange(0, 1, 0.5).shape != torch.arange(0, 1, 0.25).shape
    assert found[1].tolist() == [1.5, 1.5] and found[2].isnan().all()


def test_factories_have_their_own_default_dtypes(procs):
    with procs.activate():
        made = [torch.tril_indices(2, 2), torch.randperm(3), torch.arange(3), torch.eye(2)]
    assert [inspect(each).dtype for each in made] == [torch.int64] * 3 + [torch.float32]


def test_the_default_dtype_of_the_controller_counts(procs):
    before = torch.get_default_dtype()
    with procs.activate():
        try:
            torch.set_default_dtype(torch.float64)
            made = torch.zeros(2)
        finally:
            torch.set_default_dtype(before)
        assert made.dtype == torch.float64
        assert torch.zeros(2).dtype == torch.float32
        assert inspect(made).dtype == torch.float64


def test_autograd_runs_on_the_controller(procs):
    with procs.activate():
        weight = (torch.arange(6.0).view(2, 3) + procs.rank_tensor("gpus")).requires_grad_()
        loss = (weight.sin() * weight).sum() * 0.5
        loss.backward()
        found = inspect([loss, weight.grad], gpus=1)

    weight = (torch.arange(6.0).view(2, 3) + 1).requires_grad_()
    loss = (weight.sin() * weight).sum() * 0.5
    loss.backward()
    assert torch.allclose(found[0], loss) and torch.allclose(found[1], weight.grad)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_modules_made_under_a_mesh_are_trained_on_it(procs, optimizer):
    def train(made: Callable[[torch.Tensor], Any]) -> list[Any]:
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(made(parameter).view(parameter.shape))
        steps = optimizer(net.parameters(), lr=0.05)
        for _ in range(3):
            steps.zero_grad()
            x = made(torch.empty(6, 4)).view(6, 4)
            torch.nn.functional.cross_entropy(net(x), torch.arange(6) % 2).backward()
            steps.step()
        return [parameter.detach() for parameter in net.parameters()]

    def ramp(like: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-1, 1, like.numel())

    with procs.activate():
        found = inspect(train(ramp), hosts=1)
    wanted = train(ramp)

    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_dropout_and_random_numbers_differ_only_by_state(procs):
    seed = remote(lambda number: torch.manual_seed(number) and None, propagate=lambda number: None)
    alone = procs.slice(hosts=0, gpus=0)
    with alone.activate():
        seed(3)
        found = inspect([torch.rand(4), torch.nn.functional.dropout(torch.ones(4), 0.5), torch.randint(9, (3,))])
    torch.manual_seed(3)

    assert torch.equal(found[0], torch.rand(4))
    assert torch.equal(found[1], torch.nn.functional.dropout(torch.ones(4), 0.5))
    assert torch.equal(found[2], torch.randint(9, (3,)))


def test_inference_mode_has_views_of_what_was_made_before(procs):
    def infer(outside: Any) -> list[Any]:
        with torch.inference_mode():
            inside = torch.ones(2, 2)
            made = [outside.t(), outside.detach(), *outside.split(1), inside.t(), outside + inside]
            outside[0].add_(1)
        return made

    with procs.activate():
        made = infer(torch.zeros(2, 2))
        found = inspect(made)
    plain = infer(torch.zeros(2, 2))
    assert [each.is_inference() for each in made] == [each.is_inference() for each in plain]
    assert all(same(*pair) for pair in zip(found, plain, strict=True))


def test_custom_operators_work_where_they_are_registered(procs):
    @torch.library.custom_op("monarch_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    with procs.activate():
        assert inspect(twice(torch.ones(2))).tolist() == [2, 2]


def test_local_tensors_stay_local(procs):
    local = torch.arange(3)
    with procs.activate():
        assert type(local + 1) is torch.Tensor
        assert (local + 1).sum().item() == 6
        assert type(torch.tensor([1, 2])) is torch.Tensor


def test_a_tensor_outlives_the_activation_and_works_without(procs):
    with procs.activate():
        made = torch.ones(2)
    more = made + made

    assert inspect(more).tolist() == [2, 2]


def test_a_wrong_shape_is_told_once(procs, caplog):
    with procs.activate(), pytest.raises(RuntimeError, match="same reduction dim"):
        torch.ones(2, 3) @ torch.ones(2, 3)

    assert not caplog.records


def test_threads_share_a_mesh(procs):
    def count(step: int) -> list[float]:
        with procs.activate():
            total = torch.zeros(1)
            for _ in range(400):
                total = total + step
            return [inspect(total).item(), inspect(total.reduce("gpus")).item()]

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(count, step) for step in range(4)]
        assert [each.result(60) for each in futures] == [[400 * step, 800 * step] for step in range(4)]


def test_a_thread_is_not_part_of_what_another_one_batches_or_compiles(procs):
    def alone() -> float:
        with procs.activate():
            return float(inspect(torch.ones(1) + offset))

    @monarch.compile
    def step(x):
        made = x * 2
        beside.append(pool.submit(alone).result(30))
        return made

    beside: list[float] = []
    with ThreadPoolExecutor(1) as pool, procs.activate():
        offset = torch.full((1,), 4.0)
        first, second = step(offset), step(offset + 1)
        with monarch.coalescing():
            third = offset + 2
            beside.append(pool.submit(alone).result(30))
        assert inspect([first, second, third]) == [8, 10, 6]
    assert beside == [5, 5]


def test_what_is_not_known_here_is_refused_by_name(procs):
    with procs.activate():
        ones = torch.ones(4)
        with pytest.raises(TypeError, match=r"monarch\.inspect"):
            ones.sum().item()
        reads: list[Callable[[Any], Any]] = [bool, float, lambda each: each.tolist(), lambda each: each.numpy()]
        for read in (*reads, "{:.2f}".format, lambda each: torch.equal(each, each)):
            with pytest.raises(TypeError, match=r"monarch\.inspect"):
                read(ones.sum())
        with pytest.raises(NotImplementedError, match="depends on elements"):
            ones.nonzero()
        with pytest.raises(NotImplementedError, match="in place"):
            ones.resize_(2)
        with pytest.raises(RuntimeError, match=r"shape|size"):
            ones.view(3)
        with pytest.raises(TypeError, match="Generator"):
            torch.rand(2, generator=torch.Generator())
        assert inspect(ones).tolist() == [1] * 4


def test_many_different_operators_do_not_fill_the_workers(procs, monkeypatch):
    from monarch.mesh.tensor import dispatch

    monkeypatch.setattr(dispatch, "_MOST_PLANS", 20)
    with procs.activate():
        total = torch.zeros(1, dtype=torch.int64)
        for number in range(100):
            total = total + number
        assert inspect(total).tolist() == [sum(range(100))]
        assert len(total._ref.place.lane.templates) <= 20


def test_a_mesh_that_is_gone_is_no_failure_of_another(procs, tensor_client, monkeypatch):
    from monarch.mesh.tensor import dispatch, lane

    gone = this_host().spawn_procs(name="gone")
    with gone.activate():
        held = torch.ones(1) + 0.5
        inspect(held)
    tensor_client.kill(gone)
    for mesh in ("tensor_depots", "tensor_workers"):
        tensor_client.expect_fault(mesh)
    monkeypatch.setattr(lane, "FEWEST", 1)  # what is said to it is sent at once
    monkeypatch.setattr(dispatch, "_MOST_PLANS", 5)
    with procs.activate():
        total = torch.zeros(1, dtype=torch.int64)
        for number in range(20):
            total = total + number
        assert inspect(total).tolist() == [sum(range(20))]
    for use in (lambda: inspect(held), gone.activate):
        with pytest.raises(DeviceException, match="a tensor worker is gone"):
            use()


def test_a_mesh_that_was_stopped_is_refused_where_it_is_activated(tensor_client):
    ended = this_host().spawn_procs(name="ended")
    with ended.activate():
        inspect(torch.ones(1))
    ended.stop().get()
    with pytest.raises(RuntimeError, match="already been stopped"):
        ended.activate()
    assert type(torch.ones(1)) is torch.Tensor


def test_data_is_what_it_was_set_to(procs):
    with procs.activate():
        net = torch.nn.Linear(2, 3)
        net.double()
        assert inspect(net(torch.ones(2, dtype=torch.float64))).dtype == torch.float64
        weight = net.weight
        (weight * weight).sum().backward()
        weight.data = torch.full((3, 2), 7.0)
        weight.data.mul_(2)
        assert weight.requires_grad and weight.dtype == torch.float32
        assert inspect(weight).tolist() == [[14.0] * 2] * 3
        with pytest.raises(TypeError, match="another one, not a Tensor"):
            weight.data = torch.tensor(1.0)


def test_a_copy_has_the_same_shards(procs):
    with procs.activate():
        one = torch.ones(2, requires_grad=True)
        twin = copy.copy(one)
        with torch.no_grad():
            one.add_(1)
        assert twin is not one and twin.requires_grad
        assert inspect(twin).tolist() == [2, 2]


def test_modules_can_be_copied(procs):
    with procs.activate():
        net = torch.nn.Linear(2, 2)
        twin = copy.deepcopy(net)
        with torch.no_grad():
            net.weight.zero_()
        assert isinstance(twin.weight, torch.nn.Parameter)
        assert inspect(twin.weight).abs().sum() > 0


# ---- against torch, at random


UNARY: list[Callable[[Any], Any]] = [
    lambda x: x.neg(),
    lambda x: x.t() if x.dim() == 2 else x,
    lambda x: x.sum(0, keepdim=True),
    lambda x: x.flatten(),
    lambda x: x.clone().mul_(2),
    lambda x: x.unsqueeze(-1),
    lambda x: x.reshape(-1, 2) if x.numel() % 2 == 0 else x,
    lambda x: x.cumsum(0),
    lambda x: x.to(torch.float64).to(x.dtype),
    lambda x: x.flip(0),
    lambda x: x[:1],
    lambda x: torch.where(x > 1, x, -x),
    lambda x: x.softmax(0).round() if x.is_floating_point() else x.abs(),
    lambda x: torch.cat([x, x]),
    lambda x: x.contiguous().view(-1),
]
# No booleans: what torch refuses of them is seen by the workers only.
BINARY: list[Callable[[Any, Any], Any]] = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    lambda x, y: torch.eq(x, y).long(),
    torch.outer,
]


def apply(program: list[tuple[int, int, int]], start: list[Any]) -> list[Any]:
    """Each step makes a value of those before, or none where torch refuses."""
    values = list(start)
    for kind, at, other in program:
        x, y = values[at % len(values)], values[other % len(values)]
        try:
            values.append(BINARY[kind - len(UNARY)](x, y) if kind >= len(UNARY) else UNARY[kind](x))
        except (RuntimeError, IndexError):
            values.append(x)
    return values


@pytest.mark.parametrize("view", ["whole", "host", "flat"])
@given(st.lists(st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 9), st.integers(0, 9))))
def test_any_program_gives_what_torch_gives_for_that_rank(shared_procs: ProcMesh, view: str, program: Any) -> None:
    mesh = {"whole": shared_procs, "host": shared_procs.slice(hosts=1), "flat": shared_procs.flatten("rank")}[view]
    label, last = {"whole": ("gpus", 1), "host": ("gpus", 1), "flat": ("rank", 3)}[view]
    with mesh.activate():
        rank = mesh.rank_tensor(label)
        found = inspect(apply(program, [torch.arange(6).view(2, 3) + rank, torch.ones(3) * rank]), **{label: last})
    wanted = apply(program, [torch.arange(6).view(2, 3) + last, torch.ones(3) * last])

    for each, other in zip(found, wanted, strict=True):
        assert each.dtype == other.dtype and each.shape == other.shape
        assert torch.allclose(each, other, equal_nan=True)


# ---- memory


def table_size(procs: ProcMesh) -> int:
    """How many shards the workers hold, at most."""
    engine = procs._root._engine
    engine.flush()
    return max(engine.workers.holds.call().get().values())


def test_dropped_handles_free_their_shards(procs):
    with procs.activate():
        kept = torch.ones(2)
        before = table_size(procs)
        for _ in range(500):
            kept = kept + 1
        temporary = [kept * 2 for _ in range(50)]
        assert table_size(procs) <= before + 51
        del temporary
        gc.collect()
        assert table_size(procs) <= before + 1
        assert inspect(kept).tolist() == [501, 501]


def test_a_future_of_a_shard_can_be_awaited_by_coordinates(procs):
    rank = procs.rank_tensor("gpus")
    futures = [fetch_shard(rank, gpus=gpu) for gpu in range(2)]

    assert [int(each.result(10)) for each in futures] == [0, 1]
    assert int(fetch_shard({"a": rank}, shard={"gpus": 1}).result(10)["a"]) == 1
    assert fetch_shard(3).result() == 3


def test_parts_of_a_tensor_are_assigned_to(procs):
    def assign(base: Any) -> Any:
        base[0] = 7
        base[1, 1:] = base[0, 1:] * 2
        base[base > 10] = -1.5
        base[:, torch.arange(1)] = 0
        return base

    with procs.activate():
        found = inspect(assign(torch.ones(3, 3)))
        with pytest.raises(TypeError, match="LOCAL_TENSOR"):
            torch.ones(2)[:] = torch.tensor([1.0, 2.0])

    assert torch.equal(found, assign(torch.ones(3, 3)))


@pytest.mark.parametrize("kind", ["convolution", "attention", "recurrent"])
def test_larger_modules_are_trained_as_in_one_process(procs, kind):
    nn = torch.nn
    nets: dict[str, Callable[[], Any]] = {
        "convolution": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2)),
        "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        "recurrent": lambda: nn.LSTM(4, 3, batch_first=True),
    }
    shape = {"convolution": (2, 1, 6, 6), "attention": (2, 3, 4), "recurrent": (2, 3, 4)}[kind]

    def train() -> Any:
        net = nets[kind]()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view(parameter.shape))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        x = torch.linspace(-1, 1, math.prod(shape)).view(shape)
        for _ in range(2):
            y = net(x)
            y = y[0] if isinstance(y, tuple) else y
            optimizer.zero_grad()
            (y**2).mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        return y.detach()

    with procs.activate():
        found = inspect(train())

    assert torch.allclose(found, train(), atol=1e-5)
