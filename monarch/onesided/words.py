"""Atomic operations on words of 8 bytes, as the process that has the memory carries them out: one at a time.

They are atomic among each other, whoever asks. A device does its own (see `ibverbs`), and knows nothing of these.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Final

MASK: Final = (1 << 64) - 1
_one_at_a_time = threading.Lock()


def fetch_add(address: int, add: int) -> int:
    word = ctypes.c_uint64.from_address(address)
    with _one_at_a_time:
        before = word.value
        word.value = (before + add) & MASK
    return before


def compare_and_swap(address: int, expected: int, desired: int) -> int:
    word = ctypes.c_uint64.from_address(address)
    with _one_at_a_time:
        before = word.value
        if before == expected & MASK:
            word.value = desired & MASK
    return before
