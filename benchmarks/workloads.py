"""What monarch is measured at, over the transport that `MONARCH_TRANSPORT` names. A group of figures each, in the order
of `GROUPS`; a group spawns its processes itself, and stops them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from benchmarks.clock import latency, median, now_s, timed, times
from benchmarks.figures import KINDS, MIB, Figure, Scale
from benchmarks.memory import private_bytes
from monarch.actor import Actor, ProcMesh, current_rank, endpoint, this_host, this_proc


class Echo(Actor):
    def __init__(self) -> None:
        self.taken = 0

    @endpoint
    def ping(self, value: Any) -> Any:
        return value

    @endpoint
    async def ping_async(self, value: Any) -> Any:
        return value

    @endpoint
    def take(self, value: int) -> None:
        self.taken += 1

    @endpoint
    def give(self) -> int:
        """How many it has taken since the last time."""
        taken, self.taken = self.taken, 0
        return taken

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def call_rank(self, others: Echo, n: int) -> list[float]:
        """Seconds of each of `n` calls to the actor of the next rank."""
        other = others.flatten("rank").slice(rank=current_rank().rank + 1)
        measured = []
        for _ in range(n):
            began_s = now_s()
            await other.ping_async.call_one(1)
            measured.append(now_s() - began_s)
        return measured


def spawn(n: int) -> tuple[ProcMesh, Echo]:
    """`n` processes with an actor each, all of which have answered."""
    procs = this_host().spawn_procs(per_host={"procs": n})
    actors = procs.spawn("echo", Echo)
    actors.ping.call(1).get()
    return procs, actors


def calls(scale: Scale) -> Iterator[Figure]:
    procs, actors = spawn(2)
    one = actors.slice(procs=0)
    yield from latency("call", lambda: one.ping.call_one(1).get(), scale.calls)
    yield from latency("call_async", lambda: one.ping_async.call_one(1).get(), scale.calls)
    one.call_rank.call_one(actors, scale.calls // 10).get()
    yield Figure("call_peer", median(one.call_rank.call_one(actors, scale.calls).get()))
    procs.stop().get()


def local(scale: Scale) -> Iterator[Figure]:
    actor = this_proc().spawn("local_echo", Echo)
    yield from latency("call_local", lambda: actor.ping.call_one(1).get(), scale.calls)


def outstanding(scale: Scale) -> Iterator[Figure]:
    procs, actors = spawn(1)

    def at_once() -> None:
        for future in [actors.ping.call_one(i) for i in range(scale.outstanding)]:
            future.get()

    yield Figure("outstanding", median(times(at_once, 5)) / scale.outstanding)
    procs.stop().get()


def casts(scale: Scale) -> Iterator[Figure]:
    """The time for each, until all have taken the last one."""
    for n in scale.crowds[:2]:
        procs, actors = spawn(n)

        def cast(n: int = n, actors: Echo = actors) -> None:
            for i in range(scale.casts):
                actors.take.broadcast(i)
            taken = list(actors.give.call().get().values())
            assert taken == [scale.casts] * n, taken

        yield Figure(f"cast_{n}", median(times(cast, 3)) / scale.casts)
        procs.stop().get()


def crowds(scale: Scale) -> Iterator[Figure]:
    """Spawning and stopping; in between, calls to all, and the memory of who is idle."""
    began_s = now_s()
    procs, actors = spawn(1)
    yield Figure("spawn_first", now_s() - began_s)
    procs.stop().get()
    for n in scale.crowds:
        began_s = now_s()
        procs, actors = spawn(n)
        yield Figure(f"spawn_{n}", now_s() - began_s)
        if n > 1:
            once = lambda actors=actors: actors.ping.call(1).get()  # noqa: E731
            yield Figure(f"gather_{n}", median(times(once, max(5, scale.calls // n))))
        pids = set(actors.pid.call().get().values()) - {os.getpid()}
        if n == 8 and pids:  # else its processes are threads of this one
            yield Figure("idle_memory", median([private_bytes(pid) for pid in pids]))
        yield Figure(f"stop_{n}", timed(lambda procs=procs: procs.stop().get()))  # type: ignore[misc]


def payloads(scale: Scale) -> Iterator[Figure]:
    """There and back, of what is in nobody's memory but the sender's."""
    procs, actors = spawn(1)
    for kind in KINDS:
        make = _MAKE[kind]
        if kind != "bytes" and importlib.util.find_spec(kind) is None:
            continue
        for size in scale.sizes:
            value = make(size)
            n = max(2, min(scale.calls // 10, 64 * MIB // size))
            once = lambda value=value: actors.ping.call_one(value).get()  # noqa: E731
            yield Figure(f"echo_{kind}_{size}", median(times(once, n)))
    procs.stop().get()


def _numpy(size: int) -> Any:
    import numpy

    return numpy.ones(size, dtype=numpy.uint8)


def _torch(size: int) -> Any:
    import torch

    return torch.ones(size, dtype=torch.uint8)


_MAKE: Final[dict[str, Callable[[int], Any]]] = {"bytes": lambda size: b"x" * size, "numpy": _numpy, "torch": _torch}

GROUPS: Final[dict[str, Callable[[Scale], Iterator[Figure]]]] = {
    "crowds": crowds,  # first: torch, once imported, would be in every process
    "calls": calls,
    "local": local,
    "outstanding": outstanding,
    "casts": casts,
    "payloads": payloads,
}
