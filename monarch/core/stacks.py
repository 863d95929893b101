"""Python stacks as values: of the threads of this process, of coroutines that wait, and of what faulthandler wrote.

Frames are in the order of a traceback, the most recent call last. Whoever shows them looks up the source lines, so that
taking them touches no file.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, Final

from attrs import define, evolve

_OURS: Final = str(Path(__file__).parents[1]) + os.sep
_EXAMPLES: Final = _OURS + "examples" + os.sep
_STARTS: Final = (f"{_OURS}launch{os.sep}template.py", f"{_OURS}launch{os.sep}bootstrap.py")
_PYTHON: Final = str(Path(threading.__file__).parent) + os.sep
_DEBUGGER: Final = (
    *(f"{_PYTHON}{name}.py" for name in ("bdb", "pdb")),
    *(f"{_OURS}mesh{os.sep}{name}.py" for name in ("breakpoints", "remote_pdb")),
)
_SITE: Final = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)

_THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[([^\]]*)\])? \(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class Owner(StrEnum):
    """Whose code a frame runs."""

    USER = "user"
    LIBRARY = "monarch"
    PYTHON = "python"


@define(frozen=True)
class Frame:
    """`owner` is found where the stack is taken: whoever shows it may have this library at another place."""

    file: str
    line: int
    function: str
    owner: Owner


@functools.cache
def owner_of(file: str) -> Owner:
    if file.startswith(_OURS) and not file.startswith(_EXAMPLES):
        return Owner.LIBRARY
    if file.startswith("<frozen ") or (file.startswith(_PYTHON) and not any(part in file for part in _SITE)):
        return Owner.PYTHON
    return Owner.USER


def owned(calls: Sequence[tuple[str, int, str]]) -> tuple[Frame, ...]:
    """Frames of (file, line, function), the outermost first."""
    frames = [Frame(file, line, function, owner_of(file)) for file, line, function in calls]
    # What a process is started with by `python -c` is ours, and has a file name that users' code may have too.
    if len(frames) > 1 and frames[0].file == "<string>" and frames[1].file in _STARTS:
        frames[0] = evolve(frames[0], owner=Owner.LIBRARY)
    return tuple(frames)


@define(frozen=True)
class Stack:
    """What a thread executes, or a task waits for.

    Attributes:
        name: of the thread or the task.
        waits: it is a task, suspended at an `await`.
    """

    name: str
    frames: tuple[Frame, ...]
    waits: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether no code of the user's runs: a thread that waits for messages, or for work."""
        return not any(frame.owner is Owner.USER for frame in self.frames)


def frames_of(frame: FrameType | None) -> tuple[Frame, ...]:
    """The frames from the outermost caller up to `frame`."""
    found = []
    while frame is not None:
        found.append(_call(frame))
        frame = frame.f_back
    return owned(found[::-1])


def frames_of_waiting(coro: Any) -> tuple[Frame, ...]:
    """The frames of a suspended coroutine, and of those that it awaits, up to what is no Python any more."""
    found = []
    while (suspended := _suspended(coro)) is not None:
        frame, coro = suspended
        found.append(_call(frame))
    return owned(found)


_KINDS: Final = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))


def _suspended(awaited: Any) -> tuple[FrameType, Any] | None:
    """The frame behind what is awaited, and what that awaits in turn."""
    # One step of an async generator, and what `__await__` gives, have no attribute for it, but refer to it.
    for each in (awaited, *gc.get_referents(awaited)):
        for frame, further in _KINDS:
            if getattr(each, frame, None) is not None:
                return getattr(each, frame), getattr(each, further)
    return None


def _call(frame: FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name


def running_threads() -> dict[int, Stack]:
    """The stacks of this process's threads, by identity."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        ident: Stack(names.get(ident, f"thread {ident:#x}"), frames_of(frame))
        for ident, frame in sys._current_frames().items()
    }


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> Iterator[Stack]:
    """The tasks of a loop, of whatever thread, that are suspended at an `await`."""
    for task in asyncio.all_tasks(loop):
        coro = task.get_coro()
        if not getattr(coro, "cr_running", False):
            frames = frames_of_waiting(coro)
            if frames:
                yield Stack(task.get_name(), frames, waits=True)


def parse_dump(text: str) -> tuple[Stack, ...]:
    """What faulthandler writes for all threads, as stacks. Their names are their identities, in hexadecimal digits,
    where it knows none: before Python 3.14."""
    found: list[Stack] = []
    head: str | None = None
    calls: list[tuple[str, int, str]] = []

    def finish() -> None:
        if head is not None:
            found.append(Stack(head, owned(calls[::-1])))

    for line in text.splitlines():
        if thread := _THREAD.fullmatch(line):
            finish()
            head, calls = thread[2] or f"0x{thread[1].lstrip('0')}", []
        elif frame := _FRAME.fullmatch(line):
            calls.append((frame[1], int(frame[2]) if frame[2].isdecimal() else 0, frame[3]))
    finish()
    return tuple(found)


@define(frozen=True)
class Shown:
    """A frame, or a run of frames of the library and of Python that tells a reader little.

    Attributes:
        frame: to be shown; None for a run that is left out.
        inside: how many more frames, below it, are left out.
    """

    frame: Frame | None
    inside: int = 0


def condensed(frames: Sequence[Frame]) -> list[Shown]:
    """`frames` for a reader: what is before the first frame of the user's is left out; of a run of the library's own
    in between or at the end, the first is kept, which says what was asked of it, but of a debugger's nothing: the
    program stands where it was called."""
    first = next((at for at, frame in enumerate(frames) if frame.owner is Owner.USER), len(frames))
    shown = [Shown(None, first)] if first else []
    at = first
    while at < len(frames):
        end = at + 1
        debugs = frames[at].file in _DEBUGGER
        if debugs or frames[at].owner is Owner.LIBRARY:
            while end < len(frames) and frames[end].owner is not Owner.USER:
                end += 1
        shown.append(Shown(None, end - at) if debugs else Shown(frames[at], end - at - 1))
        at = end
    return shown
