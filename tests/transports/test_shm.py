"""What travels in shared memory, whose it is at the other end, and what becomes of it when one end dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch import sealed
from monarch.errors import LinkSevered, RemoteProtocolError
from monarch.transports import registry, ring, shm
from monarch.transports.base import Missing
from monarch.transports.framing import ELSEWHERE, header
from monarch.transports.mappings import Mapping
from monarch.transports.memory import claim
from tests.transports.drive import SECRET, WAIT_S, Receiver, connected, exchange, wait_until

TRANSPORT = registry.get("shm")
MIB = 1 << 20
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not TRANSPORT.viability().ok, reason=TRANSPORT.viability().reason)


def test_a_large_part_is_lent_and_comes_back(pool, links):
    (frame,) = exchange(*links, [[b"head", b"x" * MIB, b"tail"]])
    assert frame[0] == b"head" and frame[1] == b"x" * MIB and frame[2] == b"tail"
    assert pool.statistics()["lent_slots"] == 1
    del frame
    assert pool.statistics()["lent_slots"] == 0
    assert pool.statistics()["free_slots"] == 1


@pytest.mark.skipif(bool(ring.why_not), reason=ring.why_not or "there are rings")
def test_from_the_second_of_a_segment_on_what_is_lent_takes_the_ring(pool, links, monkeypatch):
    left, right = links
    exchange(left, right, [[b"head", b"x" * MIB]])
    assert left.recv_nowait() == []  # it knows the other's ring now
    for way in "send", "sendmsg":
        monkeypatch.setattr(left._carrier, way, lambda *_: pytest.fail("it went over the socket"))
    frames = [[b"small"], [b"head", b"y" * MIB, b"tail"], [b"z" * MIB], [b"small"]]
    assert left.send_nowait(frames) == len(frames)
    receiver = Receiver(right)
    wait_until(lambda: receiver.step() == len(frames), right)
    assert receiver.frames == frames


@pytest.mark.skipif(bool(ring.why_not), reason=ring.why_not or "there are rings")
def test_what_is_lent_is_lent_once_also_where_the_ring_is_full(pool, links):
    left, right = links
    exchange(left, right, [[b"x" * MIB]])
    assert left.recv_nowait() == []
    frames = [[bytes(50_000), b"%d" % at * MIB, bytes(at)] for at in range(9)]  # five of these heads fit
    assert left.send_nowait(frames) == len(frames) and pool.statistics()["lent_slots"] == len(frames)
    receiver = Receiver(right)
    wait_until(lambda: (left.flush_nowait(), receiver.step()) == (True, len(frames)), left, right)
    assert receiver.frames == frames
    receiver.frames.clear()
    assert pool.statistics()["lent_slots"] == 0


@pytest.mark.skipif(bool(ring.why_not), reason=ring.why_not or "there are rings")
def test_no_bell_gets_into_the_middle_of_a_frame(pool, links, monkeypatch):
    left, right = links
    exchange(left, right, [[b"the way is open"]])
    assert left.recv_nowait() == []
    pool.limit = lambda: 0
    receiver = Receiver(right)

    def make_room_and_ring(fd: int, really: Callable[[int], bool] = ring.ring_bell) -> bool:
        receiver.step()  # the ring
        receiver.step()  # the stream
        return really(fd)

    monkeypatch.setattr(ring, "ring_bell", make_room_and_ring)
    frames = [[b"small"], [b"x" * (8 * MIB)]]
    assert left.send_nowait(frames) == 2 and left.blocked
    wait_until(lambda: (left.flush_nowait(), receiver.step()) == (True, 2), left, right)
    assert receiver.frames == frames


def test_memory_of_the_pool_is_not_copied_and_belongs_to_its_only_receiver(pool, links):
    memory = pool.allocate(MIB)
    memory[:] = b"x" * MIB
    ((arrived,),) = exchange(*links, [[memory]])
    arrived[0] = 7
    assert memory[0] == 7
    assert pool.statistics()["reserved_bytes"] == MIB


def test_memory_for_several_receivers_arrives_as_private_copies(pool, links):
    memory = pool.allocate(MIB, receivers=2)
    memory[:] = b"x" * MIB
    (first,), (second,) = exchange(*links, [[memory], [memory]])
    first[0] = 7
    assert second == memory == b"x" * MIB
    del memory
    assert pool.statistics()["lent_slots"] == 0


def test_what_is_sent_on_is_copied(pool, links):
    left, right = links
    ((arrived,),) = exchange(left, right, [[b"x" * MIB]])
    ((back,),) = exchange(right, left, [[arrived]])
    back[0] = 7
    assert arrived == b"x" * MIB


def settled(arrived: list[memoryview]) -> memoryview | None:
    """What it is passed on as."""
    (memory,) = arrived
    claimed = claim(address_of(memory), len(memory))
    assert claimed is not None
    del memory
    arrived.clear()
    return claimed.settle()


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_what_is_passed_on_to_its_owner_is_not_copied(pool, links):
    left, right = links
    memory = pool.allocate(MIB)
    memory[:] = b"x" * MIB
    place = address_of(memory)
    (arrived,) = exchange(left, right, [[memory]])
    del memory
    part = settled(arrived)
    assert part is not None
    ((back,),) = exchange(right, left, [[part]])
    assert address_of(back) == place and back == b"x" * MIB
    assert pool.statistics()["free_slots"] == 1  # another, for the next message
    assert pool.statistics()["reserved_bytes"] == 2 * MIB
    del part
    back[0] = 7
    assert pool.statistics()["lent_slots"] == 1
    del back
    assert pool.statistics()["free_slots"] == 2
    exchange(left, right, [[b"y" * MIB]])
    assert pool.statistics()["reserved_bytes"] == 2 * MIB


def test_what_is_passed_on_may_be_sent_again_until_it_has_arrived(pool, links):
    left, right = links
    part = settled(exchange(left, right, [[b"x" * MIB]])[0])
    (first,), (second,) = exchange(right, left, [[part], [part]])
    del first
    assert second == b"x" * MIB
    del second, part
    assert pool.statistics()["lent_slots"] == 0


def test_what_is_passed_on_to_another_is_copied(pool, links):
    part = settled(exchange(*links, [[b"x" * MIB]])[0])
    assert part is not None
    with connected(TRANSPORT) as (left, right):
        ((arrived,),) = exchange(left, right, [[part]])
    arrived[0] = 7
    assert part == b"x" * MIB


def test_what_somebody_still_looks_at_is_not_passed_on(pool, links):
    arrived = exchange(*links, [[b"x" * MIB]])[0]
    kept = arrived[0][5:6]
    assert settled(arrived) is None
    assert kept == b"x"


def test_only_what_was_lent_comes_back(pool, links):
    left, right = links
    part = settled(exchange(left, right, [[b"x" * MIB]])[0])
    assert part is not None
    part.obj.loan.hold.mark += 1
    right.send_nowait([[part]])
    assert isinstance(Receiver(left).until_end(), RemoteProtocolError)


@pytest.mark.parametrize("limit_bytes", [0, MIB])
def test_without_room_parts_go_through_the_socket(pool, links, limit_bytes):
    pool.limit = lambda: limit_bytes
    got = exchange(*links, [[b"%d" % i, bytes([i]) * MIB] for i in range(5)])
    assert [bytes(frame[1][:1])[0] for frame in got] == [0, 1, 2, 3, 4]
    assert all(not memoryview(frame[1]).readonly for frame in got)
    assert pool.statistics()["reserved_bytes"] == limit_bytes


def test_many_sizes_pass_over_one_link(pool, links):
    frames = [[bytes([i]) * ((1 << (i % 9 + 15)) + i)] for i in range(60)]
    for frame, (part,) in zip(frames, exchange(*links, frames), strict=True):
        assert part == frame[0]


def test_a_receiver_without_room_to_map_reads(pool, links, monkeypatch):
    def refuse(mapping: Mapping) -> object:
        raise OSError(12, "Cannot allocate memory")

    memory = pool.allocate(MIB)
    memory[:] = b"x" * MIB
    with monkeypatch.context() as patch:
        patch.setattr(Mapping, "_map", refuse)
        ((first,),) = exchange(*links, [[memory]])
    ((second,),) = exchange(*links, [[memory]])
    del memory
    assert pool.statistics()["lent_slots"] == 0
    first[0] = 7
    assert second == b"x" * MIB


@pytest.fixture
def no_descriptors(links) -> Iterator[Callable[[], None]]:
    """Takes all that are left, until the end of the test."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def take() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))

    def give_back() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        while taken:
            os.close(taken.pop())

    take.give_back = give_back
    yield take
    give_back()


