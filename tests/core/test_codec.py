"""What goes through the codec comes out equal, private and writable; what cannot be pickled is named."""

from __future__ import annotations

import fractions
import io
import linecache
import pickle
import subprocess
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.core import codec
from monarch.core.codec import decode, encode, encode_call, private_parts
from monarch.core.tensors import OUT_OF_BAND_BYTES
from monarch.transports import memory
from monarch.transports.base import Missing

LARGE = OUT_OF_BAND_BYTES
ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
NESTED = st.recursive(
    ATOMS | st.fractions() | st.builds(bytearray, st.binary()) | st.sampled_from([bytes(LARGE), bytearray(LARGE)]),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.frozensets(KEYS),
    max_leaves=20,
)


class Plain:
    def __init__(self, value: Any = None) -> None:
        self.value = value


class Stubborn:
    def __getstate__(self) -> object:
        raise RuntimeError("refuses to be pickled")


def arrived(parts: list[Any]) -> Any:
    """As after a transport: every part in memory of the receiver's own, the pickle included."""
    return decode([bytearray(part) for part in parts])


def same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=50)
    assert not done.returncode, done.stderr
    return done.stdout


@given(NESTED)
def test_nested_values_come_back_equal_by_every_route(value: Any) -> None:
    parts = encode(value)
    assert same(decode(private_parts(parts)), value)
    assert same(arrived(parts), value)
    assert same(decode([bytes(part) for part in parts]), value)


@given(st.lists(NESTED, max_size=4), st.dictionaries(st.text(min_size=1), NESTED, max_size=3))
def test_calls_come_back_equal(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert arrived(encode_call(tuple(args), kwargs)) == (tuple(args), kwargs)


@pytest.mark.parametrize("value", [1, "x" * 100_000, (1, None, [2.5, {"k": (True, b"b")}]), {}, [b"x" * 1000]])
def test_plain_values_are_one_ordinary_pickle(value: Any) -> None:
    (part,) = encode(value)
    assert part == pickle.dumps(value, 5)


def test_lambdas_and_local_classes_travel_by_value() -> None:
    offset = 3

    class Local:
        def method(self) -> int:
            return offset

    function, local = arrived(encode((lambda x: x + offset, Local())))
    assert function(1) == 4
    assert local.method() == 3


def test_importable_things_travel_by_reference() -> None:
    for thing in (fractions.Fraction, traceback.print_exc, len, pickle, type(None), int):
        assert decode(encode(thing)) is thing
        assert decode(encode(thing)) is thing  # the second time from the cache
    assert len(encode(fractions.Fraction)[0]) < 100


def test_functions_of_main_travel_by_value() -> None:
    code = """
import pickle
from monarch.core.codec import encode
class Thing:
    pass
def double(x): return 2 * x
import sys; sys.stdout.write(encode((double, Thing))[0].hex())
"""
    double, thing = decode([bytes.fromhex(run(code))])
    assert double(4) == 8
    assert thing.__name__ == "Thing"


def test_the_main_script_of_a_process_that_multiprocessing_spawned_travels_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("__mp_main__")
    monkeypatch.setitem(sys.modules, "__mp_main__", module)
    exec("class Thing:\n    def get(self):\n        return 5", module.__dict__)
    try:
        parts = encode(vars(module)["Thing"]())
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, "__mp_main__")

    there = decode(parts)
    assert there.get() == 5 and decode(encode(there)).get() == 5


def test_modules_registered_for_pickling_by_value_are_heeded_after_a_reference_was_cached() -> None:
    encode(fractions.Fraction(1, 2))
    by_reference = encode(fractions.Fraction)[0]
    cloudpickle.register_pickle_by_value(fractions)
    try:
        assert len(encode(fractions.Fraction)[0]) > len(by_reference) * 10
    finally:
        cloudpickle.unregister_pickle_by_value(fractions)


