"""Which error has left the script: others keep theirs in the same place."""

from __future__ import annotations

import sys

import pytest

from monarch.core.uncaught import uncaught


def error_of(names: dict[str, object]) -> ValueError:
    """What a script, whose globals are `names`, ends with."""
    try:
        exec(compile("try:\n 1 / 0\nexcept ZeroDivisionError:\n raise ValueError('its end')", "script", "exec"), names)
    except ValueError as error:
        return error
    raise AssertionError


def test_an_error_that_has_left_the_script_counts_with_what_came_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(vars(sys.modules["__main__"]))
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert [*map(type, uncaught())] == [ValueError, ZeroDivisionError]


def test_an_error_that_somebody_has_caught_and_kept_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", error_of({}), raising=False)
    assert not [*uncaught()]


def test_at_a_prompt_nothing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(sys, "last_value", error_of(vars(sys.modules["__main__"])), raising=False)
    assert not [*uncaught()]
