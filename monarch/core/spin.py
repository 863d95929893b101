"""Whether to look for a while before sleeping. Sans-IO.

To wake a CPU that sleeps takes 25 us and more, each way, and one that looks is there at once; but who looks in vain
takes the time of those who have something to do.

So a thread looks as long as that finds something. After a look in vain it sleeps, and looks again once its sleeps have
been so short that it would have found something: one of them, and up to `_MOST_SHORT` in a row after more such errors.
What waits long, because there is nothing to do, looks once and then no more; a call that comes after it finds its
caller looking with the second answer. Where a look was interrupted in favour of others, there are not enough CPUs: the
next waits sleep, whatever comes; `_FEWEST_SKIPS` of them, then twice as many, up to `_MOST_SKIPS`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Final

from monarch import compiled

LOOK_S: Final = 400e-6
"""Longer than most calls take whose ends both sleep: they would never find each other awake."""

_PREEMPTED_S: Final = 200e-6  # one round of looking takes 2 us; who has something to do takes the CPU for longer
_FEWEST_SKIPS: Final = 8
_MOST_SKIPS: Final = 512
_MOST_SHORT: Final = 16
_SHORT_AT_FIRST: Final = 3


@cache
def cpus() -> int:
    """How many this process may use, as of the first look."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


os.register_at_fork(after_in_child=cpus.cache_clear)  # a child may be bound to some of them


class _Spin:
    """What one wait learns from those before; so it is in the compiled part, too."""

    __slots__ = ("_penalty", "_short_left", "_short_wanted", "_skips", "time_s")

    time_s: float

    def __init__(self) -> None:
        self._skips = 0  # waits that are still to sleep, since others need the CPU
        self._penalty = _FEWEST_SKIPS
        # Short sleeps in a row before the next look, which grow with looks in vain since the last find; those still to
        # come.
        self._short_wanted = self._short_left = _SHORT_AT_FIRST

    def pays(self) -> bool:
        """Whether to look now. Then `learn` hears what came of it; otherwise `slept`, how long the sleep was."""
        if self._skips:
            self._skips -= 1
            return False
        return not self._short_left

    def learn(self, found: bool, longest_s: float) -> None:
        """Something was found, or not; one round of looking took `longest_s` at most."""
        if longest_s >= _PREEMPTED_S:
            self._skips = self._penalty
            self._penalty = min(2 * self._penalty, _MOST_SKIPS)
        elif found:
            self._penalty, self._short_wanted = _FEWEST_SKIPS, 0
        else:
            self._short_left = self._short_wanted = min(max(1, 2 * self._short_wanted), _MOST_SHORT)

    def slept(self, for_s: float) -> None:
        """A wait has slept, without a look."""
        if self._short_left:
            self._short_left = self._short_left - 1 if for_s < self.time_s else self._short_wanted


if not TYPE_CHECKING and compiled.part is not None:
    _Spin = compiled.part.Spin


class Spin(_Spin):
    """Of one who waits, again and again.

    One that is new sleeps at first, some times: most threads, and most processes, get a message or two, and then none.

    Args:
        time_s: the longest that it looks.
    """

    __slots__ = ("_clock",)

    def __init__(self, time_s: float = LOOK_S, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.time_s, self._clock = time_s, clock

    def look(self, poll: Callable[[float], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        """What `poll(0)` finds within the time for it; an empty list: sleep."""
        if not self.pays():
            return []
        began_s = last_s = self._clock()
        longest_s = 0.0
        while True:
            events = poll(0)
            now_s = self._clock()
            longest_s = max(longest_s, now_s - last_s)
            if events or now_s - began_s >= self.time_s:
                break
            last_s = now_s
        self.learn(bool(events), longest_s)
        return events
