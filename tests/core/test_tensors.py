"""Arrays and tensors arrive equal, writable and private, and only their elements travel."""

from __future__ import annotations

import copyreg
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


class Named(torch.Tensor):
    """Has slots, state of its own making, and functions of torch that keep its class away."""

    __slots__ = ("slot",)
    name = "none"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.Tensor.requires_grad_, "it was made by code that is not its own"
        return super().__torch_function__(func, types, args, kwargs)

    def detach(self) -> Any:
        raise AssertionError("this is not for those who pickle")


class Stateful(torch.Tensor):
    def __getstate__(self) -> Any:
        return {"count": 1}

    def __setstate__(self, state: Any) -> None:
        self.restored = state["count"] + 1


class PicklesItself(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return (len, ("abc",))


class PicklesPlainly(torch.Tensor):
    def __reduce__(self) -> Any:
        raise AssertionError("torch asks only for the other one")


class Registered(torch.Tensor):
    pass


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("nothing is computed here")


class SubParameter(torch.nn.Parameter):
    pass


@pytest.mark.parametrize("n", [10, 1 << 17])
def test_a_subclass_sends_only_its_elements_beside_the_pickle(n: int) -> None:
    big = torch.arange(1 << 18)
    sub = big[5 : 5 + n].as_subclass(Sub)
    parts = encode([sub, sub])
    assert sum(map(len, parts)) < n * 8 + 1000
    assert len(parts) == (1 if n == 10 else 2)
    sub += 1  # the snapshot was taken before
    got, again = decode([bytearray(part) for part in parts])
    assert type(got) is Sub and again is got and got.is_leaf
    assert torch.equal(got, torch.arange(5, 5 + n))
    got += 1
    assert total(torch.zeros(1 << 18)[:10].as_subclass(SubParameter)) < 1000


def test_a_subclass_keeps_its_layout_and_what_it_requires() -> None:
    for size in (3, 300):
        for layout in (torch.rand(size, size), torch.rand(size, size).t(), torch.rand(size, 1).expand(size, size)):
            sub = layout.as_subclass(Sub).requires_grad_()
            got = sent(sub)
            assert type(got) is Sub and got.requires_grad and got.is_leaf and torch.equal(got, layout)
            result = sent(sub * 2)
            assert type(result) is Sub and not result.requires_grad and result.grad_fn is None
    assert sent(layout.t().as_subclass(Sub)).shape == layout.t().shape


def test_the_state_of_a_subclass_travels() -> None:
    named = torch.ones(3).as_subclass(Named)
    with torch._C.DisableTorchFunctionSubclass():
        named.requires_grad_()
    named.name, named.slot, named.other = "x", 5, torch.zeros(2).as_subclass(Sub)
    got = sent(named)
    assert type(got) is Named and (got.name, got.slot) == ("x", 5) and type(got.other) is Sub
    assert got.requires_grad and got.is_leaf
    assert sent(torch.ones(3).as_subclass(Stateful)).restored == 2
    local = type("Local", (torch.Tensor,), {"table": np.ones(1 << 17)})  # travels by value, with a buffer of its own
    got = sent(torch.ones(1 << 17).as_subclass(local))
    assert torch.equal(got.as_subclass(torch.Tensor), torch.ones(1 << 17)) and got.table.sum() == 1 << 17


def test_what_a_subclass_has_that_cannot_be_pickled_is_named() -> None:
    sub = torch.ones(3).as_subclass(Sub)
    sub.frame = sys._getframe()
    with pytest.raises(TypeError) as caught:
        encode([sub])
    assert "the value[0].frame is a frame" in caught.value.__notes__[0]


def test_a_subclass_that_pickles_in_its_own_way_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent(torch.ones(3).as_subclass(PicklesItself)) == 3
    assert type(sent(torch.ones(3).as_subclass(PicklesPlainly))) is PicklesPlainly
    monkeypatch.setitem(copyreg.dispatch_table, Registered, lambda _: (len, ("ab",)))
    assert sent(torch.ones(3).as_subclass(Registered)) == 2
    wrapper = torch.Tensor._make_wrapper_subclass(Dispatching, (3,))
    assert tensors.reduce_subclass(wrapper, None) is NotImplemented  # type: ignore[arg-type]
    lazy = sent(torch.nn.parameter.UninitializedBuffer())
    assert type(lazy) is torch.nn.parameter.UninitializedBuffer


@pytest.mark.filterwarnings("default")  # torch's own pickling is full of them
def test_what_is_special_is_left_to_torch() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(sent(sparse).to_dense(), torch.eye(3))
    with pytest.raises(RuntimeError, match="ZeroTensor is not serializable"):
        sent(torch._efficientzerotensor((3,)))
    meta = torch.empty(3, device="meta")
    assert sent(meta).is_meta
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    assert torch.equal(sent(quantized).dequantize(), quantized.dequantize())
    assert sent(torch.float32) is torch.float32 and sent(torch.Size([1])) == torch.Size([1])


@pytest.mark.filterwarnings("default")
def test_a_slice_of_a_quantized_tensor_sends_only_its_elements() -> None:
    numbers, scales, zeros = torch.rand(4, 1 << 16), torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.zeros(4)
    by_tensor = torch.quantize_per_tensor(numbers, 0.1, 3, torch.quint8)
    by_channel = torch.quantize_per_channel(numbers, scales, zeros.long(), 0, torch.qint8)
    labelled = by_tensor[:, 4:6]
    labelled.label = "x"
    for view in (by_tensor[1:3, 5:25], by_tensor.t()[7:9], by_channel[:, 8:12], labelled, labelled.as_subclass(Sub)):
        assert total(view) < 3000
        got = sent(view)
        assert type(got) is type(view) and got.dtype is view.dtype and got.qscheme() == view.qscheme()
        assert torch.equal(got.dequantize(), view.dequantize())
    assert sent(labelled).label == "x"
    by_four = torch.quantize_per_channel(numbers, scales, zeros, 0, torch.quint4x2)
    assert torch.equal(sent(by_four).dequantize(), by_four.dequantize())


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
