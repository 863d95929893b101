"""What the members of a mesh answered: one value for each, arranged as the mesh was.

Values may arrive undecoded, as functions that decode them; each runs when its value is first read, once, whichever
thread or view reads it. Views share the values of the mesh they were cut from. Where all values are the same, one is
stored. Neither is visible.
"""

from __future__ import annotations

from _thread import RLock  # that of `threading` is a function around it
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pprint import pformat
from textwrap import indent
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, TypeVar

from monarch.mesh.shape import Extent, Point, Region, Shape, Slice, check_dimensions
from monarch.mesh.slice import natural
from monarch.mesh.view import MeshView

R = TypeVar("R")

_SCALARS = (bool, int, str, bytes)
"""Immutable, and equal ones of one type cannot be told apart. Not float: 0.0 == -0.0."""


class _Undecoded(partial[Any]):
    """Stands for a value that nobody has read yet: decodes it."""


class _Decoding:
    """A value that somebody reads. What the function raises is kept and raised for every reader; an exception that
    stops the program, such as KeyboardInterrupt, leaves it undecoded."""

    __slots__ = ("_decode", "_error", "_lock", "_traceback", "_value")

    def __init__(self, decode: Callable[[], object]) -> None:
        self._decode: Callable[[], object] | None = decode
        self._error: Exception | None = None
        self._traceback: TracebackType | None = None
        self._value: object = None
        # One for each value: a slow one must not hold up the others. Reentrant: decoding may read the mesh.
        self._lock = RLock()

    def value(self) -> object:
        with self._lock:
            if self._decode is not None:
                try:
                    self._value = self._decode()
                except Exception as error:
                    self._error, self._traceback = error, error.__traceback__
                self._decode = None
            if self._error is not None:
                raise self._error.with_traceback(self._traceback)  # else it grows by a frame with each reader
            return self._value


_cells_lock = Lock()  # held for an instruction or two


def _compressed(values: list[Any]) -> list[Any]:
    """One value if it stands for all of them, else `values`."""
    if len(values) < 2:
        return values
    first = values[0]
    if all(value is first for value in values):
        return values[:1]
    kind = type(first)
    if kind in _SCALARS and all(type(value) is kind and value == first for value in values):
        return values[:1]
    return values


def _region_of(shape: Shape | Region | Extent) -> Region:
    if isinstance(shape, Region):
        return shape
    if isinstance(shape, Shape | Extent):
        return shape.region
    raise TypeError(f"expected a Shape, Region or Extent, not {shape!r}")


