"""One-sided buffers between actors, over each path: what arrives, what is refused, and what a death or a drop does."""

from __future__ import annotations

import os
import pickle
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import define

from monarch import rdma
from monarch.actor import ActorError, ActorMesh, Channel, this_host
from monarch.core import settings
from monarch.errors import TransferError
from monarch.onesided.exports import Place
from monarch.rdma import RDMAAction, RDMABuffer, empty, get_rdma_backend
from monarch.testing import TestClient, fresh_client
from monarch.verbs.node import prefer
from tests.mesh.actors import Worker
from tests.mesh.rdma_actors import Holder, User, pattern
from tests.verbs import cable

pytestmark = pytest.mark.filterwarnings("ignore::monarch.rdma.RDMATcpFallbackWarning")

MIB = 1 << 20
WAIT_S = 50  # a virtual machine with one CPU takes its time
KINDS = [
    pytest.param(("shm", "heap"), id="shm-heap"),
    pytest.param(("shm", "file"), id="shm-file", marks=pytest.mark.slow),
    pytest.param(("tcp", "heap"), id="tcp"),
    pytest.param(("ibverbs", "heap"), id="ibverbs", marks=pytest.mark.rdma),
    pytest.param(("ibverbs", "file"), id="ibverbs-file", marks=[pytest.mark.rdma, pytest.mark.slow]),
]


@define
class Pair:
    """An actor with memory and one that uses it, in processes of their own."""

    holder: Any
    user: Any
    path: str
    kind: str
    client: TestClient

    def offer(self, size: int, seed: int = 0) -> RDMABuffer:
        return self.holder.offer.call_one(size, seed, self.kind).get(WAIT_S)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    path, kind = request.param
    with fresh_client("ipc", rdma_path=path) as client:
        procs = this_host().spawn_procs({"gpus": 2})
        holder = procs.slice(gpus=0).spawn("holder", Holder)
        user = procs.slice(gpus=1).spawn("user", User)
        yield Pair(holder, user, path, kind, client)


@pytest.fixture
def here() -> Iterator[TestClient]:
    """A client without other processes."""
    with fresh_client("inproc") as client:
        yield client


# What arrives


@pytest.mark.parametrize("size", [1, 7, 4096, 300_001, 5 * MIB + 3])
def test_bytes_arrive_in_both_directions(pair, size):
    buffer = pair.offer(size, 3)
    assert pair.user.read.call_one(buffer).get(WAIT_S) == pattern(3, size)

    pair.user.write.call_one(buffer, pattern(4, size)).get(WAIT_S)
    assert pair.holder.content.call_one().get(WAIT_S) == pattern(4, size)


def test_a_slice_is_a_part(pair):
    buffer = pair.offer(3 * MIB, 1)
    part = buffer.slice(MIB - 5, MIB + 10)

    assert (part.size(), part.slice(5, 5).size()) == (MIB + 10, 5)
    assert pair.user.read.call_one(part).get(WAIT_S) == pattern(1, 3 * MIB)[MIB - 5 : 2 * MIB + 5]
    pair.user.write.call_one(part.slice(5, 10), b"0123456789").get(WAIT_S)
    assert pair.holder.content.call_one().get(WAIT_S)[MIB - 1 : MIB + 11] == (
        pattern(1, 3 * MIB)[MIB - 1 : MIB] + b"0123456789" + pattern(1, 3 * MIB)[MIB + 10 : MIB + 11]
    )


def test_a_larger_destination_gets_a_prefix_and_a_smaller_source_leaves_the_rest(pair):
    buffer = pair.offer(100, 1)
    assert pair.user.read_into_size.call_one(buffer, 120).get(WAIT_S) == pattern(1, 100) + bytes(20)

    pair.user.write.call_one(buffer, b"abc").get(WAIT_S)
    assert pair.holder.content.call_one().get(WAIT_S) == b"abc" + pattern(1, 100)[3:]


