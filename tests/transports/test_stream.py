"""Links over stream sockets: what the conformance suite cannot see from outside."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from monarch.errors import LinkClosed, LinkSevered, RemoteProtocolError
from monarch.transports.framing import GOODBYE, encode
from monarch.transports.stream import IOV_MAX, StreamLink
from tests.transports.drive import Receiver, Sender, exchange


@pytest.fixture
def ends() -> Iterator[tuple[StreamLink, socket.socket]]:
    """A link, and the bare socket at its other side."""
    ours, theirs = socket.socketpair()
    link = StreamLink(ours, "the test")
    theirs.settimeout(10)
    yield link, theirs
    theirs.close()
    link.abort()


def test_more_buffers_than_one_system_call_takes(ends):
    link, theirs = ends
    right = StreamLink(theirs, "left")
    frames = [[bytes([i % 256]) * 9000] * 5 for i in range(IOV_MAX)]
    assert exchange(link, right, frames) == frames


def test_the_end_without_a_goodbye_is_severed_even_between_frames(ends):
    link, theirs = ends
    theirs.sendall(b"".join(encode([b"x"])))
    theirs.close()
    receiver = Receiver(link)
    assert type(receiver.until_end()) is LinkSevered
    assert receiver.frames == [[b"x"]]
    assert "without a goodbye" in str(receiver.end)


def test_the_end_inside_a_frame_is_severed(ends):
    link, theirs = ends
    theirs.sendall(b"".join(encode([bytes(1 << 17)]))[:-1])
    theirs.close()
    assert "inside a frame" in str(Receiver(link).until_end())


def test_nonsense_ends_the_link_after_the_frames_before_it(ends):
    link, theirs = ends
    theirs.sendall(b"".join(encode([b"x"])) + b"\xee" * 10)
    receiver = Receiver(link)
    assert type(receiver.until_end()) is RemoteProtocolError
    assert receiver.frames == [[b"x"]]


def test_a_goodbye_is_answered_even_inside_a_frame(ends):
    """The peer only waits for our end of the stream; it would wait for ever behind a frame that it does not read."""
    link, theirs = ends
    theirs.settimeout(10)
    Sender(link, [[bytes(1 << 24)]]).step()
    theirs.sendall(GOODBYE)
    theirs.shutdown(socket.SHUT_WR)
    assert type(Receiver(link).until_end()) is LinkClosed
    closer = threading.Thread(target=link.close)
    closer.start()
    data = b""
    while got := theirs.recv(1 << 20):
        data = (data + got)[-100:]
    closer.join(10)
    assert data.endswith(GOODBYE)


def test_close_tells_whether_the_peer_said_goodbye(ends):
    link, theirs = ends
    theirs.close()
    assert link.close(5) is False
