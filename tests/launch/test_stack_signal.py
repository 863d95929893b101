"""Stacks by the reserved signal: the interpreter is held, and no thread of the process can answer."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from monarch.launch import linux, stack_signal
from monarch.launch.stack_signal import Silence
from tests.until import until

PROGRAM = """
import ctypes, re, sys, threading, time

def hold(seconds):
    if "compute" in sys.argv:
        re.match(r"(a+)+$", "a" * 60 + "b")  # does not end
    return ctypes.PyDLL(None).sleep(seconds)  # PyDLL keeps the interpreter lock

side = threading.Thread(target=threading.Event().wait, daemon=True, name="side")
side.start()
if "deaf" not in sys.argv:
    from monarch.launch import stack_signal
    stack_signal.answer(side)
    stack_signal.name_thread("the actor")
print("ready", flush=True)
print(hold(int(sys.argv[1])), flush=True)
"""


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def stacks_of(pid: int) -> tuple[stack_signal.Stack, ...]:
    found = stack_signal.ask({pid: always}, 10.0)[pid]
    assert not isinstance(found, Silence), found
    return found


def always() -> bool:
    return True


def wait_until_held(pid: int) -> None:
    """The program has said that it is about to; its main thread then sleeps in the kernel."""
    until(lambda: any(frame.function == "hold" for stack in stacks_of(pid) for frame in stack.frames))


@pytest.mark.slow
def test_a_held_interpreter_shows_its_stacks_by_name():
    with program("600") as process:
        wait_until_held(process.pid)
        stacks = {stack.name: [frame.function for frame in stack.frames] for stack in stacks_of(process.pid)}

    assert stacks["the actor"] == ["<module>", "hold"]
    assert stacks["side"][-1] == "wait"


@pytest.mark.slow
def test_native_code_that_computes_is_told_from_python_that_runs():
    with program("600", "compute") as process:
        wait_until_held(process.pid)


@pytest.mark.slow
def test_asking_interrupts_no_call():
    with program("4") as process:
        for _ in range(2):
            stacks_of(process.pid)
        assert process.stdout is not None
        left_s = process.stdout.readline()

    assert left_s == "0\n"  # of the 4 seconds: sleep(4) says what a signal has cut off


@pytest.mark.slow
def test_asking_leaves_no_dump_behind():
    with program("600") as process:
        wait_until_held(process.pid)
        sizes = set()
        for _ in range(3):
            stacks_of(process.pid)
            sizes |= {os.stat(f"/proc/{process.pid}/fd/{fd}").st_size for fd in memory_files(process.pid)}

    assert len(sizes) == 1


def memory_files(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    return [fd for fd in os.listdir(folder) if "monarch-stacks" in os.readlink(f"{folder}/{fd}")]


def test_once_there_is_no_room_for_a_name_threads_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with mmap.mmap(-1, 100) as names:
        monkeypatch.setattr(stack_signal, "_names", names)
        for name in ("one", "2" * 100, "three\n"):
            stack_signal.name_thread(name)
        written = names[:].rstrip(b"\0").decode().splitlines()

    assert [line.split(" ", 1)[1] for line in written] == ["one"]


def test_a_process_that_has_no_memory_for_names_leaves_no_file_that_asks_for_the_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files: list[int] = []

    def refuse(file: int, *_: object) -> None:
        files.append(file)
        raise OSError("no memory")

    monkeypatch.setattr(stack_signal, "_file", None)
    monkeypatch.setattr(mmap, "mmap", refuse)
    stack_signal.answer(threading.main_thread())
    assert stack_signal._file is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(files[0])


@pytest.mark.slow
def test_a_process_without_the_handler_gets_no_signal():
    with program("600", "deaf") as process:
        found = stack_signal.ask({process.pid: always}, 10.0)[process.pid]

    assert isinstance(found, Silence)
    assert "it has no handler for stacks" in found.reason


@pytest.mark.slow
def test_a_stopped_process_says_so_and_shows_its_stacks_later():
    with program("600") as process:
        process.send_signal(signal.SIGSTOP)
        until(lambda: linux.kernel_state(process.pid) == "T")
        silent = stack_signal.ask({process.pid: always}, 2.0)[process.pid]
        process.send_signal(signal.SIGCONT)
        stacks = stacks_of(process.pid)

    assert isinstance(silent, Silence)
    assert "stopped" in silent.reason
    assert stacks


@pytest.mark.slow
def test_a_process_that_answers_meanwhile_gets_no_signal():
    with program("600") as process:
        found = stack_signal.ask({process.pid: lambda: False}, 10.0)[process.pid]

    assert found == Silence("it answers again")


@pytest.mark.parametrize(
    ("ran_s", "elapsed_s", "is_held"),
    [
        ({1: 0.0, 2: 0.0}, 0.3, True),  # all asleep
        ({1: 0.0, 2: 0.001}, 0.3, True),  # but for one that waits for the interpreter
        ({1: 0.3, 2: 0.001}, 0.3, False),  # too short to tell
        ({1: 0.1, 2: 0.001}, 2.0, False),  # it does not get the processor
        ({1: 0.4, 2: 0.001}, 0.5, True),  # 80 turns, and nobody else had one
        ({1: 0.2, 2: 0.2, 3: 0.2}, 0.6, False),  # threads take turns
        ({1: 2.0, 2: 2.0, 3: 2.0}, 0.7, False),  # on several processors: at most one of them is in Python
        ({1: 2.0, 2: 2.0, 3: 2.0}, 2.0, True),
    ],
)
def test_whether_an_interpreter_is_held(monkeypatch, ran_s, elapsed_s, is_held):
    moments = iter([dict.fromkeys(ran_s, 5.0), {tid: 5.0 + each_s for tid, each_s in ran_s.items()}])
    clock = iter([100.0, 100.0 + elapsed_s])
    monkeypatch.setattr(linux, "run_times_s", lambda pid: next(moments))
    monkeypatch.setattr(stack_signal.time, "monotonic", lambda: next(clock))

    assert stack_signal._Suspect(1).is_held() is is_held


@pytest.mark.slow
def test_a_process_that_has_ended_is_no_error():
    with program("0") as process:
        process.wait(10)

    found = stack_signal.ask({process.pid: always}, 1.0)[process.pid]

    assert found == Silence("the process has ended")
