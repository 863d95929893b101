"""One-sided buffers as users see them: a small reference to memory of one process, by which others read and write it.

This module checks every use before a byte moves, and leaves moving to `monarch.onesided`. An actor's buffers live until
they are dropped, or the actor ends.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any, Final, Self

from monarch.core import settings
from monarch.core.future import Future
from monarch.core.monitor import PeerGone
from monarch.errors import NotViable, TransferError
from monarch.mesh.context import context
from monarch.onesided import ibverbs
from monarch.onesided.chunks import owner_gone
from monarch.onesided.exports import exports
from monarch.onesided.local import Local, local
from monarch.onesided.pages import enlarge
from monarch.onesided.path import Remote
from monarch.onesided.ranges import Range, check_conflicts, check_slice, check_timeout, check_word
from monarch.onesided.transfers import Atomic, Move, Read, Transfers, Write, preferred
from monarch.onesided.words import MASK

DEFAULT_TIMEOUT_S: Final = 60
_ASK_LIMIT_S: Final = 10


class RDMAReadTransferWarning(UserWarning):
    """A read into memory of a CUDA device goes through memory of the host."""


class RDMAWriteTransferWarning(UserWarning):
    """A write from memory of a CUDA device goes through memory of the host."""


class RDMATcpFallbackWarning(UserWarning):
    """No RDMA device can be used; said once per process, and not where `rdma_path` asks for another path."""


class Backend(str):
    """The name of a path ("ibverbs", "shm", "tcp", "none"), and in `reason` why it is that one."""

    reason: str

    def __new__(cls, name: str, reason: str = "") -> Self:
        self = super().__new__(cls, name)
        self.reason = reason
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.reason)


def _transfers() -> Transfers:
    runtime = context().actor_instance.proc_runtime
    if runtime.transfers is None:
        runtime.transfers = Transfers(runtime)
    return runtime.transfers


class RDMABuffer:
    """A reference to memory of the process that made it. Send it anywhere; the memory stays where it is.

    The owner of the memory takes no part in a transfer, and does not hear of it: tell it by a message where it should.
    Transfers have no order, unless one is awaited before the next begins. What a failed one should have written is
    undefined.
    """

    __slots__ = ("_remote",)
    _remote: Remote

    def __init__(self, data: Any) -> None:
        """Share the memory of a contiguous torch tensor of any shape and dtype, or of anything that `memoryview` takes.

        It is kept until `drop`, or until the actor that makes this ends.

        Raises:
            ValueError: it is empty, or not contiguous.
            RuntimeError: it is no memory.
            TransferError: there is no path by which others could reach it.
        """
        memory = local(data)
        backend = get_rdma_backend()
        if backend == "none":
            raise TransferError(f"no RDMA backend: {backend.reason}")
        if backend == "ibverbs" and (missing := ibverbs.why_not()):
            raise NotViable(f"rdma_path asks for ibverbs, which cannot work here: {missing}")
        instance = context().actor_instance
        owner = instance.actor_id
        export = _transfers().share(memory, owner.number)
        book, number = exports(), export.number
        in_file = book.place_of(memory)
        if in_file is None and book.place.host:
            enlarge(book, number, memory)
        self._remote = Remote(
            owner,
            book.place,
            number,
            export.slot,
            memory.address,
            in_file,
            memory.size_bytes,
            0,
            memory.size_bytes,
            memory.writable,
            memory.device,
        )

    @classmethod
    def _of(cls, remote: Remote) -> RDMABuffer:
        self = cls.__new__(cls)
        self._remote = remote
        return self

    def size(self) -> int:
        """In bytes."""
        return self._remote.size_bytes

    @property
    def owner(self) -> str:
        """The actor that made it, as text."""
        return str(self._remote.owner)

    @property
    def backend(self) -> Backend:
        """The path from this process to the buffer; its `reason` says why. Asks the owner at most once.

        Raises:
            NotViable: the path that `rdma_path` asks for does not lead there.
            SupervisionError: the owner's process is gone.
            TimeoutError: it does not answer.
        """
        path = _transfers().path_to(self._remote, time.monotonic() + _ASK_LIMIT_S)
        return Backend(path.name, path.reason)

    def slice(self, offset: int, size_bytes: int) -> RDMABuffer:
        """A part of the buffer, in bytes; nobody is asked.

        Raises:
            ValueError: it is not inside.
        """
        check_slice(offset, size_bytes, self._remote.size_bytes)
        return RDMABuffer._of(self._remote.part(offset, size_bytes))

    def read_into(self, dst: Any, *, timeout: float = DEFAULT_TIMEOUT_S) -> Future[None]:
        """Copy the whole buffer to the beginning of `dst`, a tensor or memoryview of this process.

        Args:
            timeout: in seconds; then the future fails with TimeoutError, and nothing more is written to `dst`.

        Raises:
            ValueError: `dst` is smaller than the buffer, not contiguous, read-only, or overlaps it.
            The future: BufferDropped, TransferError; SupervisionError when the owner's process is gone; TimeoutError.
        """
        return RDMAAction().read_remote(dst, self).submit(timeout=timeout)

    def write_from(self, src: Any, *, timeout: float = DEFAULT_TIMEOUT_S) -> Future[None]:
        """Copy all of `src` to the beginning of the buffer. Errors as for `read_into`; `src` must not be larger.

        After a time-out a last piece may still arrive.
        """
        return RDMAAction().write_remote(self, src).submit(timeout=timeout)

    def drop(self) -> Future[None]:
        """Give the memory back to its owner. Transfers over shared memory that run end first; others that run, and all
        later ones, fail with BufferDropped.

        Anybody may drop, and more than once.

        Raises:
            ValueError: this is a slice.
        """
        remote = self._remote
        if remote.size_bytes != remote.whole_bytes:
            raise ValueError("this is a slice: drop the whole buffer")
        future: Future[None] = Future._pending(None, lambda: f"the drop of {remote}")
        if remote.place == exports().place:
            exports().withdraw(remote.number, lambda: future._complete(lambda: None))
            return future
        runtime = context().actor_instance.proc_runtime
        asked = runtime.request(remote.owner.proc, "rdma.drop", remote.number)

        def answered() -> None:
            error = asked.exception(0)
            if isinstance(error, PeerGone):
                error = owner_gone(remote, error.down)
            future._fail(error) if error is not None else future._complete(lambda: None)

        asked._on_done(answered)
        return future

    def __reduce__(self) -> tuple[Any, ...]:
        return RDMABuffer._of, (self._remote,)

    def __eq__(self, other: object) -> bool:
        return self._remote == other._remote if isinstance(other, RDMABuffer) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._remote.owner, self._remote.number, self._remote.offset, self._remote.size_bytes))

    def __repr__(self) -> str:
        remote = self._remote
        part = f" from byte {remote.offset} on" if remote.size_bytes != remote.whole_bytes else ""
        return f"<RDMABuffer of {remote.size_bytes} bytes{part}, owned by {remote.owner}>"


class RDMAAction:
    """Transfers that are started together, with any number of owners. It can be submitted again and again.

    They have no order among each other, so what one writes, no other may touch: that is a ValueError when it is added.
    """

    def __init__(self) -> None:
        self._moves: list[Move] = []
        self._reads: list[Range] = []
        self._writes: list[Range] = []
        self._elsewhere = False  # to another process
        self._far = False  # to another host
        self._staged: set[type[Warning]] = set()

    def read_remote(self, local_dst: Any, remote_buf: RDMABuffer) -> Self:
        """Copy all of a buffer to the beginning of local memory. Raises: ValueError, as `RDMABuffer.read_into`."""
        remote = _remote(remote_buf)
        target = _target(local_dst)
        if target.size_bytes < remote.size_bytes:
            raise ValueError(
                f"the destination has {target.size_bytes} bytes, and the buffer {remote.size_bytes}: it does not fit"
            )
        wanted = _here(target, remote.size_bytes, "the destination")
        self._add(Read(remote, target), [_there(remote)], [wanted])
        if target.device != "cpu":
            self._staged.add(RDMAReadTransferWarning)
        return self

    def write_remote(self, remote_buf: RDMABuffer, local_src: Any) -> Self:
        """Copy all of local memory to the beginning of a buffer. Raises: ValueError, as `RDMABuffer.write_from`."""
        remote = _writable(_remote(remote_buf))
        source = local(local_src)
        if source.size_bytes > remote.size_bytes:
            raise ValueError(
                f"the source has {source.size_bytes} bytes, and the buffer {remote.size_bytes}: it does not fit"
            )
        part = remote.part(0, source.size_bytes)
        self._add(Write(part, source), [_here(source, source.size_bytes, "the source")], [_there(part)])
        if source.device != "cpu":
            self._staged.add(RDMAWriteTransferWarning)
        return self

    def fetch_add(self, local_dst: Any, remote_buf: RDMABuffer, add: int) -> Self:
        """Add to a word of 8 bytes, modulo 2**64, as one step; the value before goes to 8 local bytes.

        Atomic towards other atomics on the word that take the same path; not towards plain reads and writes.

        Raises:
            ValueError: one of both is not 8 bytes, or the word is not aligned to 8.
        """
        return self._atomic(local_dst, remote_buf, add, None)

    def compare_and_swap(self, local_dst: Any, remote_buf: RDMABuffer, expected: int, desired: int) -> Self:
        """Where a word of 8 bytes is `expected`, make it `desired`, as one step. Otherwise as `fetch_add`."""
        return self._atomic(local_dst, remote_buf, desired, expected)

    def _atomic(self, local_dst: Any, remote_buf: RDMABuffer, value: int, expected: int | None) -> Self:
        for number in (value, 0 if expected is None else expected):
            if not isinstance(number, int) or not -(1 << 63) <= number <= MASK:
                raise ValueError(f"{number!r} is no number of 64 bits")
        remote = _writable(_remote(remote_buf))
        target = _target(local_dst)
        check_word(remote.address, remote.size_bytes)
        if target.size_bytes != 8 or target.device != "cpu" or remote.device != "cpu":
            raise ValueError("the value before goes to 8 bytes of memory; neither they nor the word may be on a device")
        expected = None if expected is None else expected & MASK
        word = _there(remote)
        self._add(Atomic(remote, target, value & MASK, expected), [], [word, _here(target, 8, "the destination")])
        return self

    def _add(self, move: Move, reads: list[Range], writes: list[Range]) -> None:
        check_conflicts(self._reads, self._writes, reads, writes)
        self._reads += reads
        self._writes += writes
        self._moves.append(move)
        here, there = exports().place, move.remote.place
        self._elsewhere = self._elsewhere or there != here
        self._far = self._far or there.host != here.host

    def submit(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> Future[None]:
        """Start all of them. The future is done when all are, and fails with the first error.

        Raises:
            OverflowError: `timeout` is negative.
        """
        timeout_s = check_timeout(timeout)
        if not self._moves:
            return Future._completed(None)
        for staged in self._staged:
            warnings.warn("the transfer goes through memory of the host", staged, stacklevel=_users_frame())
        if self._elsewhere:
            _warn_of_fallback(self._far)
        what = f"a transfer from or to {self._moves[0].remote}"
        if len(self._moves) > 1:
            what = f"{len(self._moves)} transfers, the first from or to {self._moves[0].remote}"
        return _transfers().start(self._moves, timeout_s, what)


def _remote(buffer: RDMABuffer) -> Remote:
    if not isinstance(buffer, RDMABuffer):
        raise TypeError(f"expected an RDMABuffer, not {type(buffer).__name__}")
    return buffer._remote


def _writable(remote: Remote) -> Remote:
    if not remote.writable:
        raise ValueError("the buffer is read-only, as the memory is that it was made of")
    return remote


def _target(data: Any) -> Local:
    target = local(data)
    if not target.writable:
        raise ValueError("the destination is read-only")
    return target


def _here(memory: Local, size_bytes: int, what: str) -> Range:
    return Range(("here", memory.device), memory.address, memory.address + size_bytes, what)


def _there(remote: Remote) -> Range:
    space = "here" if remote.place == exports().place else remote.owner.proc.key
    return Range((space, remote.device), remote.address, remote.address + remote.size_bytes, str(remote))


_warned = False


def _warn_of_fallback(far: bool) -> None:
    """Where a transfer, to another host or not, goes in chunks only for lack of a device."""
    global _warned
    if _warned or settings.get("rdma_path") == "tcp" or (missing := ibverbs.why_not()) is None:
        return
    backend = get_rdma_backend()
    if backend != "tcp" and not far:
        return
    _warned = True
    text = f"no RDMA device can be used here ({missing}): transfers fall back to 'tcp', chunks over the link"
    warnings.warn(f"{text}. The setting rdma_path='tcp' silences this", RDMATcpFallbackWarning, _users_frame())


def _users_frame() -> int:
    """`stacklevel` of the first caller outside this module, seen from the caller of this function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        level, frame = level + 1, frame.f_back
    return level


