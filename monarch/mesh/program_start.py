"""What a program is told when it starts: once, by its first process, and by none of those that it starts."""

from __future__ import annotations

import threading
from typing import Final

from monarch import compiled
from monarch.log import get_logger, show_what_was_asked_for

log = get_logger("monarch.client")

_SLOWER: Final = "calls on this host take longer, and are the same otherwise"
_TO_MEND: Final = "install it where there is a C compiler, or set MONARCH_RING=0, and this is not said"

_untold: Final = threading.Semaphore(1)


def tell_at_start(*, is_first: bool = True) -> None:
    """Honour `MONARCH_LOG`; and without the compiled part say so. Who wants to do without it need not be warned.

    A program that has one client after the other is told by the first.

    Args:
        is_first: no other process of ours has started this one.
    """
    is_news = _untold.acquire(blocking=False)
    show_what_was_asked_for(tell=is_first and is_news)
    if not is_news:
        return
    if compiled.why_not and (compiled.unwanted or not is_first):
        log.info("compiled.left_out", reason=compiled.why_not, so=_SLOWER)
    elif compiled.why_not:
        log.warning("compiled.left_out", reason=compiled.why_not, so=_SLOWER, hint=_TO_MEND)
