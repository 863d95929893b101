"""Contexts: several jobs side by side in one directory, each with a name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch import cli
from monarch.errors import JobError
from monarch.job import LocalJob, ProcessJob, commands, contexts, job_load, load_current_job
from monarch.testing import wait_until_gone

STATE = Path(".monarch/job_state.pkl")


class Pretended(LocalJob):
    """A job whose allocation is a file."""

    def _create(self, client_script: str | None) -> None:
        assert self._applied is not None
        self._file = Path(f"{self._applied}.hosts").absolute()
        self._file.touch()

    def _is_alive(self) -> bool:
        return self._file.exists()

    def _kill(self) -> None:
        self._file.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> dict[str, Pretended]:
    """Jobs, by the names that one gives to `monarch apply`."""
    jobs = {"jobs.one": Pretended(), "jobs.two": Pretended()}

    def find(name: str) -> Pretended:
        try:
            return jobs[name]
        except KeyError:
            raise ImportError(f"there is no {name}") from None

    monkeypatch.setattr(commands, "named_job", find)
    return jobs


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `monarch`; the status, and all that it says."""

    def run(*words: str) -> tuple[int, str]:
        status = cli.main(words)
        found = capsys.readouterr()
        return status, found.out + found.err

    return run


def states() -> dict[str, str]:
    return {each.name: each.state for each in contexts.listed()}


def test_jobs_of_several_contexts_are_kept_apart(named: dict[str, Pretended], run: Any) -> None:
    assert run("context", "create", "first", "jobs.one")[0] == 0
    assert run("context", "create", "second")[0] == 0
    assert contexts.current() is None
    assert run("context", "use", "first") == (0, "first is the current context\n")
    assert os.readlink(STATE) == "first/state.pkl"
    assert "the job of context first is not there: `monarch apply` starts it" in run("exec", "true")[1]
    assert "jobs.one is the current job" in run("apply")[1]
    assert "the job of context first is active; `monarch kill` ends it" in run("apply", "jobs.two")[1]
    assert load_current_job().apply_id == named["jobs.one"].apply_id

    run("context", "use", "second")
    assert run("apply")[0] == 1 and "which job?" in run("apply")[1]
    assert run("apply", "jobs.two")[0] == 0
    assert contexts.spec_of("second") == "jobs.two"
    assert named["jobs.one"].active and named["jobs.two"].active
    assert load_current_job().apply_id == named["jobs.two"].apply_id

    assert run("kill", "first") == (0, "")
    assert not named["jobs.one"].active and named["jobs.two"].active
    assert states() == {"first": "no job", "second": "active"}
    assert run("kill")[0] == 0
    assert not named["jobs.two"].active
    assert contexts.current() == "second" and os.path.islink(STATE)
    assert run("kill") == (1, "monarch kill: the job of context second is not there: `monarch apply` starts it\n")


def test_programs_use_the_current_context(named: dict[str, Pretended], run: Any) -> None:
    run("context", "create", "first")
    run("context", "use", "first")
    job = ProcessJob({"hosts": 1})
    job.apply()
    job.remember(STATE)
    try:
        assert os.path.islink(STATE)
        assert job_load(".monarch/first/state.pkl").can_run(job)
    finally:
        job.kill()
    assert os.path.islink(STATE) and states() == {"first": "no job"}


def test_a_job_stays_in_the_context_in_which_it_was_asked_for(named: dict[str, Pretended], run: Any) -> None:
    """Also where another becomes the current one before it is there."""
    for name in ("first", "second"):
        contexts.create(name)
    contexts.use("first")

    class Slow(Pretended):
        def _create(self, client_script: str | None) -> None:
            super()._create(client_script)
            contexts.use("second")

        def __reduce__(self) -> Any:  # a class of a function cannot be pickled
            return Pretended, (), self.__getstate__()

        def _state(self) -> Any:
            return type("State", (), {"_meshes": {}})()

    job = Slow()
    job.state()
    assert states() == {"first": "active", "second": "no job"}
    job.kill()
    assert states() == {"first": "no job", "second": "no job"}


def test_the_list_says_which_is_current_and_what_their_jobs_do(named: dict[str, Pretended], run: Any) -> None:
    assert run("context", "ls") == (0, "CURRENT  NAME  JOB  STATE\n")
    assert not os.path.exists(".monarch")
    contexts.create("first", "jobs.one")
    contexts.create("second")
    contexts.use("first")
    run("apply")
    contexts.create("third")
    Path(".monarch/third/state.pkl").write_text("?")
    assert run("context", "ls")[1].splitlines() == [
        "CURRENT  NAME    JOB       STATE",
        "*        first   jobs.one  active",
        "         second  -         no job",
        "         third   -         unreadable",
    ]
    named["jobs.one"]._kill()
    assert states()["first"] == "ended"
    assert "has ended; `monarch kill` forgets it" in run("exec", "true")[1]


