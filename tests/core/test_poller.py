"""Who polls is woken, whether it looks or sleeps."""

from __future__ import annotations

import select
import signal
import threading
from collections.abc import Iterator

import pytest

from monarch.core.poller import Poller
from monarch.transports import ring

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


def test_one_that_is_shut_waits_for_nothing() -> None:
    poller = Poller()
    poller.shut()
    poller.poll(None)
    poller.close()


def test_the_handler_of_a_signal_ends_a_sleep_and_may_raise(poller: Poller) -> None:
    def handler(number: int, frame: object) -> None:
        raise InterruptedError("by the handler")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(InterruptedError, match="by the handler"):
            for _ in range(2):  # what has rung before this one was made ends the first
                poller.poll(WAIT_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(bool(ring.why_not), reason=ring.why_not or "there are rings")
def test_a_sleep_says_what_the_descriptors_have_and_that_it_slept() -> None:
    with select.epoll() as epoll:
        found, slept_s = ring.sleep((), (), epoll.fileno(), -1, 0.0)
        assert found == [] and slept_s is not None and slept_s >= 0.0
        closed = epoll.fileno()
    with pytest.raises(ValueError, match="closed"):
        ring.sleep((), (), closed, -1, None)
