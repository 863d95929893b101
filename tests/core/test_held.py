"""Signals that wait: each reaches its handler, whatever others raise at the end of the block."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from monarch.core import held
from monarch.core.held import Held

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
