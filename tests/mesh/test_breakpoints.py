"""`breakpoint()` in actors: it waits for a debugger, and ends with the actor; never a silent freeze."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from monarch import debug
from monarch.actor import Actor, ActorError, SupervisionError, debug_controller, endpoint, this_host, this_proc
from monarch.cli import main
from monarch.mesh.client import RootClient
from monarch.testing import TestClient, fresh_client

LIMIT_S = 20.0
STOPS_AT_THE_CALL = sys.version_info >= (3, 13)
"""pdb stops at the line of `breakpoint()`, and not behind it."""


class Stopper(Actor):
    @endpoint
    def add(self, x: int) -> int:
        y = x + 1
        breakpoint()
        y += 1
        return y

    @endpoint
    async def wait_and_add(self, x: int) -> int:
        breakpoint()
        return x + 1

    @endpoint
    def ask(self) -> str:
        return input("well? ")

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Screen:
    """Somebody at a terminal of the client's desk."""

    def __init__(self, client: TestClient) -> None:
        root = client.context.actor_instance
        assert isinstance(root, RootClient)
        self.desk = root.desk
        self._texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.terminal = self.desk.open(self._texts.put)
        self._pending = ""

    def wait_for(self, met: str | Callable[[str], Any]) -> str:
        """All that is shown up to and with what is waited for."""
        found = met if callable(met) else lambda text: met in text
        while not found(self._pending):
            self._pending += self._texts.get(timeout=LIMIT_S)
        text, self._pending = self._pending, ""
        return text

    def type(self, line: str, until: str) -> str:
        self.terminal.line(line)
        return self.wait_for(until)


@pytest.fixture(scope="module", params=["inproc", pytest.param("ipc", marks=pytest.mark.slow)])
def client(request):
    with fresh_client(request.param, cleanup_timeout="1s", process_exit_timeout="3s") as client:
        yield client


@pytest.fixture
def scene(client):
    """Two processes with an actor each, and a screen."""
    procs = this_host().spawn_procs({"gpus": 2})
    screen = Screen(client)
    yield procs, procs.spawn("stopper", Stopper), screen
    procs.stop().get(LIMIT_S)
    screen.desk.close(screen.terminal)


def both_wait(text: str) -> bool:
    return all(f"breakpoint hit in stopper[{rank}]" in text for rank in range(2))


def test_an_attached_terminal_looks_changes_and_lets_go(scene):
    _, stopper, screen = scene
    calls = stopper.add.call(5)
    screen.wait_for(both_wait)
    assert str(debug.ps()).count("add for 0.") == str(debug.ps()).count("at a breakpoint, test_breakpoints.py:") == 2
    text = screen.type("attach stopper 1", "(Pdb) ")
    if STOPS_AT_THE_CALL:
        assert "breakpoint()" in text
        text = screen.type("n", "(Pdb) ")
    assert "y += 1" in text

    assert screen.type("p x, y", "(Pdb) ") == "(5, 6)\n(Pdb) "
    screen.type("y = 100", "(Pdb) ")
    assert "return y" in screen.type("n", "(Pdb) ")
    screen.type("c", "stopper[1] goes on")
    screen.type("continue", "actor(s) go on")
    assert list(calls.get(LIMIT_S).values()) == [7, 101]
    assert "at a breakpoint" not in str(debug.ps())


def test_an_async_endpoint_stops_too_and_quit_fails_its_call(scene):
    _, stopper, screen = scene
    call = stopper.slice(gpus=0).wait_and_add.call_one(1)
    screen.wait_for("breakpoint hit in stopper[0]")
    screen.type("attach stopper", "(Pdb) ")
    screen.type("q", "goes on")

    with pytest.raises(ActorError, match="BdbQuit"):
        call.get(LIMIT_S)
    assert stopper.slice(gpus=0).pid.call_one().get(LIMIT_S)


def test_stepping_over_the_end_of_a_call_ends_the_session(scene):
    _, stopper, screen = scene
    call = stopper.slice(gpus=0).add.call_one(5)
    screen.wait_for("breakpoint hit in stopper[0]")
    screen.type("attach stopper", "(Pdb) ")
    for _ in range(2 + STOPS_AT_THE_CALL):
        screen.type("n", "(Pdb) ")
    screen.type("n", "goes on")

    assert call.get(LIMIT_S) == 7


