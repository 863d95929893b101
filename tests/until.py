"""Waiting for what nobody tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 20.0


def until(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
    """Wait, bounded, for what another thread or process brings about."""
    deadline_s = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        pause.wait(0.001)
