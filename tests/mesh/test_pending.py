"""The text of a time-out: who has not answered, and what keeps them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from monarch.actor import Channel
from monarch.core.inquiries import CallState
from monarch.core.serving import ActorState, Running
from monarch.mesh.pending import describe
from monarch.testing import TestClient
from tests.mesh.actors import AsyncWorker, Worker
from tests.mesh.conftest import Shared
from tests.until import until

Spawn = Callable[..., Any]

_BUSY = ActorState("w", 5, "serving", (Running("step", 0.0, 3.04),), 2)
_IDLE = ActorState("w", 5, "serving", (), 0)
_BORN = ActorState("w", 5, "born", (Running("__init__", 0.0, 1.0),), 1)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (CallState(_BUSY, None, Running("x", 0.0, 3.04)), "M w.x has been running for 3.0 s"),
        (CallState(_BUSY, 1), "M w.x is queued behind 1 call(s), and its actor has been running step for 3.0 s"),
        (CallState(_BORN, 0), "M w.x is next in the queue, and its actor has been running __init__ for 1.0 s"),
        (CallState(None), "M w.x waits for its actor to be spawned"),
        (CallState(_IDLE), "neither queued nor running there (its answer is on its way, or is left to a reply port"),
    ],
)
def test_a_call_at_its_callee_in_words(state: CallState, text: str) -> None:
    assert text in describe("M w.x", state)


def hold(worker: Any) -> tuple[Any, Any]:
    """A call that runs until it is released, and what releases it."""
    port, receiver = Channel[Any].open()
    future = worker.hold.call_one(port)
    return future, receiver.recv().get(10)


@pytest.mark.parametrize("cls", [Worker, AsyncWorker])
def test_a_timeout_names_what_runs_and_what_is_queued(spawn: Spawn, shared: Shared, cls: type) -> None:
    worker = spawn(cls, on=shared.procs.slice(hosts=0, gpus=1), name="w")
    running, release = hold(worker)
    queued = [worker.note.call_one(i) for i in range(3)]

    def until_told(future: Any, pattern: str) -> None:  # a busy machine may not answer in time
        until(lambda: re.search(pattern, str(future.exception(0.2))))

    until_told(running, rf"no result within 0\.2 s .*{cls.__name__} w.*\.hold has been running for")
    until_told(queued[2], r"\.note is queued behind 2 call\(s\), and its actor .*running hold for")
    until_told(queued[0], "hold")
    release.send("done")
    assert running.get(10) == "done" and queued[2].get(10) is None


def test_a_timeout_of_a_mesh_names_the_members_that_are_missing(spawn: Spawn) -> None:
    workers = spawn(Worker, name="w")
    held = [hold(workers.slice(hosts=1, gpus=gpu)) for gpu in range(2)]
    future = workers.echo.call("x")

    text = ""
    for _ in range(100):  # until the other two have answered
        text = str(future.exception(0.1))
        if "from 2 of 4 actors" in text:
            break
    assert "'hosts': 1/2, 'gpus': 0/2" in text and "'hosts': 1/2, 'gpus': 1/2" in text and "'hosts': 0/2" not in text
    for _, release in held:
        release.send(None)
    assert list(future.get(10).values()) == ["x"] * 4


def test_a_look_without_waiting_asks_nobody(spawn: Spawn, shared: Shared) -> None:
    worker = spawn(Worker, on=shared.procs.slice(hosts=0, gpus=1), name="w")
    running, release = hold(worker)

    error = running.exception(0)
    assert isinstance(error, TimeoutError) and str(error).endswith("for the answer of w.hold()")
    release.send(None)


def test_a_process_that_does_not_answer_is_named_as_such(real_client: TestClient) -> None:
    from monarch.actor import this_host

    worker: Any = this_host().spawn_procs({"gpus": 1}).spawn("w", Worker)
    pid = worker.pid.call_one().get(10)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError, match=rf"w.*\.echo: its process {pid} did not answer within 0\.1 s"):
            worker.echo.call_one("x").get(0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
