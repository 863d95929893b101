"""What the controller knows of a tensor: shape, strides, offset, dtype, device; and what torch puts off: it may be the
conjugate, or the negative, of what is in its memory.

Interned: equal ones are one object, so that they are compared and hashed by identity. One that nobody has any more is
forgotten.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Final, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

T = TypeVar("T", bound=torch.Tensor)
LARGE_BYTES: Final = 64 << 10
_known: weakref.WeakValueDictionary[tuple[Any, ...], Meta] = weakref.WeakValueDictionary()


class Meta:
    """Of one tensor; see the module. Made by `meta_of` only.

    Attributes:
        put_off: whether it is a conjugate, and a negative; None where it is neither.
    """

    __slots__ = ("__weakref__", "device", "dtype", "is_large", "offset", "put_off", "shape", "stride")

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
        put_off: tuple[bool, bool] | None = None,
    ) -> None:
        self.shape, self.stride, self.offset, self.dtype, self.device = shape, stride, offset, dtype, device
        self.put_off = put_off
        self.is_large = math.prod(shape) * dtype.itemsize >= LARGE_BYTES

    def fake(self, mode: FakeTensorMode) -> torch.Tensor:
        """A tensor without memory that looks like this. Call it inside `mode`."""
        if not self.offset:
            return self.mark(torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device))
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True) if n)
        whole = torch.empty(last + 1, dtype=self.dtype, device=self.device)
        return self.mark(whole.as_strided(self.shape, self.stride, self.offset))

    def mark(self, tensor: T) -> T:
        """`tensor`, which has just been made, with what is put off of this."""
        if self.put_off is not None:
            is_conjugate, is_negative = self.put_off
            torch._C._set_conj(tensor, is_conjugate)
            torch._C._set_neg(tensor, is_negative)
        return tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _meta, (self.shape, self.stride, self.offset, self.dtype, self.device, self.put_off)


def _meta(*fields: Any) -> Meta:
    found = _known.get(fields)
    if found is None:
        found = _known.setdefault(fields, Meta(*fields))
    return found


def meta_of(tensor: torch.Tensor) -> Meta:
    """Raises: NotImplementedError, for a layout without strides."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"a distributed tensor of layout {tensor.layout} is planned; only strided ones work")
    put_off = (tensor.is_conj(), tensor.is_neg())
    return _meta(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.device,
        put_off if any(put_off) else None,
    )


def dense_meta(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, offset: int = 0) -> Meta:
    """Of a contiguous tensor."""
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return _meta(tuple(shape), tuple(reversed(stride)), offset, dtype, device, None)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """With nothing put off: what is in its memory is what it is."""
    return tensor.resolve_conj().resolve_neg()
