"""ValueMesh: one value for each member, whatever it is stored as."""

from __future__ import annotations

import itertools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from operator import call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.mesh.shape import Extent, Point, Shape, Slice
from monarch.mesh.value_mesh import ValueMesh

SHAPE = Extent(["hosts", "gpus"], [2, 3]).region.as_shape()


def counted(values):
    """Decoders for `values`, and a list of the values decoded so far."""
    calls = []

    def decoder(value):
        def decode():
            calls.append(value)
            return value

        return decode

    return [decoder(value) for value in values], calls


def values_of(mesh):
    return list(mesh.values())


def test_items_are_points_and_values_in_row_major_order():
    mesh = ValueMesh(SHAPE, list("abcdef"))

    assert values_of(mesh) == list("abcdef")
    assert list(mesh) == list(mesh.items())
    assert [point.rank for point, _ in mesh] == list(range(6))
    assert list(mesh)[4] == (Point(4, Extent(["hosts", "gpus"], [2, 3])), "e")
    assert dict(list(mesh)[4][0]) == {"hosts": 1, "gpus": 1}
    assert len(mesh) == 6


def test_item_takes_a_coordinate_for_each_dimension():
    mesh = ValueMesh(SHAPE, list("abcdef"))

    assert [mesh.item(**point) for point in mesh.extent.points()] == list("abcdef")
    for coordinates in ({}, {"hosts": 0}, {"hosts": 0, "gpus": 0, "x": 0}, {"x": 0}):
        with pytest.raises(KeyError):
            mesh.item(**coordinates)
    for coordinates in ({"hosts": 2, "gpus": 0}, {"hosts": 0, "gpus": -1}):
        with pytest.raises(IndexError):
            mesh.item(**coordinates)


def test_item_of_a_mesh_without_dimensions_takes_none():
    assert ValueMesh(Shape.unity(), ["x"]).item() == "x"
    assert ValueMesh(SHAPE, list("abcdef")).slice(hosts=1, gpus=2).item() == "f"
    with pytest.raises(KeyError):
        ValueMesh(Shape.unity(), ["x"]).item(a=0)


def test_get_takes_the_number_in_the_current_extent():
    mesh = ValueMesh(SHAPE, list("abcdef"))

    assert [mesh.get(rank) for rank in range(6)] == list("abcdef")
    assert [mesh.slice(gpus=1).get(rank) for rank in range(2)] == ["b", "e"]
    for rank in (-1, 6):
        with pytest.raises(ValueError, match="out of range"):
            mesh.get(rank)
    with pytest.raises(ValueError, match="out of range"):
        mesh.slice(gpus=1).get(2)


def test_points_are_numbered_anew_after_slicing():
    view = ValueMesh(SHAPE, list("abcdef")).slice(gpus=slice(1, 3))

    assert [(point.rank, dict(point), value) for point, value in view.items()] == [
        (0, {"hosts": 0, "gpus": 0}, "b"),
        (1, {"hosts": 0, "gpus": 1}, "c"),
        (2, {"hosts": 1, "gpus": 0}, "e"),
        (3, {"hosts": 1, "gpus": 1}, "f"),
    ]
    assert view.extent == Extent(["hosts", "gpus"], [2, 2])


def test_the_shape_may_be_any_view_of_base_ranks():
    shape = Shape(["a", "b"], Slice(7, [2, 2], [10, 3]))
    mesh = ValueMesh(shape, list("wxyz"))

    assert values_of(mesh) == list("wxyz")
    assert values_of(mesh.slice(a=1)) == ["y", "z"]
    assert values_of(mesh.slice(b=1)) == ["x", "z"]
    assert mesh.slice(b=1).get(1) == mesh.item(a=1, b=1) == "z"
    assert values_of(ValueMesh(shape.region, list("wxyz"))) == values_of(ValueMesh(shape.extent, list("wxyz")))


