"""The mesh trait: every operation against nested lists, every error, and that an instance's own attributes win."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.errors import UnknownDimension
from monarch.mesh.shape import Extent, Region, Slice
from monarch.mesh.view import MeshView, flatten_region, slice_region


class Mesh(MeshView):
    def __init__(self, region: Region) -> None:
        self._region = region

    def _with_region(self, region: Region) -> Mesh:
        return Mesh(region)


def mesh(**sizes: int) -> Mesh:
    return Mesh(Extent(list(sizes), list(sizes.values())).region)


def ranks(m: Mesh) -> list[int]:
    return list(m._region.slice())


def nested(values: list[int], sizes: list[int]) -> Any:
    """Row-major nested lists; without sizes the only value."""
    if not sizes:
        return values[0]
    inner = math.prod(sizes[1:])
    return [nested(values[i * inner : (i + 1) * inner], sizes[1:]) for i in range(sizes[0])]


def taken(tree: Any, coordinates: list[int | slice]) -> Any:
    if not coordinates:
        return tree
    first, *rest = coordinates
    if isinstance(first, int):
        return taken(tree[first], rest)
    return [taken(each, rest) for each in tree[first]]


def seen(m: Mesh) -> Any:
    return nested(ranks(m), m._region.slice().sizes)


@pytest.mark.parametrize("n", range(1, 10))
def test_every_slice_of_a_dimension_is_what_a_list_gives(n):
    m = mesh(x=n)
    ends = [None, *range(-n - 1, n + 2)]
    for start, stop, step in itertools.product(ends, ends, [None, *range(1, n + 2)]):
        cut = slice(start, stop, step)
        view = m.slice(x=cut)
        assert ranks(view) == list(range(n))[cut]
        assert len(view) == view.size("x") == len(range(n)[cut])


@st.composite
def sizes_and_cuts(draw: st.DrawFn) -> tuple[list[int], list[int | slice]]:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    bound = st.none() | st.integers(-6, 6)
    cuts: list[int | slice] = [
        draw(st.integers(0, size - 1) | st.builds(slice, bound, bound, st.none() | st.integers(1, 5))) for size in sizes
    ]
    return sizes, cuts


@given(sizes_and_cuts())
def test_a_slice_of_a_mesh_is_what_nested_lists_give(case):
    sizes, cuts = case
    names = [f"d{i}" for i in range(len(sizes))]
    m = mesh(**dict(zip(names, sizes, strict=True)))
    view = m.slice(**dict(zip(names, cuts, strict=True)))
    kept = [name for name, cut in zip(names, cuts, strict=True) if isinstance(cut, slice)]

    assert view.extent.labels == kept
    assert seen(view) == taken(seen(m), cuts) or len(view) == 0
    assert len(view) == math.prod(view.sizes.values())


@given(sizes_and_cuts(), st.data())
def test_slices_of_slices_compose(case, data):
    sizes, cuts = case
    names = [f"d{i}" for i in range(len(sizes))]
    view = mesh(**dict(zip(names, sizes, strict=True))).slice(**dict(zip(names, cuts, strict=True)))
    again = [data.draw(st.builds(slice, st.integers(0, 3), st.integers(0, 5), st.integers(1, 3))) for _ in view.sizes]
    twice = view.slice(**dict(zip(view.extent.labels, again, strict=True)))

    assert len(twice) == 0 or seen(twice) == taken(seen(view), again)
    region = twice.region  # what was built without checks passes them
    assert Region(region.labels, Slice(region.slice().offset, region.slice().sizes, region.slice().strides)) == region


def test_an_int_drops_its_dimension_and_a_slice_keeps_it():
    m = mesh(hosts=2, gpus=4)

    assert m.slice(hosts=1).sizes == {"gpus": 4} and ranks(m.slice(hosts=1)) == [4, 5, 6, 7]
    assert m.slice(hosts=slice(1, 2)).sizes == {"hosts": 1, "gpus": 4}
    assert ranks(m.slice(hosts=1, gpus=slice(None, None, 2))) == [4, 6]
    assert m.slice(hosts=0, gpus=0).sizes == {} and len(m.slice(hosts=0, gpus=0)) == 1
    assert m.slice().region == m.region


def test_a_point_of_the_extent_selects_its_member():
    view = mesh(hosts=3, gpus=4).slice(hosts=slice(1, 3), gpus=slice(0, 4, 2))

    assert [ranks(view.slice(**point)) for point in view.extent.points()] == [[rank] for rank in ranks(view)]


@pytest.mark.parametrize(
    ("dims", "error", "text"),
    [
        ({"gpus": 4}, IndexError, "gpus=4 out of range"),
        ({"gpus": -1}, IndexError, "gpus=-1 out of range"),
        ({"gpu": 0}, TypeError, "no dimension 'gpu'"),
        ({"gpu": 0, "gpus": 9}, TypeError, "no dimension 'gpu'"),
        ({"gpus": "0"}, TypeError, "int or a slice"),
        ({"gpus": [0, 1]}, TypeError, "int or a slice"),
        ({"gpus": slice(None, None, -1)}, ValueError, "backwards"),
        ({"gpus": slice(None, None, 0)}, ValueError, "zero"),
    ],
)
def test_slice_refuses(dims, error, text):
    with pytest.raises(error, match=text):
        mesh(hosts=2, gpus=4).slice(**dims)


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda m: m.slice(gpu=0), TypeError),
        (lambda m: m.rename(gpu="x"), ValueError),
        (lambda m: m.size("gpu"), KeyError),
        (lambda m: m.extent["gpu"], KeyError),
    ],
)
def test_a_dimension_that_is_not_there_is_refused_with_the_nearest(act, kind):
    with pytest.raises(UnknownDimension, match=r"no dimension 'gpu'; it has hosts, gpus\. Did you mean 'gpus'") as it:
        act(mesh(hosts=2, gpus=4))

    assert isinstance(it.value, kind)
    assert str(pickle.loads(pickle.dumps(it.value))) == str(it.value)


def test_split_infers_one_size():
    m = mesh(host=8, gpu=2)
    view = m.split(host=("dp", "pp"), pp=4)

    assert view.sizes == {"dp": 2, "pp": 4, "gpu": 2}
    assert list(view.sizes) == ["dp", "pp", "gpu"]
    assert ranks(view) == ranks(m)
    assert m.split(host=("dp", "pp"), gpu=("tp", "cp"), pp=4, cp=2).sizes == {"dp": 2, "pp": 4, "tp": 1, "cp": 2}
    assert m.split(host=["a", "b"], a=4, b=2).sizes == {"a": 4, "b": 2, "gpu": 2}
    assert m.split(host=("host", "x"), x=2).sizes == {"host": 4, "x": 2, "gpu": 2}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"host": ("a", "b")}, "only one may be unknown"),
        ({"host": ("a", "b"), "b": 3}, "not evenly divided"),
        ({"host": ("a", "b"), "b": 0}, "not evenly divided"),
        ({"host": ("a", "b"), "a": 2, "b": 2}, "make 4"),
        ({"host": ("a", "a"), "a": 2}, "twice"),
        ({"host": ("gpu", "a"), "a": 2}, "twice"),
        ({"host": ("a", "b"), "a": 2, "c": 2}, "'c' are not used"),
        ({"a": 2}, "'a' are not used"),
        ({"host": "ab"}, "sequence of new names"),
        ({"host": 4}, "sequence of new names"),
        ({"a": ("b", "c")}, "no dimension 'a'"),
        ({"host": ("a", "b"), "b": -2}, "not negative"),
    ],
)
def test_split_refuses_with_a_value_error(arguments, text):
    with pytest.raises(ValueError, match=text):
        mesh(host=8, gpu=2).split(**arguments)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 9))
def test_flatten_and_split_are_each_others_way_back(sizes, offset):
    names = [f"d{i}" for i in range(len(sizes))]
    dense = Extent(names, sizes).region.slice()
    m = Mesh(Region(names, Slice(offset, dense.sizes, dense.strides)))
    flat = m.flatten("all")

    assert flat.sizes == {"all": math.prod(sizes)}
    assert ranks(flat) == ranks(m)
    assert flat.split(all=tuple(names), **dict(zip(names[1:], sizes[1:], strict=True))).region == m.region


@given(sizes_and_cuts(), st.integers(1, 4), st.integers(1, 4))
def test_split_keeps_members_and_order_on_sparse_meshes_too(case, outer, inner):
    sizes, cuts = case
    view = mesh(**{f"d{i}": size for i, size in enumerate([*sizes, outer * inner])})
    view = view.slice(**{f"d{i}": cut for i, cut in enumerate(cuts)})
    split = view.split(**{f"d{len(sizes)}": ("o", "i")}, i=inner)

    assert ranks(split) == ranks(view)
    assert (split.size("o"), split.size("i")) == (outer, inner)


def test_flatten_is_for_meshes_without_gaps():
    m = mesh(hosts=2, gpus=4)

    assert ranks(m.slice(hosts=1).flatten("x")) == [4, 5, 6, 7]
    assert ranks(m.slice(hosts=1, gpus=2).flatten("x")) == [6]
    assert ranks(m.slice(hosts=slice(1, 2), gpus=slice(0, 2)).flatten("x")) == [4, 5]
    for sparse in (m.slice(gpus=0), m.slice(gpus=slice(0, 2)), m.slice(gpus=slice(0, 4, 2)), m.slice(gpus=slice(0, 1))):
        with pytest.raises(ValueError, match="cannot flatten sparse mesh"):
            sparse.flatten("x")
    assert len(m.slice(gpus=slice(0, 0)).flatten("x")) == 0


def test_rename_keeps_members_and_order():
    m = mesh(a=2, b=3)

    assert list(m.rename(a="x").sizes.items()) == [("x", 2), ("b", 3)]
    assert list(m.rename(a="b", b="a").sizes.items()) == [("b", 2), ("a", 3)]
    assert ranks(m.rename(a="x", b="y")) == ranks(m)
    for names in ({"a": "b"}, {"c": "d"}, {"a": 3}):
        with pytest.raises(ValueError):
            m.rename(**names)


def test_size_of_one_several_and_all_dimensions():
    m = mesh(a=2, b=3, c=4)

    assert (m.size(), m.size("b"), m.size(("a", "c")), m.size([]), len(m)) == (24, 3, 8, 1, 24)
    for absent in ("x", ("a", "x")):
        with pytest.raises(KeyError, match="x"):
            m.size(absent)


def test_sizes_and_extent_show_the_view():
    view = mesh(a=2, b=3).slice(b=slice(1, 3))

    assert view.sizes == {"a": 2, "b": 2}
    assert view.extent == Extent(["a", "b"], [2, 2])
    assert view.region == Region(["a", "b"], Slice(1, [2, 2], [3, 1]))


def test_a_dimension_may_be_called_self():
    m = mesh(**{"self": 2, "region": 3})

    assert ranks(m.slice(**{"self": 1})) == [3, 4, 5]
    assert m.rename(**{"self": "x"}).sizes == {"x": 2, "region": 3}
    assert m.split(**{"self": ("self", "y")}, y=2).sizes == {"self": 1, "y": 2, "region": 3}


@pytest.mark.parametrize("name", ["slice", "split", "flatten", "rename", "size", "sizes", "extent", "region"])
def test_an_attribute_of_the_instance_wins_and_the_unbound_form_still_works(name):
    m = mesh(a=2, b=3)
    m.__dict__[name] = "mine"

    assert getattr(m, name) == "mine"
    assert ranks(MeshView.slice(m, a=1)) == [3, 4, 5]
    assert ranks(MeshView.flatten(MeshView.rename(m, a="x"), "y")) == list(range(6))
    assert MeshView.size(m, "b") == len(m) / 2 == 3
    assert flatten_region(slice_region(m._region, {"a": 1}), "z").labels == ["z"]


def test_assigning_a_computed_attribute_replaces_it_for_that_instance_only():
    m = mesh(a=2)
    m.sizes = "mine"

    assert m.sizes == "mine"
    assert mesh(a=2).sizes == {"a": 2}
