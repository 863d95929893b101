"""Which ends restart, who goes along, how often: in tables."""

from __future__ import annotations

import pytest

from monarch.supervision.policy import Exit, Restart, Rule, Strategy, Window, decide, group_of, restarts

PERMANENT, TRANSIENT, TEMPORARY = Restart
NORMAL, FAILED = Exit


@pytest.mark.parametrize(
    ("restart", "exit", "again"),
    [
        (PERMANENT, NORMAL, True),
        (PERMANENT, FAILED, True),
        (TRANSIENT, NORMAL, False),
        (TRANSIENT, FAILED, True),
        (TEMPORARY, NORMAL, False),
        (TEMPORARY, FAILED, False),
    ],
)
def test_the_kind_of_child_and_of_end_say_whether_it_is_restarted(restart, exit, again):
    assert restarts(restart, exit) is again


@pytest.mark.parametrize(
    ("strategy", "dead", "group"),
    [
        ("one_for_one", "a", "a"),
        ("one_for_one", "b", "b"),
        ("rest_for_one", "a", "abc"),
        ("rest_for_one", "b", "bc"),
        ("rest_for_one", "c", "c"),
        ("one_for_all", "a", "abc"),
        ("one_for_all", "c", "abc"),
    ],
)
def test_the_strategy_says_who_goes_along(strategy, dead, group):
    children = [Rule(name) for name in "abc"]

    assert [rule.name for rule in group_of(Strategy(strategy), children, Rule(dead))] == list(group)


@pytest.mark.parametrize(
    ("limit", "period_s", "at_s", "admitted"),
    [
        (3, 5.0, [0, 1, 2, 3], [True, True, True, False]),
        (3, 5.0, [0, 1, 2, 5, 5.5], [True, True, True, True, False]),
        (1, 5.0, [0, 4.9, 5, 9.9, 10], [True, False, True, False, True]),
        (0, 5.0, [0, 100], [False, False]),
        (2, 1.0, [0, 0, 0, 1, 1, 1], [True, True, False, True, True, False]),
    ],
)
def test_the_window_slides(limit, period_s, at_s, admitted):
    window = Window(limit, period_s)

    assert [window.admit(now_s) for now_s in at_s] == admitted


def test_a_refused_restart_does_not_count():
    window = Window(1, 5.0)

    assert [window.admit(now_s) for now_s in (0, 4, 5.1)] == [True, False, True]


def test_a_window_prints_as_its_limit():
    assert (str(Window(1, 5.0)), str(Window(3, 0.5))) == ("1 restart within 5 s", "3 restarts within 0.5 s")


def test_an_end_that_does_not_restart_is_not_counted():
    window = Window(1, 5.0)
    children = [Rule("a", TEMPORARY), Rule("b")]

    assert decide(Strategy.ONE_FOR_ALL, children, children[0], FAILED, window, 0.0).forget
    verdict = decide(Strategy.ONE_FOR_ALL, children, children[1], FAILED, window, 0.0)
    assert (list(verdict.group), verdict.forget, verdict.escalate) == (children, False, "")
    assert decide(Strategy.ONE_FOR_ALL, children, children[1], NORMAL, window, 1.0).escalate == (
        "restart intensity reached, 1 restart within 5 s"
    )
