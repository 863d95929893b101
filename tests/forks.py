"""Forks of the process that runs the tests."""

from __future__ import annotations

import os
import signal

LIMIT_S = 30


def fork() -> int:
    """As `os.fork`. A child that does not end is killed: it would keep the pipes of the test runner open, for ever."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
    return pid
