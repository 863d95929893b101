"""What the controller knows of a tensor: shape, strides, offset, dtype, device.

Interned: equal ones are one object, so that they are compared and hashed by identity. One that nobody has any more is
forgotten.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

LARGE_BYTES: Final = 64 << 10
_known: weakref.WeakValueDictionary[tuple[Any, ...], Meta] = weakref.WeakValueDictionary()


class Meta:
    """Of one tensor; see the module. Made by `meta_of` only."""

    __slots__ = ("__weakref__", "device", "dtype", "is_large", "offset", "shape", "stride")

    def __init__(
        self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.stride, self.offset, self.dtype, self.device = shape, stride, offset, dtype, device
        self.is_large = math.prod(shape) * dtype.itemsize >= LARGE_BYTES

    def fake(self, mode: FakeTensorMode) -> torch.Tensor:
        """A tensor without memory that looks like this. Call it inside `mode`."""
        if not self.offset:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True) if n)
        whole = torch.empty(last + 1, dtype=self.dtype, device=self.device)
        return whole.as_strided(self.shape, self.stride, self.offset)

    def __reduce__(self) -> tuple[Any, ...]:
        return _meta, (self.shape, self.stride, self.offset, self.dtype, self.device)


def _meta(*fields: Any) -> Meta:
    found = _known.get(fields)
    if found is None:
        found = _known.setdefault(fields, Meta(*fields))
    return found


def meta_of(tensor: torch.Tensor) -> Meta:
    """Raises: NotImplementedError, for a layout without strides."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"a distributed tensor of layout {tensor.layout} is planned; only strided ones work")
    return _meta(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device)


def dense_meta(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, offset: int = 0) -> Meta:
    """Of a contiguous tensor."""
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return _meta(tuple(shape), tuple(reversed(stride)), offset, dtype, device)
