"""Slice, Shape, Extent, Point, Region: arithmetic, errors, printing, and that they are values."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.mesh.shape import Extent, Point, Region, Shape, Slice

sizes_lists = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    """Any valid slice: strides grow by at least what is spanned, then dimensions are shuffled."""
    dims = []
    span = 1
    for size in draw(sizes_lists):
        stride = span + draw(st.integers(0, 3))
        dims.append((size, stride))
        span += (size - 1) * stride
    dims = draw(st.permutations(dims))
    return Slice(draw(st.integers(0, 9)), [size for size, _ in dims], [stride for _, stride in dims])


# Slice


def test_a_slice_prints_its_offset_sizes_and_strides():
    assert repr(Slice(0, [2, 3], [3, 1])) == "Slice { offset: 0, sizes: [2, 3], strides: [3, 1] }"
    assert str(Slice(7, [], [])) == "Slice { offset: 7, sizes: [], strides: [] }"


def test_a_slice_takes_its_parts_by_name_and_gives_them_back_as_lists():
    s = Slice(offset=4, sizes=[2, 3], strides=[6, 2])

    assert (s.offset, s.sizes, s.strides, s.ndim, len(s)) == (4, [2, 3], [6, 2], 2, 6)
    assert list(s) == [4, 6, 8, 10, 12, 14]


def test_a_slice_without_dimensions_is_one_rank():
    s = Slice(5, [], [])

    assert (len(s), list(s), s[0], s.index(5), s.coordinates(5), s.nditem([])) == (1, [5], 5, 0, [], 5)


def test_a_slice_with_a_size_of_zero_is_empty():
    s = Slice(0, [2, 0], [1, 1])

    assert list(s) == [] and len(s) == 0 and 0 not in s
    assert list(Slice(3, [0], [2])) == []


@given(slices())
def test_the_ranks_of_a_slice_are_its_definition(s: Slice):
    wanted = [
        s.offset + sum(i * stride for i, stride in zip(at, s.strides, strict=True))
        for at in itertools.product(*(range(size) for size in s.sizes))
    ]

    assert list(s) == wanted == [s[i] for i in range(len(s))] == [s.get(i) for i in range(len(s))]
    assert len(set(wanted)) == len(wanted)


@given(slices())
def test_index_and_coordinates_are_the_way_back(s: Slice):
    members = set(s)
    for i, base in enumerate(s):
        assert s.index(base) == i
        assert s.nditem(s.coordinates(base)) == base
        assert base in s
    for stranger in set(range(max(members) + 3)) - members:
        assert stranger not in s
        with pytest.raises(ValueError, match=f"rank {stranger} is not in"):
            s.index(stranger)
        with pytest.raises(ValueError, match=f"rank {stranger} is not in"):
            s.coordinates(stranger)


@given(slices())
def test_a_slice_indexed_by_a_python_slice_gives_a_tuple(s: Slice):
    assert s[1:3] == tuple(s)[1:3]
    assert s[::-1] == tuple(s)[::-1]


@given(st.lists(st.integers(0, 20), max_size=12))
def test_from_list_keeps_every_rank_in_order(ranks: list[int]):
    runs = Slice.from_list(ranks)

    assert [rank for run in runs for rank in run] == ranks
    assert all(Slice(run.offset, run.sizes, run.strides) == run for run in runs)


def test_from_list_takes_each_run_as_long_as_it_goes():
    assert Slice.from_list([]) == []
    assert Slice.from_list([3]) == [Slice(3, [1], [1])]
    assert Slice.from_list([1, 2, 3]) == [Slice(1, [3], [1])]
    assert Slice.from_list([0, 2, 4, 5, 6]) == [Slice(0, [3], [2]), Slice(5, [2], [1])]
    assert Slice.from_list([5, 3]) == [Slice(5, [1], [1]), Slice(3, [1], [1])]


def test_new_row_major_leaves_no_gaps():
    assert Slice.new_row_major([2, 3, 4]) == Slice(0, [2, 3, 4], [12, 4, 1])
    assert Slice.new_row_major([]) == Slice(0, [], [])


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [([2], []), ([2, 3], [1]), ([2, 2], [1, 1]), ([3], [0]), ([2, 4], [3, 1]), ([3, 2], [2, 3])],
)
def test_sizes_and_strides_that_do_not_fit_are_a_value_error(sizes, strides):
    with pytest.raises(ValueError, match="stride"):
        Slice(0, sizes, strides)


def test_the_stride_of_a_dimension_of_size_one_is_free():
    assert list(Slice(0, [1, 3], [0, 1])) == [0, 1, 2]
    assert list(Slice(2, [1], [0])) == [2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Slice(-1, [2], [1]),
        lambda: Slice(0, [-2], [1]),
        lambda: Slice(0, [2], [-1]),
        lambda: Slice(0, [2.0], [1]),
        lambda: Slice.new_row_major([-1]),
        lambda: Slice.from_list([-1]),
        lambda: Slice(0, [2], [1])[-1],
        lambda: Slice(0, [2], [1]).get(-1),
        lambda: Slice(0, [2], [1]).index(-1),
        lambda: Slice(0, [2], [1]).coordinates(-1),
        lambda: Slice(0, [2], [1]).nditem([-1]),
        lambda: Slice(0, [2], [1])["0"],
    ],
)
def test_negative_numbers_and_other_types_are_a_type_error_in_a_slice(make):
    with pytest.raises(TypeError):
        make()


def test_indexes_beyond_the_end_of_a_slice_are_an_index_error():
    s = Slice(0, [2, 3], [3, 1])
    for act in (lambda: s[6], lambda: s.get(6), lambda: s.nditem([0, 3]), lambda: s.nditem([2, 0])):
        with pytest.raises(IndexError, match="out of range"):
            act()
    with pytest.raises(ValueError, match="2 dimensions"):
        s.nditem([1])


# Shape


def test_a_shape_prints_labels_and_sizes():
    assert repr(Shape(["label0", "label1"], Slice(0, [2, 3], [3, 1]))) == "{label0=2,label1=3}"
    assert str(Shape.unity()) == "{}"


def test_a_shape_knows_its_parts():
    shape = Shape(["a", "b"], Slice(1, [2, 3], [6, 2]))

    assert shape.labels == ["a", "b"]
    assert shape.ndslice == Slice(1, [2, 3], [6, 2])
    assert shape.ranks() == [1, 3, 5, 7, 9, 11]
    assert shape.coordinates(9) == {"a": 1, "b": 1}
    assert shape.extent == Extent(["a", "b"], [2, 3])
    assert shape.region == Region(["a", "b"], shape.ndslice)
    assert shape.region.as_shape() == shape
    assert len(shape) == 6


def test_unity_has_no_dimension_and_rank_zero():
    assert Shape.unity().ranks() == [0]
    assert Shape.unity().labels == []


def test_at_drops_a_dimension_and_select_keeps_it():
    shape = Shape(["a", "b", "c"], Slice.new_row_major([2, 3, 4]))

    assert shape.at("b", 1) == Shape(["a", "c"], Slice(4, [2, 4], [12, 1]))
    assert shape.select("c", slice(1, 4, 2)) == Shape(["a", "b", "c"], Slice(1, [2, 3, 2], [12, 4, 2]))
    assert shape.select("c", slice(2, None)).ranks() == [2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23]
    assert shape.select("a", slice(1, 99)) == Shape(["a", "b", "c"], Slice(12, [1, 3, 4], [12, 4, 1]))
    assert shape.index(a=1, c=3) == Shape(["b"], Slice(15, [3], [4]))


def test_bad_labels_and_ranges_of_a_shape_are_a_value_error():
    shape = Shape(["a", "b"], Slice.new_row_major([2, 3]))
    for act in (
        lambda: shape.at("x", 0),
        lambda: shape.at("a", 2),
        lambda: shape.select("x", slice(0, 1)),
        lambda: shape.select("b", slice(3, 4)),
        lambda: shape.select("b", slice(1, 1)),
        lambda: shape.index(x=0),
        lambda: shape.coordinates(6),
        lambda: Shape(["a"], Slice.new_row_major([2, 3])),
        lambda: Shape(["a", "a"], Slice.new_row_major([2, 3])),
    ):
        with pytest.raises(ValueError):
            act()


def test_negative_numbers_overflow_in_a_shape():
    shape = Shape(["a", "b"], Slice.new_row_major([2, 3]))
    for act in (
        lambda: shape.at("a", -1),
        lambda: shape.index(b=-1),
        lambda: shape.select("a", slice(-1, None)),
        lambda: shape.select("a", slice(0, -1)),
        lambda: shape.select("a", slice(None, None, -1)),
    ):
        with pytest.raises(OverflowError):
            act()


# Extent


def test_an_extent_is_a_mapping_from_label_to_size():
    extent = Extent(["hosts", "gpus"], [2, 4])

    assert isinstance(extent, Mapping)
    assert dict(extent) == {"hosts": 2, "gpus": 4} == extent
    assert (extent["gpus"], extent.get("x"), "hosts" in extent, len(extent)) == (4, None, True, 2)
    assert (extent.nelements, extent.labels, extent.sizes) == (8, ["hosts", "gpus"], [2, 4])
    assert extent.region == Region(["hosts", "gpus"], Slice(0, [2, 4], [4, 1]))
    assert repr(extent) == "{'hosts': 2, 'gpus': 4}"
    with pytest.raises(KeyError):
        extent["x"]


def test_an_extent_without_dimensions_has_one_element():
    assert Extent([], []).nelements == 1
    assert [dict(point) for point in Extent([], []).points()] == [{}]


def test_extents_in_another_order_differ():
    assert Extent(["a", "b"], [1, 2]) != Extent(["b", "a"], [2, 1])


@pytest.mark.parametrize(
    ("labels", "sizes", "error"),
    [
        (["a"], [1, 2], ValueError),
        (["a", "a"], [1, 2], ValueError),
        (["a"], [-1], TypeError),
        (["a"], ["1"], TypeError),
        ("ab", [1, 2], TypeError),
        ([1], [1], TypeError),
    ],
)
def test_an_extent_refuses_what_makes_no_sense(labels, sizes, error):
    with pytest.raises(error):
        Extent(labels, sizes)


# Point


def test_a_point_prints_each_coordinate_over_its_size():
    assert repr(Point(1, Extent(["hosts", "gpus"], [1, 2]))) == "{'hosts': 0/1, 'gpus': 1/2}"
    assert str(Point(0, Extent([], []))) == "{}"


def test_a_point_is_a_mapping_from_label_to_coordinate():
    extent = Extent(["a", "b", "c"], [2, 3, 4])
    point = Point(17, extent)

    assert isinstance(point, Mapping)
    assert {**point} == {"a": 1, "b": 1, "c": 1} == point
    assert (point.rank, point.extent, point.size("b"), len(point), list(point)) == (17, extent, 3, 3, ["a", "b", "c"])
    for act in (lambda: point["x"], lambda: point.size("x")):
        with pytest.raises(KeyError, match=r"\{'a': 2, 'b': 3, 'c': 4\} has no dimension 'x'; it has a, b, c"):
            act()


@given(sizes_lists)
def test_points_count_row_major(sizes: list[int]):
    extent = Extent([f"d{i}" for i in range(len(sizes))], sizes)
    wanted = list(itertools.product(*(range(size) for size in sizes)))

    assert [tuple(point.values()) for point in extent.points()] == wanted
    assert [point.rank for point in extent.points()] == list(range(len(wanted)))


@pytest.mark.parametrize("rank", [-1, 6, 7])
def test_a_rank_that_the_extent_lacks_is_an_index_error(rank):
    with pytest.raises(IndexError, match=f"rank {rank} out of range"):
        Point(rank, Extent(["a", "b"], [2, 3]))


# Region


def test_a_region_tells_where_a_base_rank_stands():
    region = Region(["a", "b"], Slice(4, [2, 2], [8, 2]))

    assert region.labels == ["a", "b"]
    assert region.slice() == Slice(4, [2, 2], [8, 2])
    assert region.as_shape() == Shape(["a", "b"], region.slice())
    assert region.point_of_base_rank(12) == Point(2, Extent(["a", "b"], [2, 2]))
    assert repr(region) == "Region { labels: ['a', 'b'], slice: Slice { offset: 4, sizes: [2, 2], strides: [8, 2] } }"
    assert len(region) == 4
    with pytest.raises(ValueError, match="rank 5 is not in"):
        region.point_of_base_rank(5)


def test_a_region_needs_our_slice():
    with pytest.raises(TypeError, match="Slice"):
        Region(["a"], slice(0, 3))


# All of them


EXAMPLES = [
    Slice(3, [2, 3], [6, 2]),
    Shape(["a", "b"], Slice(3, [2, 3], [6, 2])),
    Region(["a", "b"], Slice(3, [2, 3], [6, 2])),
    Extent(["a", "b"], [2, 3]),
    Point(4, Extent(["a", "b"], [2, 3])),
]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_they_are_values_picklable_hashable_and_without_room_for_more(value):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(value, protocol))
        assert copy == value and hash(copy) == hash(value) and repr(copy) == repr(value)
        assert type(copy) is type(value)
    with pytest.raises(AttributeError):
        value.anything = 1
    assert value != object()


def test_those_of_different_kinds_are_never_equal():
    for one, other in itertools.combinations(EXAMPLES, 2):
        assert one != other


@pytest.mark.parametrize("name", ["rank", "extent"])
def test_a_point_cannot_be_changed(name):
    with pytest.raises(AttributeError):
        setattr(EXAMPLES[-1], name, 0)
