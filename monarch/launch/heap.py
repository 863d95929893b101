"""Fills the holes that imports leave in the heap of the template.

A fork shares the pages of its template until it writes to one: then the kernel copies the page (2.5 to 3.5 us measured
in a virtual machine). The objects that a child makes would go into the holes between those of the template, a few on
each page. With the holes taken they lie close together, on new pages: a process of a mesh copies 230 pages fewer of
2180 until its first answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any, Final

from monarch.launch import linux

# The interpreter's allocator hands out blocks of up to 512 bytes from pools of 16 KiB, each for one size and with a
# header of 48 bytes in front; partly used pools come before new ones (CPython, Objects/obmalloc.c).
_POOL: Final = 16 << 10
_HEADER: Final = 48
_SIZES: Final = range(48, 513, 16)
_MOST_BLOCKS: Final = 5000  # of one size; usual are 100

# Larger ones come from the C library.
_CHUNKS: Final = (*(1 << power for power in range(16, 9, -1)), *range(1008, 0, -16))
_PAGE: Final = 4096

_fillers: Final[list[bytes]] = []


def fill_holes() -> None:
    """Take all free blocks of the heap, for good. For the main thread, with no other; after a collection."""
    for size in _SIZES:
        if not _fill_pools(size):
            break
    if linux.LINUX:
        with contextlib.suppress(OSError, AttributeError):
            _fill_chunks(ctypes.CDLL(None))


def _fill_pools(size: int) -> bool:
    """Take blocks until three in a row are the first three of a pool: then it is a new one. False: there was none, as
    with `PYTHONMALLOC=malloc`."""
    content = size - sys.getsizeof(b"")
    expected = at = 0
    for _ in range(_MOST_BLOCKS):
        filler = bytes(content)
        _fillers.append(filler)
        offset = id(filler) % _POOL
        at = at + 1 if at and offset == expected else int(offset == _HEADER)
        expected = offset + size
        if at == 3:
            return True
    return False


def _fill_chunks(libc: Any) -> None:
    """Take chunks, the largest first, until they come from the end of the heap."""
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim(ctypes.c_size_t(0))  # leaves less than a page at the end
    end = libc.sbrk(ctypes.c_ssize_t(0))
    for size in _CHUNKS:
        for _ in range(_MOST_BLOCKS):
            chunk = libc.malloc(size)
            if not chunk or chunk > end - 2 * _PAGE:
                libc.free(chunk)
                break
