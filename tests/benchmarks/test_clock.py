"""How often something is measured, and what is said of it."""

from __future__ import annotations

import pytest

from benchmarks import clock


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch):
    """A clock of our own; `passing(s)` makes something that takes so long."""
    now = [0.0]
    monkeypatch.setattr(clock, "now_s", lambda: now[0])

    def made(seconds: float):
        def once() -> None:
            now[0] += seconds

        return once

    return made


@pytest.mark.parametrize(("seconds", "n", "measured"), [(0.001, 50, 50), (0.5, 50, 6), (0.25, 50, 12), (60.0, 3, 2)])
def test_what_takes_long_is_measured_less_often(passing, seconds, n, measured):
    assert clock.times(passing(seconds), n) == pytest.approx([seconds] * measured)


@pytest.mark.parametrize(("q", "found"), [(0.0, 1), (0.5, 3), (0.99, 5)])
def test_quantiles_are_measured_values(q, found):
    assert clock.quantile([5, 3, 1, 2, 4], q) == found


def test_a_latency_is_a_median_and_a_percentile(passing):
    figures = list(clock.latency("call", passing(0.25), 4))

    assert [(figure.name, figure.value) for figure in figures] == [("call", 0.25), ("call_p99", 0.25)]
