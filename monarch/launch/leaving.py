"""The end of a forked process: what a user may rely on of an interpreter's end, without taking the template apart.

A full finalization visits every object that the process shares with its template, and so copies nearly all of its
memory first: 22 ms, most of the time that a small process takes to stop. What it would destroy there is nobody's. So
`run_and_leave` runs the exit handlers, lets go of the modules that were imported since the fork (their globals'
`__del__` run), flushes, and exits: 3 ms.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from types import ModuleType
from typing import NoReturn


def disown_finalizers() -> None:
    """What this process has made is not finalized at the exit of its forks. torch has hundreds: 45 ms for each."""
    registry: dict[object, object] = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        finalizer.atexit = False  # type: ignore[attr-defined]


def run_and_leave(run: Callable[[], None], kept: Collection[str]) -> NoReturn:
    """Call `run` on the main thread, and end the process as Python does after a script.

    Args:
        kept: names of the modules that were there before the fork.
    """
    status = 0
    try:
        run()
    except SystemExit as end:
        status = _status_of(end)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # joins the threads that are not daemons
    atexit._run_exitfuncs()
    sys.setswitchinterval(1000.0)  # daemon threads shall not see their modules go
    _let_go_of_modules(kept)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            status = status or 120  # as Python does
    ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _status_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _let_go_of_modules(kept: Collection[str]) -> None:
    """As the interpreter would: drop them, and clear in reverse order those that something still holds."""
    left: list[weakref.ref[ModuleType]] = []
    for name in [name for name in sys.modules if name not in kept]:
        module = sys.modules.pop(name)
        if isinstance(module, ModuleType) and type(module).__weakrefoffset__:  # native ones may have no room for one
            left.append(weakref.ref(module))
        del module
    gc.collect()
    for ref in reversed(left):
        found = ref()
        if found is None:
            continue
        names = vars(found)
        for first in (True, False):  # private names before the others
            for name in list(names):
                if name != "__builtins__" and first == (name.startswith("_") and not name.startswith("__")):
                    names[name] = None
    gc.collect()
