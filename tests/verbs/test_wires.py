"""Queue pairs on a real device: bytes, words, errors, a cable that is pulled, a fork. In the guest of a virtual machine
there are two devices on a virtual cable, `rxe0` and `rxe1`; elsewhere both ends are on the one device."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from attrs import define

from monarch.core import settings
from monarch.errors import TransferError
from monarch.onesided.check import loopback
from monarch.onesided.local import local
from monarch.verbs import devices
from monarch.verbs.adapter import SUCCESS, Opcode, Timing
from monarch.verbs.moves import Mover, RemoteAccess
from monarch.verbs.node import Node, Wire
from monarch.verbs.registrations import register
from tests.forks import fork
from tests.verbs import cable

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


FORKED = """
import os, sys
from monarch.verbs.node import node, prefer
prefer(*sys.argv[1:])
wire = node().wire(4)
pid = os.fork()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
    wire.close()  # it is still there
"""


def test_a_fork_that_ends_as_a_program_does_has_nothing_to_say():
    command = [sys.executable, "-c", FORKED, f"nic:{device_names()[0]}", settings.get("rdma_binding")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stderr) == (0, "")


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


def test_a_full_queue_refuses_and_goes_on(nodes):
    ends = join(nodes)
    wire, passive = nodes[0].wire(4), nodes[1].wire(4)
    passive.connect(wire.mine)
    wire.connect(passive.mine)
    post, mine, theirs = wire.queue_pair.post_send, local(ends.mine).address, local(ends.theirs).address
    taken = 0
    with pytest.raises(OSError, match="post"):
        for taken in range(64):  # each takes longer than the rest of the loop
            post(Opcode.READ, taken, mine, 4 * MIB, ends.lkey, theirs, ends.rkey)
    assert taken >= 4
    done, deadline_s = [], time.monotonic() + 30
    while len(done) < taken and time.monotonic() < deadline_s:
        done += wire.queue_pair.poll()
    assert [(each.wr_id, each.status) for each in done] == [(number, SUCCESS) for number in range(taken)]
    post(Opcode.READ, 0, mine, 8, ends.lkey, theirs, ends.rkey)
    for each in (wire, passive, *ends.close):
        each.close()


def test_queues_that_no_device_has_are_refused(nodes):
    with pytest.raises(OSError):
        nodes[0].wire(1 << 24)


LOCKED = """
import os, resource, sys
from monarch.errors import TransferError
from monarch.onesided.local import local
from monarch.verbs.node import Node
from monarch.verbs.registrations import register
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
node = Node(*sys.argv[1:])
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
small, large = bytearray(1 << 20), bytearray(16 << 20)
register(node.device, local(small).address, len(small)).close()
try:
    register(node.device, local(large).address, len(large))
except TransferError as error:
    print(error)
"""


def test_memory_that_may_not_be_locked_is_an_error_that_says_what_to_do():
    binding = settings.get("rdma_binding")
    command = [sys.executable, "-c", LOCKED, f"nic:{device_names()[0]}", binding]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert f"{16 * MIB} bytes could not be registered" in told
    assert f"this process may lock {8 * MIB} bytes (`ulimit -l`). Raise the limit" in told


def test_a_loopback_transfer(nodes):
    assert loopback(nodes[0]) > 0


@pytest.mark.cable
def test_the_cable_is_pulled_and_put_in_again(nodes):
    ends = join(nodes, timing=SOON)
    ends.move(Opcode.READ, MIB)
    with cable.pulled():
        with pytest.raises((TransferError, TimeoutError)) as told:
            ends.move(Opcode.WRITE, MIB, limit_s=30)
        for each in ends.close:
            each.close()
    assert "does not answer" in str(told.value)

    ends = join(nodes)
    ends.move(Opcode.READ, MIB)
    assert ends.mine[:MIB] == ends.theirs[:MIB]
    for each in ends.close:
        each.close()
