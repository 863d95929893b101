"""The stacks of a process whose interpreter is held: native code keeps the interpreter lock, and no thread can answer.

Every process that takes part registers faulthandler's handler for a reserved signal (`answer`). The handler runs no
Python: it writes the stacks of up to 100 threads, with up to 100 frames of each, into an unnamed file in memory, which
belongs to the process and ends with it. Whoever asks (`ask`) has the same user, so that the kernel lets it open that
file in /proc; no ptrace is needed.

Threads that run meanwhile change the frames that the handler reads: one that runs Python can be crashed by it. So a
process is sent the signal only when it is silent, and the kernel shows that its interpreter is held (`_Suspect`).

The file's name says all that an asker must know: the signal, and the thread to send it to. That is a thread which runs
no user code: no call of the user's is interrupted. A process without such a file is never sent a signal.

The file begins with the names of threads, a line each, because the handler knows none: the process writes them as into
memory. An asker reads what the handler has written behind the room for them, and cuts it off again.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from attrs import define, evolve

from monarch.core import settings
from monarch.core.stacks import Stack, parse_dump
from monarch.launch import linux
from monarch.log import get_logger

log = get_logger("monarch.stacks")

_FILE: Final = re.compile(r"/memfd:monarch-stacks-(\d+)-(\d+) \(deleted\)")
_NAMES_BYTES: Final = 1 << 20  # room for names; only what is written takes memory. Later threads stay without one
_LOOK_AGAIN_S: Final = 0.005
_WINDOW_S: Final = 0.3
_ASLEEP: Final = 0.02  # a thread that waits for the interpreter wakes up every 5 ms, for some 10 us
_TURN_S: Final = 0.005  # Source: sys.getswitchinterval(), the default

_file: int | None = None
_names: mmap.mmap | None = None
"""The names in it: to write with a call of the system lets go of the interpreter, each time, 20 of the 300 us that an
actor takes where a thousand start."""


def answer(thread: threading.Thread) -> None:
    """Answer askers from now on, once per process, unless the setting forbids it or the signal has a handler of the
    user's. `thread` is the one that gets the signal."""
    import faulthandler

    global _file, _names
    name = settings.get("stack_signal")
    if _file is not None or name == "none":
        return
    signum = int(getattr(signal, name))
    if signal.getsignal(signum) not in (signal.SIG_DFL, signal.SIG_IGN):
        log.info("stacks.signal_taken", signal=name)
        return
    file = None
    try:
        file = os.memfd_create(f"monarch-stacks-{signum}-{thread.native_id}")
        os.ftruncate(file, _NAMES_BYTES)
        _names = mmap.mmap(file, _NAMES_BYTES)
    except (AttributeError, OSError) as error:
        if file is not None:
            os.close(file)  # who finds it sends the signal, which would end this process
        log.info("stacks.unavailable", reason=str(error))
        return
    _file = file
    fcntl.fcntl(_file, fcntl.F_SETFL, os.O_APPEND)
    for each in threading.enumerate():
        _name(each.ident or 0, each.name)
    faulthandler.register(signum, file=_file, all_threads=True, chain=False)


def name_thread(name: str) -> None:
    """Say whose the calling thread is, for the dumps of this process."""
    _name(threading.get_ident(), name)


def _name(ident: int, name: str) -> None:
    global _names
    if _names is not None:
        try:
            _names.write(f"{ident:#x} {' '.join(name.split())}\n".encode())  # does not let go of the interpreter
        except ValueError:
            _names = None  # it is full


@define(frozen=True)
class Silence:
    """Why a process gave no stacks."""

    reason: str


