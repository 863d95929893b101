"""Where memory of this process is: from a tensor, array or buffer of the user's to an address and a size in bytes."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from attrs import define

from monarch.transports.memory import Memory


class _PyBuffer(ctypes.Structure):
    """Source: Include/pybuffer.h, `Py_buffer`; part of the stable ABI as of 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@define(frozen=True, slots=True)
class Local:
    """Contiguous memory of this process.

    Attributes:
        keeper: an object that keeps the memory where it is; hold this `Local` for as long as a transfer uses it.
        device: "cpu", or the CUDA device, for which `address` is one of that device.
        anchor: an object that can be weakly referenced, and until whose end the memory stays where it is; None if there
            is none. An mmap can be closed before it ends, an array can grow, a tensor be resized.
    """

    address: int
    size_bytes: int
    writable: bool
    keeper: Any
    device: str = "cpu"
    anchor: Any = None

    @property
    def stop(self) -> int:
        return self.address + self.size_bytes


def local(data: Any) -> Local:
    """The memory of a torch tensor, or of anything with the buffer protocol (memoryview, bytearray, mmap, array).

    Raises:
        ValueError: it is not contiguous, empty, or holds Python objects.
        RuntimeError: it is something else.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _of_tensor(torch, data)
    try:
        view = memoryview(data)
    except TypeError:
        kind = type(data).__name__
        raise RuntimeError(f"expected a torch tensor or a memoryview, not {kind}: it has no memory to share") from None
    if "O" in view.format:
        raise ValueError("the memory holds references to Python objects, which mean nothing elsewhere")
    if not view.c_contiguous:
        raise ValueError("the memory is not contiguous: copy it first")
    if not view.nbytes:
        raise ValueError("the memory is empty: there is nothing to transfer")
    return Local(_address(view), view.nbytes, not view.readonly, view, anchor=_anchor(view))


def _of_tensor(torch: Any, tensor: Any) -> Local:
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"the tensor of shape {tuple(tensor.shape)} is not contiguous: its elements are not one range of memory; "
            "use tensor.contiguous()"
        )
    size = tensor.numel() * tensor.element_size()
    if not size:
        raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is empty: there is nothing to transfer")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"a tensor on device {tensor.device} has no memory that others can read; use cpu or cuda")
    storage = tensor.untyped_storage()
    anchor = None if storage.resizable() else storage
    return Local(tensor.data_ptr(), size, True, tensor.detach(), str(tensor.device), anchor)


class Allocation(Memory):  # type: ignore[misc, valid-type]
    """Memory of `monarch.rdma.empty`, until the last view of it is gone."""


def _anchor(view: memoryview) -> Any:
    """Whose memory it is in the end: arrays of numpy may be views of others, and those of memory that was given."""
    owner: Any = view
    while True:
        if isinstance(owner, memoryview):
            owner = owner.obj
        elif getattr(owner, "base", None) is not None:
            owner = owner.base
        else:
            break
    numpy = sys.modules.get("numpy")
    if isinstance(owner, Allocation):
        return owner
    # One of numpy that has its memory is not resized while it is weakly referenced.
    return owner if numpy is not None and isinstance(owner, numpy.ndarray) and owner.flags.owndata else None


def _address(view: memoryview) -> int:
    """`ctypes.c_char.from_buffer` would refuse memory that is read-only."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def view_of(address: int, size_bytes: int) -> memoryview:
    """The memory at an address as a writable buffer. Whoever asks holds its keeper."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def snapshot(address: int, size_bytes: int) -> bytes:
    """What is at an address now."""
    return ctypes.string_at(address, size_bytes)


def copy(target: int, source: int, size_bytes: int) -> None:
    """Copy between addresses of this process, without the interpreter lock."""
    ctypes.memmove(target, source, size_bytes)


# Memory of a CUDA device is staged through the host


def on_host(memory: Local, offset: int, size_bytes: int) -> memoryview:
    """A copy of some bytes of device memory."""
    return memoryview(_device_bytes(memory)[offset : offset + size_bytes].cpu().numpy())


def to_device(memory: Local, offset: int, data: memoryview) -> None:
    torch = sys.modules["torch"]
    _device_bytes(memory)[offset : offset + data.nbytes].copy_(torch.frombuffer(data, dtype=torch.uint8))


def _device_bytes(memory: Local) -> Any:
    torch = sys.modules["torch"]
    return memory.keeper.view(-1).view(torch.uint8)
