"""Timing something many times, and what is said of the times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks.figures import Figure

now_s = time.perf_counter
_LIMIT_S: Final = 3.0


def timed(once: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    began_s = now_s()
    once()
    return now_s() - began_s


def times(once: Callable[[], object], n: int) -> list[float]:
    """Seconds of each of `n` calls, after some that warm up; fewer where that would take longer than `_LIMIT_S`."""
    _repeated(once, n // 10, _LIMIT_S / 10, least=1)
    return _repeated(once, n, _LIMIT_S, least=2)


def _repeated(once: Callable[[], object], n: int, limit_s: float, least: int) -> list[float]:
    end_s = now_s() + limit_s
    measured: list[float] = []
    while len(measured) < least or (len(measured) < n and now_s() < end_s):
        measured.append(timed(once))
    return measured


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def latency(name: str, once: Callable[[], object], n: int) -> Iterator[Figure]:
    """The median of `n` times, and their 99th percentile as `NAME_p99`."""
    measured = times(once, n)
    yield Figure(name, median(measured))
    yield Figure(f"{name}_p99", quantile(measured, 0.99))
