"""What a program is told at its start, it is told once, whatever processes it has; and it starts as it is asked to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.certificates import Authority, variables

WITHOUT = "import sys; sys.modules['monarch._compiled'] = None"
"""Run by every interpreter of a program that has it as its `sitecustomize`."""

ONE_HOST = """
from monarch.actor import this_host
from tests.mesh.actors import Worker
print(len(this_host().spawn_procs({"gpus": 2}).spawn("worker", Worker).echo.call(1).get()))
"""

TWO_HOSTS = """
from monarch.job import ProcessJob
from tests.mesh.actors import Worker
hosts = ProcessJob({"hosts": 2}).state(cached_path=None).hosts
print(len(hosts.spawn_procs().spawn("worker", Worker).echo.call(1).get()))
"""


TWO_CLIENTS = """
from monarch.testing import fresh_client
for _ in range(2):
    with fresh_client("inproc"):
        pass
print(2)
"""


def told(program: str, folder: Path, **variables: str) -> str:
    """What a program says that has no compiled part in any of its processes."""
    (folder / "sitecustomize.py").write_text(WITHOUT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MONARCH_")}
    environ = {**kept, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]), **variables}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    return done.stderr


@pytest.mark.parametrize("program", [ONE_HOST, TWO_CLIENTS, pytest.param(TWO_HOSTS, marks=pytest.mark.slow)])
def test_that_there_is_no_compiled_part_is_said_once(program: str, tmp_path: Path) -> None:
    (line,) = told(program, tmp_path, MONARCH_TRANSPORT="shm").splitlines()
    assert line.startswith("compiled.left_out reason='the compiled part of monarch is missing (")
    assert "C compiler" in line and "MONARCH_RING=0" in line


def test_who_does_without_the_compiled_part_on_purpose_is_not_warned(tmp_path: Path) -> None:
    assert told(ONE_HOST, tmp_path, MONARCH_RING="0") == ""
    log = told(ONE_HOST, tmp_path, MONARCH_RING="0", MONARCH_LOG="info")
    (line,) = [line for line in log.splitlines() if "compiled" in line]
    assert " INFO monarch.client: compiled.left_out reason='MONARCH_RING is 0'" in line


@pytest.mark.parametrize("program", [ONE_HOST, TWO_CLIENTS, pytest.param(TWO_HOSTS, marks=pytest.mark.slow)])
def test_a_level_of_the_log_that_there_is_not_is_told_of_once(program: str, tmp_path: Path) -> None:
    (line,) = told(program, tmp_path, MONARCH_LOG="loud", MONARCH_RING="0").splitlines()
    assert line == "MONARCH_LOG is 'loud'; it can be debug, info, warning or error"


def test_a_program_talks_over_tls_where_the_environment_asks_for_that(tmp_path: Path) -> None:
    files = variables(Authority(tmp_path / "authority").sign("host"))
    assert told(ONE_HOST, tmp_path, MONARCH_TRANSPORT="tls+tcp", MONARCH_RING="0", **files) == ""
