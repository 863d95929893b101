"""A strided view over base ranks: which ranks, in which order, and the way back from a rank to its place.

Base ranks number the members of the root mesh; every view of it is a `Slice` of them. Iteration is row-major: the last
dimension moves fastest. Pure arithmetic, immutable, no labels: `shape` adds names, `view` the operations on meshes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import index as as_int
from typing import SupportsIndex, overload


def natural(value: SupportsIndex, what: str, error: type[Exception] = TypeError) -> int:
    """`value` as an int that is not negative; else `error`, or TypeError where it is no integer at all."""
    try:
        number = as_int(value)
    except TypeError:
        raise TypeError(f"{what} must be an int, not {value!r}") from None
    if number < 0:
        raise error(f"{what} must not be negative, it is {number}")
    return number


def dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides without gaps: (2, 3, 4) gives (12, 4, 1)."""
    return tuple(accumulate(reversed(sizes[1:]), int.__mul__, initial=1))[::-1] if sizes else ()


class Slice:
    """The base ranks `offset + sum(i[d] * strides[d])` for all `0 <= i[d] < sizes[d]`, in row-major order of `i`.

    No dimensions means one rank, the offset. A size of 0 makes the slice empty.

    Raises:
        ValueError: `sizes` and `strides` differ in length, or the strides overlap: ordered by stride, each dimension
            must step over everything that the smaller ones span.
        TypeError: a number is negative or no integer.
    """

    __slots__ = ("_len", "_offset", "_order", "_sizes", "_strides")

    _offset: int
    _sizes: tuple[int, ...]
    _strides: tuple[int, ...]
    _len: int
    _order: tuple[int, ...] | None  # dimensions of more than one element, largest stride first; None until asked for

    def __init__(self, offset: int, sizes: Iterable[int], strides: Iterable[int]) -> None:
        self._offset = natural(offset, "offset of a slice")
        self._sizes = tuple(natural(size, "size in a slice") for size in sizes)
        self._strides = tuple(natural(stride, "stride in a slice") for stride in strides)
        if len(self._sizes) != len(self._strides):
            raise ValueError(
                f"a slice needs one stride for each size: sizes {list(self._sizes)}, strides {list(self._strides)}"
            )
        self._len = math.prod(self._sizes)
        self._order = None
        span = 1
        for dim in reversed(self._by_stride()) if self._len else ():
            if self._strides[dim] < span:
                raise ValueError(
                    f"strides of a slice overlap: sizes {list(self._sizes)}, strides {list(self._strides)}; "
                    f"stride {self._strides[dim]} must be at least {span}"
                )
            span += (self._sizes[dim] - 1) * self._strides[dim]

    @classmethod
    def _trusted(cls, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Slice:
        """Without the checks, for what was derived from a slice that passed them."""
        self = object.__new__(cls)
        self._offset, self._sizes, self._strides = offset, sizes, strides
        self._len = math.prod(sizes)
        self._order = None
        return self

    @staticmethod
    def new_row_major(sizes: Iterable[int]) -> Slice:
        """Ranks 0, 1, 2, ... in the given sizes, without gaps."""
        checked = tuple(natural(size, "size in a slice") for size in sizes)
        return Slice._trusted(0, checked, dense_strides(checked))

    @staticmethod
    def from_list(ranks: Iterable[int]) -> list[Slice]:
        """One-dimensional slices that list exactly `ranks`, in their order: each run is taken as long as it goes."""
        runs: list[list[int]] = []  # start, size, stride
        for rank in ranks:
            rank = natural(rank, "rank")
            if runs:
                start, size, stride = run = runs[-1]
                step = rank - (start + (size - 1) * stride)
                if step > 0 and size == 1:
                    run[1:] = 2, step
                    continue
                if step == stride:
                    run[1] += 1
                    continue
            runs.append([rank, 1, 1])
        return [Slice._trusted(start, (size,), (stride,)) for start, size, stride in runs]

    @property
    def offset(self) -> int:
        """The first base rank."""
        return self._offset

    @property
    def sizes(self) -> list[int]:
        """How many elements each dimension has."""
        return list(self._sizes)

    @property
    def strides(self) -> list[int]:
        """How many base ranks apart neighbours in each dimension are."""
        return list(self._strides)

    @property
    def ndim(self) -> int:
        """How many dimensions."""
        return len(self._sizes)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks())

    def ranks(self) -> Sequence[int]:
        """All base ranks in order; a `range` where the slice is one."""
        if self._strides == dense_strides(self._sizes):
            return range(self._offset, self._offset + self._len)
        if len(self._sizes) == 1:
            stride = self._strides[0] or 1
            return range(self._offset, self._offset + self._len * stride, stride)
        ranks = [self._offset]
        for size, stride in zip(self._sizes, self._strides, strict=True):
            steps = [i * stride for i in range(size)]
            ranks = [rank + step for rank in ranks for step in steps]
        return ranks

    def __contains__(self, base: object) -> bool:
        return isinstance(base, int) and self._locate(base) is not None

    @overload
    def __getitem__(self, i: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[int, ...]: ...
    def __getitem__(self, i: SupportsIndex | slice) -> int | tuple[int, ...]:
        """The i-th base rank, or for a Python slice the tuple of them.

        Raises:
            IndexError: `i` is `len` or more.
            TypeError: `i` is negative or no integer.
        """
        if isinstance(i, slice):
            return tuple(self.ranks()[i])
        rest = natural(i, "index into a slice")
        if rest >= self._len:
            raise IndexError(f"index {rest} out of range for a slice of {self._len} ranks")
        base = self._offset
        for size, stride in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            rest, at = divmod(rest, size)
            base += at * stride
        return base

    def get(self, i: int) -> int:
        """The i-th base rank; errors as for `slice[i]`."""
        return self[natural(i, "index into a slice")]

    def index(self, base: int) -> int:
        """Where `base` stands in the iteration: `s[s.index(base)] == base`.

        Raises:
            ValueError: the slice has no such rank.
        """
        position = 0
        for size, at in zip(self._sizes, self._located(base), strict=True):
            position = position * size + at
        return position

    def coordinates(self, base: int) -> list[int]:
        """The coordinate of `base` in each dimension.

        Raises:
            ValueError: the slice has no such rank.
        """
        return self._located(base)

    def nditem(self, coordinates: Iterable[int]) -> int:
        """The base rank at these coordinates, one for each dimension.

        Raises:
            ValueError: too few or too many coordinates.
            IndexError: one is its dimension's size or more.
            TypeError: one is negative.
        """
        given = [natural(at, "coordinate") for at in coordinates]
        if len(given) != len(self._sizes):
            raise ValueError(f"a slice of {len(self._sizes)} dimensions needs as many coordinates, got {given}")
        base = self._offset
        for at, size, stride in zip(given, self._sizes, self._strides, strict=True):
            if at >= size:
                raise IndexError(f"coordinate {at} out of range for a dimension of size {size}")
            base += at * stride
        return base

    def _by_stride(self) -> tuple[int, ...]:
        if self._order is None:
            dims = [dim for dim, size in enumerate(self._sizes) if size > 1]
            self._order = tuple(sorted(dims, key=self._strides.__getitem__, reverse=True))
        return self._order

    def _locate(self, base: int) -> list[int] | None:
        # Strides do not overlap, so what remains after the larger ones is exactly what the smaller ones add.
        rest = base - self._offset
        if rest < 0 or not self._len:
            return None
        found = [0] * len(self._sizes)
        for dim in self._by_stride():
            at, rest = divmod(rest, self._strides[dim])
            if at >= self._sizes[dim]:
                return None
            found[dim] = at
        return None if rest else found

    def _located(self, base: int) -> list[int]:
        found = self._locate(natural(base, "base rank"))
        if found is None:
            raise ValueError(f"rank {base} is not in {self!r}")
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Slice):
            return NotImplemented
        return (self._offset, self._sizes, self._strides) == (other._offset, other._sizes, other._strides)

    def __hash__(self) -> int:
        return hash((self._offset, self._sizes, self._strides))

    def __reduce__(self) -> tuple[type[Slice], tuple[int, tuple[int, ...], tuple[int, ...]]]:
        return Slice, (self._offset, self._sizes, self._strides)

    def __repr__(self) -> str:
        return f"Slice {{ offset: {self._offset}, sizes: {list(self._sizes)}, strides: {list(self._strides)} }}"
