"""Real processes: how they come up, what they inherit, how their ends are told, and that nothing outlives its owner."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from monarch.launch import linux
from monarch.launch.bootstrap import BootstrapCommand, default_bootstrap_cmd
from monarch.launch.launcher import Child, Launcher
from monarch.launch.process import EXEC_PREFIXES, Exit, LaunchSpec
from monarch.launch.wire import explain
from tests.forks import fork
from tests.until import until

pytestmark = pytest.mark.skipif(not linux.LINUX, reason="process guarding is written for Linux")

LIMIT_S = 40.0
ROOT = Path(__file__).parents[2]

# The entry that all tests use: the payload is the program.
ENTRY = "launched_code:run"
ENTRY_SOURCE = """
import json, os, sys
def run(payload, *inherited):
    exec(compile(payload, "payload", "exec"), {"__name__": "payload", "inherited": inherited})
def tell(path, what):  # whole or not at all
    with open(path + ".part", "w") as f:
        json.dump(what, f)
    os.rename(path + ".part", path)
def say(fifo, text):
    fd = os.open(fifo, os.O_WRONLY)
    os.write(fd, text.encode() + b"\\n")
    os.close(fd)
"""


class Events:
    """Lines that other processes write into a named pipe."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.arrived = b""

    def next(self) -> list[str]:
        """The words of the next line."""
        deadline_s = time.monotonic() + LIMIT_S
        while b"\n" not in self.arrived:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "no event in time"
            self.arrived += os.read(self.fd, 4096)
        line, _, self.arrived = self.arrived.partition(b"\n")
        return line.decode().split()


