"""Workers for tests: processes of their own, that are gone at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import define

LIMIT_S = 40.0
"""For what waits for a worker: on a busy machine, one takes 10 s and more to come up."""


@define
class WorkerProcess:
    url: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)


@contextmanager
def worker(
    url: str, env: dict[str, str] | None = None, prefix: Sequence[str] = (), log: Path | None = None
) -> Iterator[WorkerProcess]:
    """A worker on its way up; clients wait for it."""
    command = [*prefix, sys.executable, "-m", "monarch", "worker", "--listen", url]
    output = subprocess.DEVNULL if log is None else log.open("wb")
    process = subprocess.Popen(
        command, env=os.environ | (env or {}), stdout=output, stderr=output, pass_fds=_descriptors(url)
    )
    try:
        yield WorkerProcess(url, process)
    finally:
        process.kill()
        process.wait(LIMIT_S)
        if not isinstance(output, int):
            output.close()


def _descriptors(url: str) -> list[int]:
    _, found, number = url.rpartition(":fd")
    return [int(number)] if found else []
