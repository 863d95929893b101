"""Strangers at the door of a worker: they get nothing, and disturb nobody."""

from __future__ import annotations

import os
import pickle
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from monarch.actor import attach_to_workers
from monarch.mesh.trust import shared_secret
from monarch.testing import fresh_client
from monarch.transports.auth import MAGIC, Handshake
from tests.mesh.actors import Worker
from tests.mesh.workers import LIMIT_S, worker

Address = tuple[str, int]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Address, int]]:
    """(address, pid) of a worker."""
    with socket.create_server(("127.0.0.1", 0)) as inherited:
        address = inherited.getsockname()
        with worker(f"tcp://127.0.0.1:fd{inherited.fileno()}") as process:
            with _stranger(address) as first:
                first.sendall(MAGIC)
                assert _read(first, 42).startswith(MAGIC)  # it is up
            yield address, process.pid


@contextmanager
def _stranger(address: Address) -> Iterator[socket.socket]:
    with socket.create_connection(address, LIMIT_S) as sock:
        yield sock


def _read(sock: socket.socket, size: int) -> bytes:
    """What comes until there are `size` bytes, or the end."""
    data = b""
    try:
        while len(data) < size and (more := sock.recv(size - len(data))):
            data += more
    except ConnectionError:
        pass
    return data


def _is_hung_up_on(sock: socket.socket) -> bool:
    _read(sock, 1 << 20)
    return True


def _a_friend_is_served(address: Address) -> None:
    with fresh_client("shm") as client:
        hosts = attach_to_workers(workers=[f"tcp://{address[0]}:{address[1]}"])
        assert hosts.spawn_procs().spawn("w", Worker).echo.call_one("hi").get(LIMIT_S) == "hi"
        hosts.stop().get(LIMIT_S)
        client.check_faults()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


def _proof_of_a_guess(sock: socket.socket) -> None:
    handshake = Handshake("dialer", b"x" * 32)
    sock.sendall(handshake.greeting)
    handshake.feed(_read(sock, 42))
    sock.sendall(bytes(32))


@pytest.mark.parametrize(
    "say",
    [
        lambda sock, path: sock.sendall(os.urandom(4096)),
        lambda sock, path: sock.sendall(b"GET / HTTP/1.1\r\n\r\n"),
        lambda sock, path: sock.sendall(pickle.dumps(_Bomb(path)) * 20),
        lambda sock, path: sock.sendall(struct.pack("<IQ", 1, 1 << 60) + bytes(64)),
        lambda sock, path: _proof_of_a_guess(sock),
    ],
    ids=["random bytes", "http", "a pickle bomb", "a frame of 2^60 bytes", "a guess"],
)
def test_nonsense_is_hung_up_on(
    served: tuple[Address, int], tmp_path: Path, say: Callable[[socket.socket, Path], None]
) -> None:
    address, pid = served
    before = psutil.Process(pid).memory_info().rss
    with _stranger(address) as sock:
        say(sock, tmp_path / "exploded")
        assert _is_hung_up_on(sock)
    assert not (tmp_path / "exploded").exists()
    assert psutil.Process(pid).memory_info().rss < before + (64 << 20)


def test_a_handshake_that_was_recorded_is_worthless(served: tuple[Address, int]) -> None:
    """What a friend has sent, word for word, to the same worker."""
    address, _ = served
    friend = Handshake("dialer", shared_secret("tcp://127.0.0.1:1"))
    with _stranger(address) as sock:
        sock.sendall(friend.greeting)
        answer = friend.feed(_read(sock, 42)) + friend.feed(_read(sock, 32))
        sock.sendall(answer)
        assert friend.done
    with _stranger(address) as sock:
        sock.sendall(friend.greeting + answer + bytes(17))
        _is_hung_up_on(sock)
    _a_friend_is_served(address)


@pytest.mark.slow
def test_thousands_of_silent_and_half_finished_connections_keep_no_friend_out(served: tuple[Address, int]) -> None:
    address, pid = served
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = 2000
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(limit[0], 2 * count), limit[1]), limit[1]))
    before = psutil.Process(pid)
    threads, descriptors = before.num_threads(), before.num_fds()
    try:
        with ExitStack() as stack:
            for number in range(count):
                sock = stack.enter_context(_stranger(address))
                if number % 2:
                    sock.sendall(Handshake("dialer", b"x" * 32).greeting[: number % 42])
            _a_friend_is_served(address)
            assert psutil.Process(pid).num_fds() < descriptors + 200
            assert psutil.Process(pid).num_threads() < threads + 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


_FLOOD = """
import collections, socket, sys
address, held = (sys.argv[1], int(sys.argv[2])), collections.deque()
while True:
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(address)
    held.append(sock)
    if len(held) > 900:
        held.popleft().close()
        if not sys.stdout.closed:
            print("flooding", flush=True)
            sys.stdout.close()
"""


@pytest.mark.slow
def test_a_flood_of_connections_from_his_own_address_keeps_no_friend_out(served: tuple[Address, int]) -> None:
    address, _ = served
    command = [sys.executable, "-c", _FLOOD, *map(str, address)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"flooding\n"
            _a_friend_is_served(address)
            assert stranger.poll() is None
        finally:
            stranger.kill()
