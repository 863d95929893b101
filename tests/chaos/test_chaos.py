"""Somebody dies at a random moment of random traffic, the driver too: nobody waits, nobody misses it, nothing stays.

`pytest tests/chaos -m slow --rounds 5000` for many, `--seed N` to repeat. What happens in a round, and what must hold
after it, is in `rounds`; here are the ends of drivers. A single driver is repeated without pytest, by the command that
a failure names.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.drivers import LIMIT_S, Driver

_ENDS: Final = (None, None, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGSEGV)


@pytest.mark.slow
def test_random_deaths(chaos_session: tuple[int, int, int], tmp_path: Path) -> None:
    seed, first, last = chaos_session
    rand = random.Random(f"driver {seed}:{first}")
    end, at, delay_s = rand.choice(_ENDS), rand.randrange(first, last), rand.random() * 0.3
    driver = Driver(["-m", "tests.chaos.rounds", str(seed), str(first), str(last)], tmp_path)
    try:
        for line in driver.lines():
            if line == f"round {at}: begins" and end is not None:
                time.sleep(delay_s)  # a random moment
                driver.process.send_signal(end)
                break
        status = driver.process.wait(LIMIT_S)
        came_too_late = at == last - 1 and status == 0
        assert came_too_late or status == (0 if end is None else -end)
        driver.wait_until_nothing_is_left()
    except BaseException as error:
        replay = f"MONARCH_TRANSPORT={os.environ.get('MONARCH_TRANSPORT', 'auto')} python {' '.join(driver.arguments)}"
        error.add_note(f"the driver's end: {end} in round {at} after {delay_s:.3f} s\nreplay: {replay}")
        error.add_note(driver.said.read_text(errors="replace")[-5000:])
        raise
    finally:
        driver.end()
