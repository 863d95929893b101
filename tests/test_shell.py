"""A shell on a host of a job: what is typed in a terminal here goes there, and the end of either is the end of both."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch import job as job_module
from monarch.actor import this_host
from monarch.job import ProcessJob, interactive, job_load, shell
from monarch.testing import TestClient, fresh_client, wait_until_gone
from tests.mesh.workers import LIMIT_S
from tests.until import until

pytestmark = pytest.mark.timeout(120)

HERE = """
    import sys
    from monarch.actor import this_host
    from monarch.job import shell
    if __name__ == "__main__":
        sys.exit(shell(this_host(), env={"SHELL": "/bin/sh", "PS1": "<> ", "HOME": "/nonexistent"}))
"""
ABOVE = """
import os
pid = os.getpid()
while pid > 1:
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(") ")[2].split()[1])
    print(f"above: {pid}")
"""
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(sys.path), "ENV": "", "TERM": "vt100"}


def _begin_in_a_window() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test run that goes on behind a closed window ignores it


class Window:
    """A terminal window with a program in it."""

    def __init__(self, command: list[str], size: tuple[int, int] = (24, 80)) -> None:
        self.master, self.slave = os.openpty()
        self.resize(size)
        self.output = b""
        self._seen = 0
        self.program = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            preexec_fn=_begin_in_a_window,
        )

    @classmethod
    def of(cls, program: str, size: tuple[int, int] = (24, 80)) -> Window:
        return cls([sys.executable, "-c", textwrap.dedent(program)], size)

    @property
    def is_raw(self) -> bool:
        return not termios.tcgetattr(self.slave)[3] & termios.ICANON

    def resize(self, size: tuple[int, int]) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, pattern: str) -> re.Match[bytes]:
        """Wait for it in what comes after the last that was expected."""
        deadline_s = time.monotonic() + LIMIT_S
        while (found := re.compile(pattern.encode()).search(self.output, self._seen)) is None:
            assert time.monotonic() < deadline_s, f"no {pattern!r} in {self.output[self._seen :][-2000:]!r}"
            self._read(1.0)
        self._seen = found.end()
        return found

    def run(self, line: str, pattern: str) -> re.Match[bytes]:
        """Type a line at the prompt, and wait for what it prints."""
        self.expect("<> ")
        self.type(f"{line}\r")
        return self.expect(f"\\n{pattern}")

    def status(self) -> int:
        """That of the program, once it has ended and all has been read."""
        deadline_s = time.monotonic() + LIMIT_S
        while self.program.poll() is None:
            assert time.monotonic() < deadline_s, f"it has not ended: {self.output[-2000:]!r}"
            self._read(0.05)
        while self._read(0):
            pass
        return self.program.returncode

    def _read(self, limit_s: float) -> bool:
        if not select.select([self.master], [], [], limit_s)[0]:
            return False
        self.output += os.read(self.master, 1 << 16)
        return True

    def close(self) -> None:
        self.program.kill()
        self.program.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def window() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def new(program: str = HERE, size: tuple[int, int] = (24, 80)) -> Window:
            return stack.enter_context(contextlib.closing(Window.of(program, size)))

        yield new


@pytest.fixture
def client() -> Iterator[TestClient]:
    with fresh_client("shm", cleanup_timeout="1s", process_exit_timeout="3s") as client:
        yield client


def test_what_is_typed_goes_there_and_what_is_printed_comes_here(window: Any) -> None:
    terminal = window(size=(33, 101))
    terminal.run("stty size; echo $TERM; tty", "33 101\r\nvt100\r\n/dev/pts/")
    assert terminal.is_raw
    terminal.run("printf '\\377\\0\\376\\n'", "\\xff\\x00\\xfe\r\n")
    terminal.expect("<> ")
    terminal.type("exit 7\r")
    assert terminal.status() == 7
    assert not terminal.is_raw


def test_a_window_that_gets_another_size_says_so_there(window: Any) -> None:
    terminal = window()
    terminal.run("sh -c 'trap \"stty size\" WINCH; echo READY; while :; do sleep 60 & wait $!; done'", "READY")
    terminal.resize((40, 120))
    terminal.expect("40 120")


def test_ctrl_c_is_for_the_program_there_also_when_nobody_reads_what_it_prints(window: Any) -> None:
    terminal = window()
    pid = int(terminal.run("sh -c 'echo PID $$; exec sleep 1000'", "PID (\\d+)")[1])
    terminal.type("\x03")
    wait_until_gone(pid)
    before = len(terminal.output)
    pid = int(terminal.run("sh -c 'echo PID $$; exec yes'", "PID (\\d+)")[1])
    until(lambda: "yes" in Path(f"/proc/{pid}/comm").read_text())
    terminal.type("\x03")
    wait_until_gone(pid)
    terminal.run("echo $((40 + 2))", "42")
    assert len(terminal.output) - before < 4 << 20
    assert terminal.program.poll() is None


@pytest.mark.parametrize(("line", "status"), [("kill -9 $$", 137), ("true; exit", 0)])
def test_the_status_is_that_of_the_shell(window: Any, line: str, status: int) -> None:
    terminal = window()
    terminal.expect("<> ")
    terminal.type(f"{line}\r")
    assert terminal.status() == status


def test_what_the_shell_leaves_running_ends_with_it(window: Any) -> None:
    terminal = window()
    stubborn = "trap '' HUP TERM; echo PID $$; while :; do sleep 0.1; done"
    pid = int(terminal.run(f'sh -c "{stubborn.replace("$", chr(92) + "$")}" &', ".*PID (\\d+)")[1])
    terminal.type("exit\r")
    assert terminal.status() == 0
    wait_until_gone(pid)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_a_program_that_is_killed(window: Any, signum: int) -> None:
    terminal = window()
    here = int(terminal.run("echo PID $$", "PID (\\d+)")[1])
    away = int(terminal.run("setsid sh -c 'echo PID $$; exec sleep 1000' &", ".*PID (\\d+)")[1])
    terminal.program.send_signal(signum)
    assert terminal.status() == -signum
    wait_until_gone(here)
    wait_until_gone(away)
    assert terminal.is_raw == (signum == signal.SIGKILL)


def test_a_program_that_is_stopped_gives_the_terminal_back_meanwhile(window: Any) -> None:
    terminal = window()
    terminal.run("echo $((40 + 2))", "42")
    assert terminal.is_raw
    terminal.program.send_signal(signal.SIGTSTP)
    until(lambda: Path(f"/proc/{terminal.program.pid}/stat").read_text().rpartition(") ")[2][0] == "T")
    assert not terminal.is_raw
    terminal.program.send_signal(signal.SIGCONT)
    until(lambda: terminal.is_raw)
    terminal.run("echo $((40 + 3))", "43")


def test_the_death_of_the_process_there_is_an_error_here_and_no_more(window: Any) -> None:
    terminal = window("""
        import sys
        from monarch.actor import this_host
        from monarch.errors import SupervisionError
        from monarch.job import shell
        if __name__ == "__main__":
            try:
                shell(this_host(), env={"SHELL": "/bin/sh", "PS1": "<> "})
            except SupervisionError as error:
                print("TOLD:", error)
            print("status", shell(this_host(), env={"SHELL": "/bin/sh", "PS1": "<> "}))
    """)
    pid = int(terminal.run("echo PID $PPID", "PID (\\d+)")[1])
    os.kill(pid, signal.SIGKILL)
    terminal.expect("TOLD: the shell is over, its worker is gone: .*sig=9")
    terminal.expect("<> ")
    terminal.type("exit 5\r")
    terminal.expect("status 5")
    assert terminal.status() == 0
    assert b"Unhandled" not in terminal.output


@pytest.mark.slow
def test_the_death_of_the_worker_is_an_error_here(window: Any, tmp_path: Path) -> None:
    terminal = window("""
        from monarch.job import ProcessJob, shell
        if __name__ == "__main__":
            job = ProcessJob({"hosts": 1})
            hosts = job.state(cached_path=None).hosts
            hosts.initialized.get(40)
            print("WORKER", job._workers[0].pid)
            shell(hosts, env={"SHELL": "/bin/sh", "PS1": "<> "})
    """)
    pid = int(terminal.expect("WORKER (\\d+)")[1])
    here = int(terminal.run("echo PID $$", "PID (\\d+)")[1])
    os.kill(pid, signal.SIGKILL)
    assert terminal.status() == 1
    assert not terminal.is_raw
    assert b"the shell is over, its worker is gone" in terminal.output
    wait_until_gone(here)


def typed(text: str, program: str = HERE) -> tuple[int, str]:
    """The status, and what shows, of a shell with the standard input and output in pipes."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **ENVIRONMENT},
        input=text.encode(),
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.stderr == b""
    return found.returncode, found.stdout.decode()


