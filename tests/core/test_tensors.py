"""Arrays and tensors arrive equal, writable and private, and only their elements travel."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.core import tensors
from monarch.core.codec import decode, encode, private_parts

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

DTYPES = ["float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64"]
DTYPES += ["complex64", "complex128"]
DTYPES += [n for n in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32") if hasattr(torch, n)]
LAYOUTS = ["0-dim", "empty", "contiguous", "transposed", "stepped", "expanded", "expanded_all", "channels_last"]
LAYOUTS += ["slice", "permuted_step"]


def layout(name: str, base: Any) -> Any:
    """The numbers of `base` (rows of 8) in this layout."""
    return {
        "0-dim": lambda: base.reshape(-1)[1],
        "empty": lambda: base[:0],
        "contiguous": lambda: base,
        "transposed": lambda: base.transpose(0, 1),
        "stepped": lambda: base[:, ::2],
        "expanded": lambda: base[:1].expand(4, *base.shape[1:]),
        "expanded_all": lambda: base[1, 1].expand(3, 5),
        "channels_last": lambda: base.reshape(-1, 2, 4, 6).contiguous(memory_format=torch.channels_last),
        "slice": lambda: base[1:3],
        "permuted_step": lambda: base.reshape(-1, 2, 4).permute(2, 0, 1)[:, :, 1:],
    }[name]()


def bits(tensor: Any) -> list[int]:
    """Its elements as bytes: equality of every dtype, and of NaN."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def sent(value: Any) -> Any:
    """Through memory of the receiver's own."""
    return decode([bytearray(part) for part in encode(value)])


def total(value: Any) -> int:
    return sum(memoryview(part).nbytes for part in encode(value))


@pytest.fixture(params=["numpy", "no numpy"])
def with_and_without_numpy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "no numpy":
        dtypes = tensors._dtypes.__wrapped__
        monkeypatch.setattr(tensors, "_dtypes", lambda name: (dtypes(name)[0], None))


@pytest.mark.parametrize("rows", [6, 6000])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_dtype_in_every_layout(name: str, rows: int, with_and_without_numpy: None) -> None:
    for dtype in DTYPES if rows == 6 else ("bfloat16", "int16"):  # the large ones travel as buffers of their own
        arrives_equal(dtype, name, rows)


def arrives_equal(dtype: str, name: str, rows: int) -> None:
    kind = getattr(torch, dtype)
    base = (torch.arange(rows * 8) % (2 if dtype == "bool" else 100)).to(kind).reshape(rows, 8)
    tensor = layout(name, base)
    for grad in (False, True) if kind.is_floating_point else (False,):
        source = tensor.detach().requires_grad_(grad)
        for got in (sent(source), decode(encode(source)), decode([bytes(part) for part in encode(source)])):
            assert type(got) is torch.Tensor
            assert (got.dtype, got.shape, got.requires_grad) == (kind, source.shape, grad)
            assert bits(got) == bits(source)
            assert got.is_leaf


@pytest.mark.parametrize("size", [4, 64])
def test_channels_last_and_transposed_keep_their_strides(size: int) -> None:
    for tensor in (
        torch.randn(2, 3, size, size).contiguous(memory_format=torch.channels_last),
        torch.randn(1, 1, size, size).contiguous(memory_format=torch.channels_last),
        torch.randn(size * size, 7).t(),
        torch.randn(2, 3, size, size, 2).contiguous(memory_format=torch.channels_last_3d),
    ):
        assert sent(tensor).stride() == tensor.stride()
        assert torch.equal(sent(tensor), tensor)
    stepped = torch.randn(2, 6, size, size).contiguous(memory_format=torch.channels_last)[:, ::2]
    assert sent(stepped).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(sent(stepped), stepped)


def test_a_slice_sends_only_its_elements() -> None:
    big = torch.zeros(1 << 20)
    assert total(big[:10]) < 500
    assert total(big.reshape(1024, 1024)[:, ::512]) < 10_000
    assert total(big[:1].expand(1 << 20)) < 500
    assert total(np.zeros(1 << 20)[5:15]) < 500


