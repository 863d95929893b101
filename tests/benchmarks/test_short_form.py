"""The benchmarks work: everything is measured a few times, and no figure is looked at."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import __main__ as command
from benchmarks import floor, plot
from benchmarks.figures import QUICK, ROWS, Scale
from benchmarks.runner import ROOT
from benchmarks.steps import STEPS, made
from monarch import compiled

TINY = Scale(calls=3, outstanding=3, casts=3, sizes=QUICK.sizes[:1], crowds=(1, 8))


def is_tiny(name: str) -> bool:
    """Whether TINY has a figure of that name: `fork_exit_8`, and not `fork_exit_32`."""
    count = name.rsplit("_", 1)[-1]
    return not count.isdigit() or int(count) in (*TINY.sizes, *TINY.crowds)


@pytest.mark.slow
def test_the_floor_is_measured_with_all_that_a_table_needs():
    found = {figure.name: figure.value for figure in floor.measure(TINY)}

    assert {row.floor for row in ROWS if is_tiny(row.floor)} - found.keys() == set()
    assert all(value > 0 for value in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "ipc"])
def test_the_steps_of_a_call_are_those_that_it_takes(transport):
    """The functions that it looks at are there, and are passed in this order."""
    labels = {step.until for step in STEPS}
    queued = {"callee queued"}
    by_python = {"caller numbered", "callee read", "callee numbered", "caller read", *queued}
    left_out = set() if compiled.why_not else by_python if transport == "shm" else queued
    _, *passed = [step.text for step in made(labels - left_out)]
    steps = [sys.executable, "-m", "benchmarks.steps", transport, "--calls", "20"]
    done = subprocess.run(steps, cwd=ROOT, capture_output=True, text=True, timeout=60)
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]

    assert (done.returncode, done.stderr) == (0, "")
    assert [row.split("|")[1].strip() for row in rows[2:]] == [*passed, "all"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_short_form_measures_every_transport_and_writes_its_files(tmp_path, capsys):
    status = command.main(["--quick", "--transports", "shm", "tcp", "inproc", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    saved = json.loads((tmp_path / "results.json").read_text())

    assert (status, saved["failures"]) == (0, {})
    assert "call, sync endpoint" in shown
    assert set(saved["figures"]) == {"floor", "shm", "tcp", "inproc"}
    assert {"call", "cast_8", "echo_bytes_1024", "spawn_8", "idle_memory"} <= set(saved["figures"]["shm"])
    assert (tmp_path / "results.md").read_text().startswith("| | floor |")
    if plot.is_possible():
        assert (tmp_path / "results.png").stat().st_size > 0
    else:
        assert plot.MISSING in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--transports", "udp"], "unknown transport udp"), (["--rounds", "0"], "--rounds must be at least 1")],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(arguments, text, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)

    assert text in capsys.readouterr().err
