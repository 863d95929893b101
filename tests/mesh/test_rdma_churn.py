"""Thousands of transfers between three processes at a time, and processes killed in the middle of one."""

from __future__ import annotations

import os
import random
import signal
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import define, field

from monarch.actor import Actor, ActorError, Channel, endpoint, this_host
from monarch.rdma import RDMABuffer, empty
from monarch.testing import TestClient, fresh_client
from tests.mesh.rdma_actors import Holder, User, pattern

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

MIB = 1 << 20
LARGEST = 64 * MIB
PROCS, STEPS, ROUNDS = 3, 50, 34  # each round is a write and a read: 10,200 transfers
WAIT_S = 300


@define
class Loan:
    """A buffer of another process that only this one uses, and what it has to look like."""

    buffer: RDMABuffer
    mirror: bytearray = field(factory=bytearray)


class Churner(Actor):
    """Lends memory to the others, and uses theirs."""

    def __init__(self, rank: int) -> None:
        self.rng = random.Random(rank)
        self.lent: dict[int, tuple[memoryview, RDMABuffer]] = {}
        self.noise = random.Random(7).randbytes(MIB) * 65

    @endpoint
    def lend(self, others: list[int]) -> dict[int, RDMABuffer]:
        """New memory for each of the others, of any size and kind; what they had before is dropped."""
        for other in others:
            if other in self.lent:
                self.lent[other][1].drop().get(WAIT_S)
            size = self.size(LARGEST)
            view = empty(size) if self.rng.random() < 0.5 else memoryview(bytearray(size))
            self.lent[other] = view, RDMABuffer(view)
        return {other: buffer for other, (_, buffer) in self.lent.items()}

    def size(self, most: int) -> int:
        """From 1 byte on; small ones are as frequent as large ones, with an end at each."""
        return min(most, max(1, round(most ** (self.rng.random() ** 1.5 * 1.02))))

    @endpoint
    def use(self, buffers: list[RDMABuffer], rounds: int) -> list[int]:
        """Write and read back parts of each; checksums of what each has to have in the end."""
        loans = [Loan(buffer, bytearray(buffer.size())) for buffer in buffers]
        for _ in range(rounds):
            loan = self.rng.choice(loans)
            size = self.size(loan.buffer.size())
            offset = self.rng.randint(0, loan.buffer.size() - size)
            start = self.rng.randint(0, MIB)
            data = memoryview(self.noise)[start : start + size]
            part = loan.buffer.slice(offset, size)
            part.write_from(data, timeout=WAIT_S).get()
            loan.mirror[offset : offset + size] = data
            if self.rng.random() < 0.5:  # read back more than was written
                part = loan.buffer.slice(offset // 2, size + (offset + 1) // 2)
                data = memoryview(loan.mirror)[offset // 2 : offset + size]
            mine = bytearray(part.size() + 1)
            part.read_into(mine, timeout=WAIT_S).get()
            if zlib.crc32(memoryview(mine)[:-1]) != zlib.crc32(data) or mine[-1]:
                raise AssertionError(f"{part.size()} bytes from {offset} on of {loan.buffer} came back changed")
        return [zlib.crc32(loan.mirror) for loan in loans]

    @endpoint
    def checksums(self) -> dict[int, int]:
        return {other: zlib.crc32(view) for other, (view, _) in self.lent.items()}


PATHS = ["shm", "tcp", pytest.param("ibverbs", marks=pytest.mark.rdma)]


@pytest.mark.parametrize("path", PATHS)
def test_ten_thousand_transfers(path):
    with fresh_client("ipc", rdma_path=path):
        procs = this_host().spawn_procs({"gpus": PROCS})
        churners = [procs.slice(gpus=rank).spawn(f"churner{rank}", Churner, rank) for rank in range(PROCS)]
        for _ in range(STEPS):
            ranks = range(PROCS)
            offers = [churners[rank].lend.call_one([r for r in ranks if r != rank]) for rank in ranks]
            lent = [offer.get(WAIT_S) for offer in offers]
            uses = [
                churners[rank].use.call_one([lent[other][rank] for other in ranks if other != rank], ROUNDS)
                for rank in ranks
            ]
            expected = [use.get(WAIT_S) for use in uses]
            for rank in ranks:
                found = churners[rank].checksums.call_one().get(WAIT_S)
                for other, checksum in found.items():
                    at = [r for r in ranks if r != other].index(rank)
                    assert checksum == expected[other][at], f"memory of {rank}, used by {other}"


@pytest.fixture(params=PATHS)
def client(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    with fresh_client("ipc", rdma_path=request.param) as client:
        yield client


def alone(cls: Any, name: str) -> Any:
    return this_host().spawn_procs({"gpus": 1}).spawn(name, cls)


@pytest.mark.parametrize("kind", ["heap", "file"])
def test_the_owner_is_killed_in_the_middle_of_a_transfer(client, kind):
    holder, reader = alone(Holder, "holder"), alone(User, "reader")
    port, receiver = Channel[Any].open()
    pid = holder.pid.call_one().get(WAIT_S)
    failure = reader.read_until_it_fails.call_one(holder.offer.call_one(32 * MIB, 1, kind).get(WAIT_S), port)
    receiver.recv().get(WAIT_S)
    os.kill(pid, signal.SIGKILL)

    assert "SupervisionError: the process of" in failure.get(WAIT_S)
    client.expect_fault("Killed")
    # One that takes its place is reached, by the same reader.
    again = alone(Holder, "again").offer.call_one(MIB, 2, kind).get(WAIT_S)
    assert reader.read.call_one(again).get(WAIT_S) == pattern(2, MIB)


def test_the_reader_is_killed_in_the_middle_of_a_transfer(client):
    holder, reader, other = alone(Holder, "holder"), alone(User, "reader"), alone(User, "other")
    port, receiver = Channel[Any].open()
    buffer = holder.offer.call_one(32 * MIB, 1).get(WAIT_S)
    failure = reader.read_until_it_fails.call_one(buffer, port)
    os.kill(receiver.recv().get(WAIT_S), signal.SIGKILL)
    client.expect_fault("Killed")
    assert failure.exception(WAIT_S) is not None

    assert other.checksum.call_one(buffer).get(WAIT_S) == zlib.crc32(pattern(1, 32 * MIB))
    holder.drop.call_one().get(WAIT_S)  # is not held up
    with pytest.raises(ActorError, match="BufferDropped"):
        other.read.call_one(buffer).get(WAIT_S)
