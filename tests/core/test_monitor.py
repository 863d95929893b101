"""Monitors fire once, with the reason, also for what is gone already."""

from __future__ import annotations

import logging
import pickle
import threading

import pytest

from monarch.core import monitor
from monarch.core.monitor import Down, Monitors

_DEAD = Down("killed", "it was killed")
_LATER = Down("failed", "another reason")


def test_a_monitor_fires_once_with_the_first_reason() -> None:
    monitors, heard = Monitors(), []
    monitors.watch((1, 2), heard.append)

    assert monitors.fire((1, 2), _DEAD)
    assert not monitors.fire((1, 2), _LATER)
    assert heard == [_DEAD] and monitors.watched() == 0 and monitors.gone((1, 2)) == _DEAD


def test_a_cancelled_monitor_never_fires_and_the_others_do() -> None:
    monitors, heard = Monitors(), []
    cancel = monitors.watch((1, 2), lambda down: heard.append("cancelled"))
    monitors.watch((1, 2), lambda down: heard.append("kept"))
    cancel()
    cancel()
    monitors.fire((1, 2), _DEAD)
    cancel()

    assert heard == ["kept"]


def test_a_monitor_that_is_cancelled_by_the_callback_before_it_never_fires() -> None:
    monitors, heard = Monitors(), []
    cancels = []
    monitors.watch((1, 2), lambda down: cancels[0]())
    cancels.append(monitors.watch((1, 2), heard.append))
    monitors.fire((1, 2), _DEAD)

    assert heard == [] and monitors.watched() == 0


def test_a_monitor_of_what_is_gone_fires_at_once() -> None:
    monitors, heard = Monitors(), []
    monitors.fire((1, 2), _DEAD)
    monitors.watch((1, 2), heard.append)()

    assert heard == [_DEAD] and monitors.watched() == 0


def test_a_process_takes_its_actors_along_and_no_others() -> None:
    monitors, heard = Monitors(), []
    for target in [(1, 0), (1, 2), (1, 3), (2, 2)]:
        monitors.watch(target, lambda down, target=target: heard.append(target))
    monitors.fire((1, 2), _LATER)
    monitors.fire((1, 0), _DEAD)

    assert heard == [(1, 2), (1, 0), (1, 3)]
    assert monitors.gone((1, 2)) == _LATER and monitors.gone((1, 99)) == _DEAD and monitors.gone((2, 2)) is None
    monitors.watch((1, 99), lambda down: heard.append(down))
    assert heard[-1] == _DEAD and monitors.watched() == 1


def test_an_actor_does_not_take_its_process_along() -> None:
    monitors = Monitors()
    monitors.fire((1, 2), _DEAD)

    assert monitors.gone((1, 0)) is None


def test_a_callback_that_raises_does_not_cost_the_others_theirs(caplog: pytest.LogCaptureFixture) -> None:
    monitors, heard = Monitors(), []
    monitors.watch((1, 2), lambda down: 1 / 0)
    monitors.watch((1, 2), heard.append)
    with caplog.at_level(logging.ERROR, "monarch"):
        monitors.fire((1, 2), _DEAD)

    assert heard == [_DEAD] and "monitor.failed" in caplog.text


def test_a_callback_may_watch_and_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    monitors, heard = Monitors(), []
    monitors.watch((1, 2), lambda down: monitors.watch((1, 2), heard.append))
    monitors.watch((1, 2), lambda down: monitors.fire((1, 3), down))
    monitors.watch((1, 3), heard.append)
    monitors.fire((1, 2), _DEAD)

    assert heard == [_DEAD, _DEAD]


def test_tombstones_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_TOMBSTONES", 10)
    monitors = Monitors()
    for number in range(1, 26):
        monitors.fire((1, number), _DEAD)

    assert [number for number in range(1, 26) if monitors.gone((1, number))] == list(range(16, 26))


def test_every_monitor_fires_exactly_once_whatever_races() -> None:
    for _ in range(200):
        monitors = Monitors()
        counts = [0] * 8
        barrier = threading.Barrier(3)

        def watch(first: int) -> None:
            barrier.wait(10)
            for each in range(first, first + 4):

                def count(down: Down, each: int = each) -> None:
                    counts[each] += 1

                monitors.watch((1, 2), count)

        def fire() -> None:
            barrier.wait(10)
            monitors.fire((1, 2), _DEAD)
            monitors.fire((1, 0), _DEAD)

        threads = [threading.Thread(target=watch, args=(first,)) for first in (0, 4)] + [threading.Thread(target=fire)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert counts == [1] * 8


def test_a_down_reads_as_its_reason_and_pickles() -> None:
    down = Down("killed", "the process was killed", 42).because(Down("failed", "out of memory"))

    assert str(down) == "the process was killed (process 42); caused by: out of memory"
    assert str(Down("exited", "process 42 has ended", 42)) == "process 42 has ended"
    assert pickle.loads(pickle.dumps(down)) == down
    assert Down("stopped", "x").stopped and not down.stopped


@pytest.mark.parametrize(
    ("down", "crashed"),
    [
        (Down("stopped", "it was asked to"), False),
        (Down("failed", "it raised"), True),
        (Down("unreachable", "nobody knows"), False),
        (Down("exited", "by itself", code=0), False),
        (Down("exited", "by itself", code=1), True),
        *((Down("killed", "asked by others", signal=number), False) for number in (1, 2, 15)),
        *((Down("killed", "in its middle", signal=number), True) for number in (4, 6, 7, 8, 9, 11)),
    ],
)
def test_a_crash_is_what_goes_wrong_by_itself(down: Down, crashed: bool) -> None:
    assert down.crashed == crashed


def test_of_several_reasons_the_first_failure_counts() -> None:
    stop, first, second = Down("stopped", "asked"), Down("failed", "1"), Down("killed", "2", signal=11)
    assert [stop.then(first), stop.then(first).then(second), first.then(stop)] == [first, first, first]
    assert stop.then(stop) == stop