class ValueMesh(MeshView, Generic[R]):
    """One value for each member of `shape`, in row-major order. `len` is their number, iterating gives `items()`.

    Pickling decodes all values.

    Raises:
        ValueError: the number of values is not that of the shape's ranks.
    """

    _cells: list[Any]  # values in the order of _origin, or a single one for all; undecoded ones are replaced when read
    _origin: Slice  # the base ranks that _cells were given for; _region is these or some of them

    def __init__(self, shape: Shape | Region | Extent, values: Iterable[R]) -> None:
        region = _region_of(shape)
        self._set(region, _compressed(self._counted(region, values)))

    @classmethod
    def _lazy(
        cls, shape: Shape | Region | Extent, decode: Callable[..., R], values: Iterable[Any], *given: Any
    ) -> ValueMesh[R]:
        """As the constructor, with undecoded values: `decode(value, *given)` is called at most once for each, when it
        is first read."""
        mesh, region = object.__new__(cls), _region_of(shape)
        mesh._set(region, mesh._counted(region, [_Undecoded(decode, value, *given) for value in values]))
        return mesh

    @classmethod
    def from_indexed(cls, shape: Shape | Region | Extent, pairs: Iterable[tuple[int, R]]) -> ValueMesh[R]:
        """From (position, value) pairs in any order; of several for one position the last counts.

        Raises:
            ValueError: a position has no value, or is out of range.
        """
        size = _region_of(shape).extent.nelements
        found: dict[int, R] = {}
        for position, value in pairs:
            if not 0 <= position < size:
                raise ValueError(f"index {position} out of range: the shape has {size} ranks")
            found[position] = value
        if len(found) != size:
            missing = next(position for position in range(size) if position not in found)
            raise ValueError(
                f"expected {size} values, one for each rank, but the collection contains {len(found)}: "
                f"rank {missing} has none"
            )
        return cls(shape, [found[position] for position in range(size)])

    @staticmethod
    def _counted(region: Region, values: Iterable[Any]) -> list[Any]:
        counted = list(values)
        size = region._slice._len
        if len(counted) != size:
            raise ValueError(f"expected {size} values, one for each rank of {region.extent}, but got {len(counted)}")
        return counted

    def _set(self, region: Region, cells: list[Any]) -> None:
        self._region = region
        self._origin = region._slice
        self._cells = cells

    def _with_region(self, region: Region) -> ValueMesh[R]:
        mesh = object.__new__(type(self))
        mesh._region, mesh._origin, mesh._cells = region, self._origin, self._cells
        return mesh

    def _at(self, cell: int) -> R:
        value = self._cells[cell]
        if type(value) is _Undecoded:
            with _cells_lock:
                value = self._cells[cell]
                if type(value) is _Undecoded:
                    value = self._cells[cell] = _Decoding(value)
        if type(value) is _Decoding:
            value = self._cells[cell] = value.value()
        return value  # type: ignore[no-any-return]  # cells hold what the caller gave

    def _cell(self, base: int) -> int:
        return 0 if len(self._cells) == 1 else self._origin.index(base)

    def item(self, /, **coordinates: SupportsIndex) -> R:
        """The value at these coordinates, one for each dimension; without dimensions `item()`.

        Raises:
            UnknownDimension (a KeyError): the mesh lacks one.
            KeyError: one is missing.
            IndexError: a coordinate is negative, or its dimension's size or more.
            TypeError: a coordinate is no integer.
        """
        labels = self._region.labels
        check_dimensions(self._region, coordinates)
        if missing := [label for label in labels if label not in coordinates]:
            raise KeyError(f"item needs a coordinate for each dimension, {missing} are missing")
        given = [natural(coordinates[label], f"coordinate {label!r}", IndexError) for label in labels]
        return self._at(self._cell(self._region.slice().nditem(given)))

    def get(self, rank: int) -> R:
        """The value of the member with this number in the current extent.

        Raises:
            ValueError: out of range, or negative.
        """
        size = len(self)
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} out of range: the mesh has {size} values")
        if self._region.slice() is self._origin:
            return self._at(0 if len(self._cells) == 1 else rank)
        return self._at(self._cell(self._region.slice()[rank]))

    def values(self) -> Iterator[R]:
        """The values in row-major order."""
        if self._region.slice() is self._origin and len(self._cells) != 1:
            return map(self._at, range(len(self._cells)))
        return (self._at(self._cell(base)) for base in self._region.slice())

    def items(self) -> Iterator[tuple[Point, R]]:
        """Each member's point in the current extent and its value, in row-major order."""
        return zip(self._region.extent.points(), self.values(), strict=True)

    def __iter__(self) -> Iterator[tuple[Point, R]]:
        return self.items()

    def __repr__(self) -> str:
        """The extent, then the entries; decodes all of them."""
        return f"ValueMesh({self._region.extent}):\n{indent(pformat(tuple(self.items())), '  ')}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _restored, (type(self), self._region, _compressed(list(self.values())))

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parameters: object) -> type:
            """`ValueMesh[int]` is `ValueMesh`."""
            return cls


def _restored(cls: type[ValueMesh[Any]], region: Region, cells: Sequence[Any]) -> ValueMesh[Any]:
    mesh = object.__new__(cls)
    mesh._set(region, list(cells))
    return mesh
