"""How busy the machine was with other things: the condition under which a figure holds."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from attrs import define


@define(frozen=True)
class Load:
    """While something was measured.

    Attributes:
        others: share of all CPUs' time, 0 to 1, that went to processes which were not ours.
        average: of the machine, over a minute, at the end.
    """

    others: float
    average: float


class Watch:
    """From its making to `stop`. What we use is counted once our children have been waited for."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), _own_s()

    def stop(self) -> Load:
        available_s = max(1e-9, (time.monotonic() - self._began_s) * (os.cpu_count() or 1))
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return Load(min(1.0, max(0.0, others_s / available_s)), os.getloadavg()[0])


def _busy_s() -> float:
    """CPU time of all processes since the machine was started."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _first_line("/proc/stat").split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _first_line(path: str) -> str:
    return Path(path).read_text().split("\n", 1)[0]
