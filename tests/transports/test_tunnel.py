"""Links of a process that nobody can dial, through the proxy of another."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from monarch.errors import AuthenticationError, NotViable
from monarch.transports import registry
from monarch.transports.listener import StreamListener
from monarch.transports.tunnel import Tunnel
from monarch.transports.url import parse
from tests.transports.drive import SECRET, Receiver, dial_and_accept, exchange, plain

TCP = registry.get("tcp")
FRAMES = [[b"head", os.urandom(3 << 20), b""], [b"small"], [bytes([i]) * i for i in range(250)]]


@pytest.fixture
def tunnel() -> Iterator[Tunnel]:
    """Through a listener that a thread attends to, as a worker does."""
    proxy = TCP.listen("tcp://127.0.0.1:0", SECRET)
    over, ended = socket.socketpair()

    def run() -> None:
        poll = select.poll()
        poll.register(proxy.fileno(), select.POLLIN)
        poll.register(ended.fileno(), select.POLLIN)
        while not any(fd == ended.fileno() for fd, _ in poll.poll()):
            proxy.accept_nowait()
        proxy.close()

    thread = threading.Thread(target=run)
    thread.start()
    yield Tunnel(proxy.url)
    over.close()
    thread.join(10)
    ended.close()


def both_ways(left: object, right: object) -> None:
    assert plain(exchange(left, right, FRAMES)) == plain(FRAMES)
    assert plain(exchange(right, left, FRAMES)) == plain(FRAMES)


def test_it_dials_others_through_the_proxy(tunnel: Tunnel) -> None:
    listener = TCP.listen("tcp://127.0.0.1:0", SECRET)
    left, right = dial_and_accept(tunnel, listener)
    listener.close()
    both_ways(left, right)
    closer = threading.Thread(target=left.close)
    closer.start()
    assert "closed the link" in str(Receiver(right).until_end())
    right.close()
    closer.join(10)


def test_others_dial_it_at_the_proxy(tunnel: Tunnel) -> None:
    listener = tunnel.listen(tunnel.url, SECRET)
    assert listener.url != tunnel.url
    left, right = dial_and_accept(TCP, listener)
    both_ways(left, right)
    left.abort()
    assert "broke" in str(Receiver(right).until_end())
    right.abort()
    listener.close()


def test_the_port_at_the_gate_goes_with_who_asked_for_it(tunnel: Tunnel) -> None:
    listener = tunnel.listen(tunnel.url, SECRET)
    address = parse(listener.url)
    listener.close()

    def refused() -> bool:
        try:
            socket.create_connection((address.host, address.port), 5).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # it was closed while we were in its queue
            return False
        return False

    assert any(refused() for _ in range(10_000))


def test_what_the_gate_hears_is_what_a_dialer_hears(tunnel: Tunnel) -> None:
    nobody = TCP.listen("tcp://127.0.0.1:0", SECRET)
    nobody.close()
    with pytest.raises(ConnectionRefusedError, match=f"nobody listens at {nobody.url}"):
        tunnel.dial(nobody.url, SECRET, 10)


def test_a_stranger_passes_no_proxy(tunnel: Tunnel) -> None:
    with pytest.raises(AuthenticationError):
        tunnel.dial("tcp://127.0.0.1:1", b"another secret", 10)
    with pytest.raises(AuthenticationError):
        tunnel.listen(tunnel.url, b"another secret")


def test_strangers_at_the_port_keep_no_friend_out(tunnel: Tunnel) -> None:
    listener: StreamListener = tunnel.listen(tunnel.url, SECRET)
    address = parse(listener.url)
    strangers = [socket.create_connection((address.host, address.port)) for _ in range(40)]
    left, right = dial_and_accept(TCP, listener)
    both_ways(left, right)
    for end in (left, right):
        end.abort()
    for stranger in strangers:
        stranger.close()
    listener.close()


def test_only_tcp_goes_through_a_proxy() -> None:
    with pytest.raises(NotViable, match="only tcp goes through another process"):
        Tunnel("tls+tcp://a:1")