def test_a_batch_of_several_buffers_can_be_awaited(pair):
    buffers = [pair.offer(size, size % 100) for size in (10, 2 * MIB, 500_000, 1)]

    assert pair.user.read_many.call_one(buffers).get(WAIT_S) == [pattern(b.size() % 100, b.size()) for b in buffers]


def test_a_transfer_goes_on_while_the_owner_computes(pair):
    """The owner holds its interpreter in a loop of pure Python."""
    buffer = pair.offer(3 * MIB, 2)
    started, started_receiver = Channel[Any].open()
    busy = pair.holder.compute.call_one(started)
    started_receiver.recv().get(WAIT_S)
    assert pair.user.read.call_one(buffer).get(WAIT_S) == pattern(2, 3 * MIB)
    pair.user.write.call_one(buffer.slice(0, 1), b"\x00").get(WAIT_S)

    assert busy.get(WAIT_S) > 0  # what was written is seen by the loop, and ends it


def test_atomics(pair):
    buffer = pair.offer(24)
    pair.user.write.call_one(buffer, bytes(24)).get(WAIT_S)
    word = buffer.slice(8, 8)

    assert pair.user.count.call_one(word, 5).get(WAIT_S) == [0, 1, 2, 3, 4]
    assert pair.user.swap.call_one(word, 4, 100).get(WAIT_S) == 5
    assert pair.user.swap.call_one(word, 5, 100).get(WAIT_S) == 5
    assert pair.holder.content.call_one().get(WAIT_S) == bytes(8) + (100).to_bytes(8, "little") + bytes(8)


def test_the_path_has_a_name_and_a_reason(pair):
    buffer = pair.offer(10)
    backend, reason = pair.user.backend.call_one(buffer).get(WAIT_S)

    assert backend == pair.path
    assert f"{pair.path} is what rdma_path asks for" in reason
    assert get_rdma_backend() == pair.path


def test_memory_that_takes_the_place_of_other_memory_is_told_from_it(pair):
    buffers = [pair.offer(MIB, seed) for seed in range(3)]

    assert pair.user.read_into_maps.call_one(buffers).get(WAIT_S) == [pattern(seed, MIB) for seed in range(3)]


def test_memory_belongs_to_its_user_again_when_the_transfer_is_over(pair):
    assert pair.user.read_and_grow.call_one(pair.offer(MIB), 50).get(WAIT_S) == 50


# What is refused


def test_sizes_that_do_not_fit_are_refused(pair):
    buffer = pair.offer(100, 1)
    with pytest.raises(ActorError, match="ValueError: the destination has 99 bytes, and the buffer 100"):
        pair.user.read_into_size.call_one(buffer, 99).get(WAIT_S)
    with pytest.raises(ActorError, match="ValueError: the source has 101 bytes, and the buffer 100"):
        pair.user.write.call_one(buffer, bytes(101)).get(WAIT_S)

    assert pair.holder.content.call_one().get(WAIT_S) == pattern(1, 100)


def test_a_dropped_buffer_cannot_be_used(pair):
    buffer = pair.offer(100, 1)
    assert pair.user.read.call_one(buffer).get(WAIT_S) == pattern(1, 100)
    pair.holder.drop.call_one().get(WAIT_S)

    for use in (pair.user.read.call_one(buffer), pair.user.write.call_one(buffer, b"x")):
        with pytest.raises(ActorError, match=r"BufferDropped: .*the buffer of 100 bytes of .*holder.* cannot be used"):
            use.get(WAIT_S)
    assert pair.holder.content.call_one().get(WAIT_S) == pattern(1, 100)


def test_anybody_may_drop_and_more_than_once(pair):
    buffer = pair.offer(100)
    pair.user.drop.call_one(buffer).get(WAIT_S)
    pair.user.drop.call_one(buffer).get(WAIT_S)

    with pytest.raises(ActorError, match="BufferDropped"):
        pair.user.read.call_one(buffer).get(WAIT_S)


