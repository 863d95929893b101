"""Commands, jobs and the decision whether a process can be forked; and the entry module, run by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarch.launch.bootstrap import FD_VARIABLE, BootstrapCommand, Job, default_bootstrap_cmd, read_job
from monarch.launch.process import Exit, changes, must_exec
from monarch.launch.wire import memory_file

ROOT = Path(__file__).parents[2]


def test_the_default_command_is_this_interpreter_with_its_options() -> None:
    command = default_bootstrap_cmd()

    assert command.program == sys.executable
    assert command.args[-2:] == ("-m", "monarch.launch.bootstrap")
    assert command.is_default


def test_with_env_makes_a_changed_copy() -> None:
    command = default_bootstrap_cmd().with_env({"A": "1"})
    changed = command.with_env({"A": "2", "B": "3"})

    assert command.env == {"A": "1"}
    assert changed.env == {"A": "2", "B": "3"}
    assert changed.is_default
    assert not BootstrapCommand("/other/python", None, command.args).is_default


def test_a_command_shows_as_a_shell_would_take_it() -> None:
    assert str(BootstrapCommand("env", None, ("A=1 2", "python"))) == "env 'A=1 2' python"


def test_without_an_interpreter_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")

    with pytest.raises(RuntimeError, match=r"sys\.executable is empty"):
        default_bootstrap_cmd()


def test_a_job_survives_its_encoding() -> None:
    job = Job("a name", "m:f", b"\0secret" * 1000, ("/a", "/b"), ("script.py", "\udcff"), "/c")

    assert read_job(memory_file(job.encode())) == job
    assert "secret" not in repr(job)


def test_another_interpreter_keeps_its_own_path_and_gets_only_what_lies_outside_installations() -> None:
    job = Job("n", "m:f", b"", ("", "/home/me/code", "/opt/other/lib/python3.9", "/opt/other/lib/python39.zip"))
    encoded = job.encode()
    size = int.from_bytes(encoded[:8], "big")
    facts = json.loads(encoded[8 : 8 + size]) | {"python": [3, 9, "/opt/other", "/opt/other"]}
    head = json.dumps(facts).encode()
    read = read_job(memory_file(len(head).to_bytes(8, "big") + head))

    assert read.path is not None
    assert list(read.path) == sys.path + [p for p in ("", "/home/me/code") if p not in sys.path]


def run_by_hand(env: dict[str, str], fds: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = default_bootstrap_cmd()
    return subprocess.run(
        [command.program, *command.args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        pass_fds=fds,
        capture_output=True,
        text=True,
        timeout=15,
    )


def test_the_entry_module_runs_the_job_of_its_descriptor() -> None:
    """Payload, argv, path and PYTHONPATH arrive; the variable that names the descriptor does not."""
    code = b"import os, sys; print(sys.argv, sys.path[-1], os.environ.get('PYTHONPATH'), '%s' in os.environ)"
    job = Job("n", "builtins:exec", code % FD_VARIABLE.encode(), (*sys.path, "/extra"), ("x.py",), "/from/env")
    fd = memory_file(job.encode())
    done = run_by_hand({FD_VARIABLE: str(fd)}, (fd,))
    os.close(fd)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['x.py'] /extra /from/env False\n"


def test_the_entry_module_started_by_hand_says_what_it_is_for() -> None:
    done = run_by_hand({})

    assert done.returncode == 1
    assert "does nothing when started by hand" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "loaded", "wanted"),
    [
        ({}, (), False),
        ({"ANY": "x", "CUDA_VISIBLE_DEVICES": "1"}, ("torch",), False),
        ({"PYTHONHASHSEED": "1"}, (), True),
        ({"LD_PRELOAD": "x.so"}, (), True),
        ({"LANG": "C"}, (), True),
        ({"PYTHONPATH": "/x", "PYTHONUNBUFFERED": "1"}, (), False),
        ({"OMP_NUM_THREADS": "4"}, ("torch", "numpy"), False),
        ({"GOTO_NUM_THREADS": "4"}, ("numpy",), True),
        ({"OMP_PROC_BIND": "true"}, (), False),
        ({"OMP_PROC_BIND": "true"}, ("torch",), True),
        ({"OPENBLAS_CORETYPE": "x"}, ("torch",), True),
    ],
)
def test_only_what_is_read_for_good_needs_a_fresh_interpreter(
    change: dict[str, str], loaded: tuple[str, ...], wanted: bool
) -> None:
    assert must_exec(changes({"KEPT": "1", **change}, {"KEPT": "1"}), loaded) is wanted
    assert must_exec(changes({"KEPT": "1"}, {"KEPT": "1", **change}), loaded) is wanted


def test_what_changes_in_an_environment() -> None:
    assert changes({"NEW": "1", "OTHER": "2", "SAME": "3"}, {"GONE": "0", "OTHER": "1", "SAME": "3"}) == {
        "NEW": "1",
        "OTHER": "2",
        "GONE": None,
    }


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Exit(1, code=0), "exited with code 0"),
        (Exit(1, code=3), "exited with non-zero code 3"),
        (Exit(1, signal=9, hint="why"), "Killed(sig=9) (why)"),
        (Exit(None, error="no room"), "could not be started: no room"),
        (
            Exit(1, code=7, command="p -m x", stderr_tail="oh"),
            "exited with non-zero code 7; its command was: p -m x; its last words: oh",
        ),
        (Exit(1, code=0, command="p", stderr_tail="noise"), "exited with code 0"),
    ],
)
def test_an_end_is_described_in_words(end: Exit, text: str) -> None:
    assert end.describe() == text