class Bench:
    """A launcher with somebody who pumps it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.launcher = Launcher(**options)
        self.exits: list[tuple[str, Exit]] = []
        self.names = 0

    def start(self, code: str, env: dict[str, str] | None = None, command: BootstrapCommand | None = None) -> Child:
        self.names += 1
        name = f"test[{self.names}]"
        full = dict(os.environ) if env is None else env
        spec = LaunchSpec(name, ENTRY, textwrap.dedent(code).encode(), full, command)
        return self.launcher.launch(spec, lambda e: self.exits.append((name, e)))

    def until(self, met: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
        deadline_s = time.monotonic() + limit_s
        while not met():
            ready, _, _ = select.select([self.launcher], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "the launcher had nothing to say in time"
            self.launcher.pump()

    def end_of(self, child: Child) -> Exit:
        self.until(lambda: not child.alive)
        (found,) = [e for name, e in self.exits if name == child.name]
        assert found is child.exit
        return found

    def run(self, code: str, env: dict[str, str] | None = None, command: BootstrapCommand | None = None) -> Exit:
        return self.end_of(self.start(code, env, command))

    def told(self, code: str, env: dict[str, str] | None = None, command: BootstrapCommand | None = None) -> Any:
        """What `code` gives to `tell`, run in a process of its own."""
        path = self.folder / f"told{self.names}"
        prelude = f"import os, sys, launched_code\ndef tell(what): launched_code.tell({str(path)!r}, what)\n"
        end = self.run(prelude + textwrap.dedent(code), env, command)
        assert (end.code, end.error) == (0, None), end.describe()
        return json.loads(path.read_text())


@pytest.fixture(scope="session")
def code_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    (folder / "launched_code.py").write_text(ENTRY_SOURCE)
    return folder


@pytest.fixture
def entry_on_path(code_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path, str(code_folder)])
    return code_folder


@contextlib.contextmanager
def new_bench(folder: Path) -> Iterator[Bench]:
    before = set(linux.children_of(os.getpid()))
    made = Bench(folder)
    yield made
    made.launcher.close(2.0)
    assert set(linux.children_of(os.getpid())) <= before, "processes or zombies are left"


def check_ends(bench: Bench) -> None:
    names = [name for name, _ in bench.exits]
    assert len(names) == len(set(names)), "an end was told twice"


@pytest.fixture
def own_bench(tmp_path: Path, entry_on_path: Path) -> Iterator[Bench]:
    """For tests that end the launcher or its template, or spoil them."""
    with new_bench(tmp_path) as made:
        yield made
    check_ends(made)


@pytest.fixture(scope="module")
def shared_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with new_bench(tmp_path_factory.mktemp("bench")) as made:
        yield made


@pytest.fixture
def bench(shared_bench: Bench, entry_on_path: Path) -> Iterator[Bench]:
    """A launcher whose template is there; a test leaves no child of it alive."""
    shared_bench.exits.clear()
    shared_bench.run("pass")
    yield shared_bench
    until(lambda: not linux.children_of(template_of(shared_bench)))  # nor a zombie
    check_ends(shared_bench)


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Events]:
    made = Events(tmp_path / "events")
    yield made
    os.close(made.fd)


def gone(pids: list[int], limit_s: float = 5.0) -> None:
    """Wait until no process of `pids` runs, by their pidfds."""
    deadline_s = time.monotonic() + limit_s
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))
            os.close(fd)
            assert ready, f"process {pid} is still there: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}"


# -- how they end


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("pass", 0, "exited with code 0"),
        ("raise SystemExit(3)", 3, "exited with non-zero code 3"),
        ("1 / 0", 1, "exited with non-zero code 1"),
    ],
)
def test_the_exit_code_is_told(bench: Bench, code: str, status: int, text: str) -> None:
    end = bench.run(code)

    assert (end.code, end.signal, end.started) == (status, None, True)
    assert end.describe() == text


@pytest.mark.parametrize("in_one_request", [1, 2, 100])
def test_each_process_may_have_outputs_of_its_own(bench: Bench, monkeypatch, in_one_request: int) -> None:
    monkeypatch.setattr("monarch.launch.launcher.MOST", in_one_request)
    pipes = [(os.pipe(), os.pipe()) for _ in range(5)]
    code = "import os, sys; print(%d); os.write(2, b'%d')"
    specs = [
        LaunchSpec(f"n{i}", ENTRY, (code % (i, i)).encode(), dict(os.environ), output=(out[1], err[1]))
        for i, (out, err) in enumerate(pipes)
    ]
    for child in bench.launcher.launch_all(specs, [lambda end: None] * 5):
        bench.until(lambda: not child.alive)

    said = []
    for (out, _), (err, _) in pipes:  # the launcher has closed its ends: there is an end to read to
        with open(out, "rb") as printed, open(err, "rb") as complained:
            said.append((printed.read(), complained.read()))
    assert said == [(b"%d\n" % i, b"%d" % i) for i in range(5)]


def test_each_process_inherits_what_is_for_it(bench: Bench) -> None:
    pipes = [(os.pipe(), os.pipe()) for _ in range(3)]
    code = b"import os\nfor fd in inherited: os.write(fd, b'%d' % len(inherited))"
    given: list[tuple[int, ...]] = [(one[1], other[1])[:i] for i, (one, other) in enumerate(pipes)]
    outputs = [None, (os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY)), None]
    each = zip(given, outputs, strict=True)
    specs = [LaunchSpec("n", ENTRY, code, dict(os.environ), output=out, inherits=fds) for fds, out in each]
    for child in bench.launcher.launch_all(specs, [lambda end: None] * 3):
        bench.until(lambda: not child.alive)

    for i, ends in enumerate(pipes):
        for j, (out, into) in enumerate(ends):
            if j >= i:
                os.close(into)
            with open(out, "rb") as read:  # the launcher has closed its end: there is an end to read to
                assert read.read() == (b"%d" % i if j < i else b"")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("excuse.say('first'); excuse.say('no way in'); os.kill(os.getpid(), 9)", "no way in"),
        ("excuse.say('no way in'); sys.exit(1)", "no way in"),
        ("excuse.say('no way in'); excuse.up(); os.kill(os.getpid(), 9)", None),
        ("excuse.up(); assert not excuse.say('too late'); os.kill(os.getpid(), 9)", None),
    ],
)
def test_why_a_process_does_not_come_up_is_what_it_said_last_until_it_is_up(
    bench: Bench, code: str, error: str | None
) -> None:
    payload = f"import os, sys; from monarch.launch import excuse; {code}".encode()
    (child,) = bench.launcher.launch_all(
        [LaunchSpec("n", ENTRY, payload, dict(os.environ), excuses=True)], [lambda _: None]
    )
    bench.until(lambda: not child.alive)

    assert child.exit is not None and child.exit.error == error
    assert child.exit.signal == (None if "exit" in code else 9)


def test_a_signal_is_told_with_the_usual_reason_for_9(bench: Bench) -> None:
    killed = bench.run("import os; os.kill(os.getpid(), 9)")
    hung_up = bench.run("import os; os.kill(os.getpid(), 1)")

    assert (killed.code, killed.signal) == (None, 9)
    assert killed.describe().startswith("Killed(sig=9)")
    assert "out-of-memory killer" in killed.describe()
    assert hung_up.describe() == "Killed(sig=1)"


def test_a_kill_of_ours_needs_no_explanation_and_may_come_before_the_fork(bench: Bench) -> None:
    child = bench.start("import signal; signal.pause()")
    child.kill(signal.SIGKILL)

    assert bench.end_of(child).describe() == "Killed(sig=9)"
    child.kill()  # no effect on the dead


@pytest.mark.parametrize("how", ["forked", pytest.param("by a command", marks=pytest.mark.slow), "in a wrapper"])
def test_a_process_that_becomes_another_program_is_killed_when_somebody_looks(
    bench: Bench, events: Events, how: str
) -> None:
    plain = default_bootstrap_cmd()
    wrapped = BootstrapCommand("sh", None, ("-c", '"$@"; exit $?', "sh", plain.program, *plain.args))
    own = evolve(plain, args=("-X", "dev", *plain.args))
    command = {"forked": None, "by a command": own, "in a wrapper": wrapped}[how]
    gate = str(bench.folder / f"gate of one {how}")
    os.mkfifo(gate)
    child = bench.start(
        f"""
        import launched_code, os, subprocess
        subprocess.run(["true"])  # a fork of it may exec
        launched_code.say({events.path!r}, str(os.getpid()))
        open({gate!r}).close()
        os.execvp("sh", ["sh", "-c", 'echo another >> "$0"; sleep 100', {events.path!r}])
        """,
        command=command,
    )
    pid = int(events.next()[0])
    bench.until(lambda: child.pid)
    assert (pid == child.pid) == (how != "in a wrapper")
    child.end_if_replaced(pid)
    assert bench.run("pass").code == 0  # was asked for after the look
    open(gate, "w").close()
    assert events.next() == ["another"]  # it lived on
    child.end_if_replaced(pid)

    assert "Killed(sig=9) (it had replaced itself by another program" in bench.end_of(child).describe()


def test_a_process_ends_with_its_main_thread(bench: Bench) -> None:
    end = bench.run(
        """
        import ctypes, threading
        from monarch.launch import linux
        assert linux.end_with_this_thread(70)
        threading.Thread(target=threading.Event().wait).start()  # would go on
        ctypes.CDLL(None).pthread_exit(None)
        """
    )
    assert (end.code, end.signal) == (70, None)


def test_a_signal_right_after_the_fork_is_not_lost(bench: Bench) -> None:
    children = [bench.start("import signal; signal.pause()") for _ in range(5)]
    for child in children:
        child.kill(signal.SIGTERM)

    assert [bench.end_of(c).signal for c in children] == [15] * 5


def test_an_exception_is_printed_without_frames_of_ours(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    bench.run("def deep(): raise ValueError('see me')\ndeep()")

    err = capfd.readouterr().err
    assert err.startswith("Traceback") and "ValueError: see me" in err and "in deep" in err
    assert "template.py" not in err and "bootstrap.py" not in err


def test_a_process_ends_like_any_python_program(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    """atexit functions run once, threads are waited for, output is flushed, and no resource warning is shown."""
    code = """
        import atexit, sys, threading
        atexit.register(lambda: print("atexit"))
        go = threading.Event()
        threading.Thread(target=lambda: (go.wait(10), print("thread"))).start()
        threading.Timer(0.01, go.set).start()
        sys.stdout.write("no newline,")
    """
    end = bench.run(code)

    assert end.code == 0
    assert capfd.readouterr() == ("no newline,thread\natexit\n", "")


def test_a_crash_in_native_code_shows_the_python_stack(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    end = bench.run("def culprit():\n    import ctypes; ctypes.string_at(0)\nculprit()")

    assert end.describe() == "Killed(sig=11)"
    assert "in culprit" in capfd.readouterr().err


def test_one_callback_that_raises_does_not_keep_others_from_their_news(bench: Bench) -> None:
    def refuse(_: Exit) -> None:
        raise ZeroDivisionError

    spec = LaunchSpec("x", ENTRY, b"", dict(os.environ))
    first = bench.launcher.launch(spec, refuse)
    with pytest.raises(ZeroDivisionError):
        bench.until(lambda: not first.alive)

    assert bench.run("pass").code == 0


# -- what they inherit


def test_a_process_gets_what_its_spawner_has_at_that_moment(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.run("pass")  # the template is there, with what was so before
    # What is read at exec stays, so that this one is forked.
    only = {k: v for k, v in os.environ.items() if k.startswith(EXEC_PREFIXES)} | {"ONLY": "this", "TZ": "UTC-5"}
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path, str(here)])
    monkeypatch.setattr(sys, "argv", ["script.py", "--flag"])
    mask = os.umask(0o027)
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        seen = bench.told(
            """
            import resource
            mask = os.umask(0)
            os.umask(mask)
            tell([os.getcwd(), sys.path[-1], sys.argv, mask, resource.getrlimit(resource.RLIMIT_CORE)[0]])
            """,
            only,
        )
        env = bench.told("import time; tell([dict(os.environ), time.tzname])", only)
    finally:
        os.umask(mask)
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))

    assert seen == [str(here), str(here), ["script.py", "--flag"], 0o027, 0]
    assert env == [only, ["UTC", "UTC"]]
    assert all(e.command is None for _, e in bench.exits)


def test_a_process_gets_no_variable_that_only_its_template_has(
    tmp_path: Path, entry_on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python sets LC_CTYPE where there is no locale, and native code of a library sets what it likes."""
    (entry_on_path / "sets_natively.py").write_text("import ctypes\nctypes.CDLL(None).setenv(b'NATIVE', b'1', 1)\n")
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    bench = Bench(tmp_path, preload=["sets_natively"])
    code = """
    import ctypes
    get = ctypes.CDLL(None).getenv
    get.restype = ctypes.c_char_p
    tell(["sets_natively" in sys.modules, dict(os.environ), get(b"NATIVE"), get(b"LC_CTYPE"), get(b"PATH").decode()])
    """
    try:
        seen = bench.told(code)
    finally:
        bench.launcher.close()

    assert seen == [True, dict(os.environ), None, None, os.environ["PATH"]]
    assert bench.exits[0][1].command is None


