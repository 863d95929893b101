"""What this machine does without us: the floor under every figure. Plain Python over the kernel, the shortest way there
is to do the same thing."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.clock import latency, median, timed, times
from benchmarks.figures import MIB, Figure, Scale
from benchmarks.memory import private_bytes

_SMALL = b"x" * 64


def measure(scale: Scale) -> Iterator[Figure]:
    yield from round_trips(scale)
    yield from messages(scale)
    yield from between_threads(scale)
    yield from forks(scale)
    yield from exchanges(scale)
    yield from interpreter()


@contextmanager
def echoing(n: int = 1) -> Iterator[list[socket.socket]]:
    """`n` forked processes, each of which sends back what comes; a socket to each."""
    sockets, pids = [], []
    for _ in range(n):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _echo(theirs)
        theirs.close()
        sockets.append(ours)
        pids.append(pid)
    try:
        yield sockets
    finally:
        for pid, ours in zip(pids, sockets, strict=True):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ours.close()


def _echo(sock: socket.socket) -> None:
    while data := sock.recv(64):
        sock.sendall(data)
    os._exit(0)


def _round_trip(sock: socket.socket) -> None:
    sock.sendall(_SMALL)
    sock.recv(64)


def round_trips(scale: Scale) -> Iterator[Figure]:
    """64 bytes to another process and back; to many, and back from all."""
    with echoing() as (sock,):
        yield from latency("round_trip", partial(_round_trip, sock), scale.calls)
    for n in scale.crowds:
        with echoing(n) as sockets:

            def gather(sockets: list[socket.socket] = sockets) -> None:
                for each in sockets:
                    each.sendall(_SMALL)
                for each in sockets:
                    each.recv(64)

            yield Figure(f"gather_{n}", median(times(gather, max(5, scale.calls // n))))


def messages(scale: Scale) -> Iterator[Figure]:
    """64 bytes at a time in one direction, taken in as they come. The time for each."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        left = scale.casts * len(_SMALL)
        while left:
            left -= len(theirs.recv(1 << 16))
        theirs.sendall(b"k")
        os._exit(0)

    def send_all() -> None:
        for _ in range(scale.casts):
            ours.sendall(_SMALL)
        ours.recv(1)

    yield Figure("message", timed(send_all) / scale.casts)
    os.waitpid(pid, 0)
    ours.close()
    theirs.close()


def between_threads(scale: Scale) -> Iterator[Figure]:
    """To another thread and back."""
    there: queue.SimpleQueue[int] = queue.SimpleQueue()
    back: queue.SimpleQueue[int] = queue.SimpleQueue()

    def serve() -> None:
        while value := there.get():
            back.put(value)

    def round_trip() -> None:
        there.put(1)
        back.get()

    thread = threading.Thread(target=serve)
    thread.start()
    yield from latency("thread_round_trip", round_trip, scale.calls)
    there.put(0)
    thread.join()


def forks(scale: Scale) -> Iterator[Figure]:
    for n in scale.crowds:
        yield Figure(f"fork_exit_{n}", median(times(partial(fork_and_exit, n), 5)))


def fork_and_exit(n: int) -> None:
    """Fork `n` processes which do nothing, and see them all end."""
    pids = []
    for _ in range(n):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def exchanges(scale: Scale) -> Iterator[Figure]:
    """What an echo needs at the least: a round trip, and one copy each way, between buffers that are in use."""
    with echoing() as (sock,):
        for size in scale.sizes:
            source, target = memoryview(bytearray(size)), memoryview(bytearray(size))

            def exchange(source: memoryview = source, target: memoryview = target) -> None:
                target[:] = source
                _round_trip(sock)
                source[:] = target

            yield Figure(f"exchange_{size}", median(times(exchange, max(5, min(scale.calls, 64 * MIB // size)))))


def interpreter() -> Iterator[Figure]:
    """One that has imported nothing: to start it and see it end, in seconds; its private memory, in bytes."""
    yield Figure("interpreter_start", median(times(lambda: subprocess.run([sys.executable, "-c", ""], check=True), 3)))
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield Figure("interpreter_memory", private_bytes(process.pid))
        process.communicate()
