"""The fixtures, as a project of somebody else's uses them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = 'pytest_plugins = ["monarch.testing.plugin"]\n'

TESTS = """
import pytest
from monarch.actor import Actor, context, endpoint, this_host

class Adder(Actor):
    def __init__(self): self.total = 0
    @endpoint
    def add(self, x): self.total += x; return self.total
    @endpoint
    def leave(self): raise SystemExit(3)

seen = []

@pytest.mark.parametrize("turn", range(2))
def test_each_test_has_a_client_of_its_own(monarch_client, turn):
    assert context().actor_instance not in seen
    seen.append(context().actor_instance)
    adders = this_host().spawn_procs({"gpus": 2}).spawn("adders", Adder)
    assert list(adders.add.call(1).get(10).values()) == [1, 1]

@pytest.mark.parametrize("monarch_settings", [{"transport": "ipc", "driver": "thread"}])
def test_settings_can_be_given(monarch_client):
    assert not this_host().is_fake_in_process
    assert this_host().spawn_procs().spawn("adder", Adder).add.call_one(2).get(10) == 2

def test_an_expected_failure(monarch_client):
    this_host().spawn_procs().spawn("adder", Adder).leave.broadcast()
    monarch_client.expect_fault("SystemExit")

def test_an_unexpected_failure(monarch_client):
    this_host().spawn_procs().spawn("adder", Adder).leave.broadcast()
    monarch_client.faults.wait()
"""


@pytest.mark.slow
@pytest.mark.slow
def test_the_fixtures_work_in_another_project(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_theirs.py").write_text(TESTS)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=tmp_path,
    )

    assert "5 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "UnexpectedFaults" in done.stdout
    assert "KeyboardInterrupt" not in done.stdout


def test_nothing_of_pytest_is_imported_by_monarch_testing() -> None:
    program = "import sys, monarch.testing; sys.exit('pytest' in sys.modules)"

    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
