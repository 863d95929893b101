"""Thread counts that libraries read from the environment at their import, which for a fork was in the template.

The template imports with one thread, since a fork copies no others. OpenBLAS starts threads when it is told of another
number, and new threads spin for a while: 115 ms of CPU for each process, measured with 2 CPUs. So they are ended at
once, and OpenBLAS starts them again at its first product of matrices. It has a function that ends them, which newer
builds (that of numpy 2.5) hide; all of them end their threads before a fork. The template tells it the number that most
children want; a child has something to tell only where its environment is another.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from monarch.launch import linux

NAMES: Final = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}

ONE: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""In the environment when they are imported: else numpy starts threads, and forks would be unsafe."""


class LibraryThreads:
    """Of the libraries that are imported when it is made. For a main thread, with no other thread."""

    def __init__(self) -> None:
        self._omp = os.environ.get("OMP_NUM_THREADS")
        self._openblas = _openblas()
        self._told = 1
        self.apply(os.environ)

    def apply(self, env: Mapping[str, str]) -> None:
        """What a process with this environment would have read. For forks where one of `NAMES` is another."""
        omp = env.get("OMP_NUM_THREADS")
        self._tell(_count(env.get("OPENBLAS_NUM_THREADS") or omp))
        if "torch" in sys.modules and omp != self._omp and omp and omp.isdecimal():
            sys.modules["torch"].set_num_threads(int(omp))

    def _tell(self, count: int) -> None:
        if count != self._told:
            for set_threads, end_threads in self._openblas:
                set_threads(count)
                end_threads()
        self._told = count


def _count(text: str | None) -> int:
    """From the variable, or one for each CPU."""
    cpus = len(os.sched_getaffinity(0)) if linux.LINUX else 1
    return int(text) if text and text.isdecimal() and int(text) else cpus


def _openblas() -> list[tuple[Callable[[int], Any], Callable[[], Any]]]:
    """How to set the number of threads and how to end them, for each copy in memory: numpy and scipy bring one each."""
    found: list[tuple[Callable[[int], Any], Callable[[], Any]]] = []
    with contextlib.suppress(OSError):
        words = Path("/proc/self/maps").read_text().split()
        for path in {word for word in words if word.startswith("/") and "openblas" in word}:
            library = ctypes.CDLL(path)
            end_threads = getattr(library, "blas_thread_shutdown_", _end_by_fork)
            for name in ("openblas_set_num_threads", "openblas_set_num_threads64_"):
                set_threads = getattr(library, name, None) or getattr(library, f"scipy_{name}", None)
                if set_threads is not None:
                    found.append((set_threads, end_threads))
    return found


def _end_by_fork() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