def test_a_read_only_buffer_can_be_read(pair):
    buffer = pair.holder.offer_read_only.call_one().get(WAIT_S)

    assert pair.user.read.call_one(buffer).get(WAIT_S) == b"constant"
    with pytest.raises(ActorError, match="the buffer is read-only"):
        pair.user.write.call_one(buffer, b"x").get(WAIT_S)


def test_memory_of_ones_own_must_not_overlap(pair):
    refused = pair.holder.overlapping.call_one().get(WAIT_S)

    assert len(refused) == 3
    assert "overlap by 100 bytes" in refused[0]
    assert "overlap by 1 bytes" in refused[1]


def test_bad_times_and_slices_are_refused_at_the_call(here):
    buffer = RDMABuffer(bytearray(10))
    with pytest.raises(OverflowError):
        buffer.read_into(bytearray(10), timeout=-1)
    with pytest.raises(ValueError, match="not inside"):
        buffer.slice(5, 6)
    with pytest.raises(ValueError, match="drop the whole buffer"):
        buffer.slice(1, 2).drop()
    with pytest.raises(ValueError, match="read-only"):
        buffer.read_into(b"0123456789")
    with pytest.raises(ValueError, match="empty"):
        RDMABuffer(b"")
    with pytest.raises(ValueError, match="atomics work on 8 bytes"):
        RDMAAction().fetch_add(bytearray(8), buffer, 1)


def test_transfers_of_a_batch_must_not_touch_what_another_writes(here):
    buffer, target = RDMABuffer(bytearray(100)), bytearray(100)
    action = RDMAAction().read_remote(target, buffer)
    with pytest.raises(ValueError, match="overlap"):
        action.read_remote(memoryview(target)[50:], buffer.slice(0, 50))
    with pytest.raises(ValueError, match="overlap"):
        action.write_remote(buffer.slice(99, 1), b"x")

    action.submit().get(5)  # what was refused is not in it


def test_an_empty_batch_does_nothing(here):
    RDMAAction().submit().get(0)


# References


def test_a_reference_is_small_and_equal_to_its_copy(here):
    buffer = RDMABuffer(bytearray(1000))
    copy = pickle.loads(pickle.dumps(buffer))

    assert copy == buffer and hash(copy) == hash(buffer)
    assert len(pickle.dumps(buffer)) < 1200
    assert copy.owner == buffer.owner and "client" in copy.owner
    assert "1000 bytes" in repr(copy)
    assert buffer.slice(0, 10) != buffer


def test_memory_lives_until_its_actor_ends(pair):
    holder = this_host().spawn_procs({"gpus": 1}).spawn("mortal", Holder)
    buffer = holder.offer.call_one(100, 1, pair.kind).get(WAIT_S)
    assert pair.user.read.call_one(buffer).get(WAIT_S) == pattern(1, 100)
    ActorMesh.stop(holder).get(WAIT_S)

    with pytest.raises(ActorError, match="BufferDropped"):
        pair.user.read.call_one(buffer).get(WAIT_S)


@pytest.mark.parametrize("seen_before", [True, False])
def test_the_death_of_the_owner_is_told_soon(pair, seen_before):
    procs = this_host().spawn_procs({"gpus": 1})
    mortal, worker = procs.spawn("mortal", Holder), procs.spawn("worker", Worker)
    buffer = mortal.offer.call_one(100, 1, pair.kind).get(WAIT_S)
    if seen_before:
        pair.user.read.call_one(buffer).get(WAIT_S)
    os.kill(worker.pid.call_one().get(WAIT_S), signal.SIGKILL)
    pair.client.expect_fault("Killed")
    with pytest.raises(
        ActorError, match=r"SupervisionError: the process of .*mortal.*, which owns the buffer, is gone"
    ):
        pair.user.read.call_one(buffer).get(WAIT_S)
    pair.client.expect_fault("Killed")


