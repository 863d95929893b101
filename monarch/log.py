"""Logging: structlog in front of the standard library's logger `monarch`, with nothing global configured.

Without a handler of the program's own, Python's handler of last resort shows warnings and errors on stderr, and nothing
below. `MONARCH_LOG=debug` (or info, warning, ...) shows that level of this library on stderr.

A record of the library is no actor's, on whatever thread: the thread of an actor that waits does work for all of its
process. Records name whom they are about.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, Final

_SPARED_S: Final = 600.0
_MOST_KINDS: Final = 20


def _render(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    """`noun.event key=value ...`; an exception's traceback on the lines after it."""
    trace = event.pop("exception", "")
    text = " ".join([str(event.pop("event")), *(f"{key}={value!r}" for key, value in event.items())])
    return f"{text}\n{trace}" if trace else text


class Logger:
    """A structlog logger over `logging.getLogger(name)`, made at the first record that somebody wants to see: structlog
    takes 45 ms to import, and most programs log nothing. A call below the level costs 0.2 us. Never raises."""

    def __init__(self, name: str) -> None:
        self._stdlib = logging.getLogger(name)
        self._structlog: Any = None

    def _log(self, level: int, method: str, event: str, facts: dict[str, Any]) -> None:
        if self._stdlib.isEnabledFor(level):
            contextvars.Context().run(self._emit, level, method, event, facts)

    def _emit(self, level: int, method: str, event: str, facts: dict[str, Any]) -> None:
        try:
            if self._structlog is None:
                import structlog

                self._structlog = structlog.wrap_logger(
                    self._stdlib,
                    processors=[structlog.processors.format_exc_info, _render],
                    wrapper_class=structlog.stdlib.BoundLogger,
                )
            getattr(self._structlog, method)(event, **facts)
        except Exception:  # no descriptor is left to import structlog with, or a handler of the program's is broken
            with contextlib.suppress(Exception):
                self._stdlib.log(level, "%s %r", event, facts, exc_info=method == "exception")

    def debug(self, event: str, **facts: Any) -> None:
        self._log(logging.DEBUG, "debug", event, facts)

    def info(self, event: str, **facts: Any) -> None:
        self._log(logging.INFO, "info", event, facts)

    def warning(self, event: str, **facts: Any) -> None:
        self._log(logging.WARNING, "warning", event, facts)

    def error(self, event: str, **facts: Any) -> None:
        self._log(logging.ERROR, "error", event, facts)

    def exception(self, event: str, **facts: Any) -> None:
        """An error, with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, "exception", event, facts)


class Sparing:
    """Warnings of what strangers can bring about any number of times: in `_SPARED_S`, each kind once, and no more than
    `_MOST_KINDS`. The next one that is logged says how many were left out. Thread-safe."""

    def __init__(self, logger: Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._lock = threading.Lock()
        self._kinds: set[Hashable] = set()
        self._until_s = -math.inf
        self._left_out = 0

    def warning(self, event: str, kind: Hashable, **facts: Any) -> None:
        with self._lock:
            now_s = self._clock()
            if now_s >= self._until_s:
                self._kinds.clear()
                self._until_s = now_s + _SPARED_S
            if (event, kind) in self._kinds or len(self._kinds) >= _MOST_KINDS:
                self._left_out += 1
                return
            self._kinds.add((event, kind))
            left_out, self._left_out = self._left_out, 0
        self._logger.warning(event, **facts, **({"left_out_before": left_out} if left_out else {}))


def get_logger(name: str) -> Logger:
    return Logger(name)


def show_what_was_asked_for(*, tell: bool = True) -> None:
    """Honour `MONARCH_LOG`. Called once, when the runtime starts.

    Args:
        tell: warn of a value that it cannot have. The first process of a program does.
    """
    asked = os.environ.get("MONARCH_LOG", "")
    if not asked:
        return
    logger = logging.getLogger("monarch")
    if any(getattr(handler, "is_monarch_log", False) for handler in logger.handlers):
        return
    level = logging.getLevelNamesMapping().get(asked.upper())
    if level is None:
        if tell:
            logger.warning("MONARCH_LOG is %r; it can be debug, info, warning or error", asked)
        return
    handler = logging.StreamHandler()
    handler.is_monarch_log = True  # type: ignore[attr-defined]
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