def test_a_directory_that_was_removed_is_no_obstacle(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = tmp_path / "lost"
    lost.mkdir()
    monkeypatch.chdir(lost)
    lost.rmdir()

    assert bench.run("pass").code == 0


def test_output_goes_where_the_spawner_s_went_at_that_moment(bench: Bench, tmp_path: Path) -> None:
    bench.run("pass")
    saved = os.dup(1)
    with open(tmp_path / "elsewhere", "w") as f:
        os.dup2(f.fileno(), 1)
        try:
            child = bench.start("print('hello')")
        finally:
            os.dup2(saved, 1)
            os.close(saved)
    bench.end_of(child)

    assert (tmp_path / "elsewhere").read_text() == "hello\n"


def test_a_module_without_bytecode_is_compiled_once_and_again_after_an_edit(
    own_bench: Bench, entry_on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    module = entry_on_path / "edited.py"
    code = """
        import edited
        tell([edited.x, edited.__file__])
    """
    never = """
        import importlib.machinery
        def refuse(*_, **__): raise AssertionError("compiled again")
        importlib.machinery.SourceFileLoader.source_to_code = refuse
    """
    module.write_text("x = 1")
    assert own_bench.told(code) == own_bench.told(textwrap.dedent(never) + textwrap.dedent(code)) == [1, str(module)]
    module.write_text("x = 2")
    assert own_bench.told(code) == [2, str(module)]


def test_a_process_starts_clean(bench: Bench) -> None:
    """Own process group, no open descriptors but that of shared code, default signals, an empty `__main__`, nothing of
    nng, one thread."""
    code = """
        import gc, signal
        fds = sorted(int(n) for n in os.listdir("/proc/self/fd"))
        there = [n for n in fds if os.path.lexists(f"/proc/self/fd/{n}")]
        fds = [n for n in there if not os.readlink(f"/proc/self/fd/{n}").startswith("/memfd:monarch")]
        tell({
            "fds": fds,
            "leads": os.getpgrp() == os.getpid(),
            "terminal": os.getsid(0) == os.getsid(os.getppid()),
            "stdin": os.readlink("/proc/self/fd/0"),
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "handlers": [signal.getsignal(n) == d for n, d in (
                (signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL),
                (signal.SIGPIPE, signal.SIG_IGN), (signal.SIGCHLD, signal.SIG_DFL), (signal.SIGALRM, signal.SIG_DFL))],
            "main": [n for n in vars(sys.modules["__main__"]) if not n.startswith("__")],
            "nng": [n for n in sys.modules if "nng" in n],
            "threads": len(os.listdir("/proc/self/task")),
            "gc": gc.isenabled(),
            "title": open("/proc/self/cmdline").read().rstrip(chr(0)),
            "stdout": sys.stdout.line_buffering,
        })
    """

    assert bench.told(code) == {
        "fds": [0, 1, 2],
        "leads": True,
        "terminal": True,
        "stdin": "/dev/null",
        "blocked": 0,
        "handlers": [True] * 5,
        "main": [],
        "nng": [],
        "threads": 1,
        "gc": True,
        "title": f"test[{bench.names}]",
        "stdout": True,
    }


def test_random_numbers_differ_between_processes(bench: Bench) -> None:
    assert len({str(bench.told("import random; tell(random.random())")) for _ in range(3)}) == 3


def test_a_large_payload_passes(bench: Bench) -> None:
    filler = "#" * (8 << 20)

    assert bench.run(f"raise SystemExit(5)\n{filler}").code == 5


def test_many_processes_come_from_one_request(bench: Bench) -> None:
    specs = [LaunchSpec(f"n{i}", ENTRY, f"raise SystemExit({i})".encode(), dict(os.environ)) for i in range(32)]
    ends: list[Exit] = []
    children = bench.launcher.launch_all(specs, [ends.append] * 32)
    bench.until(lambda: len(ends) == 32)

    assert [c.exit.code if c.exit else None for c in children] == list(range(32))
    assert len({c.pid for c in children}) == 32


# -- the template


def template_of(bench: Bench) -> int:
    template = bench.launcher._template
    assert template is not None and template.pid
    return template.pid


def guardian_of(bench: Bench) -> int:
    assert bench.launcher._template is not None
    return bench.launcher._template.guardian


def test_the_template_has_one_thread_and_nothing_of_nng(bench: Bench) -> None:
    bench.run("pass")
    pid = template_of(bench)

    assert os.listdir(f"/proc/{pid}/task") == [str(pid)]
    assert "nng" not in Path(f"/proc/{pid}/maps").read_text()


def test_the_template_ignores_the_signals_of_a_terminal(bench: Bench) -> None:
    bench.run("pass")
    pid = template_of(bench)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, signum)

    assert bench.run("pass").code == 0
    assert template_of(bench) == pid
    assert os.getsid(pid) == guardian_of(bench) != os.getsid(0)


def test_a_dead_template_is_told_and_replaced(own_bench: Bench, events: Events) -> None:
    child = own_bench.start(f"import launched_code, signal; launched_code.say({events.path!r}, 'up'); signal.pause()")
    events.next()
    own_bench.until(lambda: child.pid)
    pid, template = child.pid, template_of(own_bench)
    os.kill(template, signal.SIGKILL)
    end = own_bench.end_of(child)

    assert (end.pid, end.signal) == (pid, 9)
    assert f"the template process {template}, its parent, Killed(sig=9)" in end.describe()
    gone([pid] if pid else [])
    assert own_bench.run("pass").code == 0
    assert template_of(own_bench) != template


def test_a_template_that_cannot_come_up_is_an_error_and_no_hang(
    own_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    end = own_bench.run("pass")

    assert not end.started
    assert "could not be started" in end.describe() and "No such file" in end.describe()


# -- commands


def test_a_variable_read_at_exec_makes_a_fresh_interpreter(bench: Bench, tmp_path: Path) -> None:
    code = "tell([sys.flags.hash_randomization, hash('x'), sys.argv, 'PYTHONPATH' in os.environ, os.getcwd()])"
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONHASHSEED", "PYTHONPATH")}
    first = bench.told(code, {**env, "PYTHONHASHSEED": "0"})
    again = bench.told(code, {**env, "PYTHONHASHSEED": "0"})

    assert first == again == [0, first[1], sys.argv, False, os.getcwd()]
    assert str(bench.exits[-1][1].command).endswith(" -c ...")


def test_the_default_command_with_variables_still_forks(bench: Bench) -> None:
    code = "tell([os.environ['EXTRA'], os.path.basename(sys.argv[0])])"
    child_env = bench.told(code, command=default_bootstrap_cmd().with_env({"EXTRA": "1"}))

    assert child_env[0] == "1"
    assert all(e.command is None for _, e in bench.exits)


def test_numpy_in_the_template_starts_no_thread_and_its_copies_differ(tmp_path: Path, entry_on_path: Path) -> None:
    pytest.importorskip("numpy")
    bench = Bench(tmp_path, preload=["numpy"])
    code = """
import numpy
counts = [len(os.listdir("/proc/self/task"))]
numpy.ones((512, 512)) @ numpy.ones((512, 512))
tell([*counts, len(os.listdir("/proc/self/task")), numpy.random.rand()])
"""
    plain = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    try:
        environments = [plain, *({**plain, "OPENBLAS_NUM_THREADS": n} for n in "13")]
        seen = [bench.told(code, env) for env in environments]
        assert os.listdir(f"/proc/{template_of(bench)}/task") == [str(template_of(bench))]
    finally:
        bench.launcher.close()

    at_start, at_work, numbers = zip(*seen, strict=True)
    assert at_start == (1, 1, 1)
    assert at_work == (len(os.sched_getaffinity(0)), 1, 3)
    assert len(set(numbers)) == 3


def test_a_fork_ends_the_threads_of_an_openblas_that_hides_how_to() -> None:
    pytest.importorskip("numpy")
    code = """
import os, numpy
from monarch.launch import library_threads
threads = lambda: len(os.listdir("/proc/self/task"))
for set_threads, _ in library_threads._openblas():
    set_threads(3)
before = threads()
library_threads._end_by_fork()
print(before, threads())
"""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "3 1\n", done.stderr


def test_modules_are_preloaded_for_a_later_launch_too(own_bench: Bench, entry_on_path: Path) -> None:
    (entry_on_path / "shared_by_all.py").write_text("import os\npid = os.getpid()\n")
    (entry_on_path / "broken_module.py").write_text("raise ValueError\n")
    own_bench.run("pass")
    preload = ["shared_by_all", "broken_module", "no_such_module"]
    seen = []
    for _ in range(2):
        path = own_bench.folder / f"seen{len(seen)}"
        code = f"import launched_code, sys; launched_code.tell({str(path)!r}, sys.modules['shared_by_all'].pid)"
        spec = LaunchSpec(path.name, ENTRY, code.encode(), os.environ)
        (child,) = own_bench.launcher.launch_all([spec], [lambda e: None], preload)
        own_bench.until(lambda child=child: not child.alive)  # type: ignore[misc]
        seen.append(json.loads(path.read_text()))

    assert seen == [template_of(own_bench)] * 2
    assert "shared_by_all" not in sys.modules


def test_another_command_runs_the_same_entry(bench: Bench) -> None:
    default = default_bootstrap_cmd()
    command = BootstrapCommand("env", None, ("WRAPPED=1", default.program, *default.args), {"MORE": "2"})
    seen = bench.told("tell([os.environ.get(n) for n in ('WRAPPED', 'MORE', 'MONARCH_BOOTSTRAP_FD')])", command=command)

    assert seen == ["1", "2", None] or seen == [None, "2", None]  # the environment is the spawner's word
    assert bench.exits[-1][1].command == str(command)


def test_a_missing_program_is_named(bench: Bench, tmp_path: Path) -> None:
    end = bench.run("pass", command=BootstrapCommand(str(tmp_path / "nosuchpython")))

    assert not end.started
    assert "nosuchpython" in end.describe() and "No such file" in end.describe()


def test_a_program_that_ends_at_once_is_quoted(bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "badpython"
    bad.write_text("#!/bin/sh\necho no licence for this machine >&2\nexit 7\n")
    bad.chmod(0o755)
    end = bench.run("pass", command=BootstrapCommand(str(bad), None, ("-m", "x")))

    assert (end.code, end.started) == (7, True)
    assert all(words in end.describe() for words in ("code 7", "no licence for this machine", f"{bad} -m x"))
    assert capfd.readouterr().err == "no licence for this machine\n"


def test_much_output_of_a_command_passes_whole(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys\nfor i in range(20000): print('line', i, file=sys.stderr)\nraise SystemExit(2)"
    default = default_bootstrap_cmd()
    end = bench.run(code, command=BootstrapCommand("env", None, (default.program, *default.args)))

    assert capfd.readouterr().err == "".join(f"line {i}\n" for i in range(20000))
    assert end.stderr_tail.splitlines() == [f"line {i}" for i in range(19980, 20000)]


# -- limits


def test_too_few_descriptors_in_the_driver_are_an_error_that_names_the_limit(own_bench: Bench) -> None:
    own_bench.run("pass")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(n) for n in os.listdir("/proc/self/fd")) + 1, hard))
    holes = []
    with contextlib.suppress(OSError):
        while True:
            holes.append(os.open(os.devnull, os.O_RDONLY))
    try:
        child = own_bench.start("pass")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in holes:
            os.close(fd)
    end = own_bench.end_of(child)

    assert not end.started
    assert "RLIMIT_NOFILE" in end.describe() and "Too many open files" in end.describe()
    assert own_bench.run("pass").code == 0


def test_too_few_descriptors_in_the_template_are_an_error_that_names_the_limit(own_bench: Bench) -> None:
    own_bench.run("pass")
    resource.prlimit(template_of(own_bench), resource.RLIMIT_NOFILE, (10, 10))
    end = own_bench.run("pass")

    assert not end.started
    assert "RLIMIT_NOFILE" in end.describe() and "Too many open files" in end.describe()


def test_no_more_processes_is_an_error_that_names_the_limit(own_bench: Bench) -> None:
    if os.geteuid() == 0:
        pytest.skip("root is not bound by RLIMIT_NPROC")
    own_bench.run("pass")
    resource.prlimit(template_of(own_bench), resource.RLIMIT_NPROC, (1, 1))

    assert "RLIMIT_NPROC" in own_bench.run("pass").describe()


def test_errors_of_limits_name_them() -> None:
    assert "RLIMIT_NPROC is" in explain(BlockingIOError(errno.EAGAIN, "no more"), "cannot fork")
    assert explain(OSError(errno.ENOMEM, "no memory"), "cannot fork") == "cannot fork: no memory"


def test_an_idle_launcher_is_not_readable(bench: Bench) -> None:
    bench.run("pass")

    assert select.select([bench.launcher], [], [], 0)[0] == []


# -- nothing is left behind


GRANDCHILDREN = """
import launched_code, os, signal, subprocess
plain = subprocess.Popen(["sleep", "600"])
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
daemon = int(subprocess.run(["sh", "-c", "setsid sleep 600 >&- & echo $!"], stdout=subprocess.PIPE).stdout)
launched_code.say({fifo!r}, f"{{os.getpid()}} {{plain.pid}} {{apart.pid}} {{daemon}}")
signal.pause()
"""


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_what_a_process_started_ends_with_it(bench: Bench, events: Events, how: str) -> None:
    child = bench.start(GRANDCHILDREN.format(fifo=events.path))
    other = bench.start(GRANDCHILDREN.format(fifo=events.path))
    lines = {int(pids[0]): [int(p) for p in pids] for pids in (events.next(), events.next())}
    bench.until(lambda: child.pid and other.pid)
    assert child.pid and other.pid
    os.kill(child.pid, signal.SIGKILL if how == "killed" else signal.SIGTERM)
    bench.end_of(child)

    gone(lines[child.pid])
    for pid in lines[other.pid]:
        os.kill(pid, 0)  # those of others stay
    other.kill()
    bench.end_of(other)
    gone(lines[other.pid])


DRIVER = """
import os, select, signal, sys
sys.path.append({code!r})
from monarch.launch.launcher import Launcher, LaunchSpec
launcher = Launcher()
program = {program!r}.encode()
for i in range(2):
    launcher.launch(LaunchSpec("x", "launched_code:run", program, dict(os.environ)), print)
if {forks}:
    if os.fork() == 0:
        os.setsid()
        signal.pause()
import launched_code
launched_code.say({fifo!r}, f"driver {{launcher._template.guardian}}")
while True:
    select.select([launcher], [], [])
    launcher.pump()
"""


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a forked copy"])
def test_when_the_driver_is_killed_everything_ends(
    tmp_path: Path, code_folder: Path, events: Events, forks: bool
) -> None:
    program = GRANDCHILDREN.format(fifo=events.path)
    source = DRIVER.format(code=str(code_folder), program=program, fifo=events.path, forks=forks)
    driver = subprocess.Popen([sys.executable, "-W", "error", "-c", source], cwd=ROOT, start_new_session=True)
    copies: list[int] = []
    try:
        lines = [events.next() for _ in range(3)]
        pids = [int(word) for line in lines for word in line if word != "driver"]
        assert len(pids) == 9
        (guardian,) = [int(line[1]) for line in lines if line[0] == "driver"]
        pids += linux.children_of(guardian)
        copies = [p for p in linux.children_of(driver.pid) if p != guardian]
        assert len(copies) == int(forks)
        driver.kill()
        driver.wait(LIMIT_S)
        gone(pids)
        for pid in copies:
            os.kill(pid, 0)  # not ours to end
    finally:
        driver.kill()
        driver.wait(LIMIT_S)
        for pid in copies:
            os.kill(pid, signal.SIGKILL)


def test_when_the_driver_becomes_another_program_everything_ends(code_folder: Path, events: Events) -> None:
    program = GRANDCHILDREN.format(fifo=events.path)
    source = DRIVER.format(code=str(code_folder), program=program, fifo=events.path, forks=False)
    source = source.replace("while True:", "os.execvp('sleep', ['sleep', '600'])\nwhile True:")
    driver = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT)
    try:
        (line,) = [events.next()]
        gone([int(line[1])])
    finally:
        driver.kill()
        driver.wait(LIMIT_S)


