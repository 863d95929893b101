"""Threads of actors: all start, a few at a time, and what the system refuses is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from monarch.core.actor_threads import run_on_thread

LIMIT_S = 10.0


def refuse(error: Exception) -> None:
    raise AssertionError(f"refused: {error}")


class Held:
    """Threads that are to start, and run when the test says so, in its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[threading.Thread] = []
        monkeypatch.setattr(threading.Thread, "start", lambda thread: self.threads.append(thread))

    def let_go(self) -> None:
        """All of them, and those that start meanwhile."""
        for thread in self.threads:
            thread.run()

    def names(self) -> list[str]:
        return [thread.name for thread in self.threads]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def test_a_thread_runs_under_its_name_and_nobody_waits_for_its_end() -> None:
    told, over = threading.Event(), threading.Event()
    seen = []

    def run() -> None:
        seen.append((threading.current_thread().name, threading.current_thread().daemon))
        told.set()
        over.wait(LIMIT_S)

    run_on_thread("actor x", run, refuse)

    assert told.wait(LIMIT_S)
    over.set()
    assert seen == [("actor x", True)]


def test_one_that_blocks_holds_up_no_other() -> None:
    count = 100
    release, all_run = threading.Event(), threading.Event()
    running: list[int] = []

    def run() -> None:
        running.append(1)
        if len(running) == count:
            all_run.set()
        release.wait(LIMIT_S)

    for at in range(count):
        run_on_thread(f"actor {at}", run, refuse)

    assert all_run.wait(LIMIT_S)
    release.set()


def test_a_few_are_on_their_way_and_each_starts_the_next(held: Held) -> None:
    ran: list[int] = []
    runs: list[Callable[[], None]] = [lambda at=at: ran.append(at) for at in range(20)]  # type: ignore[misc]
    for at, run in enumerate(runs):
        run_on_thread(str(at), run, refuse)

    assert held.names() == [str(at) for at in range(8)]
    held.let_go()
    assert ran == list(range(20))


def test_each_that_the_system_refuses_is_told_and_others_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, refused = threading.Event(), []

    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        for _ in range(20):
            run_on_thread("actor", ran.set, lambda error: refused.append(str(error)))
    assert refused == ["can't start new thread"] * 20
    assert not ran.is_set()

    run_on_thread("actor", ran.set, refuse)
    assert ran.wait(LIMIT_S)


def test_one_whose_refusal_fails_costs_no_other_its_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    all_run, start = threading.Semaphore(0), threading.Thread.start

    def may_start(thread: threading.Thread) -> None:
        if thread.name == "refused":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", may_start)
    with caplog.at_level(logging.CRITICAL, "monarch"):
        for at in range(40):
            run_on_thread("refused" if at % 2 else "started", all_run.release, refuse)

        assert all(all_run.acquire(timeout=LIMIT_S) for _ in range(20))
