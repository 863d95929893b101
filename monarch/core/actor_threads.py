"""Threads for actors, started a few at a time.

A new thread wants the interpreter's lock, and one that waits for that asks for it every 5 ms (`sys.getswitchinterval`):
some hundred of them keep a CPU busy with asking. So no more than `_AT_ONCE` are on their way, and each, once it runs,
starts the next before it does anything else. Nor does whoever starts one wait until it runs, as with `Thread.start`,
which passes the lock to and fro each time. 1000 actors, spawned and called once, took 540 us each with `Thread.start`,
270 without its wait, and 245 so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from monarch.log import get_logger

log = get_logger("monarch.actor_threads")

Run = Callable[[], None]
Failed = Callable[[Exception], None]

_AT_ONCE: Final = 8

_lock = threading.Lock()
_waiting: deque[tuple[str, Run, Failed]] = deque()
_on_their_way = 0


def run_on_thread(name: str, run: Run, failed: Failed) -> None:
    """Run `run` on a thread of its own, soon. Does not block.

    Args:
        failed: called instead, in any thread, with what the system says against one more thread.
    """
    global _on_their_way
    with _lock:
        _waiting.append((name, run, failed))
        if _on_their_way >= _AT_ONCE:
            return
        _on_their_way += 1
    _start_next()


def _start_next() -> None:
    """In the place of one that is on its way, or was."""
    global _on_their_way
    while True:
        with _lock:
            if not _waiting:
                _on_their_way -= 1
                return
            name, run, failed = _waiting.popleft()
        try:
            _start(name, run)
        except Exception as error:
            try:
                failed(error)
            except Exception:  # there is no memory, say: it costs no other its thread
                log.exception("actor_thread.failed", thread=name)
        else:
            return


def _start(name: str, run: Run) -> None:
    thread = threading.Thread(target=_live, args=(run,), name=name, daemon=True)
    started: Any = getattr(thread, "_started", None)  # an event: what `start` waits for
    if started is not None:
        started.wait = _do_not_wait
    thread.start()


def _live(run: Run) -> None:
    _start_next()
    run()


def _do_not_wait(timeout: float | None = None) -> bool:
    return True
