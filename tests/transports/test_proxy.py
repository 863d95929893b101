"""What goes wrong with one friend of a proxy, and what the others have of it: nothing."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from monarch.transports.proxy import ID_BYTES, LISTEN, PORT, TAKE, Proxy

NO_PORT = bytes(ID_BYTES)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.close()
    proxy._thread.join(10)
    assert not proxy._thread.is_alive()


def connection(kind: type[socket.socket] = socket.socket) -> tuple[socket.socket, socket.socket]:
    """A friend's end, and the proxy's, which is of that kind."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        theirs.settimeout(10)
        return theirs, kind(fileno=server.accept()[0].detach())


def port_for(proxy: Proxy, kind: type[socket.socket] = socket.socket) -> tuple[socket.socket, tuple[str, int]]:
    """A friend with a port, and where it is dialed."""
    friend, ours = connection(kind)
    proxy.serve(LISTEN, NO_PORT, ours)
    return friend, ("127.0.0.1", PORT.unpack(friend.recv(PORT.size))[0])


def dial(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, 10)


def assert_carries(proxy: Proxy, friend: socket.socket, address: tuple[str, int]) -> None:
    """The friend is told of one who dials, goes for him, and hears what he says."""
    with dial(address) as other:
        taker, ours = connection()
        proxy.serve(TAKE, friend.recv(ID_BYTES, socket.MSG_WAITALL), ours)
        other.sendall(b"hello")
        with taker:
            assert taker.recv(5, socket.MSG_WAITALL) == b"hello"


@pytest.mark.parametrize("error", [TimeoutError(errno.ETIMEDOUT, "timed out"), OSError(errno.EHOSTUNREACH, "no route")])
@pytest.mark.parametrize("call", ["recv", "send"])
def test_a_friend_that_vanishes_ends_its_own_port_only(proxy: Proxy, error: OSError, call: str) -> None:
    vanished = False

    class Vanishing(socket.socket):
        def recv(self, *args: int) -> bytes:
            if vanished and call == "recv":
                raise error
            return super().recv(*args)

        def send(self, *args: bytes) -> int:  # type: ignore[override]
            if vanished and call == "send":
                raise error
            return super().send(*args)

    friend, address = port_for(proxy)
    gone, its_address = port_for(proxy, Vanishing)
    vanished = True
    if call == "recv":
        gone.sendall(b"x")
    else:
        dial(its_address).close()
    with suppress(ConnectionResetError):
        assert gone.recv(1) == b""
    assert_carries(proxy, friend, address)
    later, its_address = port_for(proxy)
    assert_carries(proxy, later, its_address)
    for sock in (friend, gone, later):
        sock.close()


def test_what_nobody_can_wait_for_ends_its_own_port_and_stream_only(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has a limit for what all processes of a user wait for (epoll)."""
    friend, address = port_for(proxy)
    register = proxy._selector.register

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no more watches")

    def full_but_one(*args: Any) -> None:
        proxy._selector.register = full  # type: ignore[assignment, method-assign]
        register(*args)

    for some in (full, full_but_one):
        other = dial(address)
        told = friend.recv(ID_BYTES, socket.MSG_WAITALL)
        lost, its_end = connection()
        monkeypatch.setattr(proxy._selector, "register", some)
        proxy.serve(LISTEN, NO_PORT, its_end)
        assert lost.recv(PORT.size, socket.MSG_WAITALL)[PORT.size :] == lost.recv(1) == b""
        taker, its_end = connection()
        monkeypatch.setattr(proxy._selector, "register", some)
        proxy.serve(TAKE, told, its_end)
        assert taker.recv(1) == other.recv(1) == b""
        monkeypatch.setattr(proxy._selector, "register", register)
        for sock in (other, lost, taker):
            sock.close()
    assert_carries(proxy, friend, address)
    friend.close()


def test_without_descriptors_one_who_dials_is_turned_away(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[OSError] = []

    class Full(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if refusals:
                raise refusals.pop()
            return super().accept()

    create_server = socket.create_server

    def full(*args: object, **kwargs: object) -> socket.socket:
        return Full(fileno=create_server(*args, **kwargs).detach())  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_server", full)
        friend, address = port_for(proxy)
    refusals.append(OSError(errno.EMFILE, "Too many open files"))
    with dial(address) as other:
        assert other.recv(1) == b""
    assert_carries(proxy, friend, address)
    friend.close()


def test_what_comes_after_the_end_is_closed_and_no_foreign_descriptor_is_written() -> None:
    proxy = Proxy()
    number = proxy._wake.fileno()
    proxy.close()
    proxy._thread.join(10)
    foreign = os.eventfd(0, os.EFD_NONBLOCK)
    if foreign != number:
        os.dup2(foreign, number)
    friend, ours = connection()
    proxy.serve(LISTEN, NO_PORT, ours)
    proxy.close()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(number)
    assert friend.recv(1) == b""
    friend.close()
    for fd in {foreign, number}:
        os.close(fd)
