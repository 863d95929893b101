"""Rings in shared memory: what is pushed comes out, once and in order; nobody sleeps through a frame."""

from __future__ import annotations

import mmap
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from monarch import sealed
from monarch.compiled import part
from monarch.core.poller import Poller
from monarch.errors import LinkSevered, RemoteProtocolError
from monarch.transports import registry, ring
from monarch.transports.base import BIG_BYTES, Link
from monarch.transports.ring_link import RingLink
from monarch.transports.shm import FdSocket
from monarch.transports.stream import StreamLink
from tests.transports.drive import SECRET, WAIT_S, Receiver, connected, exchange, plain, wait_until

compiled = pytest.mark.skipif(bool(ring.why_not), reason=ring.why_not or "there are rings")
SHM = registry.get("shm")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def ends():
    fds, reader = ring.offer()
    return ring.accept(fds), reader


def nothing_is_there(reader) -> bool:
    """Whether it may sleep; it does not go on sleeping."""
    with select.epoll() as epoll:
        found, slept_s = ring.sleep((reader,), ((1, 0),), epoll.fileno(), -1, 0.0)
    assert (slept_s is None) == bool(found) and found in ([], [(1, 0)])
    return not found


@compiled
def test_frames_come_out_as_they_were_pushed(ends):
    writer, reader = ends
    frames = [[], [b""], [b"a", b"", b"bc"], (bytearray(b"x" * 1000), memoryview(b"yz")), [b"p"] * 32]
    assert writer.push(frames) == len(frames)
    assert plain(reader.pop(0)) == plain(frames)
    assert reader.pop(0) == [] and reader.position == writer.position


@compiled
@pytest.mark.parametrize("frame", [[b"x" * BIG_BYTES], [b"p"] * 33, [bytes(50_000), bytes(50_000)]])
def test_what_is_too_large_is_left_to_others(ends, frame):
    writer, reader = ends
    assert writer.push([[b"before"], frame, [b"behind"]]) == 1
    assert reader.pop(0) == [[b"before"]]


@compiled
def test_what_is_small_for_the_encoder_fits_wherever_the_ring_has_come_to(ends):
    writer, reader = ends
    frame = [bytes(64), bytes(BIG_BYTES - 2048)]
    for at in range(20):
        assert writer.push([frame, [bytes(at * 3000)]]) == 2
        assert len(reader.pop(0)) == 2


@compiled
def test_a_full_ring_takes_what_fits_and_has_room_again(ends):
    writer, reader = ends
    chance = random.Random(3)
    sent, got = [], []
    for turn in range(400):  # around the ring many times, with records of all sizes at its edge
        frames = [[b"%d" % turn, bytes(chance.choice([0, 1, 7, 8, 100, 3000, 15_000, 66_000]))] for _ in range(20)]
        taken = writer.push(frames)
        sent += frames[:taken]
        if taken < 20 or chance.random() < 0.3:
            got += reader.pop(0)
    got += reader.pop(0)
    assert got == sent and len(sent) > 1000


@compiled
def test_a_frame_waits_for_those_that_come_another_way(ends):
    writer, reader = ends
    writer.push([[b"first"]])
    writer.after = 1
    writer.push([[b"third"]])
    assert reader.pop(0) == [[b"first"]]
    assert nothing_is_there(reader)
    assert reader.pop(1) == [[b"third"]]


@compiled
def test_only_a_sleeper_is_to_be_woken_and_once(ends):
    writer, reader = ends
    writer.push([[b"a"]])
    assert writer.rouse() and not writer.rouse()  # until somebody looks
    assert not nothing_is_there(reader) and not writer.rouse()  # it may not sleep
    reader.pop(0)
    assert nothing_is_there(reader) and not writer.rouse()  # it is awake
    reader.pop(0)
    writer.push([[b"b"]])
    assert writer.rouse() and not writer.rouse()


