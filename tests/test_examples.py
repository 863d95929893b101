"""The examples run as scripts, and `monarch demo` as a command: status 0, nothing on stderr, nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import monarch

ROOT = Path(__file__).parent.parent
DEMO = "import sys; from monarch.cli import main; sys.exit(main())"


def run(*command: str, cwd: Path = ROOT, path: Path = ROOT, timeout_s: float = 50, **variables: str) -> str:
    """Run Python with a command line, and return its output. The run must be quiet and end with status 0."""
    env = {**os.environ, "PYTHONPATH": str(path), "COLUMNS": "120", **variables}
    result = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s
    )

    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout


def test_ping_pong():
    output = run("examples/ping_pong.py")

    assert "Pong caught ball 2000" in output
    assert "Ping had the ball 1000 times" in output


@pytest.mark.slow
def test_getting_started():
    """It asserts what it teaches."""
    output = run("examples/getting_started.py")

    assert "actors and adverbs: values are [130, 115, 115, 115]" in output or "actors and adverbs" in output
    assert "bootstrapping" in output


@pytest.mark.slow
def test_dining_philosophers():
    output = run("examples/dining_philosophers.py")

    assert len(re.findall(r"philosopher \d ate 10 times", output)) == 5
    assert "50 meals served" in output


@pytest.mark.slow
def test_supervised():
    output = run("examples/supervised.py")

    assert "60 jobs done with 2 workers, of which 4 were killed" in output


PATHS = [
    pytest.param("shm", marks=pytest.mark.slow),
    pytest.param("tcp", marks=pytest.mark.slow),
    pytest.param("ibverbs", marks=pytest.mark.rdma),
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("path", PATHS)
def test_parameter_server(path, monkeypatch):
    monkeypatch.setenv("MONARCH_RDMA_PATH", path)
    output = run("examples/parameter_server.py", timeout_s=180)

    assert len(re.findall(r"worker \d: mean square error 0\.0", output)) == 3
    assert f"over {path}: " in output


@pytest.mark.timeout(200)
@pytest.mark.parametrize("path", PATHS)
def test_weight_sync(path, monkeypatch):
    monkeypatch.setenv("MONARCH_RDMA_PATH", path)
    output = run("examples/weight_sync.py", timeout_s=180)

    assert "version 10: 4 generators have it" in output
    assert f"over {path}: " in output


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(150)
def test_parallel_training():
    pytest.importorskip("sklearn")
    output = run("examples/parallel_training.py", "--dp", "2", "--pp", "2", "--steps", "10", timeout_s=140)

    assert "the losses differ by" in output


def demo(*arguments: str, **options: Any) -> str:
    return run("-m", "monarch", "demo", *arguments, **options)


@pytest.fixture
def wheel_contents(tmp_path):
    """The package as a wheel installs it, in a folder of its own."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("monarch", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(source)],
        check=True,
        timeout=110,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
    )
    return target


@pytest.mark.slow
def test_demo_answers_questions_over_the_standard_library():
    output = demo("--procs", "2", "--limit-files", "300", "--query", "parse command line arguments", "event loop")

    assert "with 2 processes" in output
    assert "300 of 300 files" in output
    assert re.search(r"parse command line arguments +all shards", output)
    assert re.search(r"event loop +all shards", output)
    assert "1 of 2 shards" in output
    assert "ActorError" in output and "FileNotFoundError" in output and "the actor lives on" in output
    assert re.search(r"SupervisionError: ranker: process \d+ killed by signal 9", output)
    assert re.search(r"process (\d+) was killed with \d+ questions, and process (?!\1)\d+ has answered them", output)
    assert re.search(r"all +\d+\.\d\d s", output)


@pytest.mark.slow
def test_demo_with_one_process_and_no_answer():
    output = demo("--procs", "1", "--limit-files", "5", "--query", "zzzzqqqq")

    assert "nothing found" in output


@pytest.mark.slow
def test_demo_on_a_narrow_terminal_that_has_only_ascii():
    output = demo("--procs", "2", "--limit-files", "20", COLUMNS="40", LC_ALL="C", PYTHONIOENCODING="ascii")
    _, _, times = output.partition("Times\n")

    assert len(times.splitlines()) == 9
    assert all(len(line) <= 40 for line in times.splitlines())


@pytest.mark.slow
def test_demo_runs_no_more_processes_than_the_machine_can_bear():
    cpus = len(os.sched_getaffinity(0))
    output = demo("--procs", "5000", "--limit-files", "20")

    assert f"5000 processes are too many for {cpus} CPUs: {16 * cpus} it is" in output


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_demo_from_an_installed_wheel_over_all_files(wheel_contents, tmp_path):
    output = demo(cwd=tmp_path, path=wheel_contents)
    where = run("-c", "import monarch.examples.search as s; print(s.__file__)", cwd=tmp_path, path=wheel_contents)

    assert str(wheel_contents) in where
    assert (wheel_contents / "monarch" / "py.typed").exists()
    assert "smtplib.py" in output


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(150)
def test_demo_of_training_goes_on_when_a_process_is_killed(tmp_path):
    pytest.importorskip("sklearn")
    plot = tmp_path / "curve.png"
    output = demo("train", "--plot", str(plot), timeout_s=140)
    accuracy = re.search(r"1 restart, .* to recover; accuracy (\d\.\d+)", output)

    assert "replica 1 is killed with SIGKILL" in output
    assert "has the weights of a survivor" in output
    assert accuracy is not None and float(accuracy[1]) > 0.95
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_version():
    assert run("-m", "monarch", "--version").strip() == f"monarch {monarch.__version__}"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["demo", "--procs", "0"], "'0' is not a whole number above 0"),
        (["demo", "--proc"], "expected one argument"),
        (["demo", "extra"], "invalid choice: 'extra'"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(arguments, complaint):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-m", "monarch", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=30
    )

    assert result.returncode == 2
    assert complaint in result.stderr
