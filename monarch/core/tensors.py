"""How arrays and tensors travel: their elements, as raw memory, and the few words needed to see them as before.

The codec calls these reducers by exact class, and `reduce_subclass` for subclasses of tensors. Neither numpy nor torch
is imported here until there is a value of theirs to encode, or one arrives. Torch's own reductions are never used for
plain tensors: they cost 150 us to write and 200 us to read a tensor of 16x16, and send whole storages.

The rules:

- Only elements travel, never the storage they were sliced from. Two views of one storage arrive as two tensors.
- What arrives is writable and private. A dense tensor keeps its strides (transposed, channels_last; a numpy array its C
  or Fortran order); others arrive dense, in the same order of dimensions. An expanded tensor sends each element once,
  and arrives expanded into memory of its own.
- `requires_grad` is kept for leaves. A tensor that is the result of an operation arrives as a detached copy: graphs do
  not cross processes. An `nn.Parameter` stays one. Gradients and hooks stay behind.
- A CUDA tensor goes through the host, and arrives on the receiver's current CUDA device, or on the CPU if it has none.
- A subclass of tensors travels as the plain tensor that it is, its class and its state. One that has its own way of
  pickling keeps it; so do those that compute with something else than their own elements (`__torch_dispatch__`).
- Sparse, quantized and nested tensors and other devices are left to torch's own pickling; of a quantized tensor that
  shows a part of its storage, it gets a copy of that part.
- numpy arrays of objects are left to numpy's, and subclasses of arrays keep their own way.

Buffers of `OUT_OF_BAND_BYTES` and more go to the `Outbox`; smaller ones stay inside the pickle, as a `bytearray`, which
arrives writable: one part less on the way for three cheap copies.
"""

from __future__ import annotations

import copyreg
import ctypes
import pickle
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Literal, Protocol

from monarch.transports.base import BIG_BYTES
from monarch.transports.memory import move

OUT_OF_BAND_BYTES: Final = BIG_BYTES

HOLE: Final = pickle.PickleBuffer(bytearray())
"""Stands in the pickle for the memory last taken from the outbox. Must come before anything else that uses memory."""


class Outbox(Protocol):
    def room(self, size: int) -> memoryview:
        """Writable memory of `size` bytes, which becomes the next buffer of the message. The caller fills it."""
        ...

    def claim(self, address: int, size: int) -> bool:
        """Whether the memory there itself, or a copy that is made later, becomes the next buffer of the message."""
        ...


Reducer = Callable[[Any, Outbox], Any]
"""As `__reduce__`, or NotImplemented for pickle's own way."""


def install_reducers(table: dict[type, Reducer]) -> None:
    """Enter the classes of those libraries that are loaded by now. Called for each message."""
    if len(_installed) == 2:
        return
    if "numpy" not in _installed:
        numpy = sys.modules.get("numpy")
        if hasattr(numpy, "ndarray"):
            table[numpy.ndarray] = _reduce_array  # type: ignore[union-attr]
            _installed.add("numpy")
    if "torch" not in _installed:
        torch = sys.modules.get("torch")
        # Half imported, in another thread, it lacks some names.
        if hasattr(torch, "Tensor") and hasattr(torch, "nn") and hasattr(torch, "frombuffer"):
            nn = torch.nn  # type: ignore[union-attr]
            if hasattr(nn, "Parameter"):
                table[torch.Tensor] = _reduce_tensor  # type: ignore[union-attr]
                table[nn.Parameter] = _reduce_parameter
                subclassed.append(torch.Tensor)  # type: ignore[union-attr]
                _installed.add("torch")


_installed: set[str] = set()

subclassed: Final[list[type]] = []
"""Classes whose subclasses `reduce_subclass` is for: torch's, once it is loaded."""


# numpy


def _reduce_array(array: Any, outbox: Outbox) -> Any:
    numpy = sys.modules["numpy"]
    dtype = array.dtype
    if dtype.hasobject:
        return NotImplemented
    flags = array.flags
    order: Literal["C", "F"] = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    # The short form says it all for plain numbers in the machine's order.
    kind = dtype.str if dtype.isbuiltin == 1 and dtype.kind in "biufc" else dtype
    size = array.nbytes
    if size >= OUT_OF_BAND_BYTES:
        if flags.forc and outbox.claim(array.__array_interface__["data"][0], size):
            return _array, (HOLE, kind, array.shape, order)
        there = numpy.ndarray(array.shape, dtype, outbox.room(size), order=order)
        there[...] = array  # releases the GIL, and copies whatever the layout
        return _array, (HOLE, kind, array.shape, order)
    if flags.forc and dtype.kind in "biufc?":
        memory = bytearray((array.T if order == "F" else array).data)  # without `.data` a 0-dim array is a length
    else:
        memory = bytearray(array.tobytes(order))
    return _array, (memory, kind, array.shape, order)


