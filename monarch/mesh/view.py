"""The mesh trait: cutting, folding and naming the dimensions of anything that is arranged in a region.

The algorithms are functions from `Region` to `Region`; they touch no member of a mesh and decide every error.
`MeshView` hangs them on a class that has a `_region` and can build `_with_region(new)`.

A mesh of actors may have endpoints called `slice`, `size` or `extent`, and those win: they are put into the instance's
`__dict__`, which plain methods and `overridable` attributes yield to (a `property` would not). Code of ours therefore
calls the functions here, or `MeshView.slice(mesh, ...)`, and reads `mesh._region`; never `mesh.slice`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import index as as_int
from typing import Any, Generic, Self, SupportsIndex, TypeVar, overload

from monarch.mesh.shape import Extent, Region, Slice, check_dimensions
from monarch.mesh.slice import dense_strides

T = TypeVar("T", covariant=True)
_PySlice = slice


def slice_region(region: Region, dims: Mapping[str, SupportsIndex | _PySlice]) -> Region:
    """The members at the given coordinates. An int drops its dimension, a slice keeps it, cut as a list would be.

    Raises:
        UnknownDimension: the region lacks one of the labels.
        TypeError: a coordinate is neither an int nor a slice.
        IndexError: an int is negative, or its dimension's size or more.
        ValueError: the step of a slice is not positive.
    """
    check_dimensions(region, dims)
    base = region._slice
    offset = base._offset
    kept: list[tuple[str, int, int]] = []
    for label, size, stride in zip(region._labels, base._sizes, base._strides, strict=True):
        if label not in dims:
            kept.append((label, size, stride))
            continue
        at = dims[label]
        if isinstance(at, _PySlice):
            try:
                start, stop, step = at.indices(size)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{label}={at}: {error}") from None
            if step < 0:
                raise ValueError(f"{label}={at}: a mesh cannot be sliced backwards, the step must be positive")
            size = len(range(start, stop, step))
            offset += start * stride if size else 0
            kept.append((label, size, stride * step))
        else:
            try:
                i = as_int(at)
            except TypeError:
                raise TypeError(f"{label}={at!r}: expected an int or a slice") from None
            if not 0 <= i < size:
                raise IndexError(f"{label}={i} out of range: the mesh has size {size} in {label!r}")
            offset += i * stride
    return _region(offset, kept)


def split_region(region: Region, arguments: Mapping[str, Sequence[str] | int]) -> Region:
    """Break dimensions up: `host=("dp", "pp"), pp=4`. Of the new sizes, one in each group may be left to be inferred.

    The new dimensions take the place of the old one, the last of them fastest; the members stay in their order.

    Raises:
        ValueError: a group has two unknown sizes; the sizes do not multiply to that of the old dimension; a size
            belongs to no group; two dimensions would have one name; an argument is neither names nor a size.
    """
    groups: dict[str, tuple[str, ...]] = {}
    given: dict[str, int] = {}
    for key, value in arguments.items():
        if key in region._labels:
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ValueError(f"{key}={value!r}: expected a sequence of new names, such as {key}=('a', 'b')")
            groups[key] = tuple(value)
            for name in groups[key]:
                _check_name(name, f"{key}={value!r}")
        elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            given[key] = value
        else:
            raise ValueError(
                f"{key}={value!r}: mesh {region.extent} has no dimension {key!r}; for a new one expected its size, "
                "an int that is not negative"
            )
    new_names = [name for group in groups.values() for name in group]
    if unused := [name for name in given if name not in new_names]:
        raise ValueError(f"sizes for {', '.join(map(repr, unused))} are not used: no dimension is split into them")
    all_names = [name for label in region._labels for name in groups.get(label, (label,))]
    if twice := sorted({name for name in all_names if all_names.count(name) > 1}):
        raise ValueError(f"dimension names {', '.join(map(repr, twice))} would be there twice: {all_names}")
    base = region._slice
    made: list[tuple[str, int, int]] = []
    for label, size, stride in zip(region._labels, base._sizes, base._strides, strict=True):
        if label not in groups:
            made.append((label, size, stride))
            continue
        names = groups[label]
        sizes = _infer(label, size, names, given)
        for name, part, dense in zip(names, sizes, dense_strides(sizes), strict=True):
            made.append((name, part, dense * stride))
    return _region(base._offset, made)


def _infer(label: str, size: int, names: tuple[str, ...], given: Mapping[str, int]) -> list[int]:
    unknown = [name for name in names if name not in given]
    if len(unknown) > 1:
        raise ValueError(
            f"cannot infer the sizes of {', '.join(map(repr, unknown))} in {label}={names!r}: only one may be unknown; "
            f"give a size, e.g. {unknown[0]}=2"
        )
    known = math.prod(given[name] for name in names if name in given)
    if not unknown:
        if known != size:
            raise ValueError(f"{label!r} has size {size}, but {names!r} with sizes {given!r} make {known}")
        return [given[name] for name in names]
    if not known or size % known:
        raise ValueError(f"{label!r} of size {size} is not evenly divided by {names!r} with sizes {given!r}")
    return [given.get(name, size // known) for name in names]


def flatten_region(region: Region, name: str) -> Region:
    """One dimension for all, in the same order. Dimensions of size 1 never stand in the way, nor does an offset.

    Raises:
        ValueError: the base ranks have gaps.
    """
    _check_name(name, f"flatten({name!r})")
    base = region._slice
    dense = dense_strides(base._sizes)
    if base._len and any(
        size > 1 and stride != want for size, stride, want in zip(base._sizes, base._strides, dense, strict=True)
    ):
        raise ValueError(
            f"cannot flatten sparse mesh: {region.extent} has strides {base.strides}, without gaps they would be "
            f"{list(dense)}"
        )
    return _region(base._offset, [(name, base._len, 1)])


def rename_region(region: Region, names: Mapping[str, str]) -> Region:
    """Other names for dimensions: `a="b"`.

    Raises:
        UnknownDimension: the region lacks the old name.
        ValueError: two dimensions would have one name.
    """
    check_dimensions(region, names)
    for old, new in names.items():
        _check_name(new, f"{old}={new!r}")
    return split_region(region, {old: (new,) for old, new in names.items()})


def _check_name(name: object, where: str) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: the name of a dimension must be a string that is not empty, not {name!r}")


def size_of(region: Region, dim: str | Sequence[str] | None = None) -> int:
    """Size of a dimension, product of the sizes of several, or number of all members.

    Raises:
        UnknownDimension: the region lacks it.
    """
    if dim is None:
        return region._slice._len
    labels = dim if isinstance(dim, list | tuple) else (dim,)
    check_dimensions(region, labels)
    return math.prod(region._slice._sizes[region._labels.index(label)] for label in labels)


def _region(offset: int, dims: Sequence[tuple[str, int, int]]) -> Region:
    """From (label, size, stride); the strides come from a checked slice and cannot overlap."""
    labels = tuple(label for label, _, _ in dims)
    return Region._trusted(
        labels, Slice._trusted(offset, tuple(size for _, size, _ in dims), tuple(stride for _, _, stride in dims))
    )


class overridable(Generic[T]):
    """A computed attribute that an entry in the instance's `__dict__` replaces; nothing is cached."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        return self if instance is None else self._compute(instance)