@given(st.data())
def test_any_view_arrives_equal(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(max(1, int(np.prod(shape)))).reshape(-1)[: int(np.prod(shape))].reshape(shape)
    if shape:
        tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
        tensor = tensor[tuple(slice(data.draw(st.integers(0, 2)), None, data.draw(st.integers(1, 3))) for _ in shape)]
        if data.draw(st.booleans()):
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    got = sent(tensor)
    assert torch.equal(got, tensor)
    got.add_(1)
    assert (sent(tensor.numpy()) == tensor.numpy()).all()


@pytest.mark.parametrize("n", [10, 1 << 18])
def test_what_arrives_is_writable_and_private(n: int) -> None:
    array, tensor = np.zeros(n), torch.zeros(n)
    parts = encode((array, tensor))
    array += 5  # the snapshot was taken before
    tensor.add_(5)
    receivers = [decode(private_parts(parts)), decode([bytes(p) for p in parts]), decode(parts)]
    for got_array, got_tensor in receivers:
        got_array += 1
        got_tensor.add_(1)
    for got_array, got_tensor in receivers:
        assert got_array.sum() == n and got_tensor.sum() == n
    assert array[0] == 5 and tensor[0] == 5


def test_arriving_memory_is_used_in_place() -> None:
    memory = [bytearray(part) for part in encode([np.zeros(1 << 18), torch.zeros(1 << 18)])]
    array, tensor = decode(memory)
    array[0] = tensor[0] = 1
    assert any(memory[1]) and any(memory[2])


def test_memory_that_is_not_aligned_is_made_so() -> None:
    for value in (np.arange(1 << 16, dtype="f8"), torch.arange(1 << 16), torch.randn(64, 1 << 10).t()):
        parts = encode(value)
        shifted = [memoryview(bytearray(b"x" + bytes(part)))[1:] for part in parts]
        got = decode(shifted)
        assert (got == value).all()
        assert got.flags.aligned if isinstance(got, np.ndarray) else got.data_ptr() % 8 == 0


def test_a_large_tensor_goes_straight_into_the_allocated_memory() -> None:
    rooms: list[memoryview] = []

    def allocate(size: int) -> memoryview:
        rooms.append(memoryview(bytearray(size)))
        return rooms[-1]

    values = [torch.randn(1 << 16), torch.randn(1 << 9, 1 << 9).t(), torch.randn(1 << 9, 1 << 9)[:, ::2]]
    values += [
        torch.randn(1 << 17)[::2],
        np.ones((300, 300)),
        np.asfortranarray(np.ones((300, 300))),
        np.ones(1 << 17)[::2],
    ]
    parts = encode(values, lambda keys: allocate)
    assert all(part is room for part, room in zip(parts[1:], rooms, strict=True))
    assert all((a == b).all() for a, b in zip(sent(values), values, strict=True))


def test_parameters_stay_parameters() -> None:
    for grad in (True, False):
        for source in (torch.ones(3), torch.randn(4, 5).t(), torch.randn(1 << 15)):
            parameter = torch.nn.Parameter(source, requires_grad=grad)
            got = sent([parameter])[0]
            assert type(got) is torch.nn.Parameter
            assert got.requires_grad is grad and torch.equal(got, parameter) and got.is_leaf


def test_modules_keep_tied_weights_tied() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
    module[1].weight = module[0].weight
    got = sent(module)
    assert got[1].weight is got[0].weight
    x = torch.randn(2, 200)
    assert torch.equal(got(x), module(x))


def test_a_tensor_that_is_not_a_leaf_arrives_detached() -> None:
    for value in (torch.ones(3, requires_grad=True) * 2, torch.ones(1 << 16, requires_grad=True) * 2):
        got = sent(value)
        assert torch.equal(got, value.detach())
        assert got.grad_fn is None and not got.requires_grad


def test_attributes_of_tensors_and_parameters_travel() -> None:
    tensor, parameter = torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3))
    tensor.label = parameter.label = "x"
    tensor, parameter = sent((tensor, parameter))
    assert tensor.label == parameter.label == "x"
    assert type(tensor) is torch.Tensor and tensor.requires_grad and tensor.is_leaf
    assert type(parameter) is torch.nn.Parameter


