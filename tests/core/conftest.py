"""Every test of a network of procs ends with all of them closed, and no thread of theirs alive."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from net import Net, until


@pytest.fixture(
    params=[
        "inproc-caller",
        "shm-thread",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("inproc-thread", "shm-caller")),
    ]
)
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    """Over each transport, with each driver."""
    yield from _net(*request.param.split("-"))


@pytest.fixture
def quick_net() -> Iterator[Net]:
    """For what depends on neither."""
    yield from _net("inproc", "caller")


@pytest.fixture
def shm_net() -> Iterator[Net]:
    """For what depends on memory that is lent, or on rings."""
    yield from _net("shm", "caller")


def _net(scheme: str, driver: str) -> Iterator[Net]:
    before = set(threading.enumerate())
    net = Net(scheme, driver)
    yield net
    net.close()
    until(lambda: not [t for t in set(threading.enumerate()) - before if _is_of_a_proc(t)], 5.0)


def _is_of_a_proc(thread: threading.Thread) -> bool:
    return thread.name.startswith("monarch") and thread.name != "monarch-shm"  # which is the whole process's
