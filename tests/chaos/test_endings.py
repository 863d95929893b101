"""All the ways in which a driver ends, each with actors that have started what does not end by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.chaos.drivers import LIMIT_S, Driver

PROGRAM = """
import ctypes, multiprocessing, os, signal, subprocess, sys, time
from monarch.actor import Actor, endpoint, this_host

class Litter(Actor):
    @endpoint
    def start(self) -> None:
        self.held = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)]
        if os.fork() == 0:  # as a daemon makes itself one
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        for method in ("fork", "spawn"):
            process = multiprocessing.get_context(method).Process(target=time.sleep, args=(600,), daemon=True)
            process.start()
            self.held.append(process)

    @endpoint
    def load(self) -> int:
        import torch.utils.data
        rows = torch.utils.data.TensorDataset(torch.arange(6))
        self.rows = iter(torch.utils.data.DataLoader(rows, num_workers=2, persistent_workers=True))
        return int(next(self.rows)[0])

    @endpoint
    def block(self) -> None:
        time.sleep(600)

    @endpoint
    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    litter = this_host().spawn_procs({"gpus": 2}).spawn("litter", Litter)
    litter.start.call().get()
    {first}
    print("ready", flush=True)
    {end}
"""

ENDS = {
    "its last line": ("pass", None, 0),
    "busy actors": ("litter.block.broadcast()", None, 0),
    "an exception": ("raise LookupError('on purpose')", None, 1),
    "sys.exit": ("sys.exit(5)", None, 5),
    "os._exit": ("os._exit(7)", None, 7),
    "exec": ("os.execvp('true', ['true'])", None, 0),
    "abort": ("os.abort()", None, -signal.SIGABRT),
    "a crash": ("ctypes.string_at(0)", None, -signal.SIGSEGV),
    "Ctrl-C in a call": ("litter.block.call().get()", signal.SIGINT, -signal.SIGINT),
    "Ctrl-C in a sleep": ("time.sleep(600)", signal.SIGINT, -signal.SIGINT),
    "SIGTERM": ("litter.block.call().get()", signal.SIGTERM, -signal.SIGTERM),
    "SIGKILL": ("litter.block.call().get()", signal.SIGKILL, -signal.SIGKILL),
    "a failure in its sleep": ("litter.slice(gpus=0).kill.broadcast(); time.sleep(600)", None, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left(tmp_path: Path, how: str) -> None:
    end, signum, status = ENDS[how]
    run(tmp_path, "pass", end, signum, status)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("how", ["its last line", "SIGKILL"])
def test_nothing_is_left_of_data_loaders(tmp_path: Path, how: str) -> None:
    end, signum, status = ENDS[how]
    before = set(os.listdir("/dev/shm"))
    first = "assert set(litter.load.call().get().values()) == {0}"
    run(tmp_path, first, end, signum, status, MONARCH_PRELOAD="torch.utils.data")
    left = [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch_")]
    assert left == []


def run(folder: Path, first: str, end: str, signum: int | None, status: int, **settings: str) -> None:
    script = folder / "program.py"
    script.write_text(PROGRAM.replace("{first}", first).replace("{end}", end))
    driver = Driver([str(script)], folder, **settings)
    try:
        lines = driver.lines()
        assert next(lines) == "ready"
        if signum is not None:
            driver.process.send_signal(signum)
        assert list(lines) == []
        assert driver.process.wait(LIMIT_S) == status
        driver.wait_until_nothing_is_left()
        if status == 0:
            assert driver.said.read_text() == ""
    finally:
        driver.end()