def test_a_class_that_was_redefined_still_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a reload of its module: the old class is no longer importable, so it goes by value."""

    class Old:
        pass

    Old.__module__, Old.__qualname__ = "fractions", "Old"
    monkeypatch.setattr(fractions, "Old", Old, raising=False)
    assert type(decode(encode(Old()))) is Old
    monkeypatch.setattr(fractions, "Old", type("Old", (), {}))
    assert type(arrived(encode(Old()))).__name__ == "Old"


def test_importing_the_codec_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, monarch.core.codec, monarch.core.exceptions; print({'torch', 'numpy'} & set(sys.modules))"
    assert run(code).strip() == "set()"


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: [1, {"k": (x, "y")}], lambda x: [x] * 100])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_large_bytes_leave_the_pickle(kind: type, wrap: Any) -> None:
    value = wrap(kind(b"7" * LARGE))
    parts = encode(value)
    assert len(parts) == 2
    assert len(parts[0]) < 2000 and len(parts[1]) == LARGE
    assert same(arrived(parts), value)


def test_bytes_are_neither_copied_by_the_sender_nor_by_a_receiver_in_the_same_process() -> None:
    value = bytes(LARGE)
    parts = encode_call((value,), {})
    assert parts[1] is value
    assert decode(parts)[0][0] is value


def test_a_bytearray_is_copied_once_and_handed_out_as_it_arrives() -> None:
    value = bytearray(LARGE)
    parts = encode([value])
    value[0] = 1
    (got,) = decode(parts)
    assert got[0] == 0 and got is parts[1]
    got[1] = 1


def test_the_same_large_bytes_travel_once_and_stay_one_object() -> None:
    value = bytearray(LARGE)
    parts = encode((value, [value]))
    assert len(parts) == 2
    first, (second,) = arrived(parts)
    assert first is second


def test_lists_that_are_shared_stay_shared_beside_large_bytes() -> None:
    shared = [bytes(LARGE)]
    first, second = arrived(encode((shared, Plain(shared))))
    assert first is second.value


def test_memoryviews_arrive_as_bytes() -> None:
    base = bytearray(range(256)) * 512
    for view in (memoryview(base), memoryview(base)[:10], memoryview(base)[::2], memoryview(bytes(base))):
        for wrapped in (view, {"a": [view]}):
            got = arrived(encode(wrapped))
            assert same(got if wrapped is view else got["a"][0], bytes(view))
    parts = encode(memoryview(base))
    base[0] = 99
    assert arrived(parts)[0] == 0


def test_large_memory_comes_from_the_allocator() -> None:
    given_out = []

    def allocate(size: int) -> memoryview:
        given_out.append(memoryview(bytearray(size)))
        return given_out[-1]

    parts = encode((bytearray(b"x" * LARGE), Plain(pickle.PickleBuffer(bytearray(LARGE)))), lambda keys: allocate)
    assert [id(p) for p in parts[1:]] == [id(g) for g in reversed(given_out)]
    assert arrived(parts)[0] == b"x" * LARGE


@pytest.mark.parametrize("size", [10, 1 << 20, (1 << 20) + 1])
@pytest.mark.parametrize("numpy", [True, False])
def test_plain_memory_has_the_size_and_can_be_written(monkeypatch: pytest.MonkeyPatch, size: int, numpy: bool) -> None:
    if numpy:
        pytest.importorskip("numpy")
    else:
        monkeypatch.setitem(sys.modules, "numpy", None)
    room = memory.allocate(size)
    room[:] = b"x" * size
    assert room.nbytes == size and not room.readonly and room.format == "B"


def test_buffers_of_others_are_snapshots_too() -> None:
    memory = bytearray(LARGE)
    parts = encode(Plain(pickle.PickleBuffer(memory)))
    memory[0] = 1
    value = decode([bytes(part) for part in parts]).value
    assert value[0] == 0 and not memoryview(value).readonly


def test_objects_reduce_themselves_by_their_own_rules() -> None:
    class Reference:
        def __reduce__(self) -> Any:
            return fractions.Fraction, (1, 3)

    assert decode(encode([Reference()])) == [fractions.Fraction(1, 3)]


def test_registered_reducers_go_by_exact_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_reducers", dict(codec._reducers))
    codec.register(Plain, lambda value, outbox: (fractions.Fraction, (1, 2)))
    assert decode(encode(Plain())) == fractions.Fraction(1, 2)


# What cannot be pickled


class Child(Plain):
    pass


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("args", "kwargs", "note"),
    [
        ((1, {"k": [LOCK]}), {}, "argument 2 ('y')['k'][0] is a _thread.lock, which cannot be pickled"),
        ((LOCK,), {}, "argument 1 ('x') is a _thread.lock,"),
        ((), {"opt": (1, LOCK)}, "argument 'opt'[1] is a _thread.lock,"),
        ((1, 2, Plain([LOCK])), {}, "argument 3.value[0] is a _thread.lock,"),
        ((Stubborn(),), {}, "argument 1 ('x') is a"),
        (([open],), {"f": io.BufferedRandom(io.BytesIO())}, "argument 'f' is a _io.BufferedRandom,"),  # type: ignore[arg-type]
        ((bytes(LARGE), LOCK), {}, "argument 2 ('y') is a _thread.lock,"),
        ((lambda: LOCK,), {}, "global 'LOCK' of argument 1 ('x') is a _thread.lock,"),
    ],
)
def test_an_argument_that_cannot_be_pickled_is_named(args: Any, kwargs: Any, note: str) -> None:
    with pytest.raises((TypeError, RuntimeError)) as caught:
        encode_call(args, kwargs, names=("x", "y"))
    (got,) = caught.value.__notes__
    assert got.startswith(note)


def test_errors_of_pickling_keep_their_type_and_text() -> None:
    with pytest.raises(RuntimeError, match=r"^refuses to be pickled") as caught:
        encode({"a": Stubborn()})
    assert str(caught.value) == "refuses to be pickled"
    assert "the value['a'] is a" in caught.value.__notes__[0]
    assert "Stubborn" in caught.value.__notes__[0]


def test_endless_recursion_is_a_recursion_error() -> None:
    class Endless:
        def __reduce__(self) -> Any:
            return list, ([Endless()],)

    with pytest.raises(RecursionError):
        encode(Endless())


def test_an_error_of_unpickling_comes_out_of_decode() -> None:
    class Unloadable:
        def __reduce__(self) -> Any:
            return int, ("x",)

    with pytest.raises(ValueError, match="invalid literal"):
        decode(encode(Unloadable()))


def test_code_without_a_file_brings_its_lines_along() -> None:
    """As a cell of a notebook does: tracebacks and `inspect.getsource` show them at the receiver."""
    file, lines = (
        "<cell of test_codec>",
        ["def outer():\n", "    def fail():\n", "        1 / 0  # here\n", "    return fail\n"],
    )
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("".join(lines), file, "exec"), namespace)
    linecache.cache[file] = 1, None, lines, file
    parts = encode(namespace["outer"]())
    del linecache.cache[file]

    fail = decode(parts)

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert "1 / 0  # here" in "".join(traceback.format_exception(caught.value))
    del linecache.cache[file]
    assert "1 / 0" not in str(encode(fail))  # nobody has them any more: it goes without


@pytest.mark.parametrize("parts", [[Missing.of(10)], [b"x", Missing.of(9)], [Missing.of(9), b"x"]])
def test_a_message_for_which_there_was_no_memory_says_so(parts: list[Any]) -> None:
    with pytest.raises(MemoryError, match="no memory for the 10 bytes of a message"):
        decode(parts)