def test_one_command_goes_to_many_ranks(scene):
    _, stopper, screen = scene
    calls = stopper.add.call(5)
    screen.wait_for(both_wait)
    screen.terminal.line("cast stopper ranks(gpus=0:2) p y * 10")
    screen.wait_for(lambda text: "stopper[0] 60" in text and "stopper[1] 60" in text)
    assert [each["rank"] for each in debug_controller().list.call_one().get(LIMIT_S)] == [0, 1]

    assert debug_controller().release.call_one().get(LIMIT_S) == 2
    calls.get(LIMIT_S)


def test_a_stop_does_not_wait_for_the_debugger(scene):
    procs, stopper, screen = scene
    call = stopper.add.call(5)
    screen.wait_for(both_wait)
    procs.stop().get(LIMIT_S)

    with pytest.raises((ActorError, SupervisionError), match=r"BdbQuit|stopped by client"):  # whichever rank is first
        call.get(LIMIT_S)
    assert screen.desk.waiting() == []


@pytest.mark.slow
def test_a_process_that_dies_in_the_debugger_is_gone_from_the_list():
    with fresh_client("ipc", process_exit_timeout="3s") as client:
        stopper = this_host().spawn_procs({"gpus": 2}).spawn("stopper", Stopper)
        screen = Screen(client)
        pid = stopper.slice(gpus=1).pid.call_one().get(LIMIT_S)
        stopper.add.call(5)
        screen.wait_for(both_wait)
        screen.type("attach stopper 1", "(Pdb) ")
        os.kill(pid, signal.SIGKILL)

        screen.wait_for("has ended, with its process")
        assert [who.rank for who, _ in screen.desk.waiting()] == [0]
        client.expect_fault("stopper")


def test_an_actor_of_the_clients_process_stops_there(scene):
    *_, screen = scene
    stopper = this_proc().spawn("local", Stopper)
    call = stopper.add.call_one(1)
    screen.wait_for("breakpoint hit in local[0]")
    screen.type("attach local 0", "(Pdb) ")
    screen.type("c", "goes on")

    assert call.get(LIMIT_S) == 3


def test_another_terminal_attaches_with_monarch_debug(scene, client):
    """What comes from a pipe waits for each prompt; its end detaches, and leaves."""
    _, stopper, screen = scene
    url = client.context.actor_instance.console.url
    calls = stopper.add.call(5)
    screen.wait_for(both_wait)
    # Not by the pid alone: clients of other tests live in this process, too.
    terminal = f"from monarch.mesh import console; console.found = lambda: [console.Found({os.getpid()}, {url!r})]"
    terminal += "; from monarch.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", terminal, "debug", "--pid", str(os.getpid())]
    lines = "attach stopper 1\np x\ny = 100\nc\nattach stopper 0\np y\n"
    ran = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=LIMIT_S)
    waiting = [who.rank for who, _ in screen.desk.waiting()]
    screen.terminal.line("continue")

    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("ACTOR") and "(Pdb) 5\n" in ran.stdout and "stopper[1] goes on" in ran.stdout
    assert waiting == [0]
    assert list(calls.get(LIMIT_S).values()) == [7, 101]


def test_a_driver_that_nobody_could_reach_refuses_at_once():
    with fresh_client("inproc") as client:
        root = client.context.actor_instance
        assert isinstance(root, RootClient)
        root.console.close()
        stopper = this_host().spawn_procs().spawn("stopper", Stopper)
        with pytest.raises(ActorError, match="cannot be reached by `monarch debug`"):
            stopper.add.call_one(1).get(LIMIT_S)


def test_debug_says_when_there_is_no_such_program(capsys):
    assert main(["debug", "--pid", "1"]) == 1
    assert "no monarch program of yours with a driver of pid 1" in capsys.readouterr().err


def test_breakpoints_that_are_switched_off_fail_at_once():
    with fresh_client("inproc", breakpoints=False):
        stopper = this_host().spawn_procs().spawn("stopper", Stopper)
        with pytest.raises(ActorError, match="breakpoints are off"):
            stopper.add.call_one(1).get(LIMIT_S)


def test_input_in_a_process_fails_at_once():
    with fresh_client("ipc"):
        stopper = this_host().spawn_procs().spawn("stopper", Stopper)
        with pytest.raises(ActorError, match="EOFError"):
            stopper.ask.call_one().get(LIMIT_S)
