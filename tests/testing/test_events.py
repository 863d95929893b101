"""Waiting by events, with a limit."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from monarch.testing import Recorder, wait_until_gone


def test_a_recorder_wakes_whoever_waits() -> None:
    recorder: Recorder[int] = Recorder()
    thread = threading.Thread(target=lambda: [recorder(number) for number in range(3)])
    thread.start()

    assert recorder.wait(3) == [0, 1, 2]
    thread.join()
    assert recorder.wait_for(lambda values: 2 in values) == recorder.values
    assert len(recorder) == 3


def test_a_wait_that_is_too_long_says_what_there_was() -> None:
    recorder: Recorder[str] = Recorder()
    recorder("only this")

    with pytest.raises(TimeoutError, match="only this"):
        recorder.wait(2, 0.01)


def test_a_process_is_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    with pytest.raises(TimeoutError, match="still runs"):
        wait_until_gone(process.pid, 0.01)
    process.communicate(b"\n")
    wait_until_gone(process.pid)
