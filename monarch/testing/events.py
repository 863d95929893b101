"""Waiting for what happens, by events and with a limit: no test has to sleep."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LIMIT_S = 10.0
"""How long the waits of this package take at most, unless told otherwise."""


class Recorder(Generic[T]):
    """Values in the order in which any thread recorded them. Call it to record, so that it serves as a hook."""

    def __init__(self) -> None:
        self._values: list[T] = []
        self._changed = threading.Condition()

    def __call__(self, value: T) -> None:
        with self._changed:
            self._values.append(value)
            self._changed.notify_all()

    @property
    def values(self) -> list[T]:
        """A copy of what there is now."""
        with self._changed:
            return list(self._values)

    def wait(self, count: int = 1, timeout_s: float = LIMIT_S) -> list[T]:
        """The values, once there are `count` or more.

        Raises:
            TimeoutError: there were not within `timeout_s`; says which there are.
        """
        return self.wait_for(lambda values: len(values) >= count, timeout_s)

    def wait_for(self, condition: Callable[[list[T]], Any], timeout_s: float = LIMIT_S) -> list[T]:
        """The values, once `condition(values)` is true; it is looked at after each one.

        Raises:
            TimeoutError: it was not within `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: condition(list(self._values)), timeout_s):
                raise TimeoutError(f"not within {timeout_s:g} s; recorded so far: {self._values!r}")
            return list(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Recorder {self.values!r}>"


def wait_until_gone(pid: int, timeout_s: float = LIMIT_S) -> None:
    """Wait until the process `pid` has ended. One that nobody has reaped yet counts as ended.

    Raises:
        TimeoutError: it still runs after `timeout_s`.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        _look_until_gone(pid, timeout_s)
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise TimeoutError(f"process {pid} still runs after {timeout_s:g} s")
    finally:
        os.close(fd)


def _look_until_gone(pid: int, timeout_s: float) -> None:
    """Where there are no pidfds, nothing tells: look now and then."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"process {pid} still runs after {timeout_s:g} s")
        time.sleep(0.01)
