"""Probes: questions that go from process to process, along what actors wait for. What their kinds have in common.

`crossing` and `backpressure` ask whoever is waited for whether he waits, too; so a probe may come by again, or more
probes than one need. (Those of `deadlock` go back the way of one call, and end.)
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Final, Protocol

from monarch.core.deadlock import Wait

_KNOWN: Final = 1000


class PendingCall(Protocol):
    """A call that an endpoint has made, and that is not answered: the sink of its replies."""

    number: int
    caller_wait: Wait

    def unanswered(self) -> list[tuple[int, int]]:
        """(process, number) of the actors that have not answered."""
        ...

    def wanted(self) -> str:
        """The endpoint that was called, for people."""
        ...

    def refuse(self, error: Exception) -> None:
        """Take the call back from those who have not answered, and fail with `error`."""
        ...


class Probes:
    """Numbers those that begin in this process, and knows the last ones that came by."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._passed: dict[Hashable, int] = {}

    def next_number(self) -> int:
        return next(self._numbers)

    def has_passed(self, way: Hashable, number: int) -> bool:
        """Whether the last one that came that way, from where it began to where it is, had that number. From now on it
        has."""
        if self._passed.get(way) == number:
            return True
        if len(self._passed) >= _KNOWN:
            self._passed.clear()
        self._passed[way] = number
        return False
