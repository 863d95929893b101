"""Durations: reading, the normal form, and the way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.core import duration


@pytest.mark.parametrize(
    ("text", "seconds", "normal"),
    [
        ("30s", 30, "30s"),
        ("300s", 300, "5m"),
        ("90s", 90, "1m 30s"),
        ("1m 30s", 90, "1m 30s"),
        ("1h30m", 5400, "1h 30m"),
        ("500ms", 0.5, "500ms"),
        ("0.5s", 0.5, "500ms"),
        ("1.5 h", 5400, "1h 30m"),
        ("30s 1m", 90, "1m 30s"),
        ("  2 min ", 120, "2m"),
        ("1hour 1minute 1second 1msec", 3661.001, "1h 1m 1s 1ms"),
        ("24h", 86400, "1day"),
        ("50h", 180000, "2days 2h"),
        ("2us 3ns", 2003e-9, "2us 3ns"),
        ("7µs", 7e-6, "7us"),
        ("0s", 0, "0s"),
        ("0", 0, "0s"),
    ],
)
def test_a_duration_is_read_and_printed(text, seconds, normal):
    assert duration.parse(text) == seconds
    assert duration.show(seconds) == duration.normalised(text) == normal


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "s",
        "30",
        "-1s",
        "1m30",
        "1.s",
        ".5s",
        "1.2.3s",
        "30 seconds ago",
        "30S",
        "1x",
        "forever",
        "1m,30s",
        "٣s",
    ],
)
def test_what_cannot_be_read_is_a_type_error(text):
    with pytest.raises(TypeError, match="Invalid duration format"):
        duration.parse(text)


@pytest.mark.parametrize("value", [30, 1.5, None, b"30s"])
def test_what_is_no_string_is_a_type_error(value):
    with pytest.raises(TypeError, match="Invalid duration format"):
        duration.parse(value)


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan")])
def test_a_number_that_is_no_duration_cannot_be_shown(seconds):
    with pytest.raises(ValueError, match="duration"):
        duration.show(seconds)


@given(st.integers(0, 10**15))
def test_every_number_of_nanoseconds_survives_being_shown_and_read(ns):
    seconds = ns / 10**9

    assert duration.parse(duration.show(seconds)) == seconds
    assert duration.normalised(duration.show(seconds)) == duration.show(seconds)


@given(st.lists(st.tuples(st.integers(0, 999), st.sampled_from(["ns", "us", "ms", "s", "m", "h", "d"])), min_size=1))
def test_blanks_and_order_do_not_matter(parts):
    forms = {
        "".join(f"{n}{unit}" for n, unit in parts),
        "  ".join(f"{n} {unit}" for n, unit in parts),
        " ".join(f"{n}{unit}" for n, unit in reversed(parts)),
    }

    assert len({duration.parse(form) for form in forms}) == 1


@pytest.mark.parametrize("above_0", [False, True])
def test_numbers_that_are_no_time_to_wait_are_refused(above_0):
    duration.check("limit", 0.5, above_0=above_0)
    for seconds in (-1, float("inf"), float("nan"), *([0, 0.0] if above_0 else [])):
        with pytest.raises(ValueError, match=f"limit is {seconds}; it must be a number of seconds"):
            duration.check("limit", seconds, above_0=above_0)
    for nothing in ("1", None, []):
        with pytest.raises(TypeError, match="limit is"):
            duration.check("limit", nothing, above_0=above_0)
