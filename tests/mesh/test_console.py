"""How another terminal finds the drivers of its user, and that nobody else does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.actor import this_host
from monarch.cli import main
from monarch.debug import ProcessState, Snapshot
from monarch.mesh import console
from monarch.mesh.client import RootClient
from monarch.mesh.console import Found
from monarch.testing import TestClient, fresh_client
from monarch.testing.events import LIMIT_S, wait_until_gone
from monarch.transports import ipc
from tests.mesh.stuck import Stuck

ROOT = Path(__file__).parents[2]

LISTING = """\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 20557 /run/user/monarch-driver-1-aa
0000000000000000: 00000002 00000000 00010000 0001 01 20558 @monarch-driver-4321-00ff12ab
0000000000000000: 00000003 00000000 00000000 0001 03 20559 @monarch-driver-4321-00ff12ab
0000000000000000: 00000002 00000000 00010000 0001 01 20560 @monarch-driver-77-0011
0000000000000000: 00000002 00000000 00010000 0001 01 20561 @monarch-driver-77-0011-more
0000000000000000: 00000002 00000000 00010000 0001 01 20562 @monarch-23ab
0000000000000000: 00000003 00000000 00000000 0001 03 20563
"""


def test_drivers_are_found_by_the_names_of_their_sockets():
    assert console.found(LISTING) == [
        Found(77, "ipc://@monarch-driver-77-0011"),
        Found(4321, "ipc://@monarch-driver-4321-00ff12ab"),
    ]


def of(client: TestClient) -> Found:
    """This process may have several clients at a time; other tests share some."""
    root = client.context.actor_instance
    assert isinstance(root, RootClient)
    return Found(os.getpid(), root.console.url)


@pytest.fixture
def driver(monarch_client: TestClient, monkeypatch: pytest.MonkeyPatch) -> Found:
    """A client that is the only one to be found."""
    found = of(monarch_client)
    assert found in console.found()
    monkeypatch.setattr(console, "found", lambda: [found])
    return found


def test_a_driver_that_was_found_tells_what_it_does(driver):
    this_host().spawn_procs(name="work").spawn("stuck", Stuck).ready.call_one().get(LIMIT_S)

    snapshot = console.ask(driver, with_stacks=True)

    assert snapshot is not None
    assert snapshot.pid == os.getpid()
    assert [process.name for process in snapshot.processes] == ["client", "work"]
    assert [stack.frames for process in snapshot.processes for stack in process.threads]


def test_a_client_that_was_shut_down_is_not_found():
    with fresh_client() as client:
        driver = of(client)

    assert driver not in console.found()
    assert console.ask(driver, with_stacks=False) is None


def test_a_driver_of_another_user_is_passed_over(driver, monkeypatch):
    monkeypatch.setattr(ipc, "credentials", lambda sock: (driver.pid, os.geteuid() + 1))

    assert console.ask(driver, with_stacks=False) is None
    assert console.ask_all(with_stacks=False) == []


def test_an_asker_of_another_user_is_not_even_greeted(driver, monkeypatch):
    monkeypatch.setattr(ipc, "credentials", lambda sock: (driver.pid, os.geteuid() + 1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect("\0" + driver.url.removeprefix("ipc://@"))

        assert sock.recv(1) == b""


def test_an_answer_of_another_version_is_no_error(driver, monkeypatch):
    monkeypatch.setattr(Snapshot, "to_json", lambda self: {"version": 7})

    snapshot = console.ask(driver, with_stacks=False)

    assert snapshot is not None
    assert [(process.name, process.pid) for process in snapshot.processes][:1] == [("client", os.getpid())]


def test_without_a_program_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(console, "found", lambda: [])

    assert main(["ps"]) == 1
    assert main(["stack", "--pid", "77"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "no monarch program of yours runs on this machine",
        "no monarch program of yours with a driver of pid 77 runs on this machine",
    ]


def test_the_command_shows_a_tree_stacks_or_json(driver, capsys):
    this_host().spawn_procs(name="work").spawn("stuck", Stuck).ready.call_one().get(LIMIT_S)
    pid = ["--pid", str(driver.pid)]

    assert main(["ps", *pid]) == 0
    tree = capsys.readouterr().out
    assert main(["stack", "test_the_command_shows", *pid]) == 1
    nobody = capsys.readouterr().err
    assert main(["stack", "mainthread", *pid]) == 0
    stacks = capsys.readouterr().out
    assert main(["ps", "--json", *pid]) == 0
    (facts,) = json.loads(capsys.readouterr().out)

    assert "tests.mesh.stuck.Stuck stuck  idle" in tree
    assert nobody == "no process, actor or thread has 'test_the_command_shows' in its name\n"
    assert "in test_the_command_shows_a_tree_stacks_or_json\n" in stacks
    assert [process["name"] for process in facts["hosts"][0]["processes"]] == ["client", "work"]


PROGRAM = """
import ctypes, sys
from monarch.actor import this_host
from tests.mesh.stuck import Stuck

stuck = this_host().spawn_procs(name=sys.argv[1]).spawn("stuck", Stuck)
stuck.ready.call_one().get()
if "hold" in sys.argv:
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(600)
stuck.wait_for_lock.broadcast()
print("ready", flush=True)
stuck.ready.call_one().get()
"""


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[int]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process.pid
        finally:
            process.kill()


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "monarch", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S * 2
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
def test_two_programs_are_shown_and_nothing_is_left_of_them_after_sigkill():
    with program("first") as first, program("second") as second:
        both = command("ps")
        one = command("stack", "--pid", str(second), "wait_for_lock")
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGKILL)
        wait_until_gone(first)
        wait_until_gone(second)
        left = [driver for driver in console.found() if driver.pid in (first, second)]

    assert "process first  " in both and "process second  " in both
    assert both.count("stuck  wait_for_lock for ") == 2
    assert "process second  " in one and "in wait_for_lock\n" in one
    assert "first" not in one
    assert left == []


@pytest.mark.slow
def test_a_driver_that_holds_its_interpreter_is_looked_at_from_outside():
    with program("work", "hold") as pid:
        (snapshot,) = console.ask_all(with_stacks=True, pid=pid)

    client, work = snapshot.processes
    assert (client.name, client.state) == ("client", ProcessState.HELD)
    assert [stack.name for stack in client.threads if not stack.is_idle] == ["MainThread"]
    assert (work.name, work.state) == ("work", ProcessState.UNKNOWN)
    assert [frame.function for frame in client.threads[-1].frames] == ["<module>"]
    assert work.threads == ()
