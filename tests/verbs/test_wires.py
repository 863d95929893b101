"""Queue pairs on a real device: bytes, words, errors, a cable that is pulled, a fork. In the guest of a virtual machine
there are two devices on a virtual cable, `rxe0` and `rxe1`; elsewhere both ends are on the one device."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterator

import pytest
from attrs import define

from monarch.core import settings
from monarch.errors import TransferError
from monarch.onesided.check import loopback
from monarch.onesided.local import local
from monarch.verbs import devices
from monarch.verbs.adapter import Opcode, Timing
from monarch.verbs.moves import Mover, RemoteAccess
from monarch.verbs.node import Node, Wire
from monarch.verbs.registrations import register
from tests.forks import fork
from tests.until import until

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(200)]

MIB = 1 << 20
SOON = Timing(timeout=12, retries=3)  # gives up after some 0.1 s


def device_names() -> list[str]:
    return sorted({port.device for port in devices.ports() if port.state == "ACTIVE"})


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    names = device_names()
    near, far = (Node(f"nic:{name}", settings.get("rdma_binding")) for name in (names[0], names[-1]))
    yield near, far
    near.close()
    far.close()


@define
class Ends:
    """A queue pair to start transfers from, the other end, and memory at both, registered."""

    mover: Mover
    passive: Wire
    mine: bytearray
    theirs: bytearray
    lkey: int
    rkey: int
    close: list[object]

    def move(self, opcode: Opcode, size: int, offset: int = 0, limit_s: float = 60) -> None:
        remote = local(self.theirs).address + offset
        deadline_s = time.monotonic() + limit_s
        self.mover.move(opcode, local(self.mine).address, self.lkey, remote, self.rkey, size, deadline_s)


def join(nodes: tuple[Node, Node], size: int = 4 * MIB, timing: Timing | None = None) -> Ends:
    near, far = nodes
    mine, theirs = bytearray(size), bytearray(os.urandom(size))
    regions = [register(near.device, local(mine).address, size), register(far.device, local(theirs).address, size)]
    mover, passive = Mover(near), far.wire(4)
    passive.connect(mover.wire.mine, timing)
    mover.wire.connect(passive.mine, timing)
    return Ends(mover, passive, mine, theirs, regions[0].lkey, regions[1].rkey, [passive, mover, *regions])


@pytest.fixture
def ends(nodes: tuple[Node, Node]) -> Iterator[Ends]:
    ends = join(nodes)
    yield ends
    for each in ends.close:
        each.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [1, 4096, MIB, MIB + 1, 4 * MIB])
def test_read_and_write(ends, size):
    ends.move(Opcode.READ, size)
    assert ends.mine[:size] == ends.theirs[:size]
    assert not any(ends.mine[size : size + 100])

    ends.mine[:size] = bytes(size)
    ends.move(Opcode.WRITE, size)
    assert not any(ends.theirs[:size])


def test_words(ends):
    address, far = local(ends.theirs).address, time.monotonic() + 60
    word = ctypes.c_uint64.from_address(address)
    word.value = 5

    assert ends.mover.word(Opcode.FETCH_ADD, address, ends.rkey, 7, 0, far) == 5
    assert ends.mover.word(Opcode.COMPARE_AND_SWAP, address, ends.rkey, 1, 99, far) == 12
    assert ends.mover.word(Opcode.COMPARE_AND_SWAP, address, ends.rkey, 12, 99, far) == 12
    assert word.value == 99


def test_memory_that_is_not_registered_is_an_error_and_breaks_the_queue_pair(ends):
    with pytest.raises(RemoteAccess, match="not registered there any more"):
        ends.move(Opcode.READ, MIB, offset=4 * MIB - 10)

    assert ends.mover.broken


def test_a_peer_that_is_gone_is_told_by_the_device_or_by_somebody_else(nodes):
    ends = join(nodes, timing=SOON)
    ends.move(Opcode.READ, 100)
    ends.passive.close()
    with pytest.raises((TransferError, TimeoutError)):
        ends.move(Opcode.WRITE, 100, limit_s=30)
    for each in ends.close:
        each.close()

    ends = join(nodes)
    ends.mover.cut("the process is gone")
    ends.passive.close()
    with pytest.raises(TransferError, match="the process is gone"):
        ends.move(Opcode.READ, 100)
    for each in ends.close:
        each.close()


def test_a_transfer_ends_with_its_time(ends):
    ends.passive.close()  # nobody answers, and the device has not given up yet
    with pytest.raises(TimeoutError):
        ends.move(Opcode.READ, 100, limit_s=0.05)


def test_a_fork_leaves_the_queue_pairs_of_its_parent_alone(ends):
    """It shares their descriptors, and its end would destroy them."""
    pid = fork()
    if not pid:
        for each in ends.close:
            with contextlib.suppress(Exception):
                each.close()
        os._exit(0)
    os.waitpid(pid, 0)
    ends.move(Opcode.READ, MIB)

    assert ends.mine[:MIB] == ends.theirs[:MIB]


def test_descriptors_do_not_leak(nodes):
    def once() -> None:
        ends = join(nodes, size=4096)
        ends.move(Opcode.READ, 4096)
        for each in ends.close:
            each.close()  # type: ignore[attr-defined]

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        once()

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_loopback_transfer(nodes):
    assert loopback(nodes[0]) > 0


if "RDMA_VM" in os.environ:  # only there is a cable that may be pulled

    def test_the_cable_is_pulled_and_put_in_again(nodes):
        ends = join(nodes, timing=SOON)
        ends.move(Opcode.READ, MIB)
        subprocess.run(["ip", "link", "set", "rdma1", "down"], check=True)
        try:
            with pytest.raises((TransferError, TimeoutError)) as told:
                ends.move(Opcode.WRITE, MIB, limit_s=30)
        finally:
            subprocess.run(["ip", "link", "set", "rdma1", "up"], check=True)
        for each in ends.close:
            each.close()
        assert "does not answer" in str(told.value)

        until(lambda: any(gid.gid.endswith("0a4d:0002") for port in devices.ports() for gid in port.gids), 30)
        ends = join(nodes)
        ends.move(Opcode.READ, MIB)
        assert ends.mine[:MIB] == ends.theirs[:MIB]
        for each in ends.close:
            each.close()
