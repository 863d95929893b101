"""Memory of this process for large buffers, wherever it is needed: at the encoder, at a receiver that must copy."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

from monarch.transports.base import Buffer

_FREELY_BYTES = 1 << 20
"""A copy of so much lets other threads run meanwhile."""


def allocate(size_bytes: int) -> memoryview:
    """Writable memory, not zeroed first where that can be had. 64 MiB, filled: 14 ms through numpy or a mapping with
    huge pages, 75 ms through a `bytearray`. Raises MemoryError."""
    numpy = sys.modules.get("numpy")
    if hasattr(numpy, "empty"):
        return memoryview(numpy.empty(size_bytes, numpy.uint8))  # type: ignore[union-attr]
    if size_bytes < 1 << 20 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return memoryview(bytearray(size_bytes))
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot map {size_bytes} bytes: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def copy(to: memoryview, part: Buffer) -> None:
    """Fill `to`, of the size of `part`, with its bytes."""
    size = len(part)
    if size < _FREELY_BYTES:
        to[:] = part
    elif type(part) is bytes:
        ctypes.memmove(_address(to), part, size)
    elif not memoryview(part).readonly:
        ctypes.memmove(_address(to), _address(part), size)
    else:
        to[:] = part


def _address(memory: Buffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
