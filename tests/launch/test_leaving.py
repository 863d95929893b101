"""What happens at the end of a forked process, and what does not."""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from pathlib import Path

import pytest

from monarch.launch.leaving import disown_finalizers, run_and_leave
from tests.forks import fork


class Thing:
    pass


def test_a_fork_finalizes_its_own_things_only() -> None:
    theirs, own = Thing(), Thing()
    before = {each for each in list(weakref.finalize._registry) if each.atexit}  # type: ignore[attr-defined]
    inherited = weakref.finalize(theirs, os.write, 2, b"")
    read, write = os.pipe()
    pid = fork()
    if not pid:
        weakref.finalize(theirs, os.write, write, b"inherited ")
        disown_finalizers()
        run_and_leave(lambda: weakref.finalize(own, os.write, write, b"own ") and None, next(reversed(sys.modules)))
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    _, status = os.waitpid(pid, 0)

    assert (said, status) == ("own ", 0)
    assert inherited.atexit and all(each.atexit for each in before)  # of this process, nothing was changed


LAST_WORDS = """
import os

class Thing:
    def __init__(self, name):
        self.name = name
    def __del__(self, write=os.write):
        write({fd}, self.name)

plain, _cyclic = Thing(b"plain "), Thing(b"cyclic ")
_cyclic.itself = _cyclic
"""


@pytest.mark.parametrize(
    ("folder", "held", "expected"),
    [
        (".", False, {"plain", "cyclic"}),
        (".", True, {"plain", "cyclic"}),
        ("site-packages", False, set()),
    ],
)
def test_the_globals_of_the_users_modules_are_let_go(
    tmp_path: Path, folder: str, held: bool, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    place = tmp_path / folder
    place.mkdir(exist_ok=True)
    (place / "last_words.py").write_text(LAST_WORDS.format(fd=write))
    monkeypatch.syspath_prepend(str(place))
    newest = next(reversed(sys.modules))
    pid = fork()
    if not pid:
        holders: list[object] = []

        def run() -> None:
            module = importlib.import_module("last_words")
            if held:
                holders.append(module)

        run_and_leave(run, newest)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read().split()
    _, status = os.waitpid(pid, 0)

    assert (sorted(said), status) == (sorted(expected), 0)
