"""Remote functions, failures of workers, and wrong use."""

from __future__ import annotations

import threading

import pytest
import torch

import monarch
from monarch import OpaqueRef, RemoteException, Stream, call_on_shard_and_fetch, fetch_shard, inspect, remote
from monarch.actor import ActorError, this_host
from monarch.mesh.tensor.handle import Memory


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such luck")


def same_shape(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


failing = remote(fail, propagate=same_shape)


@pytest.mark.parametrize("propagate", [None, "cached", "inspect", "mocked", same_shape])
def test_every_way_to_know_the_shape_gives_the_same(procs, propagate):
    function = remote(double, propagate=propagate)
    with procs.activate():
        made = function(torch.ones(2, 3) + procs.rank_tensor("gpus"))
        assert made.shape == (2, 3)
        assert inspect(made, gpus=1).tolist() == [[4.0] * 3] * 2


def test_a_function_can_be_named_by_its_path(procs):
    with procs.activate():
        made = remote("torch.nn.functional.relu", propagate=same_shape)(torch.ones(2) * -1)
        missing = remote("torch.no_such_function", propagate=same_shape)(torch.ones(2))
        assert inspect(made).tolist() == [0, 0]
        with pytest.raises(RemoteException, match="no_such_function"):
            inspect(missing)


def test_a_function_is_a_decorator_and_takes_any_arguments(procs):
    @remote(propagate=lambda pair, *, local, factor: {"sum": torch.empty(2), "rest": [factor, torch.empty(3)]})
    def mix(pair, *, local, factor):
        return {"sum": pair[0] + pair[1] + local, "rest": [factor, torch.full((3,), float(factor))]}

    with procs.activate():
        made = mix((torch.ones(2), torch.ones(2)), local=torch.tensor([1.0, 2.0]), factor=3)
        found = inspect(made)

    assert found["sum"].tolist() == [3, 4]
    assert (found["rest"][0], found["rest"][1].tolist()) == (3, [3.0] * 3)


def test_adverbs_bring_values(procs):
    function = remote(lambda x, more: (int(x) + more, "text"))
    with procs.activate():
        rank = procs.rank_tensor("gpus")
        assert [value[0] for value in function.call(rank, 5).get().values()] == [5, 6, 5, 6]
        assert function.choose(rank, 5).get()[0] in (5, 6)
        assert sorted(future.get()[0] for future in function.stream(rank, 5)) == [5, 5, 6, 6]
        with pytest.raises(ValueError, match="exactly 1"):
            function.call_one(rank, 5)
        function.broadcast(rank, 5)
        with pytest.raises(ActorError, match="no such luck"):
            remote(fail).call(rank).get()
    with procs.slice(hosts=1, gpus=1).activate():
        assert function.call_one(rank, 1).get() == (2, "text")


def test_one_worker_can_be_asked(procs):
    rank = procs.rank_tensor("gpus")

    assert call_on_shard_and_fetch(lambda x: int(x) + 1, rank, shard={"gpus": 1}).get() == 2
    assert fetch_shard(rank, preprocess=remote(lambda x: int(x) + 7), gpus=1).get() == 8


def test_a_remote_function_needs_a_mesh_and_tensors_of_it(procs):
    with pytest.raises(ValueError, match="no mesh is active"):
        remote(double)(1)
    alone = procs.slice(hosts=0)
    with alone.activate():
        there = torch.ones(2)
    with procs.activate():
        with pytest.raises(ValueError, match="no part of the mesh"):
            remote(double)(there)
        whole = torch.ones(2)
    with alone.activate():
        assert remote(double)(whole).mesh == alone
    apart = this_host().spawn_procs({"hosts": 2, "gpus": 2}, name="apart")
    with apart.activate():
        with pytest.raises(ValueError, match="no part of the mesh"):
            remote(double)(whole)
        with pytest.raises(TypeError, match="spawned apart"):
            torch.ones(2) + whole
    with pytest.raises(ValueError, match="dotted path"):
        remote("double")
    with pytest.raises(TypeError, match="propagate"):
        remote(double, propagate="guess")
    with pytest.raises(TypeError, match="dotted path"):
        remote(3)


def test_a_result_that_is_not_what_propagate_said_is_a_failure(procs):
    with procs.activate():
        wrong_shape = remote(double, propagate=lambda x: x.new_empty(7))(torch.ones(2))
        wrong_count = remote(double, propagate=lambda x: (x, x))(torch.ones(2))
        with pytest.raises(RemoteException, match=r"`propagate` said \(7,\)"):
            inspect(wrong_shape)
        with pytest.raises(RemoteException, match="returned 1 tensors"):
            inspect(wrong_count)


def test_functions_that_are_gone_are_forgotten_by_the_workers(procs):
    with procs.activate():
        x = torch.ones(1)
        for factor in range(50):
            x = remote(lambda each, factor=factor: each + factor, propagate=same_shape)(x)
        assert inspect(x).tolist() == [1 + sum(range(50))]
        lane = x._ref.place.lane
        assert len(lane.known) < 40


def test_empty_results_are_local_too(procs):
    with procs.activate():
        found = fetch_shard(torch.empty(0, 3)).result()
        assert type(found) is torch.Tensor and found.shape == (0, 3)


# ---- failures


def test_a_failure_names_both_lines_and_reaches_all_that_depend_on_it(procs):
    with procs.activate():
        ones = torch.ones(2)
        bad = failing(ones)  # the failing line
        later = (bad + 1).sum()
        with pytest.raises(RemoteException) as caught:
            inspect([ones, later])
        error = caught.value
        assert "failing(ones)  # the failing line" in error.controller_trace
        assert "no such luck" in str(error) and 'raise ValueError("no such luck")' in error.worker_trace
        assert "tensor_workers" in error.worker
        assert inspect(ones + 1).tolist() == [2, 2]
        assert isinstance(fetch_shard(bad).exception(10), RemoteException)


def test_a_failing_operator_in_place_poisons_what_it_wrote_to(procs):
    with procs.activate():
        target = torch.zeros(3)
        target.index_add_(0, torch.full((3,), 9), torch.ones(3))  # out of range, which only the workers see
        with pytest.raises(RemoteException, match="index"):
            inspect(target)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_shares_memory_with_what_was_not_written_to_is_poisoned_too(procs, compiled):
    def write(row):
        row.add_(failing(row))

    step = monarch.compile(write) if compiled else write
    with procs.activate():
        for _ in range(2):  # recorded, and run again
            base, apart = torch.zeros(2, 3), torch.zeros(2, 3)
            row, other = base[0], base[1]
            step(row)
            for each in (base, row, other, base.t()):
                with pytest.raises(RemoteException, match="no such luck"):
                    inspect(each)
            assert not inspect(apart).any()


def test_a_failing_reduction_in_place_poisons_what_it_is_a_part_of(procs):
    def odd(x):
        if int(x):
            raise ValueError("odd")
        return x

    with procs.activate():
        whole = torch.zeros(2, 1, dtype=torch.int64)
        part = whole[0]
        part.copy_(remote(odd, propagate=same_shape)(procs.rank_tensor("gpus")))
        part.reduce_("gpus")
        for gpu in range(2):
            with pytest.raises(RemoteException, match=r"odd|another member"):
                inspect(whole, gpus=gpu)


def test_a_function_that_needs_elements_is_told_to_say_its_shape(procs):
    with procs.activate(), pytest.raises(ActorError) as caught:
        remote(lambda x: x * x.sum().item())(torch.ones(2))
    assert any("function as `propagate`" in note for note in caught.value.__notes__)


def test_a_failure_on_one_rank_is_not_one_of_the_others(procs):
    def odd(x):
        if int(x):
            raise ValueError("odd")
        return x

    with procs.activate():
        rank = procs.rank_tensor("gpus")
        made = remote(odd, propagate=same_shape)(rank)
        assert int(inspect(made, gpus=0)) == 0
        with pytest.raises(RemoteException, match="odd"):
            inspect(made, gpus=1)
        total = made.reduce("gpus")  # the reducing line
        into = torch.zeros_like(rank)
        made.reduce("gpus", out=into)
        within = made.clone()
        within.reduce_("gpus")
        for gpu, reason in enumerate(("another member", "odd")):
            for each in (total, into, within):
                with pytest.raises(RemoteException, match=reason) as caught:
                    inspect(each, gpus=gpu)
        with pytest.raises(RemoteException) as caught:
            inspect(total, gpus=0)
        assert "# the reducing line" in caught.value.controller_trace
        assert int(inspect(rank.reduce("gpus"))) == 1  # the group goes on


# ---- wrong use


def test_wrong_arguments_are_a_type_error_with_a_reason_for_each(procs):
    side = Stream("side")
    with procs.activate():
        here, gone = torch.ones(2), torch.ones(2)
        gone.drop()  # the dropping line
        assert gone.dropped
        with side.activate():
            on_side = torch.ones(2)
    with procs.slice(hosts=0).activate():
        elsewhere = torch.ones(2)
    with procs.activate():
        with pytest.raises(TypeError, match="Incorrect arguments to monarch operation") as caught:
            torch.cat([here, torch.tensor([1.0]), elsewhere, on_side, gone])

        for sum_of in (lambda: here + torch.tensor([1.0]), lambda: torch.tensor([1.0]) + here, lambda: here + gone):
            with pytest.raises(TypeError, match=r"LOCAL_TENSOR|DROPPED"):
                sum_of()

    text = str(caught.value)
    assert "tensor 0" not in text
    for at, reason in enumerate(("LOCAL_TENSOR", "WRONG_MESH", "WRONG_STREAM", "DROPPED"), 1):
        assert f"tensor {at}, of shape" in text and reason in text
    assert "gone.drop()  # the dropping line" in text


def test_meshes_of_the_same_sizes_are_told_apart_by_their_ranks(procs):
    first, second = procs.slice(hosts=0), procs.slice(hosts=1)
    with first.activate():
        x = torch.ones(2)
    with second.activate(), pytest.raises(TypeError) as caught:
        _ = x + torch.ones(2)
    assert "{'gpus': 2} (ranks 0, 1 of 4), others are on {'gpus': 2} (ranks 2, 3 of 4); use to_mesh" in str(
        caught.value
    )


def test_autograd_cannot_follow_into_a_remote_function(procs):
    with procs.activate():
        weight = torch.ones(2, requires_grad=True)
        with pytest.raises(TypeError, match="REQUIRES_GRAD"):
            remote(double)(weight)
        with torch.no_grad():
            assert inspect(remote(double)(weight)).tolist() == [2, 2]


def test_borrows_say_who_may_use_a_tensor(procs):
    side = Stream("side")
    with procs.activate():
        base = torch.ones(2)
        lent, borrow = side.borrow(base)
        assert inspect(base + 1).tolist() == [2, 2]  # may be read meanwhile
        with pytest.raises(TypeError, match="BORROWED"):
            base.add_(1)
        with pytest.raises(TypeError, match="WRONG_STREAM"):
            _ = lent + 1
        with pytest.raises(RuntimeError, match="cannot be borrowed"):
            side.borrow(base, mutable=True)
        with side.activate():
            with pytest.raises(TypeError, match="MUTATING_BORROW"):
                lent.add_(1)
            made = lent * 3
        borrow.drop()
        with side.activate(), pytest.raises(TypeError, match="DROPPED"):
            _ = lent + 1
        with pytest.raises(RuntimeError, match="already"):
            borrow.drop()
        lent, borrow = side.borrow(base, mutable=True)
        with pytest.raises(TypeError, match="BORROWED"):
            _ = base + 1
        with borrow, side.activate():
            lent.add_(5)
        assert [inspect(each).tolist() for each in (base, made)] == [[6, 6], [3, 3]]
        assert made.stream is side and base.stream is monarch.get_active_stream()


def test_a_borrow_holds_for_all_views(procs):
    side, third = Stream("side"), Stream("third")
    with procs.activate():
        base = torch.ones(4)
        row = base[:2]
        lent, borrow = side.borrow(base)
        with pytest.raises(TypeError, match="BORROWED"):
            row.add_(1)
        with side.activate():
            part = lent.view(2, 2)[0]
            with pytest.raises(TypeError, match="MUTATING_BORROW"):
                part.add_(5)
            with pytest.raises(RuntimeError, match="without mutable"):
                third.borrow(part, mutable=True)
            assert inspect(part + 1).tolist() == [2, 2]
        borrow.drop()  # the ending line
        with side.activate(), pytest.raises(TypeError, match="DROPPED") as caught:
            _ = part + 1
        assert "the ending line" in str(caught.value)
        row.add_(1)
        _, borrow = side.borrow(row, mutable=True)
        with borrow, pytest.raises(TypeError, match="BORROWED"):
            _ = base + 1
        assert inspect(base).tolist() == [2, 2, 1, 1]


def test_views_that_two_threads_make_at_once_share_a_memory(procs, monkeypatch):
    first, second_is_done = threading.Event(), threading.Event()

    class Slow(Memory):
        def __init__(self) -> None:
            super().__init__()
            if not first.is_set():
                first.set()
                second_is_done.wait(0.2)  # which waits for this one

    monkeypatch.setattr("monarch.mesh.tensor.handle.Memory", Slow)
    with procs.activate():
        base = torch.ones(2)
        found = []

        def share(done: threading.Event) -> None:
            found.append(base._ref.shared())
            done.set()

        threads = [threading.Thread(target=share, args=(each,)) for each in (threading.Event(), second_is_done)]
        threads[0].start()
        assert first.wait(20)
        threads[1].start()
        for thread in threads:
            thread.join(20)
    assert len(found) == 2 and found[0] is found[1]


def test_a_borrow_that_is_forgotten_warns(procs):
    with procs.activate():
        _, borrow = Stream("side").borrow(torch.ones(1))
        with pytest.warns(UserWarning, match="never dropped"):
            del borrow, _


# ---- objects


class Counter:
    def __init__(self) -> None:
        self.count = 0


def test_objects_stay_on_their_workers(procs):
    def add(ref: OpaqueRef, number: int) -> torch.Tensor:
        ref.value.count += number
        return torch.tensor(ref.value.count)

    with procs.activate():
        ref = remote(lambda: OpaqueRef(Counter()))()
        step = remote(add, propagate=lambda ref, number: torch.empty((), dtype=torch.int64))
        step(ref, 2)
        assert int(inspect(step(ref, 3), gpus=1)) == 5
        with pytest.raises(AttributeError, match="on its worker only"):
            _ = ref.value


def test_seeds_and_states_of_random_numbers(procs):
    from monarch.builtins import get_rng_state_remote, set_manual_seed_remote, set_rng_state_remote

    with procs.slice(hosts=0, gpus=0).activate():
        set_manual_seed_remote(5)
        state = get_rng_state_remote()
        first = torch.rand(3)
        set_rng_state_remote(state)
        again = torch.rand(3)
        assert torch.equal(*inspect([first, again]))
