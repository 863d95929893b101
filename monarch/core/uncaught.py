"""The error that has left the script, and what people read with it: what they know from there is not told again."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator


def uncaught() -> Iterator[BaseException]:
    """What Python has shown, or is showing, since an error left the script; nothing before. At a prompt, errors may
    have left any statement, and count for nothing, as those do that another keeps in the same place, which it has
    caught (pytest, of each test that fails)."""
    last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    return shown_with(last) if last is not None and _has_left_the_script(last) else iter(())


def _has_left_the_script(error: BaseException) -> bool:
    script = sys.modules["__main__"].__dict__
    return any(
        frame.f_code.co_name == "<module>" and frame.f_globals is script
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def shown_with(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that the traceback of `error` shows, `error` first: causes, contexts and members of groups."""
    left, seen = [error], set[int]()
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            before = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
            left += [before] if before is not None else []
            left += each.exceptions if isinstance(each, BaseExceptionGroup) else []
