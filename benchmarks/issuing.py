"""What an operator on distributed tensors costs the program that issues it: `python issuing.py` prints it as JSON.

It needs any package `monarch` with the API of sharded tensors, and nothing else of ours; `benchmarks.tensors` runs it
in turns with two of them.
"""

import json
import statistics
import time
from collections.abc import Callable

import torch

import monarch
from monarch.actor import this_host

OPERATORS = 100
ROUNDS = 7


def chain_of_sums(x: torch.Tensor) -> None:
    for _ in range(OPERATORS):
        x = x + 1.0


def chain_of_views(x: torch.Tensor) -> None:
    for _ in range(OPERATORS):
        x = x.t()


def views_of_one(x: torch.Tensor) -> None:
    for _ in range(OPERATORS):
        x.t()


def measured(work: Callable[[torch.Tensor], None], x: torch.Tensor, count: int) -> tuple[float, float]:
    """Seconds of each of `count` operators, as they pass, and as the CPU of this thread is used: medians."""
    wall, cpu = [], []
    for _ in range(ROUNDS):
        monarch.inspect(x)
        before_cpu, before = time.thread_time(), time.perf_counter()
        work(x)
        wall.append((time.perf_counter() - before) / count)
        cpu.append((time.thread_time() - before_cpu) / count)
    return statistics.median(wall), statistics.median(cpu)


def main() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    with procs.activate():
        x = torch.ones(10, 10)
        found = {each.__name__: measured(each, x, OPERATORS) for each in (chain_of_sums, chain_of_views, views_of_one)}
        found["fetch"] = measured(monarch.inspect, x, 1)
    print(json.dumps(found))
    procs.stop().get()


if __name__ == "__main__":
    main()
