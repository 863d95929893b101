"""Distributed tensors, as the controller has them: handles without elements, of which a shard is on each process."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from monarch.mesh.tensor.errors import Stack, stack_of, value_refused
from monarch.mesh.tensor.metadata import Meta

if TYPE_CHECKING:
    from monarch.mesh.proc_mesh import ProcMesh
    from monarch.mesh.tensor.lane import Place
    from monarch.mesh.tensor.streams import Borrow, Stream


class Memory:
    """What a tensor and its views have in common: who may use them.

    Attributes:
        borrowed: how many borrows of it have not ended.
        mutably: whether one of them may write.
        borrow: what it was lent by, if it was.
        ended: where that has ended.
    """

    __slots__ = ("__weakref__", "borrow", "borrowed", "ended", "mutably")

    def __init__(self, borrow: Borrow | None = None) -> None:
        self.borrow = borrow
        self.borrowed = 0
        self.mutably = False
        self.ended: Stack | None = None


class Ref:
    """The number of a tensor's shards, and where they are. Once nobody has it any more, the shards are freed.

    Attributes:
        base: the ref whose shards these are too (a view of them on fewer workers); it frees them.
        memory: None while there are neither views nor borrows.
    """

    __slots__ = ("__weakref__", "base", "dropped", "memory", "meta", "number", "place")

    def __init__(
        self, number: int, place: Place, meta: Meta, base: Ref | None = None, memory: Memory | None = None
    ) -> None:
        self.number, self.place, self.meta, self.base, self.memory = number, place, meta, base, memory
        self.dropped: Stack | None = None

    def shared(self) -> Memory:
        """Its memory, for whoever has a part in that."""
        if self.memory is None:
            with self.place.lane.engine.lock:
                if self.memory is None:  # still
                    self.memory = Memory()
        return self.memory

    def drop(self, stack: Stack) -> None:
        if self.dropped is None:
            self.dropped = stack
            if self.base is None:
                self._free()

    def dropped_at(self) -> Stack | None:
        """Where it was dropped, if it was, or the borrow that it was made by."""
        if self.dropped is None and self.memory is not None and self.memory.ended is not None:
            return self.memory.ended
        return self.dropped if self.dropped is not None or self.base is None else self.base.dropped_at()

    def __del__(self) -> None:
        try:
            if self.dropped is None and self.base is None:
                self._free()
        except AttributeError:
            pass  # torch.compile makes some without __init__

    def _free(self) -> None:
        # Any thread, any time: appending to a list, and setting a flag, is all that may happen here.
        lane = self.place.lane
        lane.freed.append(self.number)
        if self.meta.is_large:
            lane.frees_now = True


_make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
_DATA: Any = torch.Tensor.data


class _Refused(threading.local):
    error: TypeError | None = None


refused = _Refused()
"""The last refusal of an operator. `x + y` of torch drops a TypeError, as if the class did not know the operator."""


def _operator(name: str) -> Callable[[Any, Any], Any]:
    of_torch = getattr(torch.Tensor, name)

    @functools.wraps(of_torch)
    def operator(self: Any, other: Any) -> Any:
        refused.error = None
        result = of_torch(self, other)
        if result is NotImplemented and refused.error is not None:
            raise refused.error
        return result

    return operator


class Tensor(torch.Tensor):
    """A tensor of which each process of a mesh has a shard. Made by torch operators under an active mesh.

    All shards have the same shape and dtype; the elements differ. What needs the elements (`item`, `bool`, `tolist`) is
    an error here: use `fetch_shard` or `inspect`.
    """

    _ref: Ref
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    for _name in (
        "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv mod pow rpow matmul "
        "rmatmul and or xor eq ne lt le gt ge"
    ).split():
        locals()[f"__{_name}__"] = _operator(f"__{_name}__")
    del _name
    __hash__ = torch.Tensor.__hash__

    @staticmethod
    def __new__(cls, ref: Ref) -> Tensor:
        meta = ref.meta
        self: Tensor = _make(cls, meta.shape, meta.stride, meta.offset or None, dtype=meta.dtype, device=meta.device)
        self._ref = ref
        return self if meta.put_off is None else meta.mark(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _issue(func, args, kwargs or {})

    @property
    def mesh(self) -> ProcMesh:
        """The processes that have a shard."""
        return self._ref.place.lane.mesh

    @property
    def stream(self) -> Stream:
        return self._ref.place.stream

    @property
    def dropped(self) -> bool:
        return self._ref.dropped_at() is not None

    def drop(self) -> None:
        """Free the shards now. Later use is a TypeError that names this line."""
        self._ref.drop(stack_of(sys._getframe(1)))

    if TYPE_CHECKING:  # module `collectives` puts these here

        def reduce(
            self,
            dims: Any = None,
            reduction: str = "sum",
            scatter: bool = False,
            mesh: Any = None,
            out: Tensor | None = None,
        ) -> Tensor: ...

        def reduce_(
            self, dims: Any = None, reduction: str = "sum", scatter: bool = False, mesh: Any = None
        ) -> Tensor: ...

        def to_mesh(self, mesh: ProcMesh, stream: Stream | None = None) -> Tensor: ...

        def slice_mesh(self, **dims: Any) -> Tensor: ...

    @property
    def data(self) -> Any:
        """The same shards, which autograd does not follow. What is assigned gives its shards, shape and dtype.

        Raises (an assignment):
            TypeError: a local tensor.
        """
        return _DATA.__get__(self)

    @data.setter
    def data(self, other: Any) -> None:
        if type(other) is not Tensor:
            raise TypeError(f"the data of a distributed tensor can be another one, not a {type(other).__name__}")
        _DATA.__set__(self, other)  # of the handle, which has a shape and no elements
        self._ref = other._ref

    def __format__(self, spec: str) -> str:
        if spec:
            raise value_refused()
        return repr(self)

    def tolist(self) -> Any:  # type: ignore[override]
        """Raises: TypeError, always: see `inspect`."""
        raise value_refused()

    def numpy(self, *, force: bool = False) -> Any:  # type: ignore[override]
        """Raises: TypeError, always: see `inspect`."""
        raise value_refused()

    def __copy__(self) -> Tensor:
        return self._as_this(Tensor(self._ref))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError("only tensors that are no results of autograd can be copied with deepcopy")
        twin = memo[id(self)] = self._as_this(self.detach().clone())
        if self.grad is not None:
            twin.grad = self.grad.detach().clone()
        return twin

    def _as_this(self, twin: Any) -> Tensor:
        """`twin`, which is a parameter, and has gradients, where this does."""
        twin.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            twin._is_param = True
        return twin  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        dims = dict(self._ref.place.lane.mesh.sizes)
        gone = ", dropped" if self.dropped else ""
        return f"<distributed Tensor of shape {tuple(self.shape)}, {self.dtype}, over {dims}{gone}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self!r} stays with its controller; it can be an argument of a remote function, or of an endpoint of "
            "actors on its mesh. Values travel by fetch_shard"
        )


def handles(leaves: Iterable[Any], place: Place, first: int) -> list[Any]:
    """`leaves` with a tensor for each Meta, numbered from `first` on."""
    numbers = itertools.count(first)
    return [Tensor(Ref(next(numbers), place, leaf)) if isinstance(leaf, Meta) else leaf for leaf in leaves]


_issue: Callable[[Any, Any, dict[str, Any]], Any]


def operators_are_issued_by(issue: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
    """What becomes of operators on handles where no mesh is active."""
    global _issue
    _issue = issue