@compiled
def test_who_polls_the_ring_is_woken_by_the_bell_each_time(ends):
    writer, reader = ends
    reader.attended = True
    asleep, got = threading.Semaphore(0), []

    def sleep() -> None:
        with select.epoll() as epoll:
            epoll.register(ring.bell().fd, select.EPOLLIN | select.EPOLLET)
            ring.sleep((), (), epoll.fileno(), ring.bell().fd, 0.0)  # what has rung before
            while len(got) < 3:
                asleep.release()
                found, _ = ring.sleep((reader,), ((5, 0),), epoll.fileno(), ring.bell().fd, WAIT_S)
                assert found == [(5, 0)]
                got.extend(reader.pop(0))

    thread = threading.Thread(target=sleep)
    thread.start()
    for text in b"a", b"b", b"c":
        assert asleep.acquire(timeout=WAIT_S)
        assert writer.push([[text]]) == 1 and not writer.rouse(), "nothing is to go over the stream"
    thread.join(WAIT_S)
    assert got == [[b"a"], [b"b"], [b"c"]]


@compiled
def test_a_ring_without_a_bell_is_refused_and_its_descriptors_are_closed():
    for others in [], list(os.pipe()), [os.eventfd(0)]:  # that one might block
        (memory, bell), _ = ring.offer()
        os.close(bell)
        with pytest.raises(ValueError, match="a bell"):
            ring.accept([memory, *others])
        for fd in memory, *others:
            with pytest.raises(OSError):
                os.fstat(fd)


@compiled
def test_nobody_can_cut_a_ring_off():
    fds, _ = ring.offer()
    with pytest.raises(PermissionError):
        os.ftruncate(fds[0], 256)
    for fd in fds:
        os.close(fd)


@compiled
def test_a_ring_that_its_reader_could_cut_off_is_left_out_and_the_log_says_whose_it_is(monkeypatch, caplog):
    monkeypatch.setattr(sealed, "seal", lambda fd: None)
    with caplog.at_level("INFO", "monarch"), connected(SHM) as (left, right):
        exchange(right, left, [[b"first"]])
        assert plain(exchange(left, right, [[b"a"], [b"b"]])) == [[b"a"], [b"b"]]
        assert left._writer is None
        refused = next(record.message for record in caplog.records if "ring.refused" in record.message)
        assert repr(left.peer) in refused and "the file can be cut off" in refused


@compiled
def test_whoever_polls_only_the_descriptor_is_put_to_sleep_by_the_last_pop(ends):
    writer, reader = ends
    assert reader.pop(0) == []
    writer.push([[b"a"]])
    assert writer.rouse()


@compiled
def test_a_look_finds_what_is_in_a_ring_and_what_a_descriptor_has(ends):
    writer, reader = ends
    fd, bell = os.eventfd(0), bytearray(1)
    epoll = select.epoll()
    epoll.register(fd, select.EPOLLIN)
    assert ring.look((reader,), epoll.fileno(), 1e-4, bell)[0] is None
    writer.push([[b"a"]])
    assert ring.look((reader,), epoll.fileno(), WAIT_S, bell)[0] == [0]
    reader.pop(0)
    os.eventfd_write(fd, 1)
    assert ring.look((reader,), epoll.fileno(), WAIT_S, bell)[0] == []
    epoll.close()
    os.close(fd)


@compiled
def test_a_look_ends_when_another_thread_rings_the_bell():
    bell = bytearray(1)
    thread = threading.Timer(0.0, lambda: bell.__setitem__(0, 1))
    thread.start()
    assert ring.look((), -1, WAIT_S, bell)[0] == []
    thread.join()


@compiled
@pytest.mark.parametrize("bell", [bytearray(), bytearray(2), b"\0", None])
def test_what_is_no_bell_is_refused(bell):
    with pytest.raises(TypeError, match="bell"):
        ring.look((), -1, 0.0, bell)