@pytest.fixture
def stopped(pair: Pair) -> Iterator[RDMABuffer]:
    """A buffer whose owner has been stopped by SIGSTOP. For the test."""
    owner = this_host().spawn_procs({"gpus": 1}).spawn("stopped", Holder)
    buffer = owner.offer.call_one(MIB, 1, pair.kind).get(WAIT_S)
    pid = owner.pid.call_one().get(WAIT_S)
    os.kill(pid, signal.SIGSTOP)
    yield buffer
    os.kill(pid, signal.SIGCONT)


def test_a_transfer_that_waits_for_its_owner_ends_with_its_time(pair, stopped):
    read = pair.user.read.call_one(stopped, timeout=0.3)
    if pair.path == "shm":  # needs nobody
        assert read.get(WAIT_S) == pattern(1, MIB)
        return
    with pytest.raises(ActorError, match=r"TimeoutError: the transfer from or to the buffer of \d+ bytes of .*stopped"):
        read.get(WAIT_S)


def test_an_owner_that_does_not_answer_holds_up_no_other(pair, stopped):
    buffer = pair.offer(MIB, 2)

    assert pair.user.read_past.call_one(stopped, 40, buffer).get(WAIT_S) == pattern(2, MIB)
    os.kill(os_pid(stopped), signal.SIGCONT)
    assert pair.user.await_begun.call_one().get(WAIT_S) == 40


def os_pid(buffer: RDMABuffer) -> int:
    return buffer._remote.place.pid


def test_nothing_is_kept_of_owners_that_are_gone(pair):
    pair.user.read.call_one(pair.offer(MIB)).get(WAIT_S)  # with the first transfer comes a file of its own
    before = pair.user.files_of_exports.call_one().get(WAIT_S)
    for seed in range(4):
        procs = this_host().spawn_procs({"gpus": 1})
        buffer = procs.spawn("passing", Holder).offer.call_one(MIB, seed, pair.kind).get(WAIT_S)
        assert pair.user.read.call_one(buffer).get(WAIT_S) == pattern(seed, MIB)
        procs.stop().get(WAIT_S)

    assert pair.user.files_of_exports.call_one().get(WAIT_S) <= before + 1  # the last, until there is another


# Memory from `empty`


def test_empty_gives_memory_that_is_found_in_the_shared_file(here):
    view = empty(10_000)
    assert (view.nbytes, view.readonly, bytes(view)) == (10_000, False, bytes(10_000))
    assert RDMABuffer(view)._remote.in_file is not None
    with pytest.raises(ValueError, match="no elements"):
        empty(0)
    with pytest.raises(ValueError, match="needs a dtype"):
        empty((2, 3))


def test_empty_arrays(here):
    import numpy

    array = empty((3, 5), numpy.float32)
    array[:] = 1.5

    assert (array.shape, array.dtype, array.sum()) == ((3, 5), numpy.float32, 22.5)
    assert RDMABuffer(array).size() == 60


@pytest.mark.torch
def test_tensors_of_any_shape(here):
    import torch

    source = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    target = empty((3, 4), torch.bfloat16)
    RDMABuffer(source).read_into(target).get(5)
    assert torch.equal(source, target)
    with pytest.raises(ValueError, match="not contiguous"):
        RDMABuffer(source.t())


@pytest.mark.gpu
@pytest.mark.torch
def test_cuda_tensors_are_read_and_written():
    import torch

    on_host, on_device = torch.arange(1000), torch.zeros(1000, dtype=torch.int64, device="cuda")
    with fresh_client("ipc"):
        user = this_host().spawn_procs({"gpus": 1}).spawn("user", User)
        with pytest.warns(rdma.RDMAReadTransferWarning):
            RDMABuffer(on_host).read_into(on_device).get(WAIT_S)
        assert torch.equal(on_device.cpu(), on_host)

        shared = RDMABuffer(on_device)
        assert user.read.call_one(shared).get(WAIT_S) == on_host.numpy().tobytes()
        user.write.call_one(shared, bytes(8000)).get(WAIT_S)
        assert not on_device.any()
        with pytest.warns(rdma.RDMAWriteTransferWarning):
            RDMABuffer(on_host).write_from(on_device).get(WAIT_S)
        assert not on_host.any()