@pytest.mark.parametrize("loads", ["at its start", pytest.param("later", marks=pytest.mark.slow)])
def test_a_driver_killed_while_the_template_loads_leaves_nothing(
    tmp_path: Path, code_folder: Path, events: Events, loads: str
) -> None:
    (tmp_path / "slow_module.py").write_text(
        f"import launched_code, os, time\nlaunched_code.say({events.path!r}, str(os.getpid()))\n"
        "while True: time.sleep(0.01)\n"
    )
    first = 'launcher = Launcher(preload=["slow_module"]); launcher.warm()'
    program = GRANDCHILDREN.format(fifo=events.path).encode()
    later = f"""
launcher = Launcher()
spec = LaunchSpec("x", "launched_code:run", {program!r}, dict(os.environ))
launcher.launch_all([spec], [print])
with open({events.path!r} + ".go") as f: f.read()
launcher.launch_all([spec], [print], ["slow_module"])
"""
    os.mkfifo(events.path + ".go")
    source = f"""
import os, signal, sys
sys.path += [{str(code_folder)!r}, {str(tmp_path)!r}]
from monarch.launch.launcher import Launcher, LaunchSpec
{first if loads == "at its start" else later}
signal.pause()
"""
    driver = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT)
    pids: list[int] = []
    try:
        if loads == "later":
            pids += map(int, events.next())  # a child and what it has started
            Path(events.path + ".go").write_text("")
        pids += map(int, events.next())  # the template
    finally:
        driver.kill()
        driver.wait(LIMIT_S)

    gone(pids)