@pytest.mark.parametrize(
    ("text", "status", "shown"),
    [
        ("echo $((40 + 2))\nexit 9\n", 9, "42\r\n"),
        ("stty size; (exit 4)", 4, "24 80\r\n"),
        ("cat; cat; echo $((40 + 2))\nsalt", 0, "salt\r\n42\r\n"),
        ("", 0, "<> "),
    ],
)
def test_the_input_may_come_through_a_pipe_and_has_an_end_there_too(text: str, status: int, shown: str) -> None:
    found, output = typed(text)
    assert (found, shown in output) == (status, True), output


def test_of_much_input_nothing_is_lost(tmp_path: Path) -> None:
    lines = "".join(f"line {number}\n" for number in range(20_000))
    _, output = typed(f"stty -echo; cat > {tmp_path / 'copy'}\n{lines}")
    assert (tmp_path / "copy").read_text() == lines, output[-2000:]


def test_a_shell_is_on_one_host(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interactive, "_kept", lambda hosts: pytest.fail("something is started"))
    job = ProcessJob({"hosts": 2})
    with pytest.raises(ValueError, match="requires a singleton HostMesh; this one has 2 hosts"):
        shell(job.state(cached_path=None).hosts)
    job.kill()
    assert job_module.shell is shell


def test_a_directory_that_is_not_there_is_an_error(client: TestClient) -> None:
    with pytest.raises(FileNotFoundError, match="/nonexistent"):
        shell(this_host(), workdir="/nonexistent")


