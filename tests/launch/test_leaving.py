"""What happens at the end of a forked process, and what does not."""

from __future__ import annotations

import os
import sys
import weakref

from monarch.launch.leaving import disown_finalizers, run_and_leave


class Thing:
    pass


def test_a_fork_finalizes_its_own_things_only() -> None:
    theirs, own = Thing(), Thing()
    before = {each for each in list(weakref.finalize._registry) if each.atexit}  # type: ignore[attr-defined]
    inherited = weakref.finalize(theirs, os.write, 2, b"")
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        weakref.finalize(theirs, os.write, write, b"inherited ")
        disown_finalizers()
        run_and_leave(lambda: weakref.finalize(own, os.write, write, b"own ") and None, set(sys.modules))
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    _, status = os.waitpid(pid, 0)

    assert (said, status) == ("own ", 0)
    assert inherited.atexit and all(each.atexit for each in before)  # of this process, nothing was changed