ONE_CHILD = """
import os, select, sys
sys.path.append({code!r})
from monarch.launch.launcher import Launcher, LaunchSpec
launcher = Launcher()
program = b"print('up'); import signal; signal.pause()"
child = launcher.launch(LaunchSpec("x", "launched_code:run", program, dict(os.environ)), print)
while child.pid is None:
    select.select([launcher], [], [], 10)
    launcher.pump()
print(child.pid, launcher._template.pid, launcher._template.guardian, flush=True)
"""


def pids_in(output: str) -> list[int]:
    return [int(word) for word in output.split() if word != "up"]


def test_close_ends_when_the_program_has_closed_every_descriptor(code_folder: Path) -> None:
    source = ONE_CHILD.format(code=str(code_folder)) + "os.closerange(3, 1024)\nlauncher.close()\n"
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    assert "Bad file descriptor" in done.stderr
    gone(pids_in(done.stdout))


def test_a_driver_that_falls_off_its_end_is_silent_and_leaves_nothing(code_folder: Path, tmp_path: Path) -> None:
    """Also without `close`; and no file, no segment is left."""
    source = ONE_CHILD.format(code=str(code_folder))
    shm = set(os.listdir("/dev/shm"))
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )

    assert (done.returncode, done.stderr) == (0, "")
    gone(pids_in(done.stdout))
    assert os.listdir(tmp_path) == []
    assert set(os.listdir("/dev/shm")) <= shm


