"""Signals that wait: each reaches its handler, whatever others raise at the end of the block."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from monarch.core import held
from monarch.core.held import ALL_BUT_INTERRUPT, NOTHING_HELD, Held, undisturbed

CAME: list[int] = []


class Raised(Exception):
    pass


def _raises(number: int, frame: FrameType | None) -> None:
    CAME.append(number)
    raise Raised


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    CAME.clear()
    numbers = signal.SIGALRM, signal.SIGUSR1
    before = [signal.signal(number, _raises) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_all_handlers_that_were_held_back_run_though_each_raises() -> None:
    with pytest.raises(Raised), Held() as block:
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGUSR1)
        assert block.noted and not CAME
    assert CAME == [signal.SIGALRM, signal.SIGUSR1]


def test_a_signal_is_heard_though_others_raised_while_it_was_to_be_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disturbed:
        """Two that are back raise, one after the other, before the next signal is."""

        def signal(self, number: int, handler: Any) -> Any:
            if handler is _raises and number == signal.SIGUSR1:
                raise Raised
            return signal.signal(number, handler)

    with pytest.raises(Raised), Held():
        signal.raise_signal(signal.SIGALRM)
        monkeypatch.setattr(held, "_signal", Disturbed())
    assert CAME == [signal.SIGALRM]
    with pytest.raises(Raised):
        signal.raise_signal(signal.SIGUSR1)
    assert CAME == [signal.SIGALRM, signal.SIGUSR1]


def test_within_a_block_that_holds_all_another_has_nothing_to_hold() -> None:
    with pytest.raises(Raised), Held():
        with undisturbed() as inner:
            signal.raise_signal(signal.SIGALRM)
        assert inner is NOTHING_HELD and not CAME
    assert CAME == [signal.SIGALRM]

    with undisturbed() as alone, undisturbed() as inner:
        assert isinstance(alone, Held) and inner is NOTHING_HELD
    with Held(signals=ALL_BUT_INTERRUPT), undisturbed() as inner:
        assert isinstance(inner, Held)


def test_the_handlers_that_run_at_the_end_of_a_block_can_be_held_back_themselves() -> None:
    seen: list[Any] = []

    def handler(number: int, frame: FrameType | None) -> None:
        with undisturbed() as block:
            seen.append(block)

    signal.signal(signal.SIGALRM, handler)
    with Held():
        signal.raise_signal(signal.SIGALRM)
    assert [type(block) for block in seen] == [Held]
