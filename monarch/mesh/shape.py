"""Names for dimensions: how large a mesh is, where a member stands in it, and which members a view has.

| class    | is                                                                                   |
|----------|--------------------------------------------------------------------------------------|
| `Extent` | label → size: a mesh as its users see it, members numbered row-major from 0           |
| `Point`  | label → coordinate: one member of an extent, known by that number                     |
| `Region` | labels and a `Slice` of base ranks: a view of a mesh that may have been cut before     |
| `Shape`  | the same as a region, with the older way to narrow it: `at`, `select`, `index`         |

All are immutable, hashable and picklable. A point is built for every message and is therefore a class with two slots;
its coordinates are computed when somebody asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from monarch.errors import UnknownDimension
from monarch.mesh.slice import Slice, dense_strides, natural

__all__ = ["Extent", "Point", "Region", "Shape", "Slice"]


def _labels(labels: Iterable[str], dims: int) -> tuple[str, ...]:
    if isinstance(labels, str):
        raise TypeError(f"labels must be a sequence of strings, not the string {labels!r}")
    names = tuple(labels)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a label must be a string, not {name!r}")
    if len(names) != dims:
        raise ValueError(f"{len(names)} labels {list(names)} for {dims} dimensions: each needs exactly one")
    if len(set(names)) != len(names):
        raise ValueError(f"labels must differ from each other: {list(names)}")
    return names


class Extent(Mapping[str, int]):
    """The size of each dimension, by label, in order. Equal extents have the same labels in the same order.

    Raises:
        ValueError: `labels` and `sizes` differ in length, or a label is there twice.
        TypeError: a size is negative or no integer, or a label no string.
    """

    __slots__ = ("_dims", "_labels", "_nelements", "_region", "_sizes")

    _labels: tuple[str, ...]
    _sizes: tuple[int, ...]
    _nelements: int
    _dims: dict[str, tuple[int, int]]  # label -> dense stride, size
    _region: Region | None  # made when first asked for

    def __init__(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        checked = tuple(natural(size, "size of a dimension") for size in sizes)
        self._set(_labels(labels, len(checked)), checked)

    def _set(self, labels: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self._labels, self._sizes, self._region = labels, sizes, None
        self._nelements = math.prod(sizes)
        self._dims = dict(zip(labels, zip(dense_strides(sizes), sizes, strict=True), strict=True))

    @classmethod
    def _trusted(cls, labels: tuple[str, ...], sizes: tuple[int, ...]) -> Extent:
        self = object.__new__(cls)
        self._set(labels, sizes)
        return self

    @property
    def labels(self) -> list[str]:
        """The names of the dimensions, in order."""
        return list(self._labels)

    @property
    def sizes(self) -> list[int]:
        """How many members each dimension has, in order."""
        return list(self._sizes)

    @property
    def nelements(self) -> int:
        """How many members: the product of the sizes, 1 without dimensions."""
        return self._nelements

    @property
    def region(self) -> Region:
        """The region whose base ranks are this extent's own numbers."""
        if self._region is None:
            region = Region._trusted(self._labels, Slice._trusted(0, self._sizes, dense_strides(self._sizes)))
            region._extent, self._region = self, region
        return self._region

    def points(self) -> Iterator[Point]:
        """Every point, in order of rank."""
        return (Point(rank, self) for rank in range(self._nelements))

    def _dim(self, label: str) -> tuple[int, int]:
        try:
            return self._dims[label]
        except KeyError:
            raise UnknownDimension(f"extent {self}", label, self._labels) from None

    def __getitem__(self, label: str) -> int:
        return self._dim(label)[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            return self._labels == other._labels and self._sizes == other._sizes
        return dict(self) == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __reduce__(self) -> tuple[type[Extent], tuple[tuple[str, ...], tuple[int, ...]]]:
        return Extent, (self._labels, self._sizes)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label!r}: {size}" for label, (_, size) in self._dims.items()) + "}"


class Point(Mapping[str, int]):
    """A member of an extent: label → coordinate. `mesh.slice(**point)` selects it.

    Args:
        rank: its row-major number, last label fastest.
        extent: where it stands.

    Raises:
        IndexError: the extent has no such rank.
    """

    __slots__ = ("_extent", "_rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        if not 0 <= rank < extent._nelements:
            raise IndexError(f"rank {rank} out of range: extent {extent} has {extent._nelements} points")
        self._rank = rank
        self._extent = extent

    @property
    def rank(self) -> int:
        """Its row-major number, last label fastest."""
        return self._rank

    @property
    def extent(self) -> Extent:
        """Where it stands."""
        return self._extent

    def size(self, label: str) -> int:
        """Size of the dimension; KeyError if the extent has no such label."""
        return self._extent._dim(label)[1]

    def __getitem__(self, label: str) -> int:
        stride, size = self._extent._dim(label)
        return self._rank // stride % size

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent._labels)

    def __len__(self) -> int:
        return len(self._extent._labels)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return self._rank == other._rank and self._extent == other._extent
        return dict(self) == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._rank, self._extent))

    def __reduce__(self) -> tuple[type[Point], tuple[int, Extent]]:
        return Point, (self._rank, self._extent)

    def __repr__(self) -> str:
        dims = self._extent._dims.items()
        return "{" + ", ".join(f"{label!r}: {self._rank // step % size}/{size}" for label, (step, size) in dims) + "}"


