"""A client for a block of code: fresh, recorded, and gone afterwards."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

import monarch.actor
from monarch.actor import Actor, context, endpoint, this_host, this_proc
from monarch.config import get_global_config
from monarch.testing import UnexpectedFaults, fresh_client
from tests.mesh.actors import FailingCleaner, Worker


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("transport", "driver"),
    [
        ("inproc", "caller"),
        ("inproc", "thread"),
        ("ipc", "caller"),
        pytest.param("ipc", "thread", marks=pytest.mark.slow),
        pytest.param("tcp", "caller", marks=pytest.mark.slow),
        pytest.param("tcp", "thread", marks=pytest.mark.slow),
    ],
)
def test_a_block_leaves_nothing_behind(transport: str, driver: str) -> None:
    """Threads and descriptors are as before, once a first block has loaded what loads once."""

    def block(kill: bool) -> None:
        with fresh_client(transport, driver) as client:
            procs = this_host().spawn_procs({"gpus": 2})
            workers = procs.spawn("workers", Worker)
            assert list(workers.add.call(1).get(10).values()) == [1, 1]
            if kill:
                client.kill(procs.slice(gpus=1))
                client.expect_fault("Killed")

    block(False)
    threads, fds = set(threading.enumerate()), descriptors()
    block(False)
    block(True)

    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
    assert not [thread.name for thread in set(threading.enumerate()) - threads if thread.is_alive()]
    assert descriptors() <= fds


def test_blocks_nest_and_restore_what_was_before() -> None:
    with fresh_client(cleanup_timeout="7s") as outer:
        mine = context().actor_instance
        with fresh_client(cleanup_timeout="2s") as inner:
            assert context().actor_instance is inner.context.actor_instance is not mine
            assert get_global_config()["cleanup_timeout"] == "2s"
            hook = monarch.actor.unhandled_fault_hook
            monarch.actor.unhandled_fault_hook = print
        assert monarch.actor.unhandled_fault_hook is hook
        assert context() is outer.context
        assert get_global_config()["cleanup_timeout"] == "7s"
        assert this_host().spawn_procs().spawn("w", Worker).echo.call_one(1).get(10) == 1


def test_the_environment_does_not_win_over_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_TRANSPORT", "tcp")

    with fresh_client("inproc"):
        assert this_host().is_fake_in_process


def test_an_unexpected_failure_fails_the_block() -> None:
    with pytest.raises(UnexpectedFaults, match="SystemExit") as caught, fresh_client() as client:
        this_host().spawn_procs().spawn("worker", Worker).leave.broadcast()
        client.faults.wait()

    assert [failure.mesh_name for failure in caught.value.failures] == ["worker"]


@pytest.mark.parametrize(
    ("transport", "last_line"),
    [("inproc", "leave"), ("ipc", "crash"), pytest.param("ipc", "leave", marks=pytest.mark.slow)],
)
def test_a_failure_of_the_last_line_fails_the_block(
    transport: str, last_line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the actor has much to do before it."""
    monkeypatch.setattr("monarch.testing.client._SETTLE_LIMIT_S", 30.0)

    class Frail(Actor):
        @endpoint
        def work(self) -> int:
            return sum(range(1_000_000))

        @endpoint
        def leave(self) -> None:
            raise SystemExit(3)

        @endpoint
        def crash(self) -> None:
            os._exit(3)

    with pytest.raises(UnexpectedFaults, match="frail"), fresh_client(transport):
        frail = this_host().spawn_procs({"gpus": 2}).spawn("frail", Frail)
        for _ in range(5):
            frail.work.broadcast()
        getattr(frail.slice(gpus=1), last_line).broadcast()


def test_a_failure_over_the_end_of_an_actor_fails_the_block() -> None:
    class Owner(Actor):
        def __init__(self) -> None:
            self.child = this_proc().spawn("child", FailingCleaner)

        @endpoint
        def wait_for_child(self) -> None:
            self.child.initialized.get(10)

    match = r"(?s)Owner owner .*child.* raised ValueError: cleanup says no"
    with pytest.raises(UnexpectedFaults, match=match), fresh_client():
        this_host().spawn_procs().spawn("owner", Owner).wait_for_child.call().get(10)


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
def test_a_kill_returns_when_the_process_is_dead_and_that_is_known(transport: str) -> None:
    with fresh_client(transport) as client:
        procs = this_host().spawn_procs({"gpus": 2})
        workers = procs.spawn("workers", Worker)
        pid = workers.slice(gpus=1).pid.call_one().get(10)
        client.kill(procs.slice(gpus=1))

        assert len(client.faults) == 1
        if transport != "inproc":
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        with pytest.raises(LookupError, match="does not run"):
            client.kill(procs.slice(gpus=1))
        client.expect_fault("Killed", 0)


def test_a_failure_explains_another_error_of_the_block() -> None:
    with pytest.raises(LookupError) as caught, fresh_client() as client:
        this_host().spawn_procs().spawn("worker", Worker).leave.broadcast()
        client.faults.wait()
        raise LookupError("what the test saw")

    assert "SystemExit" in "\n".join(caught.value.__notes__)


def test_failures_may_be_expected_allowed_or_hooked() -> None:
    def fail() -> None:
        this_host().spawn_procs().spawn("worker", Worker).leave.broadcast()

    with fresh_client() as client:
        fail()
        assert client.expect_fault("worker").kind == "failed"
        with pytest.raises(TimeoutError):
            client.expect_fault("worker", 0.01)
    with fresh_client() as client:
        client.allow_faults()
        fail()
        client.faults.wait()
    with fresh_client() as client:
        heard = threading.Event()
        monarch.actor.unhandled_fault_hook = lambda failure: heard.set()
        fail()
        assert heard.wait(10)


@pytest.mark.slow
def test_settings_reach_real_processes() -> None:
    class Reader(Actor):
        @endpoint
        def read(self) -> Any:
            return get_global_config()["cleanup_timeout"]

    with fresh_client("tcp", cleanup_timeout="9s"):
        assert this_host().spawn_procs().spawn("r", Reader).read.call_one().get(10) == "9s"
