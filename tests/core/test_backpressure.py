"""Who waits for room in a mailbox, and what ends the wait. With actors: tests/mesh/test_backpressure.py."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from net import LIMIT_S, Net, until

from monarch.core.ids import ActorId
from monarch.core.instance import Sender
from monarch.core.monitor import Down
from monarch.core.proc import Proc

ACTOR = 77  # its number, in another process


def waiting(proc: Proc, target: tuple[int, int]) -> threading.Thread:
    """A thread of the client's that waits for room there."""
    sender = Sender(proc, ActorId(proc.proc_id, 9))
    thread = threading.Thread(target=proc.backpressure.wait, args=(*target, sender, "slow"), daemon=True)
    thread.start()
    until(lambda: any(proc.backpressure.full.get(target, ())))
    return thread


@pytest.mark.parametrize(
    "end",
    [
        lambda here, there: there.tell(here.proc_id, "mailbox_room", (there.key, ACTOR)),
        lambda here, there: here.gateway.peers.declare_gone(there.proc_id, Down("killed", "it was killed")),
        lambda here, there: here.close(0.1),
    ],
    ids=["room", "the process is gone", "this process closes"],
)
def test_a_wait_ends(quick_net: Net, end: Callable[[Proc, Proc], None]) -> None:
    here, there = quick_net.proc("here"), quick_net.proc("there")
    target = there.key, ACTOR
    there.tell(here.proc_id, "mailbox_full", target)
    until(lambda: target in here.backpressure.full)
    threads = [waiting(here, target) for _ in range(2)]
    end(here, there)
    for thread in threads:
        thread.join(LIMIT_S)

    assert not any(thread.is_alive() for thread in threads)
    assert here.backpressure.full == {}


def test_nobody_waits_for_another_actor_of_that_process(quick_net: Net) -> None:
    here, there = quick_net.proc("here"), quick_net.proc("there")
    there.tell(here.proc_id, "mailbox_full", (there.key, ACTOR))
    until(lambda: here.backpressure.full)

    here.backpressure.wait(there.key, ACTOR + 1, Sender(here, ActorId(here.proc_id, 9)), "other")  # returns
