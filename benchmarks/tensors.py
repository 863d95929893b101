"""Sharded tensors, each figure beside what it is made of, or compared with.

    python -m benchmarks.tensors [GROUP ...]

- `issue`: an operator, as the program that issues it sees it, beside torch's bare dispatch mode;
- `reduce`: an all-reduce beside torch.distributed's gloo alone, over as many processes;
- `move`: `to_mesh` beside `memcpy`;
- `fetch`: a small value, beside an endpoint that returns it;
- `torchmonarch`: `issuing.py` with our package and with Meta's, whose Python `MONARCH_BENCH_TORCHMONARCH` names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed

import monarch
from benchmarks import beside
from benchmarks.beside import Row
from benchmarks.clock import median, timed
from benchmarks.figures import MIB, in_words
from monarch import inspect, remote
from monarch.actor import Actor, ProcMesh, current_rank, endpoint, this_host

dist: Any = torch.distributed
ROUNDS: Final = 7
OPERATORS: Final = 100
_OTHER: Final = "MONARCH_BENCH_TORCHMONARCH"


@contextmanager
def mesh(count: int) -> Iterator[ProcMesh]:
    procs = this_host().spawn_procs({"procs": count})
    yield procs
    procs.stop().get()


# ---- issuing


class _Bare(torch.Tensor):
    """A handle that nobody has shards of."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls) -> _Bare:
        return torch.Tensor._make_wrapper_subclass(cls, (10, 10), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls()


def sums(x: torch.Tensor) -> torch.Tensor:
    for _ in range(OPERATORS):
        x = x + 1.0
    return x


def views(x: torch.Tensor) -> torch.Tensor:
    for _ in range(OPERATORS):
        x = x.t()
    return x


def _cpu_s(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def issue(rounds: int = 5 * ROUNDS) -> Iterator[Row]:
    compiled = monarch.compile(sums)

    def coalesced(x: torch.Tensor) -> None:
        with monarch.coalescing():
            sums(x)

    cases: list[tuple[str, Callable[[Any], object], Callable[[Any], object]]] = [
        ("an operator", sums, sums),
        ("one in a coalesced block", coalesced, sums),
        ("one in a compiled function", compiled, sums),
        ("a view of a view, up to the hundredth", views, views),
    ]
    with mesh(2) as procs, procs.activate():
        x, bare = torch.ones(10, 10), _Bare()
        for title, work, alone in cases:
            ours, its = [], []
            work(x)
            for _ in range(rounds):
                inspect(x)
                ours.append(_cpu_s(lambda: work(x)) / OPERATORS)  # noqa: B023
                with monarch.no_mesh.activate():
                    its.append(_cpu_s(lambda: alone(bare)) / OPERATORS)  # noqa: B023
            yield Row(f"{title}, CPU of the thread", median(ours), "a bare dispatch of torch", median(its))


# ---- between processes


class Member(Actor):
    """One of a group of torch.distributed's gloo, by itself."""

    def __init__(self, path: str, size: int) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
        store = dist.FileStore(path, size)
        options: Any = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        self._group = dist.ProcessGroupGloo(store, current_rank().rank, size, options)
        self._tensor = torch.ones(1)

    @endpoint
    def prepare(self, count: int) -> None:
        self._tensor = torch.ones(count)

    @endpoint
    def all_reduce(self) -> None:
        self._group.allreduce([self._tensor]).wait()

    @endpoint
    def get(self) -> torch.Tensor:
        return self._tensor


def reduce(count: int = 4, size_bytes: int = 64 * MIB, rounds: int = ROUNDS) -> Iterator[Row]:
    """Each is as long as this program waits for it, gloo's for the answers of an endpoint."""
    folder = tempfile.mkdtemp()
    with mesh(count) as procs:
        alone = procs.spawn("alone", Member, f"{folder}/store", count)
        alone.prepare.call(size_bytes // 4).get()
        probe = remote(lambda x: float(x[0]), propagate=lambda x: 0.0)
        with procs.activate():
            x: Any = torch.ones(size_bytes // 4)
            ours, again, its = [], [], []
            for _ in range(rounds + 1):
                probe.call(x).get()
                ours.append(timed(lambda: (x.reduce_(None, "avg"), probe.call(x).get())))
                again.append(timed(lambda: probe.call(x.reduce(None, "avg")).get()))
                its.append(timed(lambda: alone.all_reduce.call().get()))
    shutil.rmtree(folder)
    title = f"all-reduce of {in_words(size_bytes)} over {count} processes"
    yield Row(f"{title}, in place", median(ours[1:]), "gloo alone", median(its[1:]))
    yield Row(title, median(again[1:]), "gloo alone", median(its[1:]))


def move(size_bytes: int = 64 * MIB, rounds: int = ROUNDS) -> Iterator[Row]:
    with mesh(2) as procs:
        first, second = procs.slice(procs=0), procs.slice(procs=1)
        probe = remote(lambda x: float(x[-1]))
        copied = remote(lambda x, y: timed(lambda: y.copy_(x)))
        with first.activate():
            x: Any = torch.ones(size_bytes // 4)
            y = torch.ones(size_bytes // 4)
            moves, copies = [], []
            for _ in range(rounds + 2):
                probe.call_one(x).get()

                def moved() -> None:
                    there = x.to_mesh(second)
                    with second.activate():
                        probe.call_one(there).get()

                moves.append(timed(moved))
                copies.append(copied.call_one(x, y).get())
    yield Row(f"to_mesh of {in_words(size_bytes)}", median(moves[2:]), "memcpy", median(copies[2:]), size_bytes)


def fetch(rounds: int = 50 * ROUNDS) -> Iterator[Row]:
    with mesh(1) as procs, tempfile.TemporaryDirectory() as folder:
        actor = procs.spawn("alone", Member, f"{folder}/store", 1)
        with procs.activate():
            x = torch.ones(1)
            fetched, called = [], []
            for _ in range(rounds):
                fetched.append(timed(lambda: inspect(x)))
                called.append(timed(lambda: actor.get.call_one().get()))
    yield Row("fetch of one number", median(fetched), "an endpoint that returns it", median(called))


# ---- the other package


def torchmonarch(rounds: int = 3) -> Iterator[Row]:
    program = Path(__file__).with_name("issuing.py")
    found: dict[str, list[dict[str, tuple[float, float]]]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as elsewhere:  # where no package of ours is found by chance
        for _ in range(rounds):
            for which, python in (("ours", sys.executable), ("theirs", os.environ[_OTHER])):
                command = [python, "-P", str(program)]
                run = subprocess.run(command, cwd=elsewhere, stdout=subprocess.PIPE, text=True, check=True)
                found[which].append(json.loads(run.stdout.splitlines()[-1]))
    for name in found["ours"][0]:
        for at, how in enumerate(("", ", CPU of the thread")):
            ours, theirs = (median([each[name][at] for each in found[which]]) for which in found)
            yield Row(f"{name.replace('_', ' ')}{how}", theirs, "ours", ours)


def why_not(group: str) -> str:
    if group == "torchmonarch" and not os.environ.get(_OTHER):
        return f"{_OTHER} names no Python that has it"
    return ""


GROUPS: Final[dict[str, Callable[[], Iterator[Row]]]] = {
    "issue": issue,
    "reduce": reduce,
    "move": move,
    "fetch": fetch,
    "torchmonarch": torchmonarch,
}


def main() -> None:
    beside.main("tensors", __doc__, GROUPS, why_not)


if __name__ == "__main__":
    from benchmarks import tensors  # by its name, which the other processes know, too

    tensors.main()
