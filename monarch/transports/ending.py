"""What a transport has to end with the process: last of all, when those who still had links have closed them.

Exit handlers run in the reverse order of their registration, and a transport may load late; so this module is loaded
with `registry`, before anybody can register who has links.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Final

_LAST: Final[list[Callable[[], None]]] = []


def at_the_end(action: Callable[[], None]) -> None:
    _LAST.append(action)


@atexit.register
def _run() -> None:
    for action in reversed(_LAST):
        action()