def test_a_process_without_free_descriptors_reads_copies_and_shares_again_when_it_has_some(pool, links, no_descriptors):
    memories = [pool.allocate(size) for size in (MIB, 2 * MIB, 4 * MIB, MIB)]
    for at, memory in enumerate(memories):
        memory[:] = bytes([at]) * len(memory)
    no_descriptors()
    frames = exchange(*links, [[memory] for memory in memories])
    assert [frame[0] for frame in frames] == memories
    assert pool.statistics()["lent_slots"] == 0  # copies were made
    no_descriptors.give_back()
    for memory in memories:
        ((arrived,),) = exchange(*links, [[memory]])
        arrived[0] = 77
        assert memory[0] == 77


def test_where_not_even_one_descriptor_can_be_had_the_message_says_so_and_the_link_lives(pool, links, no_descriptors):
    memory = pool.allocate(MIB)
    no_descriptors()
    os.close(TRANSPORT._spare._fd)
    TRANSPORT._spare._fd = None
    taken = os.dup(0)
    ((arrived,), last) = exchange(*links, [[memory], [b"small"]])
    os.close(taken)
    with TRANSPORT._spare.freed():
        pass
    assert isinstance(arrived, Missing) and "ulimit -n" in arrived.lacking
    assert last == [b"small"]