def test_what_is_no_context_is_not_listed() -> None:
    for folder in (".monarch/exec", ".monarch/logs/job_1", ".monarch/other"):
        os.makedirs(folder)
    Path(".monarch/other/notes").touch()
    contexts.create("first")
    assert contexts.names() == ["first"]
    with pytest.raises(JobError, match=r"there is something else at \.monarch/other already"):
        contexts.create("other")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("..", "begins with a letter or digit"),
        (".", "begins with a letter or digit"),
        ("", "begins with a letter or digit"),
        ("a/b", "the name of a directory"),
        ("/tmp", "the name of a directory"),
        ("two words", "the name of a directory"),
        ("line\n", "the name of a directory"),
        ("x" * 101, "100 at most"),
        ("logs", ".monarch/logs is something else"),
        ("exec", ".monarch/exec is something else"),
        ("lock", ".monarch/lock is something else"),
        ("job_state.pkl", ".monarch/job_state.pkl is something else"),
    ],
)
def test_bad_names_are_refused_with_the_reason(name: str, why: str, run: Any) -> None:
    for words in (["create", name], ["use", name], ["rm", name]):
        status, said = run("context", *words)
        assert (status, said.startswith(f"monarch context {words[0]}: a context cannot be named")) == (1, True)
        assert why in said
    assert run("kill", name)[0] == 1
    assert not os.path.exists(".monarch")


def test_contexts_that_are_not_there_are_refused(run: Any) -> None:
    assert run("context", "use", "first") == (
        1,
        "monarch context use: there is no context 'first'; there is none\n",
    )
    assert not os.path.exists(".monarch")
    contexts.create("first")
    for words in (["context", "use", "firts"], ["context", "rm", "firts"], ["kill", "firts"]):
        status, said = run(*words)
        assert (status, "it has first. Did you mean 'first'?" in said) == (1, True)
    assert "there is a context 'first' already" in run("context", "create", "first")[1]


def test_a_context_is_not_made_for_a_job_that_is_not_there(named: dict[str, Pretended], run: Any) -> None:
    assert run("context", "create", "first", "jobs.three") == (
        1,
        "monarch context create: there is no jobs.three\n",
    )
    assert contexts.names() == []


def test_a_context_with_an_active_job_is_removed_by_force_only(named: dict[str, Pretended], run: Any) -> None:
    contexts.create("first", "jobs.one")
    contexts.create("second")
    contexts.use("first")
    run("apply")
    assert "first is the current context: `monarch context use` another one" in run("context", "rm", "first")[1]
    contexts.use("second")
    status, said = run("context", "rm", "first")
    assert (status, "the job of first is active: `monarch kill first` ends it" in said) == (1, True)
    assert named["jobs.one"].active and states() == {"first": "active", "second": "no job"}
    assert run("context", "rm", "--force", "first") == (0, "")
    assert not job_is_there() and states() == {"second": "no job"}
    assert run("context", "rm", "-f", "second") == (0, "")
    assert contexts.current() is None and not os.path.lexists(STATE)
    assert os.listdir(".monarch") == ["lock"]


def job_is_there() -> bool:
    return any(name.endswith(".hosts") for name in os.listdir())


def test_what_is_left_of_a_job_that_has_ended_goes_with_its_context(named: dict[str, Pretended], run: Any) -> None:
    contexts.create("first", "jobs.one")
    contexts.use("first")
    run("apply")
    contexts.create("second")
    contexts.use("second")
    named["jobs.one"]._kill()
    assert run("context", "rm", "first") == (0, "")
    assert states() == {"second": "no job"}


def test_a_context_whose_job_cannot_be_read_is_removed_by_force_only(run: Any) -> None:
    contexts.create("first")
    Path(".monarch/first/state.pkl").write_text("?")
    status, said = run("context", "rm", "first")
    assert (status, "cannot be ended" in said, "--force" in said) == (1, True, True)
    status, said = run("context", "rm", "-f", "first")
    assert (status, "may still have its hosts" in said) == (1, True)
    assert contexts.names() == []


def test_a_job_from_before_there_were_contexts_gets_one(named: dict[str, Pretended], run: Any) -> None:
    job = named["jobs.one"]
    assert run("apply", "jobs.one")[0] == 0
    assert STATE.is_file() and not STATE.is_symlink()
    assert states() == {"": "active"}
    contexts.create("first")
    assert states() == {"": "active", "first": "no job"}
    assert contexts.listed()[0].is_current
    contexts.use("first")
    assert states() == {"default": "active", "first": "no job"}
    assert run("kill", "default") == (0, "") and not job.active
    assert contexts.current() == "first"