# Which path


def test_without_any_path_a_buffer_is_an_error(here, monkeypatch):
    monkeypatch.setattr("monarch.onesided.transfers.exports", lambda: _NoBook)
    with (
        settings.overridden(rdma_path="auto", rdma_allow_tcp_fallback=False),
        pytest.raises(TransferError, match="rdma_allow_tcp_fallback is off"),
    ):
        RDMABuffer(bytearray(10))


@pytest.mark.parametrize(("device", "expected"), [(None, "ibverbs"), ("no device in this test", "tcp")])
def test_a_kernel_that_does_not_copy_leaves_the_other_paths(here, monkeypatch, device, expected):
    monkeypatch.setattr("monarch.onesided.transfers.no_copying_here", lambda: "Function not implemented")
    monkeypatch.setattr("monarch.onesided.ibverbs.why_not", lambda: device)
    with settings.overridden(rdma_path="auto"):
        backend = get_rdma_backend()

    assert backend == expected
    assert "does not copy between processes of this host (Function not implemented)" in backend.reason


class _NoBook:
    place = Place("", 1)


def test_the_fallback_warns_once_and_names_path_and_setting(pair, monkeypatch):
    monkeypatch.setattr("monarch.mesh.rdma._warned", False)
    monkeypatch.setattr("monarch.onesided.ibverbs.why_not", lambda: "no device in this test")
    buffer = pair.offer(10)
    expected = r"no device in this test.* fall back to 'tcp'.*rdma_path='tcp' silences"
    with warnings.catch_warnings(), settings.overridden(rdma_path="auto"):
        warnings.simplefilter("error", rdma.RDMATcpFallbackWarning)
        monkeypatch.setattr("monarch.onesided.transfers.no_copying_here", lambda: "")
        buffer.read_into(bytearray(10)).get(WAIT_S)  # shared memory on one host is none
    monkeypatch.setattr("monarch.onesided.transfers.no_copying_here", lambda: "the test forbids it")
    with settings.overridden(rdma_path="auto"):
        with pytest.warns(rdma.RDMATcpFallbackWarning, match=expected) as seen:
            buffer.read_into(bytearray(10)).get(WAIT_S)
            buffer.read_into(bytearray(10)).get(WAIT_S)
        assert [warning.filename for warning in seen] == [__file__]


def on_the_far_device() -> None:
    """The bootstrap of processes as on another host."""
    prefer("nic:rxe1", settings.get("rdma_binding"))


@pytest.mark.rdma
@pytest.mark.cable
def test_a_cable_that_is_pulled_fails_a_transfer_and_those_after_it_work():
    with fresh_client("ipc", rdma_path="ibverbs"):
        holder = this_host().spawn_procs(bootstrap=on_the_far_device).spawn("holder", Holder)
        user = this_host().spawn_procs().spawn("user", User)
        buffer = holder.offer.call_one(16 * MIB, 1).get(WAIT_S)
        port, receiver = Channel[Any].open()
        failure = user.read_until_it_fails.call_one(buffer, port)
        receiver.recv().get(WAIT_S)
        with cable.pulled():
            assert "TransferError" in failure.get(WAIT_S)

        assert user.read.call_one(buffer).get(WAIT_S) == pattern(1, 16 * MIB)


def test_is_rdma_available_is_deprecated():
    with pytest.warns(DeprecationWarning, match="is_ibverbs_available"):
        assert rdma.is_rdma_available() == rdma.is_ibverbs_available()