@compiled
@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        b"\x05" * 64,
        struct.pack("<IIQ", 64, 33, 0),
        struct.pack("<IIQI", 64, 1, 0, 45),
        struct.pack("<IIQII", 64, 2, 0, 1 << 31 | 45, 1),
    ],
    ids=["skip", "size", "parts", "part", "elsewhere"],
)
def test_what_is_no_frame_is_refused_and_nothing_outside_is_read(garbage):
    memory = mmap.mmap(-1, 256 + 4096)
    writer, reader = part.Writer(memory, None, -1), part.Reader(memory, None)
    assert writer.push([[b"good"], [bytes(40)]]) == 2
    memory[256 + 24 : 256 + 24 + len(garbage)] = garbage
    assert reader.pop(0) == [[b"good"]]
    with pytest.raises(ValueError, match="no frame"):
        reader.pop(0)


@compiled
def test_a_size_that_changes_while_it_is_looked_at_is_looked_at_once():
    """Another process may write there at any time: what was compared is what counts."""
    fd = os.memfd_create("ring")
    os.ftruncate(fd, 256 + 4096)
    with mmap.mmap(fd, 0) as memory:
        memory[256:280] = struct.pack("<IIQII", 24, 1, 0, 4, 7)
        memory[:8] = struct.pack("<Q", 24)
        program = f"""if True:
            import ctypes, mmap
            size = ctypes.c_uint32.from_buffer(mmap.mmap({fd}, 0), 256)
            print(flush=True)
            while True:
                size.value = 24
                size.value = 4096 - 16
            """
        other = subprocess.Popen([sys.executable, "-c", program], pass_fds=[fd], stdout=subprocess.PIPE)
        try:
            other.stdout.readline()
            places = set()
            for _ in range(200_000):
                reader = part.Reader(memory, None)
                with suppress(ValueError):
                    reader.pop(0)
                places.add(reader.position)
        finally:
            other.kill()
            other.wait()
            other.stdout.close()
            os.close(fd)
        del reader
    assert places == {0, 24}


@compiled
def test_a_part_that_lies_elsewhere_is_found_where_it_comes_out(ends):
    writer, reader = ends
    reader.find = lambda description: [b"found", description]
    assert writer.push([[b"a", (b"abc",), b"b"], ((b"",),)]) == 2
    assert reader.pop(0) == [[b"a", [b"found", b"abc"], b"b"], [[b"found", b""]]]


@compiled
@pytest.mark.parametrize("wrong", [(), (b"a", b"b"), (bytearray(1),), (1,)])
def test_what_describes_no_part_is_refused(ends, wrong):
    writer, _ = ends
    with pytest.raises(TypeError, match="stands for a part"):
        writer.push([[b"a", wrong]])
    assert writer.position == 0


@compiled
def test_a_pop_ends_with_some_large_parts_only_where_a_poller_looks_again(ends):
    writer, reader = ends
    reader.find = lambda description: memoryview(bytearray(3 << 20))
    for _ in range(2):
        assert writer.push([[b"%d" % n, (b"",)] for n in range(5)]) == 5
        reader.attended = not reader.attended
        taken = []
        while frames := reader.pop(0):
            taken.append([int(frame[0]) for frame in frames])
        assert taken == ([[0, 1], [2, 3], [4]] if reader.attended else [[0, 1, 2, 3, 4]])


@compiled
def test_what_cannot_be_found_is_told_after_what_came_before(ends):
    writer, reader = ends

    def refuse(description: bytes) -> bytes:
        raise RemoteProtocolError("a place that is none")

    writer.push([[b"a"], [(b"abc",)]])
    assert reader.pop(0) == [[b"a"]]
    with pytest.raises(ValueError, match="no frame"):
        reader.pop(0)  # nobody says where
    reader.find = refuse
    with pytest.raises(RemoteProtocolError, match="none"):
        reader.pop(0)


