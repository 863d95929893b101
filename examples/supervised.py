"""A pool that survives its workers: a supervisor restarts what dies, and the callers hardly notice.

    python examples/supervised.py

A `Ledger` and a few `Worker`s are children of one supervisor. While jobs run, this program kills a worker again and
again with SIGKILL. A job that was under way then fails with SupervisionError; whoever asked decides whether it may be
done again (here it may), and calls the same handle: the next worker is behind it as soon as it is up.
"""

from __future__ import annotations

import os
import random
import signal
import time

from monarch.actor import Actor, SupervisionError, endpoint, this_proc
from monarch.supervision import Child, Supervisor


class Ledger(Actor):
    """Remembers what is done, so that nothing is done for nothing."""

    def __init__(self) -> None:
        self.done: dict[int, int] = {}

    @endpoint
    def enter(self, job: int, result: int) -> None:
        self.done[job] = result

    @endpoint
    def results(self) -> dict[int, int]:
        return self.done


class Worker(Actor):
    """Does jobs; may die in the middle of one."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def square(self, job: int) -> int:
        time.sleep(0.005)
        return job * job


def main(jobs: int = 60, workers: int = 2, kills: int = 4) -> None:
    ledger_spec = Child("ledger", Ledger)
    worker_specs = [Child(f"worker{i}", Worker) for i in range(workers)]
    # Each child has a process of its own. More restarts than this within a minute would be a reason to give up.
    supervisor = this_proc().spawn(
        "pool", Supervisor, [ledger_spec, *worker_specs], max_restarts=10 * kills, within_s=60.0
    )
    ledger = supervisor.child(ledger_spec)
    handles = [supervisor.child(spec) for spec in worker_specs]

    dice = random.Random(0)
    deadly = set(dice.sample(range(jobs), kills))
    again = 0
    waits_s = []
    for job in range(jobs):
        worker = handles[job % workers]
        victim = worker.pid.call_one().get()
        answer = worker.square.call_one(job)
        if job in deadly:
            os.kill(victim, signal.SIGKILL)
        try:
            result = answer.get()
        except SupervisionError:
            began_s = time.perf_counter()
            result = worker.square.call_one(job).get()  # waits for the replacement
            waits_s.append(time.perf_counter() - began_s)
            again += 1
        ledger.enter.call_one(job, result).get()

    results = ledger.results.call_one().get()
    assert results == {job: job * job for job in range(jobs)}
    restarts = sum(child.restarts for child in supervisor.children.call_one().get())
    print(f"{len(results)} jobs done with {workers} workers, of which {kills} were killed; {again} jobs were repeated")
    print(f"{restarts} restarts; a replacement answered after {1000 * min(waits_s, default=0):.0f} ms at best")
    supervisor.stop().get()


if __name__ == "__main__":
    main()
