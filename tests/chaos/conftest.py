"""How many rounds, and from which seed."""

from __future__ import annotations

import os
import random
from typing import Final

import pytest

_PER_DRIVER: Final = 10


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chaos_session" in metafunc.fixturenames:
        rounds = metafunc.config.getoption("--rounds")
        seed = metafunc.config.getoption("--seed")
        if seed is None:
            run = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # all workers must collect the same tests
            seed = (random.Random(run) if run else random.SystemRandom()).randrange(1 << 31)
        sessions = [(seed, first, min(first + _PER_DRIVER, rounds)) for first in range(0, rounds, _PER_DRIVER)]
        metafunc.parametrize("chaos_session", sessions, ids=[f"seed {seed}, from {s[1]}" for s in sessions])