def _array(memory: Any, kind: Any, shape: tuple[int, ...], order: Literal["C", "F"]) -> Any:
    import numpy

    dtype = _numpy_dtype(kind) if type(kind) is str else kind
    array = numpy.ndarray(shape, dtype, memory if len(memory) else None, order=order)
    return array if array.flags.aligned else array.copy(order)


@cache
def _numpy_dtype(name: str) -> Any:
    import numpy

    return numpy.dtype(name)


# torch


def _reduce_tensor(tensor: Any, outbox: Outbox) -> Any:
    if tensor.__dict__:
        return _with_attributes(tensor, outbox)
    torch = sys.modules["torch"]
    grad = tensor.requires_grad and tensor.is_leaf
    if not tensor.is_cpu and not tensor.is_cuda:
        return NotImplemented
    if tensor.is_quantized:
        return _reduce_quantized(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor._is_zerotensor():  # that has no memory
        return NotImplemented
    name = _dtype_name(tensor.dtype)
    if tensor.requires_grad:
        tensor = tensor.detach()
    device = "" if tensor.is_cpu else "cuda"
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    expanded, strides, dense = None, None, True
    if not tensor.is_contiguous():
        if 0 in tensor.stride():
            tensor, expanded = _narrowed(tensor)
        strides, dense = _layout(tensor)
    shape, dtype, size = tuple(tensor.shape), tensor.dtype, tensor.nbytes
    memory: Any = None
    if device or not dense:
        there = torch.frombuffer(outbox.room(size), dtype=dtype) if size >= OUT_OF_BAND_BYTES else None
        memory = HOLE
        if there is None:
            there = torch.empty(tensor.numel(), dtype=dtype)
            memory = bytearray(size)
        # One copy, from whatever layout and device.
        there.as_strided(shape, strides or _row_major(shape)).copy_(tensor)
        if memory is not HOLE and size:
            memory[:] = (ctypes.c_char * size).from_address(there.data_ptr())
    elif size >= OUT_OF_BAND_BYTES:
        address = tensor.data_ptr()
        if not outbox.claim(address, size):
            # 1 MiB takes 90 us; 7 ms by `copy_`, which wakes torch's threads, when the cores are busy. It lets go
            # of the interpreter.
            room = outbox.room(size)
            move(ctypes.addressof(ctypes.c_char.from_buffer(room)), address, size, room, tensor)
        memory = HOLE
    elif size:
        # By address: works for every dtype, and without numpy. 0.6 us, where tensor.numpy() takes 0.9.
        memory = bytearray((ctypes.c_char * size).from_address(tensor.data_ptr()))
    if not size:
        memory = None
    if strides is None and not grad and expanded is None and not device:
        return _tensor, (memory, name, shape)
    return _tensor, (memory, name, shape, strides, expanded, device, grad)


def _with_attributes(tensor: Any, outbox: Outbox) -> Any:
    """Tensors take attributes (buffers of modules have some); they travel beside the tensor."""
    torch = sys.modules["torch"]
    plain = tensor.detach()
    attributes = dict(tensor.__dict__)
    grad = tensor.requires_grad and tensor.is_leaf
    if type(plain) is not torch.Tensor or plain.__dict__:
        return NotImplemented
    return _attributed, (plain, attributes, grad)


def _attributed(tensor: Any, attributes: dict[str, Any], grad: bool) -> Any:
    tensor.__dict__.update(attributes)
    return tensor.requires_grad_() if grad else tensor


def reduce_subclass(tensor: Any, outbox: Outbox) -> Any:
    """A Reducer for those whose class is a subclass of one of `subclassed`, and has no reducer of its own."""
    torch = sys.modules["torch"]
    kind, base = type(tensor), torch.Tensor
    if (
        kind.__reduce_ex__ is not base.__reduce_ex__
        or kind.__reduce__ is not base.__reduce__
        or kind.__torch_dispatch__ is not base.__torch_dispatch__
        or hasattr(kind, "__tensor_flatten__")
        or kind in copyreg.dispatch_table
    ):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        plain = base.detach(tensor)  # not one that the class has
        grad = tensor.requires_grad and tensor.is_leaf
    if type(plain) is not base:
        return NotImplemented
    if hasattr(tensor, "_clear_non_serializable_cached_data"):
        tensor._clear_non_serializable_cached_data()
    return _of_subclass, (plain, kind, torch._utils._get_obj_state(tensor), grad)


def _of_subclass(plain: Any, kind: type, state: Any, grad: bool) -> Any:
    import torch

    tensor = plain.as_subclass(kind)
    if grad:
        with torch._C.DisableTorchFunctionSubclass():
            tensor.requires_grad_()  # before, it would be no leaf
    set_state: Any = torch._tensor._rebuild_from_type_v2
    return set_state(lambda: tensor, kind, (), state)


def _reduce_quantized(tensor: Any) -> Any:
    """Torch sends the whole storage: where that is more than the tensor shows, of a copy."""
    if tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return NotImplemented
    try:
        return tensor.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except RuntimeError:  # a scheme that torch cannot copy
        return NotImplemented


def _reduce_parameter(parameter: Any, outbox: Outbox) -> Any:
    torch = sys.modules["torch"]
    plain = parameter.detach()
    if type(plain) is not torch.Tensor:
        return NotImplemented
    reduced = _reduce_tensor(plain, outbox)
    if reduced is NotImplemented:
        return NotImplemented
    rebuild, args = reduced
    return _parameter, (*args[:1], rebuild, args[1:], parameter.requires_grad, parameter.__dict__ or None)


def _parameter(memory: Any, rebuild: Any, args: tuple[Any, ...], grad: bool, attributes: dict[str, Any] | None) -> Any:
    import torch

    parameter = torch.nn.Parameter(rebuild(memory, *args), requires_grad=grad)
    if attributes:
        parameter.__dict__.update(attributes)
    return parameter


def _tensor(
    memory: Any,
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    expanded: tuple[int, ...] | None = None,
    device: str = "",
    grad: bool = False,
) -> Any:
    import torch

    dtype, numpy_dtype = _dtypes(name)
    if memory is None:
        tensor = torch.empty_strided(shape, strides, dtype=dtype) if strides else torch.empty(shape, dtype=dtype)
    elif numpy_dtype is not None and strides is None:
        import numpy

        # 0.9 us where torch.frombuffer and view take 1.7
        array = numpy.ndarray(shape, numpy_dtype, memory)
        tensor = torch.from_numpy(array if array.flags.aligned else array.copy())
        if tensor.dtype is not dtype:
            tensor = tensor.view(dtype)
    else:
        flat = torch.frombuffer(memory, dtype=dtype)
        if flat.data_ptr() % flat.itemsize:
            flat = flat.clone()
        tensor = flat.view(shape) if strides is None else flat.as_strided(shape, strides)
    if expanded is not None:
        tensor = tensor.expand(expanded).clone(memory_format=torch.contiguous_format)
    if device and torch.cuda.is_available():
        tensor = tensor.to(device)
    return tensor.requires_grad_() if grad else tensor


def _narrowed(tensor: Any) -> tuple[Any, tuple[int, ...] | None]:
    """`tensor` with each element once, and the shape to expand it to, or None if it was not expanded."""
    narrow, shape = tensor, tuple(tensor.shape)
    for dim, stride in enumerate(tensor.stride()):
        if not stride and shape[dim] > 1:
            narrow = narrow.narrow(dim, 0, 1)
    return narrow, None if narrow is tensor else shape


def _layout(tensor: Any) -> tuple[tuple[int, ...] | None, bool]:
    """Strides without holes that keep the order of dimensions (None for row-major), and whether `tensor` has them."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    ideal, size, dense = list(strides), 1, True
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d])):
        ideal[dim] = size
        size *= max(shape[dim], 1)
        dense = dense and (shape[dim] == 1 or strides[dim] == ideal[dim])
    if dense:
        return strides, True  # as they are: torch tells channels_last by the strides of dimensions of size 1, too
    return None if tuple(ideal) == _row_major(shape) else tuple(ideal), False


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= max(n, 1)
    return tuple(reversed(strides))


@cache
def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name.startswith(("qint", "quint")):
        # A plain tensor viewed as a quantized dtype has no scale; torch crashes when it makes one from a buffer.
        raise TypeError(f"a tensor of dtype {name} that is not quantized cannot be sent")
    return name


@cache
def _dtypes(name: str) -> tuple[Any, Any]:
    """Torch's dtype, and a numpy dtype of the same size to see the memory through, or None without numpy."""
    import torch

    dtype = getattr(torch, name)
    try:
        import numpy

        torch.from_numpy(numpy.zeros(1))  # a torch that was built for another numpy refuses
    except (ImportError, RuntimeError):
        return dtype, None
    if name in ("float32", "float64", "float16", "bool", "uint8", "int8", "int16", "int32", "int64"):
        return dtype, numpy.dtype(name)
    if name in ("complex64", "complex128"):
        return dtype, numpy.dtype(name)
    return dtype, {1: numpy.dtype("u1"), 2: numpy.dtype("i2")}.get(dtype.itemsize)