@compiled
def test_a_bell_goes_into_a_stream_whole_or_not_at_all():
    here, there = socket.socketpair()
    with here, there:
        assert ring.ring_bell(here.fileno()) and there.recv(100) == bytes(4)
        here.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                here.send(bytes(1 << 16))
        assert not ring.ring_bell(here.fileno())
        there.close()
        assert not ring.ring_bell(here.fileno())


@compiled
@pytest.mark.parametrize("size", [256, 256 + 32, 256 + 100, 300])
def test_memory_of_another_size_is_refused(size):
    with pytest.raises(ValueError, match="power of two"):
        part.Reader(mmap.mmap(-1, size), None)


@compiled
def test_a_forked_child_has_nothing_to_do_with_it(ends):
    writer, reader = ends
    writer.push([[b"before"]])
    assert reader.pop(0) == [[b"before"]]
    writer.push([[b"a"]])
    child = os.fork()
    if child == 0:
        with suppress(ValueError):  # it finds an empty ring at another place
            if reader.pop(0):
                os._exit(1)
        writer.push([[b"of the child"]])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert reader.pop(0) == [[b"a"]] and reader.pop(0) == []


# Links


@pytest.fixture(params=["both", "left", "right", "none"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Link, Link]]:
    """Links over shared memory, where both sides have rings, or one, or none."""
    if request.param != "none" and ring.why_not:
        pytest.skip(ring.why_not)
    begin = RingLink._begin
    dials = threading.get_ident()  # `connected` dials on a thread of its own, and accepts on this one

    def with_or_without(link: RingLink) -> None:
        side = "right" if threading.get_ident() == dials else "left"
        with pytest.MonkeyPatch.context() as patch:
            if request.param not in ("both", side):
                patch.setattr(ring, "why_not", "the test does without")
            begin(link)

    monkeypatch.setattr(RingLink, "_begin", with_or_without)
    with connected(SHM) as pair:
        yield pair


def test_small_and_large_frames_keep_their_order_whichever_way_each_takes(links):
    left, right = links
    chance = random.Random(1)
    frames = [[b"%d" % i, bytes(chance.choice([0, 10, 5000, 20_000, 70_000, 300_000]))] for i in range(400)]
    assert plain(exchange(left, right, frames)) == frames
    assert plain(exchange(right, left, frames)) == frames


def test_more_than_a_ring_holds_waits_for_the_reader(links):
    left, right = links
    frame = [b"x" * 1000]
    sent = 0
    while not left.blocked:
        sent += left.send_nowait([frame] * 50)
    receiver = Receiver(right)

    def done() -> bool:
        left.flush_nowait()
        return receiver.step() == sent

    wait_until(done, left, right)
    assert left.send_nowait([[b"last"]]) == 1
    wait_until(lambda: receiver.step() == sent + 1, right)
    assert receiver.frames == [*[frame] * sent, [b"last"]]


def test_what_was_sent_before_the_end_is_read_before_it(links):
    left, right = links
    exchange(left, right, [[b"the way is open"]])
    exchange(right, left, [[b"and back"]])
    left.send_nowait([[b"%d" % i] for i in range(100)])
    left.abort()
    receiver = Receiver(right)
    assert isinstance(receiver.until_end(), LinkSevered)
    assert receiver.frames == [[b"%d" % i] for i in range(100)]


