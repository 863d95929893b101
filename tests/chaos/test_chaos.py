"""Somebody dies at a random moment of random traffic, the driver too: nobody waits, nobody misses it, nothing stays.

`pytest tests/chaos -m slow --rounds 5000` for many, `--seed N` to repeat. What happens in a round, and what must hold
after it, is in `rounds`; here are the ends of drivers. A single driver is repeated without pytest, by the command that
a failure names.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from monarch.testing import wait_until_gone
from tests.chaos.rounds import LIMIT_S

ROOT: Final = Path(__file__).parents[2]
_ROUND_LIMIT_S: Final = 30.0
_ENDS: Final = (None, None, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGSEGV)


class Driver:
    """A driver that runs rounds, with a mark in its environment, which everything that it causes inherits."""

    def __init__(self, seed: int, first: int, last: int, folder: Path) -> None:
        self.arguments = ["-m", "tests.chaos.rounds", str(seed), str(first), str(last)]
        self.mark = f"CHAOS_MARK={os.urandom(8).hex()}"
        self.temporary, self.said = folder / "tmp", folder / "stderr"
        self.temporary.mkdir()
        name, _, value = self.mark.partition("=")
        environ = {**os.environ, name: value, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        with self.said.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *self.arguments], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=stderr
            )

    def lines(self) -> Iterator[str]:
        """What it prints, as it comes; each line within a limit."""
        stdout = self.process.stdout
        assert stdout is not None
        arrived = b""
        while True:
            ready, _, _ = select.select([stdout], [], [], _ROUND_LIMIT_S)
            assert ready, "a round hangs"
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                return
            arrived += data
            *lines, arrived = arrived.split(b"\n")
            yield from (line.decode() for line in lines)

    def left(self) -> list[int]:
        """Processes with the mark."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(int(pid))
            except OSError:
                continue
        return found

    def wait_until_nothing_is_left(self) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while left := self.left():
            for pid in left:
                wait_until_gone(pid, max(0.0, deadline_s - time.monotonic()))
        assert list(self.temporary.iterdir()) == []
        assert [name for name in os.listdir("/dev/shm") if "monarch" in name] == []


@pytest.mark.slow
def test_random_deaths(chaos_session: tuple[int, int, int], tmp_path: Path) -> None:
    seed, first, last = chaos_session
    rand = random.Random(f"driver {seed}:{first}")
    end, at, delay_s = rand.choice(_ENDS), rand.randrange(first, last), rand.random() * 0.3
    driver = Driver(seed, first, last, tmp_path)
    try:
        for line in driver.lines():
            if line == f"round {at}: begins" and end is not None:
                time.sleep(delay_s)  # a random moment
                driver.process.send_signal(end)
                break
        status = driver.process.wait(LIMIT_S)
        assert status == (0 if end is None else -end)
        driver.wait_until_nothing_is_left()
    except BaseException as error:
        replay = f"MONARCH_TRANSPORT={os.environ.get('MONARCH_TRANSPORT', 'auto')} python {' '.join(driver.arguments)}"
        error.add_note(f"the driver's end: {end} in round {at} after {delay_s:.3f} s\nreplay: {replay}")
        error.add_note(driver.said.read_text(errors="replace")[-5000:])
        raise
    finally:
        driver.process.kill()
        driver.process.communicate()
