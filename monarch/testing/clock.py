"""A clock that stands still until it is moved, for everything that takes `now_s` or a `clock()`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from attrs import define, field


@define(eq=False)
class ManualClock:
    """Call it for the time in seconds, as `time.monotonic`."""

    now_s: float = 0.0
    _due: list[tuple[float, int, Callable[[], object]]] = field(factory=list, init=False)
    _count: itertools.count[int] = field(factory=itertools.count, init=False)

    def __call__(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, action: Callable[[], object]) -> None:
        """Run `action` once the clock has reached `when_s`, in the thread that moves it."""
        heapq.heappush(self._due, (when_s, next(self._count), action))

    def advance(self, by_s: float) -> float:
        """Move on, stopping at each action that falls due on the way, and return the new time.

        Raises:
            ValueError: `by_s` is negative: time does not run backwards.
        """
        if by_s < 0:
            raise ValueError(f"cannot advance by {by_s} s: time does not run backwards")
        end_s = self.now_s + by_s
        while self._due and self._due[0][0] <= end_s:
            when_s, _, action = heapq.heappop(self._due)
            self.now_s = max(self.now_s, when_s)
            action()
        self.now_s = end_s
        return end_s
