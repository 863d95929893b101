"""Who polls is woken, whether it looks or sleeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from monarch.core.poller import Poller

WAIT_S = 20.0
ROUNDS = 2000


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.shut()
    poller.close()


@pytest.mark.parametrize("eager", [True, False])
def test_no_wake_up_is_lost(poller: Poller, eager: bool) -> None:
    """Another thread wakes it as often as it has polled: each time at another moment of the poll."""
    polled, woken = threading.Semaphore(0), 0

    def wake() -> None:
        nonlocal woken
        for _ in range(ROUNDS):
            woken += 1
            poller.wake()
            assert polled.acquire(timeout=WAIT_S)

    thread = threading.Thread(target=wake)
    thread.start()
    for round_ in range(1, ROUNDS + 1):
        while woken < round_:
            poller.poll(WAIT_S, eager=eager)
        polled.release()
    thread.join(WAIT_S)


def test_a_wake_up_before_the_poll_ends_it_at_once(poller: Poller) -> None:
    poller.wake()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (poller.poll(None, eager=True), done.set()), daemon=True)
    thread.start()
    assert done.wait(WAIT_S)


def test_a_timer_that_another_thread_sets_runs_while_it_waits(poller: Poller) -> None:
    ran = threading.Event()
    thread = threading.Thread(target=lambda: poller.call_later(0.0, ran.set))
    thread.start()
    while not ran.is_set():
        poller.poll(WAIT_S, eager=True)
    thread.join(WAIT_S)
