"""Whether a process still is the program that it was made to be, and not another since an `exec`.

The process locks a byte of a file, the one with the number of its pid. The kernel gives such a lock back when the
descriptor is closed, as an `exec` does with those that are not inheritable, and a fork does not inherit it. A process
that a command starts claims once it is the interpreter that was wanted, whatever wrappers that command has.
"""

from __future__ import annotations

import fcntl
import os


def claim(fd: int) -> None:
    """This process is what it should be, for as long as it keeps `fd`, which nothing else in it may open and close."""
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, os.getpid())


def is_claimed(fd: int, pid: int) -> bool:
    """Whether another process, of that pid, still is what it should be."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, pid)
    except OSError:
        return True
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, pid)
    return False
