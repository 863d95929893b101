"""Collectives among workers, in groups of torch.distributed, each made once and used again: over gloo for tensors of
the CPU, and NCCL for those of CUDA devices.

A worker whose input could not be computed takes part all the same, with zeros and a mark that says so, because the
others wait for it; each member then has a failure as its result. Where all reduce into a buffer of ours, the mark is
one more element of it; elsewhere it is exchanged first. A reduction in place needs little memory beside the tensor.

What gloo cannot reduce (bits, booleans, complex numbers) is gathered, and reduced by each member in the order of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed
from attrs import define

from monarch.mesh.tensor.buffers import Buffers
from monarch.mesh.tensor.direct import Direct, Jobs
from monarch.mesh.tensor.metadata import Meta, dense_meta, plain
from monarch.mesh.tensor.rendezvous import TIMEOUT_S, Notes, Put, bind_address, share_host, shares_memory
from monarch.mesh.tensor.slots import Slots

dist: Any = torch.distributed

REDUCTIONS: Final = ("stack", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")

DIRECT_BYTES: Final = 16 << 20
"""Reductions of so much go directly, where processes share memory. Smaller ones are faster over gloo."""
DIRECT_AT_ONCE_BYTES: Final = 32 << 20
"""What a reduction in place sends at once: about so much memory it needs beside the tensor."""

IN_FLIGHT_BYTES: Final = 512 << 20
"""Results that are on their way hold about so much memory at most, or one of them does."""

_NATIVE: Final = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_NATIVE_DTYPES: Final = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
)
_FOLDS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_MARKS: Final = {"min": (1, 0), "product": (1, 0)}
"""By reduction: the mark of a member that is well, and of one that failed. Otherwise 0 and 1."""
_ALIGNED_BYTES: Final = 16
_HEARD_S: Final = 0.5
"""Within so much the controller has heard of a death."""


@define(frozen=True)
class Reduction:
    """What to do with the shards of a tensor.

    Attributes:
        dims: of the mesh; members that differ in these alone are a group, in row-major order.
        meta: of the input.
    """

    dims: tuple[str, ...]
    how: str
    scatter: bool
    meta: Meta


class MemberFailed(Exception):
    """Another member of the group had no input."""

    def __init__(self) -> None:
        super().__init__("the input of another member of the reduction could not be computed")


class InFlight:
    """Reductions of one worker that are on their way, and the memory that they hold: it waits for the oldest before it
    starts one that would make that more than `IN_FLIGHT_BYTES`. Members start them in the same order, so the oldest of
    all can be done."""

    def __init__(self) -> None:
        self._started: deque[tuple[int, Callable[[], bool], Callable[[], Any]]] = deque()
        self._bytes = 0

    def make_room(self, size_bytes: int) -> None:
        while self._started:
            oldest, is_done, wait = self._started[0]
            if not is_done():
                if self._bytes + size_bytes <= IN_FLIGHT_BYTES:
                    return
                with contextlib.suppress(Exception):  # which whoever uses its result gets
                    wait()
            self._started.popleft()
            self._bytes -= oldest

    def add(self, size_bytes: int, is_done: Callable[[], bool], wait: Callable[[], Any]) -> None:
        self._started.append((size_bytes, is_done, wait))
        self._bytes += size_bytes


class Pending:
    """A result that is still on its way, while the worker goes on.

    Attributes:
        issued: lane and number of the command that it is the result of.
    """

    __slots__ = ("_finish", "issued")

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish = finish
        self.issued = (0, 0)

    def get(self) -> torch.Tensor:
        """Raises: MemberFailed."""
        return self._finish()


class Groups:
    """Those of one worker, by their members' ranks.

    Args:
        engine: a text that all workers of a controller have in common, and no others.
    """

    def __init__(self, rank: int, engine: str, put: Put, slots: Slots) -> None:
        self._rank, self._engine, self._put, self._slots = rank, engine, put, slots
        self._buffers, self._jobs, self._in_flight = Buffers(), Jobs(), InFlight()
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}

    def of(self, ranks: tuple[int, ...], device: str = "cpu", name: str = "") -> Group:
        """The group of these workers; all of them ask for it, or it is never complete."""
        found = self._groups.get((ranks, device + name))
        if found is None:
            whole = f"{self._engine}/{device}{name}/{','.join(map(str, ranks))}"
            notes = Notes(whole, ranks, self._put, self._slots)
            found = Group(
                ranks.index(self._rank), len(ranks), notes, device, self._buffers, self._jobs, self._in_flight
            )
            self._groups[ranks, device + name] = found
        return found

    def process_group(self, ranks: tuple[int, ...], name: str) -> Any:
        """One of torch.distributed, for functions of the user's."""
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        members = [self.of(ranks, device, name) for device in devices]
        group = dist.ProcessGroup(members[0].notes, ranks.index(self._rank), len(ranks))
        kinds = {"cpu": dist.ProcessGroup.BackendType.GLOO, "cuda": dist.ProcessGroup.BackendType.NCCL}
        group._set_default_backend(kinds[devices[-1]])
        for device, member in zip(devices, members, strict=True):
            group._register_backend(torch.device(device), kinds[device], member.backend)
        return group


