"""Why a process does not come up, in its own words, for whoever had it launched and can hear nothing else of it.

A forked process has a pipe for that from its template, which tells its last words when it ends, whatever ends it. Once
it is up it has none: then others speak of its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Final

_MOST: Final = 500  # characters, so that each arrives in one piece
_lock: Final = threading.Lock()
_pipe = -1
_said = ""


def write(pipe: int, text: str) -> None:
    """Say it of this process; "" takes back what was said. It does not block: what nobody reads is lost."""
    with contextlib.suppress(OSError):
        os.write(pipe, json.dumps([os.getpid(), text[:_MOST]]).encode() + b"\n")


def keep(pipe: int) -> None:
    """Have `pipe` for `say`, until `up`."""
    global _pipe
    _pipe = pipe


def say(text: str) -> bool:
    """False: there is nobody to say it to."""
    global _said
    with _lock:
        if _pipe >= 0 and text != _said:
            write(_pipe, text)
            _said = text
        return _pipe >= 0


def up() -> None:
    """The process is up, and needs no excuse."""
    global _pipe
    with _lock:
        if _pipe >= 0:
            if _said:
                write(_pipe, "")
            os.close(_pipe)
            _pipe = -1