@compiled
def test_no_frame_is_slept_through(monkeypatch):
    """Two pollers throw frames to each other, in volleys; each looks for a while before it sleeps, or not."""
    rounds = 4000
    with connected(SHM) as (left, right):
        errors: list[BaseException] = []

        def play(link: Link, seed: int, begins: bool) -> None:
            chance = random.Random(seed)
            poller = Poller()
            heard = 0

            def hear(event: int) -> None:
                nonlocal heard
                heard += len(link.recv_nowait())

            try:
                poller.register(link.fileno(), hear, link.ring)
                wanted = 0
                for turn in range(rounds):
                    volley = 1 + turn % 3
                    if begins:
                        assert link.send_nowait([[b"ball"]] * volley) == volley
                    wanted += volley
                    while heard < wanted:
                        poller.poll(WAIT_S, eager=chance.random() < 0.5)
                    if not begins:
                        assert link.send_nowait([[b"ball"]] * volley) == volley
            except BaseException as error:
                errors.append(error)
            finally:
                poller.shut()
                poller.close()

        threads = [
            threading.Thread(target=play, args=(left, 1, True)),
            threading.Thread(target=play, args=(right, 2, False)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a frame was slept through"
        assert not errors


PUSHER = """
import select, sys
from monarch.transports import registry
link = registry.get("shm").dial(sys.argv[1], sys.stdin.buffer.read(), 20)
poll = select.poll()
poll.register(link.fileno(), select.POLLIN)
while not link.recv_nowait():
    poll.poll(20_000)
poll.register(link.fileno(), select.POLLIN | select.POLLOUT)
number = 0
while True:
    number += link.send_nowait([[b"%d" % (number + at), bytes(100)] for at in range(50)])
    while link.blocked and not link.flush_nowait():
        poll.poll(20_000)
"""


@compiled
def test_of_a_process_that_is_killed_while_it_pushes_whole_frames_arrive_and_then_the_end():
    listener = SHM.listen("shm://", SECRET)
    command = [sys.executable, "-c", PUSHER, listener.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as pusher:
        assert pusher.stdin is not None
        pusher.stdin.write(SECRET)
        pusher.stdin.close()
        links: list[Link] = []
        wait_until(lambda: links.extend(listener.accept_nowait()) or links, listener)
        (link,) = links
        link.send_nowait([[b"go"]])
        receiver = Receiver(link)
        wait_until(lambda: receiver.step() > 20_000, link)
        pusher.kill()
        assert isinstance(receiver.until_end(), LinkSevered)
    listener.close()
    link.abort()
    assert receiver.frames == [[b"%d" % at, bytes(100)] for at in range(len(receiver.frames))]


def test_a_first_byte_that_comes_while_it_is_waited_for_is_no_frame():
    class Late(FdSocket):
        """Says once that there is nothing, just before there is."""

        looks = 0

        def recv(self, size: int, flags: int = 0) -> bytes:
            self.looks += 1
            if self.looks == 1:
                raise BlockingIOError
            return super().recv(size, flags)

    ours, theirs = socket.socketpair()
    carrier, other = Late(ours.detach()), FdSocket(theirs.detach())
    link, peer = RingLink(StreamLink(carrier, "peer"), carrier), RingLink(StreamLink(other, "link"), other)
    peer.send_nowait([[b"a"]])
    assert link.recv_nowait() == []
    assert link.recv_nowait() == [[b"a"]]
    link.abort()
    peer.abort()


@compiled
def test_garbage_in_a_ring_ends_its_link(monkeypatch):
    with connected(SHM) as (left, right):
        exchange(left, right, [[b"the way is open"]])
        exchange(right, left, [[b"and back"]])

        class Broken:
            attended = False

            def pop(self, after: int) -> None:
                raise ValueError("what lies in the ring is no frame")

        monkeypatch.setattr(right, "ring", Broken())
        left.send_nowait([[b"x"]])
        assert isinstance(Receiver(right).until_end(), RemoteProtocolError)


@compiled
@pytest.mark.parametrize("size", [0, 7, 8, 31, 33])
def test_a_description_of_another_length_ends_its_link(size, monkeypatch):
    with connected(SHM) as (left, right):
        exchange(left, right, [[b"the way is open"]])
        exchange(right, left, [[b"and back"]])
        assert left._writer.push([[b"x", (bytes(size),)]]) == 1 and left._writer.rouse()
        left._stream.send_empty(ring.ring_bell)
        assert isinstance(Receiver(right).until_end(), RemoteProtocolError)
