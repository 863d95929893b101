"""Streams, and borrows between them: who may use a tensor now.

A tensor belongs to the stream that was active when it was made. What another stream does with it goes by a borrow,
which says when that begins and ends, so that a missing wait is an error here and not a race on a device. Workers run
the commands of all streams of a process in the controller's order; what overlaps with it is communication (see
`reduce`).
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from monarch.mesh.tensor.commands import Op
from monarch.mesh.tensor.errors import stack_of
from monarch.mesh.tensor.handle import Memory, Ref, Tensor
from monarch.mesh.tensor.usage import refuse


class Stream:
    """A named sequence of operators: `with Stream("comm").activate(): ...`."""

    def __init__(self, name: str) -> None:
        self.name = name

    @contextmanager
    def activate(self) -> Iterator[Stream]:
        """What operators make inside belongs to this stream."""
        before, _active.stream = _active.stream, self
        try:
            yield self
        finally:
            _active.stream = before

    def borrow(self, tensor: Tensor, mutable: bool = False) -> tuple[Tensor, Borrow]:
        """`tensor` for use on this stream, and the borrow, to be ended by `drop()` or as a `with` block.

        Meanwhile its own stream may read it and its views, or not even that with `mutable`.

        Raises:
            RuntimeError: it is borrowed already, and one of both borrows is mutable; or it was borrowed itself, and not
                to be written to.
            TypeError: it is local, or was dropped.
        """
        if type(tensor) is not Tensor:
            raise TypeError(f"only distributed tensors are borrowed, not {type(tensor).__name__}")
        ref = tensor._ref
        lane = ref.place.lane
        with lane.engine.lock:
            memory = ref.shared()
            if memory.mutably or (mutable and memory.borrowed):
                raise RuntimeError("Tensor cannot be borrowed: it is borrowed already, and two may not write to it")
            if mutable and memory.borrow is not None and not memory.borrow.mutable:
                raise RuntimeError("Tensor cannot be borrowed to be written to: it was lent without mutable=True")
            refuse("borrow", [tensor], mesh=None, stream=ref.place.stream)
            number = lane.engine.new()
            lane.append((int(Op.ALIAS), ref.number, number), stack_of(sys._getframe(1)))
            own = Ref(number, lane.place(self), ref.meta)
            borrow = Borrow(memory, own, mutable)
        return Tensor(own), borrow

    def __repr__(self) -> str:
        return f"<Stream {self.name}>"


class Borrow:
    """See `Stream.borrow`. One that is collected without being dropped warns."""

    def __init__(self, lent: Memory, own: Ref, mutable: bool) -> None:
        self.mutable = mutable
        own.memory = Memory(self)
        self._lent, self._own, self._memory = lent, weakref.ref(own), weakref.ref(own.memory)  # which have this
        self._lock = own.place.lane.engine.lock
        self._over = False
        lent.borrowed += 1
        lent.mutably = mutable

    def drop(self) -> None:
        """End it: the borrowed tensor, and views of it, cannot be used any more. Again is an error.

        Raises:
            RuntimeError: it has ended.
        """
        with self._lock:
            if self._over:
                raise RuntimeError("this borrow has been dropped already")
            self._over = True
            self._lent.borrowed -= 1
            self._lent.mutably = False
        stack = stack_of(sys._getframe(1))
        own, memory = self._own(), self._memory()
        if own is not None:
            own.drop(stack)
        if memory is not None:
            memory.ended = stack

    def __enter__(self) -> Borrow:
        return self

    def __exit__(self, *_: Any) -> None:
        self.drop()

    def __del__(self) -> None:
        if not self._over:
            warnings.warn("a borrow was never dropped: call drop(), or use it in a with block", stacklevel=2)


_MAIN = Stream("main")


class _Active(threading.local):
    stream: Stream = _MAIN


_active = _Active()


def get_active_stream() -> Stream:
    """The stream that operators of this thread belong to; "main" where none was activated."""
    return _active.stream
