"""From objects of the user's to addresses."""

from __future__ import annotations

import array
import ctypes
import mmap
import weakref

import pytest

from monarch.onesided.exports import Exports
from monarch.onesided.local import copy, local, view_of


@pytest.mark.parametrize(
    "data",
    [bytearray(b"12345678"), memoryview(bytearray(b"12345678")), array.array("b", b"12345678"), mmap.mmap(-1, 8)],
    ids=lambda d: type(d).__name__,
)
def test_writable_memory(data):
    found = local(data)

    assert (found.size_bytes, found.writable, found.device) == (8, True, "cpu")
    ctypes.memset(found.address, 0x61, 8)
    assert bytes(data) == b"a" * 8


def test_a_part_of_read_only_memory():
    found = local(memoryview(b"0123456789")[3:6])

    assert ctypes.string_at(found.address, found.size_bytes) == b"345"
    assert not found.writable


def test_memory_is_kept_where_it_is():
    data = bytearray(8)
    found = local(data)

    with pytest.raises(BufferError):
        data.extend(b"more")
    del found
    data.extend(b"more")


def test_only_memory_that_stays_where_it_is_until_the_end_of_an_object_has_an_anchor():
    numpy = pytest.importorskip("numpy")
    view, array_ = Exports().allocate(8), numpy.zeros(8)

    assert local(view).anchor is local(numpy.frombuffer(view)).anchor is view.obj
    assert local(array_).anchor is local(array_[3:]).anchor is array_
    anchor = weakref.ref(array_)
    with pytest.raises(ValueError, match="cannot resize"):
        array_.resize(100, refcheck=False)
    assert anchor() is array_
    for other in (mmap.mmap(-1, 8), array.array("b", b"12345678"), bytearray(8), numpy.frombuffer(mmap.mmap(-1, 8))):
        assert local(other).anchor is None


@pytest.mark.torch
def test_a_tensor_that_may_be_resized_has_no_anchor():
    import torch

    fixed = torch.frombuffer(Exports().allocate(8), dtype=torch.uint8)

    assert local(fixed).anchor is fixed.untyped_storage()
    assert local(torch.zeros(8)).anchor is None


@pytest.mark.parametrize("data", [b"", bytearray(), memoryview(b"")])
def test_empty_memory_is_refused(data):
    with pytest.raises(ValueError, match="empty"):
        local(data)


def test_memory_with_gaps_is_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        local(memoryview(bytearray(10))[::2])


def test_references_to_python_objects_are_refused():
    with pytest.raises(ValueError, match="Python objects"):
        local((ctypes.py_object * 2)())


@pytest.mark.parametrize("data", [3, "text", [1, 2], None, object()])
def test_what_has_no_memory_is_refused(data):
    with pytest.raises(RuntimeError, match="expected a torch tensor or a memoryview"):
        local(data)


def test_copy_and_view():
    source, target = bytearray(b"from"), bytearray(b"to..")
    copy(local(target).address, local(source).address, 4)
    view_of(local(source).address, 4)[:2] = b"FR"

    assert (bytes(target), bytes(source)) == (b"from", b"FRom")


@pytest.mark.torch
def test_tensors_of_any_shape_and_dtype():
    import torch

    for shape, dtype in [((2, 3, 4), torch.bfloat16), ((7,), torch.bool), ((), torch.complex64), ((1, 5), torch.int8)]:
        tensor = torch.zeros(shape, dtype=dtype)
        found = local(tensor)
        assert (found.address, found.size_bytes) == (tensor.data_ptr(), tensor.numel() * tensor.element_size())
    part = torch.arange(10)[3:6]
    assert local(part).address == part.data_ptr()


@pytest.mark.torch
def test_tensors_that_are_not_one_range_of_memory_are_refused():
    import torch

    for tensor in [torch.zeros(4, 4).t(), torch.zeros(10)[::2], torch.zeros(1).expand(5), torch.eye(3).to_sparse()]:
        with pytest.raises(ValueError, match="not contiguous"):
            local(tensor)
    with pytest.raises(ValueError, match="empty"):
        local(torch.empty(0, dtype=torch.uint8))
    with pytest.raises(ValueError, match="meta"):
        local(torch.empty(4, device="meta"))