def test_close_ends_the_stubborn_too_and_tells_of_everybody(own_bench: Bench, events: Events) -> None:
    stubborn = own_bench.start(
        f"import launched_code, signal; signal.signal(15, signal.SIG_IGN);"
        f"launched_code.say({events.path!r}, 'deaf')\nwhile True: signal.pause()"
    )
    meek = own_bench.start(f"import launched_code, signal; launched_code.say({events.path!r}, 'meek'); signal.pause()")
    events.next(), events.next()
    own_bench.until(lambda: stubborn.pid and meek.pid)
    pids = [stubborn.pid or 0, meek.pid or 0, template_of(own_bench)]
    own_bench.launcher.close(0.3)

    assert [c.exit.describe() if c.exit else "" for c in (stubborn, meek)] == ["Killed(sig=9)", "Killed(sig=15)"]
    gone(pids, 0)
    with pytest.raises(RuntimeError, match="closed"):
        own_bench.start("pass")


def test_close_does_not_wait_for_a_template_that_is_loading(entry_on_path: Path, tmp_path: Path) -> None:
    (entry_on_path / "endless_module.py").write_text("import time\nwhile True: time.sleep(0.01)\n")
    bench = Bench(tmp_path, preload=["endless_module"])
    child = bench.start("pass")
    bench.launcher.close(3600.0)  # the test has a time limit

    assert child.exit is not None and not child.exit.started


