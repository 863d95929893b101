"""What a link over nng makes of the messages it gets; nng itself is played by a list."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator

import pytest

from monarch.errors import LinkClosed, LinkSevered, RemoteProtocolError
from monarch.transports.framing import MARKER, encode, header
from monarch.transports.tcp_link import TcpLink, Wake
from tests.transports.drive import Receiver, wait_until

ON_PLAIN = 1 << 63


class FakePair:
    def __init__(self) -> None:
        self.wake = Wake()
        self.is_gone = False
        self.recv_fd, self.send_fd = os.eventfd(0), os.eventfd(0)
        self.inbox: deque[bytes] = deque()
        self.sent: list[bytes] = []
        self.room = 1 << 30

    def send(self, message: bytes) -> bool:
        if len(self.sent) >= self.room:
            return False
        self.sent.append(message)
        return True

    def recv(self) -> bytes | None:
        return self.inbox.popleft() if self.inbox else None

    def check_end(self) -> None:
        pass

    def go(self) -> None:
        self.is_gone = True
        self.wake.set()

    def close(self) -> None:
        self.wake.close()
        os.close(self.recv_fd)
        os.close(self.send_fd)


@pytest.fixture
def ends() -> Iterator[tuple[TcpLink, FakePair, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    pair = FakePair()
    link = TcpLink(ours, pair, "the test")
    yield link, pair, theirs
    link.abort()
    theirs.close()


@pytest.mark.parametrize(
    "message",
    [b"\0\0\1", header(1).pack(1, 10) + b"short", b"\x00\x20\x00\x00", header(2).pack(2, 1, 1)[:-1]],
    ids=["count", "part", "parts", "sizes"],
)
def test_nonsense_ends_the_link_after_the_frames_before_it(ends, message):
    link, pair, _ = ends
    pair.inbox += [b"".join(encode([b"x"])), message]
    receiver = Receiver(link)
    assert receiver.step() == 1
    assert type(receiver.until_end()) is RemoteProtocolError
    assert receiver.frames == [[b"x"]]


def test_queued_small_frames_leave_as_one_message(ends):
    link, pair, _ = ends
    pair.room = 1
    assert link.send_nowait([[b"alone"]]) == 1
    for i in range(100):
        assert link.send_nowait([[b"%d" % i]]) == 1
    assert link.blocked
    pair.room = 10
    assert link.flush_nowait()
    assert len(pair.sent) == 3  # the second one was refused before the others came


def test_a_large_part_waits_for_the_plain_connection_and_all_behind_it(ends):
    link, pair, theirs = ends
    big = os.urandom(100_000)
    pair.inbox.append(header(2).pack(2, 1, len(big) | ON_PLAIN) + b"a" + b"".join(encode([b"later"])))
    receiver = Receiver(link)
    assert receiver.step() == 0
    theirs.sendall(big[:50_000])
    assert receiver.step() == 0
    theirs.sendall(big[50_000:])
    wait_until(lambda: receiver.step() == 2, link)
    assert receiver.frames == [[b"a", big], [b"later"]]


def test_frames_that_arrived_are_read_before_the_death_is_told(ends):
    link, pair, theirs = ends
    theirs.close()
    assert link.recv_nowait() == []  # nng may still hold frames: only when its pipe is gone is it over
    pair.inbox.append(b"".join(encode([b"x"])))
    pair.go()
    receiver = Receiver(link)
    assert type(receiver.until_end()) is LinkSevered
    assert receiver.frames == [[b"x"]]


def test_the_end_inside_a_large_part_is_severed(ends):
    link, pair, theirs = ends
    pair.inbox.append(header(1).pack(1, 100_000 | ON_PLAIN))
    theirs.sendall(bytes(10))
    theirs.close()
    assert "inside a frame" in str(Receiver(link).until_end())


def test_a_goodbye_is_answered_on_the_plain_connection(ends):
    link, pair, theirs = ends
    pair.inbox.append(b"\xff" * 4)
    assert type(Receiver(link).until_end()) is LinkClosed
    assert theirs.recv(100) == MARKER
    assert theirs.recv(100) == b""
