"""Memory whose pages a device knows: others must stay from putting other pages there."""

from __future__ import annotations

import threading
from typing import Final

from attrs import define


@define(eq=False)
class Pin:
    """Some memory, until `release`."""

    start: int
    size_bytes: int

    def release(self) -> None:
        """Takes no lock."""
        _pins.discard(self)


_pins: Final[set[Pin]] = set()
none_new: Final = threading.RLock()
"""No pin begins while it is held."""


def pin(address: int, size_bytes: int) -> Pin:
    made = Pin(address, size_bytes)
    with none_new:
        _pins.add(made)
    return made


def pinned(address: int, size_bytes: int) -> bool:
    """Whether a device knows some of it."""
    return any(pin.start < address + size_bytes and address < pin.start + pin.size_bytes for pin in list(_pins))