def get_rdma_backend() -> Backend:
    """The path between processes of this host for memory of any kind: "ibverbs", "shm", "tcp", or "none" where there is
    no path."""
    return Backend(*preferred())


def is_ibverbs_available() -> bool:
    """Whether this process can use an RDMA device. `monarch rdma check` says more."""
    return ibverbs.why_not() is None


def is_rdma_available() -> bool:
    """Deprecated: use `is_ibverbs_available`."""
    warnings.warn("is_rdma_available() is deprecated: use is_ibverbs_available()", DeprecationWarning, stacklevel=2)
    return is_ibverbs_available()


def empty(shape: int | tuple[int, ...], dtype: Any = None) -> Any:
    """Zeroed memory that processes of this host map, and so reach fastest; the place for what is read often.

    Args:
        shape: without a dtype, the size in bytes.
        dtype: of torch, for a tensor; of numpy, for an array. None gives a memoryview.

    Raises:
        ValueError: it would be empty, or has a shape and no dtype.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    count = 1
    for size in sizes:
        count *= size
    if count < 1 or any(size < 1 for size in sizes):
        raise ValueError(f"the shape {shape} has no elements")
    if dtype is None:
        if not isinstance(shape, int):
            raise ValueError("a shape needs a dtype; without one, give the size in bytes")
        return exports().allocate(shape)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return torch.frombuffer(exports().allocate(count * dtype.itemsize), dtype=dtype).view(sizes)
    import numpy

    kind = numpy.dtype(dtype)
    return numpy.frombuffer(exports().allocate(count * kind.itemsize), kind).reshape(sizes)
