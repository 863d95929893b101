"""Failures that nobody handled, and how they end the program: see `Faults`."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

from monarch.core import held
from monarch.core.future import Future
from monarch.core.uncaught import shown_with, uncaught
from monarch.errors import MonarchError, SupervisionError
from monarch.supervision.failure import MeshFailure

_INTERRUPT_S = 2.0
_HANDLER_S = 0.05, 1.0
"""How long a handler of the error that a call met may take to begin, and to end, before the program is interrupted."""

_ADVICE = """\
The program ends over this. To go on after a failure of what the main program has spawned, assign a function to
monarch.actor.unhandled_fault_hook; to catch the SupervisionError of a call is not enough. For what an actor has
spawned, it is its __supervise__ that returns True."""

_ADVICE_IN_SHORT = "to go on after one, assign a function to monarch.actor.unhandled_fault_hook"

_leaving = False


class Faults:
    """Failures that nobody handled: each goes to `monarch.actor.unhandled_fault_hook`, on a thread of its own.

    Where the hook raises (the default one does), the program ends: KeyboardInterrupt in the main thread, atexit
    functions, status 1. Once. Where a call of the main thread has met the same, its error comes before the
    KeyboardInterrupt, and its handler has a moment.

    A person reads of the failure once: in the traceback of the main thread, where an error that tells of it leaves the
    script, and in a report on stderr elsewhere.
    """

    def __init__(self) -> None:
        self.fatal = threading.Event()  # the hook has raised: once is enough
        self._at_end = threading.Event()  # the program ends by itself, in any case
        self._untold: tuple[MeshFailure, str] | None = None  # what the program ends over, and what the hook raised
        self._shows = sys.__excepthook__  # what leaves the script; another may show it to nobody here
        self._queue: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, failure: MeshFailure) -> None:
        self._queue.put(failure)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-faults", daemon=True)
                self._thread.start()

    def told(self) -> bool:
        """Whether the program ends over a failure, of which people read in any case."""
        return self.fatal.is_set() or any(isinstance(each, SupervisionError) for each in uncaught())

    def take_over(self) -> None:
        """The main thread has come to the end of the program: from here on, it is the one that tells."""
        self._at_end.set()

    def end_program_if_due(self) -> None:
        """The program is at its end in spite of the KeyboardInterrupt, or before it: its status tells the truth."""
        if self.fatal.is_set() and not _leaving:
            self._tell(next(uncaught(), None) if self._shows is sys.__excepthook__ else None)
            end_with_1()

    def take_last(self, failures: Sequence[MeshFailure]) -> None:
        """Those of a program that ends anyway, on the thread that ends it."""
        for failure in failures:
            self._unhandled(failure)

    def _run(self) -> None:
        while True:
            if self._unhandled(self._queue.get()):
                self._end_program()

    def _unhandled(self, failure: MeshFailure) -> bool:
        """Whether the hook raises, for the first time."""
        if self.fatal.is_set():
            return False
        hook: Callable[[MeshFailure], object] = sys.modules["monarch.actor"].unhandled_fault_hook
        try:
            hook(failure)
        except BaseException as error:
            because = "" if isinstance(error, SystemExit) else f"\nunhandled_fault_hook raised {error!r}"
            self._untold = failure, because
            held.interrupted_because = f"{failure.member}: {failure.down}"
            self._shows, sys.excepthook = sys.excepthook, self._leave_over
            self.fatal.set()
            return True
        return False

    def _tell(self, error: BaseException | None, shown: str = "") -> None:
        """Write the report, unless that is done. In one piece: others write to the same terminal.

        Args:
            error: it has left the script, if there is one; `shown` is what is still to be written of it.
        """
        with self._lock:
            untold, self._untold = self._untold, None
        if untold is not None:
            failure, because = untold
            now = datetime.now().isoformat(sep=" ", timespec="seconds")
            known = error is not None and _tells_of(error, failure)
            above = f"the failure of {failure.mesh_name}, above; {_ADVICE_IN_SHORT}"
            what = above if known else f"{failure.report()}{because}\n{_ADVICE}"
            host, pid = socket.gethostname(), os.getpid()
            shown += f"Unhandled monarch error on the root actor, hostname={host}, PID={pid} at time {now}: {what}\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed: the program ends all the same
            sys.stderr.write(shown)
            sys.stderr.flush()

    def _leave_over(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """`sys.excepthook` of a program that ends by a fault. An uncaught KeyboardInterrupt would end it by SIGINT, and
        would skip nothing on its way but the status: so run the rest of a normal end here, and leave with 1."""
        if isinstance(error, KeyboardInterrupt):
            self._tell(None)
        elif self._shows is sys.__excepthook__:
            self._tell(error, "".join(traceback.format_exception(kind, error, trace)))
        else:
            try:
                self._shows(kind, error, trace)
            except Exception:
                sys.__excepthook__(kind, error, trace)
            self._tell(None)
        leave_with_1()

    def _end_program(self) -> None:
        main = threading.main_thread().ident or 0
        self._let_handlers_end(main)
        if self._at_end.is_set():
            return
        self._tell(None)
        if callable(signal.getsignal(signal.SIGINT)):
            signal.pthread_kill(main, signal.SIGINT)
            _end_calls_of_the_system(main)
            return
        # Nobody handles SIGINT, as in a script that a shell runs in the background: raise it in the main thread, which
        # may be in a call of the system for ever.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(KeyboardInterrupt))
        time.sleep(_INTERRUPT_S)
        if not _leaving:
            leave_with_1()

    def _let_handlers_end(self, thread: int) -> None:
        """Wait, bounded, for a thread whose call has met a failure: until it has raised that, and dealt with it."""
        begin_s, limit_s = _HANDLER_S
        deadline_s = time.monotonic() + limit_s
        self._at_end.wait(begin_s)
        while _meets_a_failure(thread) and time.monotonic() < deadline_s and not self._at_end.wait(0.005):
            pass


def _tells_of(error: BaseException, failure: MeshFailure) -> bool:
    """Whether who has read `error` knows of `failure`: of the same mesh, or the same process."""
    found = [each.failure for each in shown_with(error) if isinstance(each, SupervisionError)]
    return any(
        isinstance(each, MeshFailure)
        and (each.mesh_name == failure.mesh_name or (each.pid, each.host) == (failure.pid, failure.host))
        for each in found
    )


def _meets_a_failure(thread: int) -> bool:
    """Whether it handles an error of ours now, or waits for a call that has its answer, and is about to raise that, or
    Python shows an error of ours that has left the script."""
    handled: Any = sys._current_exceptions().get(thread)
    if isinstance(handled[1] if isinstance(handled, tuple) else handled, MonarchError):
        return True
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is Future.get.__code__:
            return bool(frame.f_locals["self"].done())
        frame = frame.f_back
    return any(isinstance(each, MonarchError) for each in uncaught())


def _end_calls_of_the_system(thread: int) -> None:
    """A SIGINT that comes just before the main thread begins a `time.sleep` does not end it: Python looks at signals
    only when a call is interrupted. So interrupt it, by a signal that does nothing else."""
    if signal.getsignal(signal.SIGURG) is not signal.SIG_DFL:
        return  # the program has its own use for it
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGURG, ctypes.cast(libc.getppid, ctypes.c_void_p))  # any function without effect
    libc.siginterrupt(signal.SIGURG, 1)
    for pause_s in (0.02, 0.2, 1.0):
        time.sleep(pause_s)
        signal.pthread_kill(thread, signal.SIGURG)


class _Last:
    """Goes when the interpreter takes `sys` down: after all exit functions, each of which has run once."""

    def __del__(self, leave: Callable[[int], object] = os._exit) -> None:
        leave(1)


def end_with_1() -> None:
    """Have the interpreter end with status 1, once it has come to its end. Once: another would end it at once."""
    sys._monarch_last = _Last()  # type: ignore[attr-defined]


def leave_with_1() -> None:
    global _leaving
    _leaving = True
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def was_interrupted() -> bool:
    """Whether a KeyboardInterrupt has left the script. (At a prompt, it may have left any statement.)"""
    return getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1")


def end_as_interrupted() -> None:
    """Have the interpreter end by SIGINT, once it has come to its end. It does where the last code that was run as a
    script, or from a string, was left by a KeyboardInterrupt, and imports at the exit run such code, too."""
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
