"""Memory for the results of collectives, used again once nobody has it any more.

The kernel fills each page of fresh memory with zeros, when it is first touched: of 64 MiB that takes as long as all
else that a member of a reduction does with them. So large results are in memory of our own, which asks for huge pages,
and some of it is kept for the next ones.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress
from typing import Final

import torch

KEPT_BYTES: Final = 256 << 20
"""So much unused memory is kept at most."""
_FEWEST_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 2 << 20


class Buffers:
    """Those of one process. Thread-safe: whoever lets go of a tensor last gives its memory back."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._unused: list[mmap.mmap] = []  # oldest first

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of one dimension, whose elements have any value. Its memory is its own until its storage is gone."""
        size_bytes = count * dtype.itemsize
        if device.type != "cpu" or size_bytes < _FEWEST_BYTES:
            return torch.empty(count, dtype=dtype, device=device)
        memory = self._take(-(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        lease = memoryview(memory)  # torch keeps it as long as the storage
        weakref.finalize(lease, self._give_back, memory).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=count)

    def _take(self, size_bytes: int) -> mmap.mmap:
        with self._lock:
            for at, memory in enumerate(self._unused):
                if len(memory) == size_bytes:
                    return self._unused.pop(at)
        memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # not everywhere
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _give_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._unused.append(memory)
            while sum(map(len, self._unused)) > KEPT_BYTES:
                del self._unused[0]
