"""Drives links in tests: every wait polls descriptors and ends at a deadline."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from monarch.core import settings
from monarch.errors import MonarchError
from monarch.transports.base import Buffer, Frame, Link, Listener, Transport
from monarch.verbs.node import prefer

prefer("", settings.get("rdma_binding"))  # as the processes of a mesh do
SECRET = b"the secret of the tests"
WAIT_S = 20.0

ADDRESSES = {
    "inproc": "inproc://",
    "ipc": "ipc://",
    "shm": "shm://",
    "tcp": "tcp://127.0.0.1:0",
    "tls+tcp": "tls+tcp://127.0.0.1:0",
    "ibverbs": "ibverbs://127.0.0.1:0",
}


def wait_until(condition: Callable[[], Any], *ends: Any, wait_s: float = WAIT_S) -> Any:
    """Ask `condition` whenever one of `ends` (links, listeners) is ready, until it says something true."""
    deadline_s = time.monotonic() + wait_s
    poll = select.poll()
    while not (result := condition()):
        for end in ends:
            blocked = getattr(end, "blocked", False)
            poll.register(end.fileno(), select.POLLIN | (select.POLLOUT if blocked else 0))
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1e3):
            raise TimeoutError(f"waited {wait_s} s for {condition}")
    return result


def dial_and_accept(transport: Transport, listener: Listener, wait_s: float = WAIT_S) -> tuple[Link, Link]:
    """The dialer's end and the acceptor's."""
    return accept_from(lambda: transport.dial(listener.url, SECRET, wait_s), listener, wait_s)


def accept_from(connect: Callable[[], Link], listener: Listener, wait_s: float = WAIT_S) -> tuple[Link, Link]:
    """What `connect` returns, on a thread, and the acceptor's end."""
    dialled: list[Link | BaseException] = []

    def dial() -> None:
        try:
            dialled.append(connect())
        except BaseException as error:
            dialled.append(error)

    thread = threading.Thread(target=dial)
    thread.start()
    accepted: list[Link] = []
    try:
        wait_until(lambda: accepted.extend(listener.accept_nowait()) or accepted, listener, wait_s=wait_s)
    finally:
        thread.join(wait_s)
    if isinstance(dialled[0], BaseException):
        raise dialled[0]
    return dialled[0], accepted[0]


@contextmanager
def connected(transport: Transport) -> Iterator[tuple[Link, Link]]:
    listener = transport.listen(ADDRESSES[transport.scheme], SECRET)
    try:
        left, right = dial_and_accept(transport, listener)
    finally:
        listener.close()
    try:
        yield left, right
    finally:
        left.abort()
        right.abort()


def plain(frames: Sequence[Sequence[Buffer]]) -> list[list[bytes]]:
    return [[bytes(part) for part in frame] for frame in frames]


class Sender:
    """Sends frames as there is room for them."""

    def __init__(self, link: Link, frames: Sequence[Sequence[Buffer]]) -> None:
        self.link, self.frames, self.sent = link, frames, 0

    def step(self) -> bool:
        """True once everything is out of the link."""
        if self.link.blocked and not self.link.flush_nowait():
            return False
        while self.sent < len(self.frames):
            taken = self.link.send_nowait(self.frames[self.sent : self.sent + 256])
            self.sent += taken
            if self.link.blocked:
                return False
            assert taken
        return True


class Receiver:
    """Collects frames until the link ends."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.frames: list[Frame] = []
        self.end: MonarchError | None = None

    def step(self) -> int:
        if self.end is None:
            try:
                self.frames += self.link.recv_nowait()
            except MonarchError as error:
                self.end = error
        return len(self.frames)

    def until_end(self, wait_s: float = WAIT_S) -> MonarchError:
        wait_until(lambda: self.step() >= 0 and self.end is not None, self.link, wait_s=wait_s)
        assert self.end is not None
        return self.end


def exchange(left: Link, right: Link, frames: Sequence[Sequence[Buffer]], wait_s: float = WAIT_S) -> list[Frame]:
    """Send from left to right; returns what arrived."""
    sender, receiver = Sender(left, frames), Receiver(right)

    def done() -> bool:
        sender.step()
        receiver.step()
        assert receiver.end is None, receiver.end
        return len(receiver.frames) >= len(frames)

    wait_until(done, left, right, wait_s=wait_s)
    return receiver.frames
