"""The end of a forked process: what a user may rely on of an interpreter's end, without taking the template apart.

A full finalization visits every object that the process shares with its template, and so copies nearly all of its
memory first: 22 ms, most of the time that a small process takes to stop. What it would destroy there is nobody's. So
`run_and_leave` runs the exit handlers, lets go of the user's modules that were imported since the fork (their globals'
`__del__` run), flushes, and exits: 3 ms.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

_STDLIB = os.path.join(os.path.dirname(os.__file__), "")


def disown_finalizers() -> None:
    """What this process has made is not finalized at the exit of its forks. torch has hundreds: 45 ms for each."""
    registry: dict[object, object] = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        finalizer.atexit = False  # type: ignore[attr-defined]


def run_and_leave(run: Callable[[], None], newest: str) -> NoReturn:
    """Call `run` on the main thread, and end the process as Python does after a script.

    Args:
        newest: name of the module that was imported last before the fork.
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
    _let_go_of_modules(newest)
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


def _let_go_of_modules(newest: str) -> None:
    """As the interpreter would, but for installed libraries, which are many objects and whose ends nobody looks at
    (150 ms for torch): drop the others, and clear in reverse order those that something still holds."""
    left: list[weakref.ref[ModuleType]] = []
    since = list(itertools.takewhile(newest.__ne__, reversed(sys.modules)))  # a look at the others copies 70 pages
    for name in reversed(since):
        module = sys.modules[name]
        if isinstance(module, ModuleType) and not _is_installed(module):
            del sys.modules[name]
            left.append(weakref.ref(module))
        del module
    if left:
        gc.collect()
    held = [found for ref in reversed(left) if (found := ref()) is not None]
    for module in held:
        names = vars(module)
        for first in (True, False):  # private names before the others
            for name in list(names):
                if name != "__builtins__" and first == (name.startswith("_") and not name.startswith("__")):
                    names[name] = None
    if held:
        gc.collect()


def _is_installed(module: ModuleType) -> bool:
    """Whether it came with the interpreter or with a package manager, or was never in a file."""
    spec = getattr(module, "__spec__", None)
    file = spec.origin if isinstance(spec, ModuleSpec) and spec.has_location else None
    return file is None or file.startswith(_STDLIB) or "-packages" + os.sep in file
