"""Links of two connections on their way up: where they are dialed; and where the second fails, they are closed, and the
listener goes on."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from types import SimpleNamespace

import pytest
from attrs import define, field

from monarch.transports import pairing, registry
from monarch.transports.nng import Pair, _End
from monarch.transports.pairing import Pairings
from monarch.wake import Wake
from tests.transports.drive import SECRET, dial_and_accept, exchange

FULL = OSError(errno.EMFILE, "Too many open files")


@define(eq=False)
class FakePair:
    """Up, with a door that may not shut."""

    trouble: OSError | None = None
    wake: Wake = field(factory=Wake)
    is_closed: bool = False

    def shut_the_door(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    def close(self) -> None:
        self.is_closed = True
        self.wake.close()


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        theirs.settimeout(10)
        with server.accept()[0] as ours:
            yield theirs, ours


def finished(ours: socket.socket, pair: FakePair, starved: list[Exception]) -> object:
    """What the listener gets when the pair is up."""
    with selectors.DefaultSelector() as selector:
        pairings = Pairings("tls+tcp", "here")
        pairings.listener = SimpleNamespace(selector=selector, starves=starved.append)  # type: ignore[assignment]
        pairings.add(ours, pair)  # type: ignore[arg-type]
        pair.wake.set()
        ((key, _),) = selector.select(10)
        return key.data()


def test_a_door_that_does_not_shut_ends_its_own_link_only(connection):
    theirs, ours = connection
    pair = FakePair(FULL)
    assert finished(ours, pair, []) is None
    assert pair.is_closed and theirs.recv(1) == b""


def test_a_link_for_which_no_descriptor_is_left_is_closed(connection, monkeypatch):
    def no_link(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(pairing, "TcpLink", no_link)
    theirs, ours = connection
    pair = FakePair()
    starved: list[Exception] = []
    assert finished(ours, pair, starved) is None
    assert pair.is_closed and theirs.recv(10, socket.MSG_WAITALL)[1:] == b""
    assert starved == [FULL]


def test_what_nobody_can_wait_for_is_closed(connection):
    class Refusing(selectors.DefaultSelector):
        def register(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, "no more watches")

    theirs, ours = connection
    pair = FakePair()
    with Refusing() as selector:
        pairings = Pairings("tls+tcp", "here")
        pairings.listener = SimpleNamespace(selector=selector)
        with pytest.raises(OSError, match="no more watches"):
            pairings.add(ours, pair)
        pairings.close()
    assert pair.is_closed and theirs.recv(1) == b""


@pytest.mark.parametrize("call", ["dup", "listdir"])
def test_a_door_is_not_taken_for_shut_without_descriptors(monkeypatch, call):
    def full(*_: object) -> None:
        raise FULL

    with socket.create_server(("127.0.0.1", 0)) as server, monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OSError, match="Too many open files"):
            list(_End(server.getsockname()[1], is_ours=True).sockets())


def test_a_door_that_is_not_found_is_not_taken_for_shut(monkeypatch):
    pair, _ = Pair.behind_a_door("127.0.0.1")
    pair.shut_the_door()
    monkeypatch.setattr(_End, "sockets", lambda _: iter(()))
    with pytest.raises(OSError, match="was not found"):
        pair.shut_the_door()
    pair.close()


def test_a_tcp_alias_is_what_peers_are_told():
    listener = registry.get("tcp").listen("tcp://localhost:0@tcp://127.0.0.1:0", SECRET)
    assert listener.url.startswith("tcp://localhost:") and not listener.url.endswith(":0")
    left, right = dial_and_accept(registry.get("tcp"), listener)
    assert exchange(left, right, [[b"x"]])
    left.abort()
    right.abort()
    listener.close()
