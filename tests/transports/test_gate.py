"""What goes wrong with one friend of a gate, and what the others have of it: nothing."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from monarch.transports.gate import ID_BYTES, LISTEN, PORT, TAKE, Gate

NO_PORT = bytes(ID_BYTES)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()
    gate._thread.join(10)
    assert not gate._thread.is_alive()


def connection(kind: type[socket.socket] = socket.socket) -> tuple[socket.socket, socket.socket]:
    """A friend's end, and the gate's, which is of that kind."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        theirs.settimeout(10)
        return theirs, kind(fileno=server.accept()[0].detach())


def port_for(gate: Gate, kind: type[socket.socket] = socket.socket) -> tuple[socket.socket, tuple[str, int]]:
    """A friend with a port, and where it is dialed."""
    friend, ours = connection(kind)
    gate.serve(LISTEN, NO_PORT, ours)
    return friend, ("127.0.0.1", PORT.unpack(friend.recv(PORT.size))[0])


def dial(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, 10)


def assert_carries(gate: Gate, friend: socket.socket, address: tuple[str, int]) -> None:
    """The friend is told of one who dials, goes for him, and hears what he says."""
    with dial(address) as other:
        taker, ours = connection()
        gate.serve(TAKE, friend.recv(ID_BYTES, socket.MSG_WAITALL), ours)
        other.sendall(b"hello")
        with taker:
            assert taker.recv(5, socket.MSG_WAITALL) == b"hello"


@pytest.mark.parametrize("error", [TimeoutError(errno.ETIMEDOUT, "timed out"), OSError(errno.EHOSTUNREACH, "no route")])
@pytest.mark.parametrize("call", ["recv", "send"])
def test_a_friend_that_vanishes_ends_its_own_port_only(gate: Gate, error: OSError, call: str) -> None:
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

    friend, address = port_for(gate)
    gone, its_address = port_for(gate, Vanishing)
    vanished = True
    if call == "recv":
        gone.sendall(b"x")
    else:
        dial(its_address).close()
    with suppress(ConnectionResetError):
        assert gone.recv(1) == b""
    assert_carries(gate, friend, address)
    later, its_address = port_for(gate)
    assert_carries(gate, later, its_address)
    for sock in (friend, gone, later):
        sock.close()


def test_what_nobody_can_wait_for_ends_its_own_port_and_stream_only(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has a limit for what all processes of a user wait for (epoll)."""
    friend, address = port_for(gate)
    register = gate._selector.register

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no more watches")

    def full_but_one(*args: Any) -> None:
        gate._selector.register = full  # type: ignore[assignment, method-assign]
        register(*args)

    for some in (full, full_but_one):
        other = dial(address)
        told = friend.recv(ID_BYTES, socket.MSG_WAITALL)
        lost, its_end = connection()
        monkeypatch.setattr(gate._selector, "register", some)
        gate.serve(LISTEN, NO_PORT, its_end)
        assert lost.recv(PORT.size, socket.MSG_WAITALL)[PORT.size :] == lost.recv(1) == b""
        taker, its_end = connection()
        monkeypatch.setattr(gate._selector, "register", some)
        gate.serve(TAKE, told, its_end)
        assert taker.recv(1) == other.recv(1) == b""
        monkeypatch.setattr(gate._selector, "register", register)
        for sock in (other, lost, taker):
            sock.close()
    assert_carries(gate, friend, address)
    friend.close()


def test_without_descriptors_one_who_dials_is_turned_away(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
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
        friend, address = port_for(gate)
    refusals.append(OSError(errno.EMFILE, "Too many open files"))
    with dial(address) as other:
        assert other.recv(1) == b""
    assert_carries(gate, friend, address)
    friend.close()


def test_what_comes_after_the_end_is_closed_and_no_foreign_descriptor_is_written() -> None:
    gate = Gate()
    number = gate._wake.fileno()
    gate.close()
    gate._thread.join(10)
    foreign = os.eventfd(0, os.EFD_NONBLOCK)
    if foreign != number:
        os.dup2(foreign, number)
    friend, ours = connection()
    gate.serve(LISTEN, NO_PORT, ours)
    gate.close()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(number)
    assert friend.recv(1) == b""
    friend.close()
    for fd in {foreign, number}:
        os.close(fd)
