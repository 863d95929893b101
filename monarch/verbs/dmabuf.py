"""Memory of a CUDA device as a dma-buf, by which an RDMA device can use it without a stop in memory of the host."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_PAGE: Final = os.sysconf("SC_PAGESIZE")
_AS_DMA_BUF: Final = 1  # Source: cuda.h, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD


@contextmanager
def exported(address: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """A descriptor of the pages that have this memory, for the block, and where in them the memory begins.

    Raises:
        OSError: there is no CUDA driver, or it does not export this memory. torch's does with
            `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    start = address // _PAGE * _PAGE
    stop = -(-(address + size_bytes) // _PAGE) * _PAGE
    fd = ctypes.c_int(-1)
    failed = cuda.cuMemGetHandleForAddressRange(
        ctypes.byref(fd), ctypes.c_ulonglong(start), ctypes.c_size_t(stop - start), _AS_DMA_BUF, ctypes.c_ulonglong(0)
    )
    if failed:
        raise OSError(f"the CUDA driver does not export the memory (error {failed})")
    try:
        yield fd.value, address - start
    finally:
        os.close(fd.value)