@pytest.mark.slow
def test_close_is_bounded_when_the_template_does_not_answer(own_bench: Bench) -> None:
    child = own_bench.start("import signal; signal.pause()")
    own_bench.until(lambda: child.pid)
    pids = [child.pid or 0, template_of(own_bench)]
    os.kill(pids[1], signal.SIGSTOP)
    own_bench.launcher.close(0.1)

    assert child.exit is not None and child.exit.signal == 9
    gone(pids)


def test_what_a_process_launched_itself_ends_with_it(bench: Bench, events: Events) -> None:
    """A launcher inside a child: its template and its children, and theirs, are gone after the child was killed."""
    inner = GRANDCHILDREN.format(fifo=events.path)
    child = bench.start(
        f"""
        import os, signal
        from monarch.launch.launcher import Launcher
        from monarch.launch.process import LaunchSpec
        launcher = Launcher()
        launcher.launch(LaunchSpec("inner", {ENTRY!r}, {inner!r}.encode(), dict(os.environ)), print)
        signal.pause()
        """
    )
    pids = [int(word) for word in events.next()]
    bench.until(lambda: child.pid)
    assert child.pid
    (guardian,) = linux.children_of(child.pid)
    (template,) = linux.children_of(guardian)
    os.kill(child.pid, signal.SIGKILL)
    bench.end_of(child)

    gone([*pids, guardian, template])