@pytest.mark.slow
def test_the_command_line_has_a_shell_on_a_host_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.py").write_text("from monarch.job import ProcessJob\njob = ProcessJob({'a': 2, 'b': 1})\n")
    (tmp_path / "there").mkdir()

    def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "monarch", *words],
            env={**os.environ, **ENVIRONMENT, "SHELL": "/bin/sh"},
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert "there is no current job" in run("shell").stderr
    assert run("apply", "jobs.job").returncode == 0
    try:
        found = run("shell", "-e", "WORD=salt", "--workdir", "there", text="echo $WORD $PWD; exit 3\n")
        assert (found.returncode, found.stderr) == (3, "")
        assert f"salt {tmp_path}/there\n" in found.stdout
        (tmp_path / "above.py").write_text(ABOVE)
        whose = f"{sys.executable} above.py\n"
        workers = [worker.pid for worker in job_load(".monarch/job_state.pkl")._workers]
        for where, worker in [
            (["--mesh", "a", "--point", "hosts=0"], workers[0]),
            (["--point", "hosts=1"], workers[1]),
            (["--mesh", "b"], workers[2]),
        ]:
            assert f"above: {worker}\n" in run("shell", *where, text=whose).stdout
        for words, complaint in [
            (["--mesh", "c"], "it has a, b"),
            (["--point", "hosts=2"], "hosts"),
            (["--point", "racks=0"], "racks"),
            (["--workdir", "nowhere"], "nowhere"),
        ]:
            found = run("shell", *words)
            assert (found.returncode, found.stderr.count("\n")) == (1, 1), found.stderr
            assert found.stderr.startswith("monarch shell: ") and complaint in found.stderr
        closed = f"exec {sys.executable} -m monarch shell <&-"
        environment = {**os.environ, **ENVIRONMENT, "SHELL": "/bin/sh"}
        subprocess.run(["/bin/sh", "-c", closed], env=environment, stdout=subprocess.DEVNULL, timeout=60, check=True)
        assert run("shell", "--kill", text="exit 2\n").returncode == 2
        assert run("kill").returncode == 1
    finally:
        run("kill")


def test_a_failure_elsewhere_that_ends_the_program_leaves_the_terminal_as_it_was(window: Any) -> None:
    terminal = window("""
        import os
        from monarch.actor import Actor, endpoint, this_host
        from monarch.job import shell

        class Other(Actor):
            @endpoint
            def pid(self) -> int:
                return os.getpid()

        if __name__ == "__main__":
            other = this_host().spawn_procs().spawn("other", Other)
            print("OTHER", other.pid.call_one().get())
            shell(this_host(), env={"SHELL": "/bin/sh", "PS1": "<> "})
    """)
    pid = int(terminal.expect("OTHER (\\d+)")[1])
    here = int(terminal.run("echo PID $$", "PID (\\d+)")[1])
    os.kill(pid, signal.SIGKILL)
    assert terminal.status() == 1
    assert not terminal.is_raw
    assert b"Unhandled monarch error" in terminal.output
    wait_until_gone(here)


def test_a_shell_may_be_called_by_any_thread(window: Any) -> None:
    terminal = window("""
        import threading
        from monarch.actor import this_host
        from monarch.job import shell

        def work():
            print("status", shell(this_host(), env={"SHELL": "/bin/sh", "PS1": "<> "}))

        if __name__ == "__main__":
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    """)
    terminal.expect("<> ")
    assert terminal.is_raw
    terminal.type("exit 6\r")
    terminal.expect("status 6")
    assert terminal.status() == 0


def test_the_end_of_the_terminal_is_the_end_of_the_shell(window: Any) -> None:
    """Also of a program that takes no notice of SIGHUP."""
    terminal = window("""
        import signal
        from monarch.actor import this_host
        from monarch.job import shell
        if __name__ == "__main__":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            shell(this_host(), env={"SHELL": "/bin/sh", "PS1": "<> "})
    """)
    pid = int(terminal.run("sh -c 'echo PID $$; exec sleep 1000'", "PID (\\d+)")[1])
    os.close(terminal.master)
    try:
        wait_until_gone(pid)
        assert terminal.program.wait(LIMIT_S) is not None
    finally:
        terminal.master = os.open(os.devnull, os.O_RDONLY)