def ask(silent: Mapping[int, Callable[[], bool]], limit_s: float) -> dict[int, tuple[Stack, ...] | Silence]:
    """The stacks of processes of this user and machine that have not answered a question which is still open. All are
    asked at once; blocks up to `limit_s`.

    Args:
        silent: by pid, whether it has still not answered; looked at just before the signal.
    """
    deadline_s = time.monotonic() + limit_s
    asked: dict[int, _Question | Silence] = {}
    suspects: dict[int, _Suspect] = {}
    for pid in silent:
        try:
            suspects[pid] = _Suspect(pid)
        except OSError as error:
            asked[pid] = Silence(_explain(pid, error))
    while suspects:
        time.sleep(_WINDOW_S)
        over = time.monotonic() >= deadline_s - _WINDOW_S
        for pid, suspect in list(suspects.items()):
            try:
                if suspect.is_held():
                    asked[pid] = _Question.put(pid) if silent[pid]() else Silence("it answers again")
                elif over:
                    asked[pid] = Silence("it may be running Python, and then the signal could crash it; ask again")
                else:
                    continue
            except OSError as error:
                asked[pid] = Silence(_explain(pid, error))
            del suspects[pid]
    found: dict[int, tuple[Stack, ...] | Silence] = {}
    for pid, question in asked.items():
        if isinstance(question, Silence):
            found[pid] = question
            continue
        try:
            found[pid] = question.wait(deadline_s)
        except OSError as error:
            found[pid] = Silence(_explain(pid, error))
        finally:
            question.close()
    return found


def _explain(pid: int, error: OSError) -> str:
    if not os.path.exists(f"/proc/{pid}"):
        return "the process has ended"
    return f"it cannot be asked: {error.strerror or error}"


class _Suspect:
    """A silent process: is its interpreter held?

    Python gives the interpreter to another thread every 5 ms, where one waits for it. So a process whose threads have
    run, k of them, for 40 (k + 1) such turns since, and which has not answered, does not give it away: to answer takes
    some ten turns. One in which no thread runs is asleep in native code, with the interpreter or without it. Any
    other does not get the processor.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since_s = time.monotonic()
        self._before_s = linux.run_times_s(pid)

    def is_held(self) -> bool:
        """Raises: OSError, when it has ended."""
        elapsed_s = time.monotonic() - self._since_s
        ran_s = [now_s - self._before_s.get(tid, 0.0) for tid, now_s in linux.run_times_s(self._pid).items()]
        running = sum(each_s > _ASLEEP * elapsed_s for each_s in ran_s)
        return not running or min(sum(ran_s), elapsed_s) >= 40 * (running + 1) * _TURN_S


@define(eq=False)
class _Question:
    """A dump that was asked for and may not be complete."""

    _pid: int
    _tid: int
    _signum: int
    _file: int
    _start: int  # where the dump begins in the file

    @classmethod
    def put(cls, pid: int) -> _Question:
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            try:
                match = _FILE.fullmatch(os.readlink(path))
            except FileNotFoundError:
                continue
            if match is not None:
                return cls._put(pid, int(match[2]), int(match[1]), os.open(path, os.O_RDWR | os.O_CLOEXEC))
        raise OSError(errno.ENOTSUP, "it has no handler for stacks (a setting, or it has only just started)")

    @classmethod
    def _put(cls, pid: int, tid: int, signum: int, file: int) -> _Question:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            start = os.fstat(file).st_size
            if not linux.signal_thread(pid, tid, signum):
                tid = pid
                linux.signal_thread(pid, tid, signum)
            return cls(pid, tid, signum, file, start)
        except BlockingIOError:
            os.close(file)
            raise OSError(errno.EBUSY, "somebody else is asking it") from None
        except BaseException:
            os.close(file)
            raise

    def wait(self, deadline_s: float) -> tuple[Stack, ...] | Silence:
        """The dump, when the kernel says that the handler has come and gone."""
        quiet = 0  # between a signal's arrival and its handler's start there is a moment that shows neither
        while quiet < 2:
            over = not linux.handles_signal(self._pid, self._tid, self._signum)
            quiet = quiet + 1 if over and os.fstat(self._file).st_size > self._start else 0
            if time.monotonic() >= deadline_s:
                stopped = linux.kernel_state(self._pid) in ("T", "t")
                return Silence("it is stopped (SIGCONT lets it go on)" if stopped else "it did not react to the signal")
            time.sleep(_LOOK_AGAIN_S)
        names = self._read(0, _NAMES_BYTES).partition("\0")[0]
        dump = self._read(self._start, os.fstat(self._file).st_size)
        os.ftruncate(self._file, self._start)
        known = {ident: name for ident, _, name in (line.partition(" ") for line in names.splitlines())}
        return tuple(evolve(stack, name=known.get(stack.name, stack.name)) for stack in parse_dump(dump))

    def _read(self, start: int, end: int) -> str:
        return os.pread(self._file, end - start, start).decode(errors="replace")

    def close(self) -> None:
        """Let others ask."""
        os.close(self._file)