@pytest.mark.parametrize("victim", ["template", "guardian"])
def test_what_is_between_driver_and_children_takes_everything_along(
    own_bench: Bench, events: Events, victim: str
) -> None:
    child = own_bench.start(GRANDCHILDREN.format(fifo=events.path))
    pids = [int(word) for word in events.next()]
    own_bench.until(lambda: child.pid)
    both = {"template": template_of(own_bench), "guardian": guardian_of(own_bench)}
    os.kill(both[victim], signal.SIGKILL)

    assert f"{both[victim]}" in own_bench.end_of(child).describe()
    gone([*pids, *both.values()])
    assert own_bench.run("pass").code == 0


def test_a_process_that_says_so_outlives_everything(own_bench: Bench, events: Events) -> None:
    child = own_bench.start(
        f"""
        import launched_code, os, signal, subprocess
        keep = {{**os.environ, "MONARCH_OUTLIVE": "1"}}
        kept = subprocess.Popen(["sleep", "600"], env=keep, start_new_session=True)
        plain = subprocess.Popen(["sleep", "600"])
        launched_code.say({events.path!r}, f"{{kept.pid}} {{plain.pid}}")
        signal.pause()
        """
    )
    kept, plain = map(int, events.next())
    try:
        child.kill()
        own_bench.end_of(child)
        gone([plain])
        os.kill(kept, 0)
        own_bench.launcher.close()
        os.kill(kept, 0)
    finally:
        os.kill(kept, signal.SIGKILL)


def test_shared_memory_of_a_killed_process_is_removed(bench: Bench, events: Events) -> None:
    """By its resource tracker, which is not killed before it has done so."""
    child = bench.start(
        f"""
        import launched_code, signal
        from multiprocessing import resource_tracker, shared_memory
        held = shared_memory.SharedMemory(create=True, size=64)
        launched_code.say({events.path!r}, f"{{held.name}} {{resource_tracker._resource_tracker._pid}}")
        signal.pause()
        """
    )
    name, tracker = events.next()
    assert os.path.exists(f"/dev/shm/{name}")
    child.kill()
    bench.end_of(child)

    gone([int(tracker)])
    assert not os.path.exists(f"/dev/shm/{name}")


def test_a_fork_of_the_driver_can_start_nothing_and_its_end_kills_nobody(own_bench: Bench, events: Events) -> None:
    child = own_bench.start(f"import launched_code, signal; launched_code.say({events.path!r}, 'up'); signal.pause()")
    events.next()
    pid = fork()
    if pid == 0:
        status = 1
        try:
            own_bench.launcher.pump()
            child.kill()
            own_bench.launcher.close()
            own_bench.start("pass")
        except RuntimeError as e:
            status = 0 if "fork" in str(e) else 2
        finally:
            os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert own_bench.run("pass").code == 0
    assert child.alive