def test_as_an_older_version_has_remembered_it_too(named: dict[str, Pretended], run: Any) -> None:
    job = named["jobs.one"]
    job.apply()
    job._files.append(os.path.abspath(STATE))
    job.dump(STATE)
    contexts.create("first")
    contexts.use("first")
    job.kill()  # by a program that knows nothing of contexts
    assert os.readlink(STATE) == "first/state.pkl"
    assert states() == {"default": "ended", "first": "no job"}


def test_a_job_that_got_a_context_is_forgotten_when_its_program_ends_it(named: dict[str, Pretended], run: Any) -> None:
    run("apply", "jobs.one")
    contexts.use("default")
    assert os.readlink(STATE) == "default/state.pkl"
    named["jobs.one"].kill()
    assert states() == {"default": "no job"} and os.path.islink(STATE)


def test_a_job_does_not_take_the_place_of_the_context_default(named: dict[str, Pretended], run: Any) -> None:
    contexts.create("default")
    run("apply", "jobs.one")
    status, said = run("context", "use", "default")
    assert (status, "`monarch kill` ends the job" in said) == (1, True)
    assert states() == {"": "active", "default": "no job"}


def test_a_job_that_ends_leaves_the_one_that_came_after_it(named: dict[str, Pretended], run: Any) -> None:
    contexts.create("first")
    contexts.use("first")
    run("apply", "jobs.one")
    named["jobs.one"]._kill()
    run("apply", "jobs.two")
    named["jobs.one"].kill()
    assert states() == {"first": "active"}


def test_programs_that_change_contexts_at_once_take_turns(named: dict[str, Pretended]) -> None:
    """Each of a thread's own makes, uses and removes them; the link always leads to one of them."""
    contexts.create("home")
    contexts.use("home")
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(20):
                contexts.create(name)
                contexts.use(name)
                assert contexts.current() is not None
                contexts.use("home")
                contexts.remove(name, force=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"name{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert contexts.names() == ["home"]
    assert sorted(name for name in os.listdir(".monarch") if name not in ("home", "job_state.pkl")) == ["lock"]


def test_of_two_that_apply_at_once_one_is_refused(named: dict[str, Pretended]) -> None:
    contexts.create("first")
    contexts.use("first")
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Pretended):
        def _create(self, client_script: str | None) -> None:
            begun.set()
            go_on.wait(20)
            super()._create(client_script)

        def __reduce__(self) -> Any:
            return Pretended, (), self.__getstate__()

    named["jobs.one"] = Slow()
    slow = threading.Thread(target=commands.apply, args=("jobs.one",))
    slow.start()
    assert begun.wait(20)
    refusals: list[BaseException] = []

    def second() -> None:
        try:
            commands.apply("jobs.two")
        except commands.NoJob as error:
            refusals.append(error)

    other = threading.Thread(target=second)
    other.start()
    go_on.set()
    slow.join(20)
    other.join(20)
    assert "is active" in str(refusals[0])
    assert named["jobs.one"].active and named["jobs.two"].apply_id is None


def test_the_commands_of_the_docs_work(named: dict[str, Pretended], run: Any) -> None:
    text = (Path(__file__).parent.parent / "docs" / "hosts.md").read_text(encoding="utf-8")
    block = text.partition("### Several jobs side by side")[2].partition("```sh\n")[2].partition("```")[0]
    named.update({"jobs.trainers": Pretended(), "jobs.evaluation": Pretended()})
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(commands) > 5
    for program, *words in commands:
        assert (program, run(*words)[0]) == ("monarch", 0), words
    assert contexts.names() == ["training"] and not job_is_there()


@pytest.mark.slow
def test_the_command_line_keeps_jobs_of_processes_apart(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(
        "from monarch.job import ProcessJob\n"
        "one = ProcessJob({'hosts': 1}, env={'WHO': 'one'})\n"
        "two = ProcessJob({'hosts': 1}, env={'WHO': 'two'})\n"
    )

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "monarch", *words]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert found.returncode == 0, found.stderr
        return found.stdout

    try:
        for name in ("one", "two"):
            run("context", "create", name, f"jobs.{name}")
            run("context", "use", name)
            run("apply")
        pids = [job_load(f".monarch/{name}/state.pkl")._workers[0].pid for name in ("one", "two")]
        assert run("exec", "--", "sh", "-c", "echo $WHO") == "two\n"
        run("context", "use", "one")
        assert run("exec", "--", "sh", "-c", "echo $WHO") == "one\n"
        assert re.findall(r"(\S+) +jobs\.\S+ +(\S+)", run("context", "ls")) == [("one", "active"), ("two", "active")]
        run("context", "use", "two")
        assert run("exec", "--kill", "--", "sh", "-c", "echo $WHO") == "two\n"
        run("context", "rm", "-f", "one")
        for pid in pids:
            wait_until_gone(pid)
        assert run("context", "ls").splitlines()[1:] == ["*        two   jobs.two  no job"]
    finally:
        for name in contexts.names():
            contexts.remove(name, force=True)