def test_lazily_conjugated_and_negated_tensors_arrive_as_values() -> None:
    for n in (4, 1 << 14):
        tensor = torch.randn(n, 4, dtype=torch.complex64)
        for view in (tensor.conj(), tensor.conj().imag, tensor.t().conj()):
            assert torch.equal(sent(view), view.resolve_conj().resolve_neg())


def test_one_tensor_twice_stays_one_object() -> None:
    tensor = torch.ones(3)
    first, second = sent([tensor, {"k": tensor}])
    assert first is second["k"]


class Sub(torch.Tensor):
    pass


@pytest.mark.filterwarnings("default")  # torch's own pickling is full of them
def test_what_is_special_is_left_to_torch() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(sent(sparse).to_dense(), torch.eye(3))
    sub = torch.ones(3).as_subclass(Sub)
    assert type(sent(sub)) is Sub
    meta = torch.empty(3, device="meta")
    assert sent(meta).is_meta
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    assert torch.equal(sent(quantized).dequantize(), quantized.dequantize())
    assert sent(torch.float32) is torch.float32 and sent(torch.Size([1])) == torch.Size([1])


def test_a_quantized_dtype_without_a_scale_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="dtype qint8 that is not quantized"):
        encode(torch.zeros(3, dtype=torch.uint8).view(torch.qint8))


@pytest.mark.gpu
def test_cuda_tensors_come_back_on_cuda() -> None:
    for tensor in (torch.randn(1 << 16), torch.randn(3, 4).t(), torch.tensor(1.0)):
        got = sent(tensor.cuda())
        assert got.is_cuda and torch.equal(got.cpu(), tensor)


# numpy


@pytest.mark.parametrize("rows", [3, 3000])
@pytest.mark.parametrize(
    "dtype", ["f4", "f8", "f2", "?", "u1", "i8", "c8", ">f4", "g", "U3", "S5", "M8[s]", "m8[ns]", "i4,f8", "V3"]
)
def test_numpy_arrays_of_every_dtype_and_order(dtype: str, rows: int) -> None:
    flat = np.arange(rows * 8)
    base = (flat.astype("S3").astype("V3") if dtype == "V3" else flat.astype(dtype)).reshape(rows, 8)
    for array in (
        base,
        base.T,
        np.asfortranarray(base),
        base[:, ::2],
        base[::-1],
        base[:0],
        base[1, 1, ...],
        base[:1, :1],
    ):
        for got in (sent(array), decode([bytes(part) for part in encode(array)])):
            assert type(got) is np.ndarray
            assert got.dtype == array.dtype and got.shape == array.shape
            assert got.tobytes() == array.tobytes()
            assert got.flags.writeable
            if array.flags.forc:
                assert got.flags.f_contiguous == array.flags.f_contiguous
                assert got.flags.c_contiguous == array.flags.c_contiguous


def test_read_only_and_broadcast_arrays_arrive_writable() -> None:
    array = np.broadcast_to(np.arange(5.0), (3, 5))
    got = sent(array)
    got += 1
    assert (got == array + 1).all()


def test_arrays_of_objects_and_subclasses_are_left_to_numpy() -> None:
    array = np.array([1, "a", None, {"k": 2}], dtype=object)
    assert sent(array).tolist() == array.tolist()
    masked = np.ma.masked_array(np.arange(20_000), mask=np.arange(20_000) % 2 == 0)
    got = sent(masked)
    assert type(got) is type(masked) and (got == masked).all()
    record = np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    assert type(sent(record)) is np.recarray and sent(record).b[0] == 2.0


def test_an_unpicklable_object_inside_an_array_is_named() -> None:
    with pytest.raises(TypeError) as caught:
        encode([np.array([sys._getframe()], dtype=object)])
    assert "the value[0] is a numpy.ndarray" in caught.value.__notes__[0]