@pytest.mark.parametrize("mapped", [True, False])
def test_memory_that_its_owner_could_cut_off_is_refused_and_the_error_says_whose_it_is(
    pool, links, monkeypatch, mapped
):
    left, right = links
    with monkeypatch.context() as patch:
        patch.setattr(sealed, "seal", lambda fd: None)
        memory = pool.allocate(MIB)
    assert left.send_nowait([[memory]]) == 1
    if not mapped:
        monkeypatch.setattr(shm._Sharing, "_attach", lambda sharing, fd: None)
    receiver = Receiver(right)
    end = receiver.until_end()
    assert isinstance(end, RemoteProtocolError) and receiver.frames == []
    assert str(end).startswith(f"shared memory of {right.peer} cannot be used: the file can be cut off")


def test_a_description_of_what_is_not_there_breaks_the_link(links):
    left, right = links
    left._stream._sock.send(header(1).pack(1, ELSEWHERE | 100_000) + bytes(24))
    assert isinstance(Receiver(right).until_end(), RemoteProtocolError)


@pytest.mark.skipif(bool(ring.why_not), reason=ring.why_not or "there are rings")
@pytest.mark.parametrize("way", ["ring", "stream"])
def test_what_was_in_flight_over_a_link_that_broke_is_lent_no_longer_and_nobody_reads_it(pool, links, way):
    left, right = links
    exchange(left, right, [[b"the way is open"], *([[b"x" * MIB]] if way == "ring" else [])])
    assert left.recv_nowait() == []
    frames = [[b"head"], *([b"%d" % at * MIB, b"y" * MIB] for at in range(3))]
    assert left.send_nowait(frames) == len(frames) and pool.statistics()["lent_slots"] == 6
    left.abort()
    assert pool.statistics()["lent_slots"] == 0
    del [pool.allocate(MIB) for _ in range(6)][:]  # others use the memory
    receiver = Receiver(right)
    assert isinstance(receiver.until_end(), LinkSevered)
    assert receiver.frames == [[b"head"]]


def test_what_was_read_before_its_link_broke_stays_lent_until_it_is_let_go(pool, links):
    left, right = links
    ((arrived,),) = exchange(left, right, [[b"x" * MIB]])
    left.abort()
    right.abort()
    assert pool.statistics()["lent_slots"] == 1 and arrived == b"x" * MIB
    del arrived
    assert pool.statistics()["lent_slots"] == 0


PEER = """
import sys, select
from monarch.transports import registry
link = registry.get("shm").dial(sys.argv[1], sys.stdin.buffer.read(), 20)
poll = select.poll()
poll.register(link.fileno(), select.POLLIN)
held = []
while not held:
    poll.poll(20000)
    held = link.recv_nowait()
assert held[0][0][-1] == 120
print("held", flush=True)
poll.poll(60000)
"""


def test_what_a_killed_process_held_is_free_again(pool):
    listener = TRANSPORT.listen("shm://", SECRET)
    command = [sys.executable, "-c", PEER, listener.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as peer:
        try:
            assert peer.stdin is not None and peer.stdout is not None
            peer.stdin.write(SECRET)
            peer.stdin.close()
            link = wait_until(listener.accept_nowait, listener)[0]
            link.send_nowait([[b"x" * MIB]])
            assert peer.stdout.readline() == b"held\n"
            assert pool.statistics()["lent_slots"] == 1
            peer.kill()
            peer.wait(WAIT_S)
            Receiver(link).until_end()
            link.abort()
            assert pool.statistics()["lent_slots"] == 0
        finally:
            peer.kill()
            listener.close()
