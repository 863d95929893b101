"""Memory for the results of collectives, used again once nobody has it any more.

The kernel fills each page of fresh memory with zeros, when it is first touched, which takes longer than a copy. So some
of what large results leave behind is kept for the next ones.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Final

import torch

from monarch.transports.memory import allocate

KEPT_BYTES: Final = 256 << 20
"""So much unused memory is kept at most."""
_FEWEST_BYTES: Final = 1 << 20
_STEP_BYTES: Final = 2 << 20
_ALIGNED_BYTES: Final = 64
"""A cache line: copies to elsewhere take a quarter longer."""


class Buffers:
    """Those of one process. Thread-safe: whoever lets go of a tensor last gives its memory back."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._unused: list[memoryview] = []  # oldest first

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of one dimension, whose elements have any value. Its memory is its own until its storage is gone."""
        size_bytes = count * dtype.itemsize
        if device.type != "cpu" or size_bytes < _FEWEST_BYTES:
            return torch.empty(count, dtype=dtype, device=device)
        memory = self._take(-(-size_bytes // _STEP_BYTES) * _STEP_BYTES)
        lease = memoryview(memory)  # torch keeps it as long as the storage
        weakref.finalize(lease, self._give_back, memory).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=count)

    def _take(self, size_bytes: int) -> memoryview:
        with self._lock:
            for at, memory in enumerate(self._unused):
                if len(memory) == size_bytes:
                    return self._unused.pop(at)
        memory = allocate(size_bytes + _ALIGNED_BYTES)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _ALIGNED_BYTES
        return memory[start : start + size_bytes]

    def _give_back(self, memory: memoryview) -> None:
        with self._lock:
            self._unused.append(memory)
            while sum(map(len, self._unused)) > KEPT_BYTES:
                del self._unused[0]