def test_the_mesh_trait_works_on_values():
    mesh = ValueMesh(SHAPE, list("abcdef"))

    assert values_of(mesh.flatten("all")) == list("abcdef")
    assert mesh.flatten("all").item(all=4) == "e"
    assert mesh.rename(hosts="h").item(h=1, gpus=0) == "d"
    assert mesh.split(gpus=("x", "y"), y=3).sizes == {"hosts": 2, "x": 1, "y": 3}
    assert mesh.size("gpus") == 3
    with pytest.raises(ValueError, match="cannot flatten sparse mesh"):
        mesh.slice(gpus=0).flatten("x")
    assert values_of(mesh.slice(gpus=slice(0, 0))) == []


@pytest.mark.parametrize("count", [0, 5, 7])
def test_another_number_of_values_is_a_value_error(count):
    with pytest.raises(ValueError, match=f"expected 6 values.*got {count}"):
        ValueMesh(SHAPE, range(count))
    with pytest.raises(ValueError, match=f"expected 6 values.*got {count}"):
        ValueMesh._lazy(SHAPE, call, [int] * count)


def test_a_shape_that_is_none_is_a_type_error():
    with pytest.raises(TypeError, match="Shape"):
        ValueMesh([2, 3], range(6))


def test_it_prints_the_extent_and_then_the_entries():
    mesh = ValueMesh(Extent(["hosts", "gpus"], [1, 2]), [None, "x"])

    assert repr(mesh) == (
        "ValueMesh({'hosts': 1, 'gpus': 2}):\n"
        "  (({'hosts': 0/1, 'gpus': 0/2}, None), ({'hosts': 0/1, 'gpus': 1/2}, 'x'))"
    )


def test_from_indexed_takes_any_order_and_the_last_of_several():
    shape = Extent(["x"], [3])

    assert values_of(ValueMesh.from_indexed(shape, [(2, "c"), (0, "a"), (1, "?"), (1, "b")])) == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"expected 3 .* contains 2"):
        ValueMesh.from_indexed(shape, [(0, "a"), (2, "c"), (2, "d")])
    for position in (-1, 3):
        with pytest.raises(ValueError, match="out of range"):
            ValueMesh.from_indexed(shape, [(position, "a")])


def test_subscripting_the_class_gives_the_class():
    assert ValueMesh[int] is ValueMesh
    assert type(ValueMesh[int](SHAPE, range(6))) is ValueMesh
    assert isinstance(ValueMesh(SHAPE, range(6)), ValueMesh[str])


# Laziness


def test_values_are_decoded_when_read_and_once():
    decoders, calls = counted("abcdef")
    mesh = ValueMesh._lazy(SHAPE, call, decoders)
    view = mesh.slice(hosts=1)

    assert (len(mesh), mesh.sizes, calls) == (6, {"hosts": 2, "gpus": 3}, [])
    assert view.get(0) == "d" and calls == ["d"]
    assert mesh.item(hosts=1, gpus=0) == "d" and calls == ["d"]
    assert values_of(mesh) == values_of(mesh) == list("abcdef")
    assert sorted(calls) == list("abcdef")


def test_a_single_value_is_lazy_too():
    decoders, calls = counted("a")
    mesh = ValueMesh._lazy(Shape.unity(), call, decoders)

    assert calls == []
    assert mesh.item() == mesh.item() == "a"
    assert calls == ["a"]


def test_many_threads_decode_a_value_once():
    barrier = threading.Barrier(8)
    calls = []

    def decode():
        calls.append(threading.get_ident())
        return object()

    mesh = ValueMesh._lazy(SHAPE, call, [decode] * 6)

    def read(_):
        barrier.wait()
        return [mesh.get(rank) for rank in range(6)]

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(read, range(8)))

    assert len(calls) == 6
    assert all(one is other for row in seen for one, other in zip(row, seen[0], strict=True))


def test_a_value_that_cannot_be_decoded_raises_for_every_reader_and_spares_the_others():
    calls = []

    def broken():
        calls.append(1)
        raise RuntimeError("no such class")

    mesh = ValueMesh._lazy(Extent(["x"], [2]), call, [broken, lambda: "fine"])

    depths = []
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no such class") as caught:
            mesh.get(0)
        depths.append(len(caught.traceback))
    assert len(calls) == 1 and len(set(depths)) == 1
    assert mesh.get(1) == "fine"


