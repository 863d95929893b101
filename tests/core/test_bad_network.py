"""Processes with a network between them that delays, overtakes itself, cuts, heals and crawls: a relay of TCP."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from monarch.core.ids import ProcId, Uid
from monarch.core.limits import Limits
from monarch.core.proc import Proc
from monarch.transports import registry
from tests.core.net import LIMIT_S, SECRET, Collector, peer, send, until
from tests.ports import free_port

MIB = 1 << 20


class Relay:
    """Carries connections to `port`. What passes waits for up to `delay_s`, each connection for itself, so that the two
    of a link overtake each other."""

    def __init__(self, port: int, seed: int = 1) -> None:
        self.delay_s = 0.0
        self._is_cut = False
        self.target, self._random = port, random.Random(seed)
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Break all connections, and each new one."""
        with self._lock:
            self._is_cut = True
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._server.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT_S)
        for sock in (self._server, *self._ends):
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                there, _ = self._server.accept()
                with self._lock:
                    if self._is_cut:
                        there.close()
                        continue
                    self._ends.append(there)
                    here = socket.create_connection(("127.0.0.1", self.target))
                    self._ends.append(here)
                for ends in ((there, here), (here, there)):
                    self._threads.append(threading.Thread(target=self._carry, args=ends, daemon=True))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                if self.delay_s:
                    time.sleep(self._random.random() * self.delay_s)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


class Network:
    """Two processes that reach each other through relays alone; one sends to a port of the other."""

    def __init__(self, **limits: float) -> None:
        self.relays: list[Relay] = []
        self.source, self.sink = (self._proc(label, Limits(**limits)) for label in ("source", "sink"))
        self.port, self.arrived = self.sink.new_port(), Collector()
        self.sink.ports[self.port] = self.arrived
        self.back, self.returned = self.source.new_port(), Collector()
        self.source.ports[self.back] = self.returned

    def _proc(self, label: str, limits: Limits) -> Proc:
        relay = Relay(free_port())
        self.relays.append(relay)
        proc = Proc(ProcId(Uid.instance(label)), registry.get("tcp"), SECRET, limits=limits)
        proc.gateway.listen(f"tcp://127.0.0.1:{relay.port}@tcp://127.0.0.1:{relay.target}")
        return proc

    def slow_down(self, delay_s: float) -> None:
        for relay in self.relays:
            relay.delay_s = delay_s

    def cut(self) -> None:
        for relay in self.relays:
            relay.cut()

    def heal(self) -> None:
        for relay in self.relays:
            relay.heal()

    def send(self, data: bytes, may_wait: bool = False) -> None:
        send(self.source, self.sink, self.port, data, self.back, may_wait)

    def close(self) -> None:
        for proc in (self.source, self.sink):
            proc.close(0)
        for relay in self.relays:
            relay.close()


@pytest.fixture
def quick() -> Iterator[Network]:
    """Gives up what cannot be reached for half a second."""
    network = Network(message_delivery_timeout_s=0.5, ack_interval_s=0.01)
    yield network
    network.close()


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network(ack_interval_s=0.01, send_buffer_bytes=4 * MIB)
    yield network
    network.close()


def numbers(collector: Collector) -> list[int]:
    return [int(data[:8]) for data in collector.got]


def test_cuts_that_heal_lose_repeat_and_reorder_nothing(network: Network) -> None:
    """Of small frames, and large ones, which take the other connection of a link."""
    network.slow_down(0.003)
    for number in range(300):
        network.send(b"%08d" % number + bytes(100_000 if number % 10 == 5 else 10))
        if number % 75 == 30:
            until(lambda: len(network.arrived.got) > number - 25)
            network.cut()
        if number % 75 == 50:
            network.heal()
    until(lambda: len(network.arrived.got) >= 300)
    assert numbers(network.arrived) == list(range(300))
    assert peer(network.source, network.sink).breaks >= 4
    assert not network.returned.bounces and not network.returned.gone


def test_a_cut_that_lasts_gives_back_what_was_not_acknowledged(quick: Network) -> None:
    quick.send(b"%08d" % 0)
    until(lambda: quick.arrived.got and not peer(quick.source, quick.sink).session.unacked)
    quick.cut()
    for number in range(1, 20):
        quick.send(b"%08d" % number)
    until(lambda: len(quick.returned.bounces) == 19)
    assert [int(data) for data, _ in quick.returned.bounces] == list(range(1, 20))
    assert {down.kind for _, down in quick.returned.bounces} == {"unreachable"}
    assert [key for key, _ in quick.returned.gone] == [quick.sink.key]
    assert numbers(quick.arrived) == [0]


def test_a_slow_network_slows_its_senders_and_memory_stays_bounded(network: Network) -> None:
    network.slow_down(0.004)
    most = 0
    began_s = time.monotonic()
    for number in range(64):
        network.send(b"%08d" % number + bytes(MIB), may_wait=True)
        most = max(most, peer(network.source, network.sink).session.unacked_bytes)
        assert time.monotonic() - began_s < LIMIT_S * 3
    until(lambda: len(network.arrived.got) == 64)
    assert numbers(network.arrived) == list(range(64))
    assert most < 40 * MIB  # the buffer, and what the kernel and the relay have
