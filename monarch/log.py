"""Logging: structlog in front of the standard library's logger `monarch`, with nothing global configured.

Without a handler of the program's own, Python's handler of last resort shows warnings and errors on stderr, and nothing
below. `MONARCH_LOG=debug` (or info, warning, ...) shows that level of this library on stderr.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

import structlog


def _render(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    """`noun.event key=value ...`; an exception's traceback on the lines after it."""
    trace = event.pop("exception", "")
    text = " ".join([str(event.pop("event")), *(f"{key}={value!r}" for key, value in event.items())])
    return f"{text}\n{trace}" if trace else text


_PROCESSORS: list[Any] = [structlog.stdlib.filter_by_level, structlog.processors.format_exc_info, _render]


def get_logger(name: str) -> Any:
    """A structlog logger over `logging.getLogger(name)`; a call below the level costs some 0.3 us."""
    return structlog.wrap_logger(
        logging.getLogger(name), processors=_PROCESSORS, wrapper_class=structlog.stdlib.BoundLogger
    )


def show_what_was_asked_for() -> None:
    """Honour `MONARCH_LOG`. Called once, when the runtime starts."""
    asked = os.environ.get("MONARCH_LOG", "").upper()
    logger = logging.getLogger("monarch")
    if not asked or any(getattr(handler, "is_monarch_log", False) for handler in logger.handlers):
        return
    level = logging.getLevelNamesMapping().get(asked)
    if level is None:
        logger.warning("MONARCH_LOG is %r; it can be debug, info, warning or error", asked)
        return
    handler = logging.StreamHandler()
    handler.is_monarch_log = True  # type: ignore[attr-defined]
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