class _Labelled:
    """Labels, one for each dimension of a slice of base ranks."""

    __slots__ = ("_extent", "_labels", "_slice")

    _labels: tuple[str, ...]
    _slice: Slice
    _extent: Extent | None  # made when first asked for

    def __init__(self, labels: Sequence[str], slice: Slice) -> None:
        if not isinstance(slice, Slice):
            raise TypeError(f"the second argument must be a monarch Slice, not {slice!r}")
        self._labels = _labels(labels, slice.ndim)
        self._slice = slice
        self._extent = None

    @property
    def labels(self) -> list[str]:
        """The names of the dimensions, in order."""
        return list(self._labels)

    @property
    def extent(self) -> Extent:
        """The sizes, by label."""
        if self._extent is None:
            self._extent = Extent._trusted(self._labels, self._slice._sizes)
        return self._extent

    def __len__(self) -> int:
        return self._slice._len

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._labels == other._labels and self._slice == other._slice

    def __hash__(self) -> int:
        return hash((self._labels, self._slice))

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...], Slice]]:
        return type(self), (self._labels, self._slice)


def check_dimensions(region: _Labelled, wanted: Iterable[object], what: str = "mesh") -> None:
    """Raises: UnknownDimension, where one that is wanted is not there."""
    for label in wanted:
        if label not in region._labels:
            raise UnknownDimension(f"{what} {region.extent}", label, region._labels)


class Region(_Labelled):
    """A view of a mesh: labels, and the slice of base ranks they name. `len` is the number of members.

    Raises:
        ValueError: not one label for each dimension, or a label twice.
    """

    __slots__ = ()

    @classmethod
    def _trusted(cls, labels: tuple[str, ...], slice: Slice) -> Region:
        self = object.__new__(cls)
        self._labels, self._slice, self._extent = labels, slice, None
        return self

    def slice(self) -> Slice:
        """The base ranks."""
        return self._slice

    def as_shape(self) -> Shape:
        """The same labels and base ranks."""
        return Shape(self._labels, self._slice)

    def point_of_base_rank(self, rank: int) -> Point:
        """Where the member with this base rank stands in the region's extent.

        Raises:
            ValueError: it is not in the region.
        """
        return Point(self._slice.index(rank), self.extent)

    def __repr__(self) -> str:
        return f"Region {{ labels: {list(self._labels)}, slice: {self._slice} }}"


class Shape(_Labelled):
    """A region that can be narrowed. `len` is the number of ranks.

    Raises:
        ValueError: not one label for each dimension, or a label twice.
    """

    __slots__ = ()

    @staticmethod
    def unity() -> Shape:
        """No dimensions, one rank: 0."""
        return Shape((), Slice(0, (), ()))

    @property
    def ndslice(self) -> Slice:
        """The base ranks."""
        return self._slice

    @property
    def region(self) -> Region:
        """The same labels and base ranks."""
        return Region._trusted(self._labels, self._slice)

    def ranks(self) -> list[int]:
        """All base ranks in order."""
        return list(self._slice.ranks())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Label → coordinate of a base rank; ValueError if the shape has no such rank."""
        return dict(zip(self._labels, self._slice.coordinates(rank), strict=True))

    def at(self, label: str, i: int) -> Shape:
        """The ranks at coordinate `i`, without that dimension.

        Raises:
            ValueError: no such label, or `i` is its size or more.
            OverflowError: `i` is negative.
        """
        dim = self._dim(label)
        i = natural(i, f"index of {label!r}", OverflowError)
        offset, sizes, strides = self._slice._offset, self._slice._sizes, self._slice._strides
        if i >= sizes[dim]:
            raise ValueError(f"index {i} of {label!r} out of range: its size is {sizes[dim]}")
        return Shape(
            self._labels[:dim] + self._labels[dim + 1 :],
            Slice._trusted(
                offset + i * strides[dim], sizes[:dim] + sizes[dim + 1 :], strides[:dim] + strides[dim + 1 :]
            ),
        )

    def select(self, label: str, slice: slice) -> Shape:
        """The ranks in a range of coordinates, keeping the dimension; an end beyond its size is cut.

        Raises:
            ValueError: no such label, or the range is empty.
            OverflowError: the range has a negative number.
        """
        dim = self._dim(label)
        offset, sizes, strides = self._slice._offset, self._slice._sizes, self._slice._strides
        for part in (slice.start, slice.stop, slice.step):
            if part is not None:
                natural(part, f"range of {label!r}", OverflowError)
        start, stop, step = slice.indices(sizes[dim])
        size = len(range(start, stop, step))
        if not size:
            raise ValueError(f"range {start}:{stop}:{step} of {label!r} is empty: its size is {sizes[dim]}")
        return Shape(
            self._labels,
            Slice._trusted(
                offset + start * strides[dim],
                (*sizes[:dim], size, *sizes[dim + 1 :]),
                (*strides[:dim], step * strides[dim], *strides[dim + 1 :]),
            ),
        )

    def index(self, /, **coordinates: int) -> Shape:
        """`at` for several labels at once."""
        shape = self
        for label, i in coordinates.items():
            shape = shape.at(label, i)
        return shape

    def _dim(self, label: str) -> int:
        check_dimensions(self, (label,), "shape")
        return self._labels.index(label)

    def __repr__(self) -> str:
        return "{" + ",".join(f"{label}={size}" for label, size in self.extent.items()) + "}"