def _make(notes: Notes, rank: int, size: int, device: str, within_host: bool) -> Any:
    if device == "cuda":
        return dist.ProcessGroupNCCL(notes, rank, size, dist.ProcessGroupNCCL.Options())
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=bind_address(within_host))]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return dist.ProcessGroupGloo(notes, rank, size, options)


class Group:
    """Some workers that reduce together."""

    def __init__(
        self,
        rank: int,
        size: int,
        notes: Notes,
        device: str,
        buffers: Buffers,
        jobs: Jobs,
        in_flight: InFlight,
    ) -> None:
        self.rank, self.size = rank, size
        within_host = share_host(notes, rank, size)
        self.backend = _make(notes, rank, size, device, within_host)
        self.notes, self._buffers, self._in_flight = notes, buffers, in_flight
        self._is_broken = False
        self._direct = None
        if within_host and device == "cpu" and shares_memory():
            self._direct = Direct(notes, rank, size, buffers, jobs)

    def reduce(self, shard: torch.Tensor | None, reduction: Reduction) -> torch.Tensor | Pending:
        """The result for this member. `shard` is None where it could not be computed.

        Raises:
            MemberFailed: that was so at another member.
        """
        meta, how = reduction.meta, reduction.how
        if shard is not None and meta.put_off is not None:
            shard = plain(shard)
        native = how in _NATIVE and meta.dtype in _NATIVE_DTYPES
        large = _size_bytes(meta) >= DIRECT_BYTES
        if self._direct is not None and large and not reduction.scatter and how != "stack":
            return self._all_reduce_directly(self._direct, shard, meta, how)
        if not reduction.scatter and native:
            return self._all_reduce(shard, meta, how)
        if how == "stack":
            return self._exchange(shard, meta) if reduction.scatter else torch.stack(self._gather(shard, meta))
        if native:
            return self._reduce_scatter(shard, meta, how)
        pieces = self._gather(shard, meta)
        if reduction.scatter:
            pieces = [piece[self.rank] for piece in pieces]
        result = functools.reduce(_FOLDS[how], pieces)
        return self._averaged(result) if how == "avg" else result

    def reduce_in_place(self, shard: torch.Tensor | None, reduction: Reduction) -> None:
        """As `reduce`, into the shard itself, which is unchanged where this raises. Without scatter or stack."""
        meta, how = reduction.meta, reduction.how
        dense = meta is dense_meta(meta.shape, meta.dtype, meta.device, meta.offset)
        if not (dense and how in _NATIVE and meta.dtype in _NATIVE_DTYPES):
            reduced = self.reduce(shard, reduction)
            value = reduced.get() if isinstance(reduced, Pending) else reduced
            if shard is not None:
                shard.copy_(value)
            return
        whole = self._agree(shard, meta.device)
        if self._direct is not None and _size_bytes(meta) >= DIRECT_BYTES:
            for part in whole.view(-1).split(DIRECT_AT_ONCE_BYTES // meta.dtype.itemsize):
                self._direct.all_reduce(part, _FOLDS[how], self._finish(how), in_place=True).result()
            return
        options = dist.AllreduceOptions()
        options.reduceOp = _NATIVE[how]
        self._wait(self.backend.allreduce([whole], options))
        if how == "avg":
            self._averaged(whole)

    def _finish(self, how: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """What makes the result of a sum, or of whatever else was folded."""
        return self._averaged if how == "avg" else lambda total: total

    def _wait(self, work: Any) -> None:
        """Until it is done. Where that fails, a member has most likely died, which the controller hears by itself, and
        tells better: it may do so first."""
        try:
            work.wait()
        except RuntimeError:
            if not self._is_broken:
                self._is_broken = True
                time.sleep(_HEARD_S)
            raise

    def _averaged(self, total: torch.Tensor) -> torch.Tensor:
        rounding = None if total.is_floating_point() or total.is_complex() else "floor"
        return total.div_(self.size, rounding_mode=rounding)

    def _all_reduce(self, shard: torch.Tensor | None, meta: Meta, how: str) -> Pending:
        well, failed = _MARKS.get(how, (0, 1))
        self._in_flight.make_room(_size_bytes(meta))
        buffer = self._buffers.empty(_count(meta) + 1, meta.dtype, meta.device)
        value = buffer[:-1].view(meta.shape)
        if shard is None:
            buffer.zero_()
        else:
            value.copy_(shard)
        buffer[-1] = failed if shard is None else well
        options = dist.AllreduceOptions()
        options.reduceOp = _NATIVE[how]
        work = self.backend.allreduce([buffer], options)
        self._in_flight.add(_size_bytes(meta), work.is_completed, work.wait)

        def finish() -> torch.Tensor:
            self._wait(work)
            if buffer[-1] != well:
                raise MemberFailed
            return self._averaged(value) if how == "avg" else value

        return Pending(finish)

    def _all_reduce_directly(self, direct: Direct, shard: torch.Tensor | None, meta: Meta, how: str) -> Pending:
        self._in_flight.make_room(_size_bytes(meta))
        result = direct.all_reduce(shard, _FOLDS[how], self._finish(how))
        self._in_flight.add(_size_bytes(meta), result.done, result.exception)

        def finish() -> torch.Tensor:
            whole = result.result()
            if whole is None:
                raise MemberFailed
            return whole.view(meta.shape)

        return Pending(finish)

    def _agree(self, shard: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """The shard, once all members have said that they have one."""
        mark = torch.tensor([0 if shard is not None else 1], dtype=torch.int32, device=device)
        self._wait(self.backend.allreduce([mark], dist.AllreduceOptions()))
        if shard is None or mark.item():
            raise MemberFailed
        return shard

    def _reduce_scatter(self, shard: torch.Tensor | None, meta: Meta, how: str) -> torch.Tensor:
        whole = self._agree(shard, meta.device).contiguous()
        options = dist.ReduceScatterOptions()
        options.reduceOp = _NATIVE[how]
        result = torch.empty(meta.shape[1:], dtype=meta.dtype, device=meta.device)
        if result.numel():
            part = result.view(-1)  # gloo wants as many dimensions on both sides
            self._wait(self.backend._reduce_scatter_base(part, whole.clone().view(-1), options))
        return self._averaged(result) if how == "avg" else result

    def _exchange(self, shard: torch.Tensor | None, meta: Meta) -> torch.Tensor:
        """Piece i of each member's shard goes to member i, which has them in the order of the members then."""
        whole = self._agree(shard, meta.device).contiguous()
        result = torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
        if result.numel():
            sent, received = _bytes(whole), _bytes(result)
            self._wait(self.backend.alltoall_base(received, sent, [], [], dist.AllToAllOptions()))
        return result

    def _gather(self, shard: torch.Tensor | None, meta: Meta) -> list[torch.Tensor]:
        """All shards, in the order of the members; views of one buffer. Bytes travel, so that every dtype does."""
        size = _size_bytes(meta)
        room = (size // _ALIGNED_BYTES + 1) * _ALIGNED_BYTES
        own = torch.zeros(room, dtype=torch.uint8, device=meta.device)
        if shard is None:
            own[-1] = 1
        elif size:
            own[:size].view(meta.dtype).view(meta.shape).copy_(shard)
        every = torch.empty(room * self.size, dtype=torch.uint8, device=meta.device)
        self._wait(self.backend._allgather_base(every, own))
        if every[room - 1 :: room].any():
            raise MemberFailed
        rows = every.view(self.size, room)[:, :size]
        return [row.view(meta.dtype).view(meta.shape) for row in rows]


def _count(meta: Meta) -> int:
    return functools.reduce(int.__mul__, meta.shape, 1)


def _size_bytes(meta: Meta) -> int:
    return _count(meta) * meta.dtype.itemsize


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def result_meta(reduction: Reduction, size: int) -> tuple[int, ...]:
    """The shape of the result, for groups of `size` members."""
    shape = reduction.meta.shape
    if reduction.how == "stack":
        return shape if reduction.scatter else (size, *shape)
    return shape[1:] if reduction.scatter else shape


def members(sizes: Sequence[int], dims: Sequence[int], at: Sequence[int]) -> list[tuple[int, ...]]:
    """The coordinates that differ from `at` in `dims` alone, row-major."""
    found: list[tuple[int, ...]] = [()]
    for dim, size in enumerate(sizes):
        choices = range(size) if dim in dims else (at[dim],)
        found = [(*head, each) for head in found for each in choices]
    return found