class MeshView(ABC):
    """Something arranged in labelled dimensions, of which views can be taken. Views share what they show."""

    _region: Region
    """Labels and base ranks of the members."""

    @abstractmethod
    def _with_region(self, region: Region) -> Self:
        """The same thing seen through another region of the same base ranks."""

    def slice(self, /, **dims: SupportsIndex | _PySlice) -> Self:
        """The members at the given coordinates: `mesh.slice(hosts=0, gpus=slice(0, 4, 2))`.

        An int drops its dimension, a Python slice keeps it, cut as a list would be.

        Raises:
            UnknownDimension (a TypeError): no such dimension.
            IndexError: an int is negative, or its dimension's size or more.
            ValueError: the step of a slice is not positive.
        """
        return self._with_region(slice_region(self._region, dims))

    def split(self, /, **dims: Sequence[str] | int) -> Self:
        """Break dimensions up: `mesh.split(host=("dp", "pp"), pp=4)`; one new size in each group can be inferred.

        Raises:
            ValueError: several sizes of a group are unknown, they do not divide the dimension evenly, a name is
                there twice, or a size is not used.
        """
        return self._with_region(split_region(self._region, dims))

    def flatten(self, name: str) -> Self:
        """All dimensions as one, in the same order.

        Raises:
            ValueError: the base ranks of this view have gaps.
        """
        return self._with_region(flatten_region(self._region, name))

    def rename(self, /, **names: str) -> Self:
        """Other names for dimensions: `mesh.rename(hosts="dp")`.

        Raises:
            UnknownDimension (a ValueError): no such dimension.
            ValueError: two would have one name.
        """
        return self._with_region(rename_region(self._region, names))

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Size of a dimension, product of the sizes of several, or number of all members; KeyError if absent."""
        return size_of(self._region, dim)

    @overridable
    def sizes(self) -> dict[str, int]:
        """Label → size, in order."""
        return dict(self._region.extent)

    @overridable
    def extent(self) -> Extent:
        """The sizes of this view, by label."""
        return self._region.extent

    @overridable
    def region(self) -> Region:
        """Labels and base ranks of this view."""
        return self._region

    def __len__(self) -> int:
        return self._region._slice._len
