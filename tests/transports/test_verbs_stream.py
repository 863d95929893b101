"""The stream over two queue pairs that are made of queues, and as strict as real ones: an event only where one was
asked for, no message without a receive for it, no more sends than there is room for."""

from __future__ import annotations

import ctypes
import os
import random
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import define

from monarch.errors import LinkClosed, LinkSevered
from monarch.transports import verbs_stream
from monarch.transports.stream import StreamLink
from monarch.transports.verbs_stream import DEPTH, READY, SLOT_BYTES, VerbsStream
from monarch.verbs.adapter import POLLED, SUCCESS, Completion, Opcode
from tests.transports.drive import Receiver, Sender, exchange, plain, wait_until


class Region:
    lkey = rkey = 1

    def close(self) -> None:
        pass


class Pair:
    """One of two joined queue pairs."""

    peer: Pair

    def __init__(self) -> None:
        self.receives: deque[tuple[int, int, int]] = deque()
        self.completed: deque[Completion] = deque()
        self.sends: deque[int] = deque()  # those that take up room: all since the last that was seen to be complete
        self.armed = False
        self.calls = 0  # that would be system calls
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)

    def fileno(self) -> int:
        return self.fd

    def receive(self, wr_id: int, address: int, size_bytes: int, lkey: int) -> tuple[int, int, int]:
        return wr_id, address, size_bytes

    def post_recv(self, receive: tuple[int, int, int]) -> None:
        self.receives.append(receive)

    def post_send(
        self, opcode: Opcode, wr_id: int, address: int, size_bytes: int, lkey: int, *, signalled: bool = True
    ) -> None:
        self.calls += 1
        self.sends.append(wr_id)
        assert len(self.sends) <= DEPTH, "the queue is full"
        slot, target, room = self.peer.receives.popleft()  # there is one: credits see to it
        assert size_bytes <= room
        ctypes.memmove(target, address, size_bytes)
        self.peer.complete(Completion(slot, SUCCESS, size_bytes))
        if signalled:
            self.complete(Completion(wr_id, SUCCESS, size_bytes))

    def complete(self, done: Completion) -> None:
        self.completed.append(done)
        if self.armed:
            self.armed = False
            os.eventfd_write(self.fd, 1)

    def poll(self) -> list[Completion]:
        found = [self.completed.popleft() for _ in range(min(POLLED, len(self.completed)))]
        for done in found:
            while done.wr_id in self.sends:
                self.sends.popleft()
        return found

    def arm(self) -> None:
        self.calls += 1
        self.armed = True

    def take_event(self) -> bool:
        self.calls += 1
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True


class Wire:
    class node:
        device = None

    def __init__(self) -> None:
        self.queue_pair = Pair()

    def close(self) -> None:
        os.close(self.queue_pair.fd)


@define
class Ends:
    left: StreamLink
    right: StreamLink
    pairs: tuple[Pair, Pair]
    controls: tuple[socket.socket, socket.socket]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(verbs_stream, "register", lambda *_: Region())
    wires: tuple[Any, Any] = Wire(), Wire()
    pairs = wires[0].queue_pair, wires[1].queue_pair
    pairs[0].peer, pairs[1].peer = pairs[1], pairs[0]
    controls = socket.socketpair()
    streams = [VerbsStream(control, wire) for control, wire in zip(controls, wires, strict=True)]
    for control in controls:
        control.send(READY)
    links = [
        StreamLink(stream, "the test", room_event=select.POLLIN, send_lock=stream.lock)  # type: ignore[arg-type]
        for stream in streams
    ]
    yield Ends(links[0], links[1], pairs, controls)
    for link in links:
        link.abort()


def test_frames_of_all_sizes_pass_both_ways_at_once(ends):
    rng = random.Random(3)
    sizes = [0, 1, SLOT_BYTES - 13, SLOT_BYTES - 12, SLOT_BYTES, 5 * SLOT_BYTES + 1, 100_000, 600_000]
    frames = {link: [[rng.randbytes(rng.choice(sizes))] for _ in range(100)] for link in (ends.left, ends.right)}
    senders = [Sender(link, frames[link]) for link in frames]
    receivers = [Receiver(ends.right), Receiver(ends.left)]

    def done() -> bool:
        for step in (*senders, *receivers):
            step.step()
        return all(len(receiver.frames) == 100 for receiver in receivers)

    wait_until(done, ends.left, ends.right)
    assert [plain(receiver.frames) for receiver in receivers] == list(frames.values())


def test_a_sender_that_nobody_answers_goes_on_as_it_is_read(ends):
    """All credits come back in messages of their own, and the sender looks only when its descriptor is readable."""
    frames = [[b"%d" % number, bytes(5000)] for number in range(1000)]
    assert plain(exchange(ends.left, ends.right, frames)) == frames


def test_a_round_trip_costs_three_system_calls_on_each_side(ends):
    """To send, to take the event, to ask for the next one; and of 16 sends one completes."""
    exchange(ends.left, ends.right, [[b"x"]])
    exchange(ends.right, ends.left, [[b"x"]])
    ends.pairs[0].calls = 0
    for _ in range(160):
        for one, other in ((ends.left, ends.right), (ends.right, ends.left)):
            one.send_nowait([[b"ping"]])
            assert wait_until(other.recv_nowait, other) == [[b"ping"]]

    assert ends.pairs[0].calls <= 160 * 3 + 2 * 160 // 16 + 2


def test_the_end_of_a_stream_waits_for_what_was_sent(ends):
    frames = [[bytes(3000)] for _ in range(40)]
    ends.left.send_nowait(frames)
    ends.left.send_nowait([[b"last"]])
    receiver = Receiver(ends.right)
    closer = threading.Thread(target=ends.left.close)
    closer.start()

    assert type(receiver.until_end()) is LinkClosed
    ends.right.close()
    closer.join(10)
    assert plain(receiver.frames) == [*frames, [b"last"]]


def test_the_end_of_the_control_connection_is_a_death_after_all_that_has_arrived(ends):
    ends.left.send_nowait([[b"last words"]])
    wait_until(ends.left.flush_nowait, ends.left)
    ends.controls[0].shutdown(socket.SHUT_RDWR)
    receiver = Receiver(ends.right)

    assert type(receiver.until_end()) is LinkSevered
    assert plain(receiver.frames) == [[b"last words"]]


def test_an_error_of_the_device_severs_the_link_and_says_which(ends):
    exchange(ends.left, ends.right, [[b"x"]])
    ends.pairs[1].complete(Completion(1 << 62, 12, 0))
    end = Receiver(ends.right).until_end()

    assert type(end) is LinkSevered and "the cable is out" in str(end)
    with pytest.raises(LinkSevered):
        ends.right.send_nowait([[b"more"]])
