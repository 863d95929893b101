"""The compiled part of the library, `_compiled.c`: what every message between processes of one host passes.

- Rings in shared memory (`transports.ring`), and a wait that looks at them with the interpreter let go.
- A byte of shared memory that two processes may change at the same time (`transports.segments`).
- The numbering of sessions and the heads of messages; `core.protocol` and `core.envelope` have the same in Python.
- Lanes: a message goes from its sender into the rings of all its receivers in one step; into the mailbox of an actor of
  the same process (`core.mailbox`), too.
- The lead: a thread that waits delivers meanwhile what rings bring, in one step (`core.poller`). It looks at objects
  that are in Python, too: `Signal` of `core.driver`, `Wake` of `wake`, `Spin` of `core.spin`.

It is optional, and built where a C compiler is. Without it, and where the variable `MONARCH_RING` is 0, all goes by
Python and through sockets.

Attributes:
    part: the module, or None.
    why_not: why there is none, for people; "" where there is.
    unwanted: whether that is as the user wants it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from monarch._compiled import Lane, Reader, Writer

__all__ = [
    "FULL",
    "SENT",
    "Lane",
    "Reader",
    "Take",
    "Targets",
    "Writer",
    "delivery",
    "part",
    "post",
    "unwanted",
    "why_not",
]

_VERSION: Final = 18

SENT: Final = 1
FULL: Final = 2
"""What `post` says when it has sent; `FULL`: and who sends is to wait for room."""

Take = Callable[[Any], None]
"""Takes a message, on the driving thread, and does not block."""

Targets = tuple[tuple[Any, Iterator[int] | None, int, int], ...]
"""Receivers of one message, each: (who has its `lane`, where its number comes from, process, rank); or, alone, an actor
of this process: (its mailbox, None, process, rank)."""

try:
    import monarch._compiled as part
except ModuleNotFoundError as error:
    part = None  # type: ignore[assignment]
    why_not = f"the compiled part of monarch is missing ({error}): there was no C compiler when it was installed"
except ImportError as error:
    part = None  # type: ignore[assignment]
    why_not = f"the compiled part of monarch cannot be loaded: {error}"
else:
    why_not = ""
    if getattr(part, "VERSION", 1) != _VERSION:  # of a checkout that has moved on since
        part = None  # type: ignore[assignment]
        why_not = "the compiled part of monarch is of another version: install monarch again"
unwanted = os.environ.get("MONARCH_RING") == "0"
if unwanted:
    part, why_not = None, "MONARCH_RING is 0"  # type: ignore[assignment]


def _no_post(*_: object) -> int:
    return 0


post = _no_post if part is None else part.post
"""Send a message to all of `targets` on their lanes: see `_compiled.pyi`. Without the compiled part nobody has one."""


def _by_python(take: Take, actors: Mapping[int, Any], ports: Mapping[int, Any]) -> Take:
    return take


delivery = _by_python if part is None else part.Delivery
"""`take`, which delivers a message of this process. A ring that is given this gives a call to the `mailbox` of its
actor itself, and a value to `deliver` of its port, where nothing about them is special."""