def test_an_interrupt_while_decoding_leaves_the_value_to_the_next_reader():
    answers = iter([KeyboardInterrupt, None])

    def decode():
        if error := next(answers):
            raise error
        return "value"

    mesh = ValueMesh._lazy(Extent(["x"], [1]), call, [decode])
    with pytest.raises(KeyboardInterrupt):
        mesh.get(0)
    assert mesh.get(0) == "value"


def test_decoding_may_read_the_mesh_it_belongs_to():
    mesh: ValueMesh[int] = ValueMesh._lazy(Extent(["x"], [2]), call, [lambda: mesh.get(1) + 1, lambda: 1])

    assert values_of(mesh) == [2, 1]


def test_pickling_decodes_all_values_once():
    decoders, calls = counted("abcdef")
    mesh = ValueMesh._lazy(SHAPE, call, decoders)
    copy = pickle.loads(pickle.dumps(mesh))

    assert values_of(copy) == values_of(mesh) == list("abcdef")
    assert sorted(calls) == list("abcdef")


# Storage


def test_a_pickled_view_holds_its_own_values_and_cuts_as_before():
    mesh = ValueMesh(SHAPE, [bytes([65 + rank]) * 1000 for rank in range(6)])
    view = mesh.slice(gpus=slice(0, 3, 2))
    data = pickle.dumps(view)
    copy = pickle.loads(data)

    assert len(data) < 4500
    assert values_of(copy) == values_of(view)
    assert copy.region == view.region
    assert values_of(copy.slice(gpus=1)) == values_of(view.slice(gpus=1))


SAMPLES = [True, 1, 1.0, False, 0, 0.0, -0.0, None, "a", b"a", (1,), (True,), float("nan")]


def alike(one, other):
    return [(type(value), repr(value)) for value in one] == [(type(value), repr(value)) for value in other]


@given(st.lists(st.sampled_from(SAMPLES), min_size=4, max_size=4))
def test_equal_values_stay_what_they_were(values):
    mesh = ValueMesh(Extent(["a", "b"], [2, 2]), values)
    copy = pickle.loads(pickle.dumps(mesh))

    assert alike(mesh.values(), values) and alike(copy.values(), values)
    assert alike(copy.slice(a=1).values(), values[2:])
    assert all(one is other for one, other in zip(mesh.values(), values, strict=True)) or len(set(map(id, values))) > 1


@pytest.mark.parametrize("value", [None, 7, "".join(["x"] * 50), True, b"\0" * 50])
def test_equal_values_take_the_room_of_one(value):
    mesh = ValueMesh(Extent(["a", "b"], [100, 10]), [value] * 1000)

    assert len(pickle.dumps(mesh)) < 500
    assert values_of(mesh) == [value] * 1000
    assert values_of(mesh.slice(a=99, b=slice(1, 3))) == [value] * 2
    assert mesh.get(999) == mesh.item(a=3, b=4) == value


def test_values_whose_equality_is_no_bool_are_never_compared():
    class Tensor:
        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = object.__hash__

    values = [Tensor() for _ in range(6)]
    assert all(one is other for one, other in zip(ValueMesh(SHAPE, values).values(), values, strict=True))


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_any_view_shows_the_values_at_its_base_ranks(sizes, data):
    names = [f"d{i}" for i in range(len(sizes))]
    extent = Extent(names, sizes)
    mesh = ValueMesh(extent, range(extent.nelements))
    cuts = {
        name: data.draw(st.integers(0, size - 1) | st.builds(slice, st.integers(0, 4), st.integers(0, 4)))
        for name, size in extent.items()
    }
    view = mesh.slice(**cuts)

    for each in (view, pickle.loads(pickle.dumps(view))):
        assert values_of(each) == list(view.region.slice())
        assert [each.get(rank) for rank in range(len(each))] == list(view.region.slice())
        assert [each.item(**point) for point, _ in each] == list(view.region.slice())
    assert list(itertools.islice(view, 1)) == list(view.items())[:1]
