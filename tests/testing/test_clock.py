"""A clock that is moved by hand."""

from __future__ import annotations

import pytest

from monarch.testing import ManualClock


def test_it_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(5.0)

    assert clock() == clock() == 5.0
    assert clock.advance(2.5) == clock.now_s == 7.5


def test_actions_run_in_order_at_their_time() -> None:
    clock = ManualClock()
    ran: list[tuple[str, float]] = []
    clock.call_at(2, lambda: ran.append(("second", clock())))
    clock.call_at(
        1, lambda: (ran.append(("first", clock())), clock.call_at(1.5, lambda: ran.append(("on the way", 1.5))))
    )
    clock.call_at(9, lambda: ran.append(("not yet", clock())))

    clock.advance(3)

    assert ran == [("first", 1), ("on the way", 1.5), ("second", 2)]


def test_it_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="backwards"):
        ManualClock().advance(-1)
