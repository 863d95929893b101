"""Durations as people give them: numbers of seconds, and texts such as "30s", "1m 30s", "1h30m", "500ms". This module
decides which numbers are durations, the units, and the normal form.

Numbers may have a decimal fraction; parts may stand in any order, with or without blanks; a bare number needs a unit,
except 0. Printing takes the largest units first, down to nanoseconds: 90 s is "1m 30s", 86400 s is "1day".
"""

from __future__ import annotations

import functools
import math
import re
from decimal import Decimal
from typing import Final

_NS: Final = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
_NAMES: Final = {
    "ns": ("ns", "nsec", "nanos"),
    "us": ("us", "µs", "usec", "micros"),
    "ms": ("ms", "msec", "millis"),
    "s": ("s", "sec", "secs", "second", "seconds"),
    "m": ("m", "min", "mins", "minute", "minutes"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
    "d": ("d", "day", "days"),
}
_UNITS: Final = {name: _NS[unit] for unit, names in _NAMES.items() for name in names}
_PART: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zµ]+)\s*", re.ASCII)


def check(name: str, seconds: float, *, above_0: bool = False) -> None:
    """See to it that `seconds`, which somebody gave as `name`, is a time that can be waited for.

    Raises:
        ValueError: it is infinite, NaN or negative; or 0 where it must be above.
        TypeError: it is no number at all.
    """
    error: type[Exception] = ValueError
    try:
        fits = math.isfinite(seconds) and (seconds > 0 if above_0 else seconds >= 0)
    except TypeError:
        fits, error = False, TypeError
    if not fits:
        raise error(
            f"{name} is {seconds!r}; it must be a number of seconds, {'above 0' if above_0 else 'not negative'}"
        )


def parse(text: str) -> float:
    """Seconds of a duration.

    Raises:
        TypeError: "Invalid duration format", for what is no string or cannot be read.
    """
    if not isinstance(text, str):
        raise TypeError(f"Invalid duration format: {text!r} is no string; write it with a unit, such as '30s'")
    return _seconds(text)


@functools.lru_cache(maxsize=256)
def _seconds(text: str) -> float:
    if text.strip() == "0":
        return 0.0
    total = Decimal(0)
    at = 0
    while part := _PART.match(text, at):
        number, unit = part.groups()
        if unit not in _UNITS:
            raise TypeError(
                f"Invalid duration format: unknown unit {unit!r} in {text!r}; units are {', '.join(_NS)} "
                "and their long names"
            )
        total += Decimal(number) * _UNITS[unit]
        at = part.end()
    if at == 0 or at != len(text):
        raise TypeError(f"Invalid duration format: {text!r}; expected numbers with units, such as '1m 30s' or '500ms'")
    return round(total) / 10**9


def show(seconds: float) -> str:
    """The normal form, to the nearest nanosecond: `parse(show(seconds))` gives it back.

    Raises:
        ValueError: negative, infinite or not a number.
    """
    check("a duration", seconds)
    rest = round(Decimal(seconds) * 10**9)
    parts = []
    for unit, size in reversed(_NS.items()):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}" if unit != "d" else f"{count}day{'s' * (count > 1)}")
    return " ".join(parts) or "0s"


def normalised(text: str) -> str:
    """The normal form of a duration in text; errors as for `parse`."""
    return show(parse(text))
