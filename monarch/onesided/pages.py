"""Large pages under memory that others copy from and to.

The kernel looks up each page of a copy between processes: of 4 KiB that costs more than the copy. With the owner's
memory in pages of 2 MiB it copies 64 MiB at 2.4 GB/s, and at 0.9 without, where `memcpy` does 2.3.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Final

from monarch.errors import BufferDropped
from monarch.onesided.exports import Exports, libc
from monarch.onesided.local import Local

_HUGE: Final = 2 << 20
_WORTH_BYTES: Final = 4 << 20
_MADV_COLLAPSE: Final = 25  # Linux 6.1; elsewhere it is refused, and pages stay as they are


def enlarge(book: Exports, number: int, memory: Local) -> None:
    """Move a buffer's memory to large pages, on a thread beside: its content and addresses stay."""
    if memory.size_bytes < _WORTH_BYTES or memory.device != "cpu":
        return

    def collapse() -> None:
        start = -(-memory.address // _HUGE) * _HUGE
        try:
            with book.using(number):
                libc().madvise(
                    ctypes.c_void_p(start), ctypes.c_size_t(memory.stop // _HUGE * _HUGE - start), _MADV_COLLAPSE
                )
        except BufferDropped:
            pass

    threading.Thread(target=collapse, name="monarch-pages", daemon=True).start()
