"""Who is let in over stream sockets, and who is turned away: what the conformance suite cannot see from outside."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from monarch.errors import AuthenticationError
from monarch.transports import registry
from monarch.transports.auth import MAGIC, Handshake
from monarch.transports.listener import StreamListener, most_newcomers
from monarch.transports.newcomers import network_of
from monarch.transports.stream import StreamLink
from tests.transports.drive import SECRET, dial_and_accept, exchange, wait_until


def listener_on(sock: socket.socket, **options: object) -> StreamListener:
    sock.listen(64)
    return StreamListener(sock, SECRET, "test", lambda s, _: StreamLink(s, "x"), **options)  # type: ignore[arg-type]


@pytest.fixture
def bound() -> Iterator[tuple[socket.socket, str]]:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind("")
    yield sock, sock.getsockname()
    sock.close()


def stranger_at(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(address)
    return sock


def test_a_newcomer_that_says_nothing_is_dropped_at_its_deadline(bound):
    now_s = 100.0
    listener = listener_on(bound[0], clock=lambda: now_s, handshake_s=5.0)
    with stranger_at(bound[1]) as stranger:
        wait_until(lambda: listener.accept_nowait() or listener.newcomer_count, listener)
        now_s = 104.9
        listener.accept_nowait()
        assert listener.newcomer_count == 1
        now_s = 105.0
        listener.accept_nowait()
        assert listener.newcomer_count == 0
        assert stranger.recv(100) == b""
    listener.close()


def test_one_newcomer_too_many_pushes_out_the_oldest(bound):
    listener = listener_on(bound[0], max_newcomers=3)
    strangers = [stranger_at(bound[1]) for _ in range(5)]
    for _ in range(5):
        listener.accept_nowait()
    assert listener.newcomer_count == 3
    assert strangers[0].recv(1) == strangers[1].recv(1) == b""
    for s in strangers:
        s.close()
    listener.close()


def test_who_is_accepted_while_another_thread_closes_is_closed_too(bound):
    closers: list[threading.Thread] = []

    def close_aside(sock: socket.socket) -> bool:
        closers.append(threading.Thread(target=listener.close))
        closers[0].start()
        closers[0].join(0.1)  # it waits
        return True

    listener = listener_on(bound[0], is_welcome=close_aside)
    with stranger_at(bound[1]) as stranger:
        assert listener.accept_nowait() == []
        closers[0].join(5)
        assert stranger.recv(1) == b"" and listener.newcomer_count == 0 and listener.accept_nowait() == []


@pytest.mark.parametrize(
    ("descriptors", "most"), [(2, 1), (60, 7), (1024, 128), (1 << 20, 128), (resource.RLIM_INFINITY, 128)]
)
def test_newcomers_take_an_eighth_of_the_descriptors_at_most(monkeypatch, descriptors, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert most_newcomers() == most


def test_a_flood_leaves_descriptors_for_friends(bound, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (60, 60))
    listener = listener_on(bound[0])
    strangers = [stranger_at(bound[1]) for _ in range(20)]
    wait_until(lambda: listener.accept_nowait() or readable(strangers[12]), listener)
    assert listener.newcomer_count == 7
    for s in strangers:
        s.close()
    listener.close()


def test_a_flood_pushes_out_those_of_its_own_address():
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        listener = listener_on(server, max_newcomers=3)

        def newcomer(source: str) -> socket.socket:
            sock = stack.enter_context(socket.create_connection(server.getsockname(), 5, (source, 0)))
            sock.sendall(MAGIC)
            wait_until(lambda: listener.accept_nowait() or readable(sock), listener)
            assert len(sock.recv(100)) == 42
            return sock

        friend = newcomer("127.0.0.1")
        flood = [newcomer("127.0.0.2") for _ in range(10)]
        assert [each.recv(1) for each in flood[:8]] == [b""] * 8
        for each in (friend, *flood[8:]):
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)
        listener.close()


def test_who_has_said_something_by_then_stays_and_the_silent_go(bound):
    """All come from one place; the friend is the oldest, and speaks while the strangers are on their way."""
    listener = listener_on(bound[0], max_newcomers=3)
    with stranger_at(bound[1]) as friend, ExitStack() as stack:
        wait_until(lambda: listener.accept_nowait() or listener.newcomer_count, listener)
        handshake = Handshake("dialer", SECRET)
        friend.sendall(handshake.greeting)
        strangers = [stack.enter_context(stranger_at(bound[1])) for _ in range(10)]
        wait_until(lambda: listener.accept_nowait() or readable(friend), listener)
        assert [each.recv(1) for each in strangers[:8]] == [b""] * 8
        handshake.feed(friend.recv(42, socket.MSG_WAITALL))
        friend.sendall(handshake.feed(friend.recv(32, socket.MSG_WAITALL)))
        (link,) = wait_until(listener.accept_nowait, listener)
        link.abort()
    listener.close()


def test_nobody_is_answered_before_he_says_something(bound):
    listener = listener_on(bound[0])
    with stranger_at(bound[1]) as stranger:
        wait_until(lambda: listener.accept_nowait() or listener.newcomer_count, listener)
        assert listener.accept_nowait() == [] and not readable(stranger)
        stranger.sendall(MAGIC[:1])
        wait_until(lambda: listener.accept_nowait() or readable(stranger), listener)
        assert stranger.recv(100).startswith(MAGIC)
    listener.close()


def test_those_who_wait_are_taken_in_together_however_many_may_stay(bound):
    listener = listener_on(bound[0], max_newcomers=10)
    with ExitStack() as stack:
        strangers = [stack.enter_context(stranger_at(bound[1])) for _ in range(40)]
        wait_until(lambda: listener.accept_nowait() or listener.newcomer_count, listener)
        assert [each.recv(1) for each in strangers[:30]] == [b""] * 30
        assert listener.newcomer_count == 10
    listener.close()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("192.0.2.1", 1), ("192.0.2.1", 2), True),
        (("192.0.2.1", 1), ("192.0.2.2", 1), False),
        (("2001:db8::1", 1, 0, 0), ("2001:db8::ffff:1", 2, 0, 0), True),
        (("2001:db8::1", 1, 0, 0), ("2001:db8:0:1::1", 1, 0, 0), False),
        (("fe80::1%eth0", 1, 0, 2), ("fe80::2%eth0", 1, 0, 2), True),
        (("::ffff:192.0.2.1", 1, 0, 0), ("::ffff:192.0.2.2", 1, 0, 0), False),
        ("", b"\0a name", True),
    ],
)
def test_addresses_that_one_stranger_can_have_are_of_one_network(one: object, other: object, same: bool) -> None:
    assert (network_of(one) == network_of(other)) is same


def test_running_out_of_descriptors_is_survived():
    transport = registry.get("ipc")
    listener = transport.listen("ipc://", SECRET)
    sockaddr = "\0" + listener.url.removeprefix("ipc://@")
    clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    fillers: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                fillers.append(os.dup(0))
        for client in clients:
            client.connect(sockaddr)
        assert listener.accept_nowait() == []
        for client in clients:
            client.settimeout(5)
            assert client.recv(100) == b""  # refused, not left hanging
        assert listener.starved is not None and listener.starved.errno == errno.EMFILE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in fillers:
            os.close(fd)
        for client in clients:
            client.close()
    left, right = dial_and_accept(transport, listener)
    assert listener.starved is None
    assert exchange(left, right, [[b"still there"]])
    left.abort()
    right.abort()
    listener.close()


def test_connections_that_cannot_be_watched_are_not_handed_down_and_not_kept(bound, monkeypatch):
    sock, _ = bound
    listener = listener_on(sock, connections=lambda: [socket.socketpair(), socket.socketpair()])
    before, watched, register = open_descriptors(), len(listener.selector.get_map()), listener.selector.register

    def register_one(*args: object) -> object:
        if len(listener.selector.get_map()) > watched:
            raise OSError(errno.ENOSPC, "the kernel watches no more")
        return register(*args)

    monkeypatch.setattr(listener.selector, "register", register_one)
    with pytest.raises(OSError, match="watches no more"):
        listener.hand_down()
    assert open_descriptors() == before
    assert len(listener.selector.get_map()) == watched
    listener.close()


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def turn_away(listener: StreamListener, stranger: socket.socket) -> None:
    """A dialer with another secret: it sees our proof, and leaves."""
    handshake = Handshake("dialer", b"another secret")
    stranger.sendall(handshake.greeting)
    wait_until(lambda: listener.accept_nowait() or readable(stranger), listener)
    handshake.feed(stranger.recv(42, socket.MSG_WAITALL))
    wait_until(lambda: listener.accept_nowait() or readable(stranger), listener)
    with pytest.raises(AuthenticationError):
        handshake.feed(stranger.recv(32, socket.MSG_WAITALL))
    stranger.close()
    wait_until(lambda: listener.accept_nowait() or not listener.newcomer_count, listener)


def readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def test_who_has_another_secret_is_told_of_once(bound, caplog):
    listener = listener_on(bound[0])
    for _ in range(3):
        turn_away(listener, stranger_at(bound[1]))
    with stranger_at(bound[1]):  # who leaves, and has said nothing, is not
        wait_until(lambda: listener.accept_nowait() or listener.newcomer_count, listener)
    wait_until(lambda: listener.accept_nowait() or not listener.newcomer_count, listener)
    listener.close()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        "newcomer.refused address='test' peer='this host' reason=\"the peer does not know this job's"
    )
