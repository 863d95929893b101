"""The worker of a process: an actor that runs commands, in order, on the shards that it holds by number.

What a command cannot compute is a `Failure`, in place of its results and of all that is computed from them; the worker
goes on. Commands run without autograd, whose graph the controller has; functions of the user's may use it for
themselves.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch.core import codec, exceptions
from monarch.mesh.actor import Actor
from monarch.mesh.context import context, current_rank
from monarch.mesh.endpoint import endpoint
from monarch.mesh.shape import Region
from monarch.mesh.slice import Slice
from monarch.mesh.tensor.commands import (
    NEW,
    Failure,
    Function,
    Graph,
    Hole,
    Op,
    Template,
    fill,
)
from monarch.mesh.tensor.groups import Groups, Pending, members
from monarch.mesh.tensor.metadata import Meta, meta_of, plain
from monarch.mesh.tensor.propagation import without_memory
from monarch.mesh.tensor.slots import Slot, Slots, SlotsClosed, slots_here

if TYPE_CHECKING:
    from monarch.mesh.actor_mesh import ActorMesh

Command = tuple[Any, ...]
Table = dict[int, Any]


class Failed(Exception):
    """An input could not be computed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class _Operator:
    """A template, ready to be called. With `alone`, this process takes on the controller's default dtype."""

    def __init__(self, template: Template, alone: bool) -> None:
        self.template = template
        self.function = template.function()
        self.holes = template.holes
        self.results = template.results
        returns = self.function._schema.returns
        self.only_new = template.results == (NEW,) and str(returns[0].type) == "Tensor"  # and no list of one
        nested = (list, tuple)
        self.default_dtype = template.default_dtype if alone else None
        self.flat = not any(isinstance(each, nested) for each in (*template.args, *template.kwargs.values()))

    def call(self, values: Sequence[Any]) -> Any:
        if self.default_dtype is not None and self.default_dtype is not torch.get_default_dtype():
            torch.set_default_dtype(self.default_dtype)
        args, kwargs = self.template.args, self.template.kwargs
        if self.flat:
            filled = [values[each.i] if type(each) is Hole else each for each in args]
        else:
            filled = [fill(each, values) for each in args]
        if not kwargs:
            return self.function(*filled)
        return self.function(*filled, **{name: fill(each, values) for name, each in kwargs.items()})


class Worker(Actor):
    """See the module.

    Attributes:
        table: shards, `Pending` ones and `Failure`s, by number.

    Args:
        engine: the controller's number for it.
        controller: its process id, which is that of this process where processes are threads of one.
        hosts: by rank, equal for workers of one host.
    """

    def __init__(self, engine: int, depots: ActorMesh[Any], controller: int, hosts: Sequence[int]) -> None:
        self.rank = current_rank().rank
        self._alone = os.getpid() != controller
        if self._alone:
            settle_in(self.rank, hosts)
        self.name = str(context().actor_instance)
        self.table: Table = {}
        self._tables: list[Table] = [self.table]  # while a graph runs, its own one also
        self._known: dict[int, Any] = {}
        self._slots: Slots = slots_here(engine)
        self._depots = depots
        self._puts: dict[int, Callable[[Slot, Any], None]] = {}
        self._groups = Groups(self.rank, str(engine), self._put, self._slots)
        self._lane = 0
        self._number = 0
        self._failed: list[int] = []
        self._special: dict[int, Callable[[Command], None]] = {
            Op.FREE: self._free,
            Op.CALL: self._call,
            Op.REDUCE: self._reduce,
            Op.SEND: self._send,
            Op.RECEIVE: self._receive,
            Op.RANK: self._rank,
            Op.ALIAS: self._alias,
            Op.PUBLISH: self._publish,
            Op.TAKE: self._take,
            Op.REPLAY: self._replay,
            Op.GROUP: self._group,
            Op.FORGET: self._forget,
        }

    def __cleanup__(self, exc: Exception | None) -> None:
        self._slots.close()

    def _handle_undeliverable_message(self, message: Any) -> bool:
        return True  # a process is gone that a tensor was sent to; the controller hears of that

    # ---- batches

    @endpoint
    def execute(self, lane: int, first: int, batch: bytes) -> list[int] | None:
        """Run the commands of a batch, numbered from `first` on. Returns the numbers of those that failed, if any."""
        definitions, commands = pickle.loads(batch)
        for number, what in definitions:
            self._define(number, what)
        self._failed = []
        self._lane, self._number = lane, first
        self._run(commands)
        return self._failed or None

    def _define(self, number: int, what: Any) -> None:
        try:
            if isinstance(what, Template):
                self._known[number] = _Operator(what, self._alone)
            elif isinstance(what, Function):
                self._known[number] = resolve(what)
            else:
                self._known[number] = what
        except Exception as error:
            self._known[number] = error  # for whoever uses it

    def _get(self, number: int) -> Any:
        known = self._known[number]
        if isinstance(known, Exception):
            raise known
        return known

    def _run(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if command[0] > 0:
                self._operator(command)
            else:
                self._special[command[0]](command)
            self._number += 1

    def _value(self, number: int) -> Any:
        """Raises: Failed, when it could not be computed."""
        value = self.table[number]
        if type(value) is Pending:
            try:
                value = value.get()
            except Exception as error:
                value = self._failure_of(error, *value.issued)
            self.table[number] = value
        if type(value) is Failure:
            raise Failed(value)
        return value

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, Failed):
            return error.failure
        if self._number not in self._failed:
            self._failed.append(self._number)
        return self._failure_of(error, self._lane, self._number)

    def _failure_of(self, error: Exception, lane: int, number: int) -> Failure:
        what = f"{exceptions.type_name(error)}: {exceptions.text_of(error)}"
        return Failure(lane, number, what, exceptions.format_remote(error), self.name)

    def _fail(self, error: Exception, first: int, count: int, mutated: Sequence[int] = ()) -> None:
        failure = self._failure(error)
        for number in range(first, first + count):
            self.table[number] = failure
        for number in mutated:
            self._spoil(number, failure)

    def _spoil(self, number: int, failure: Failure) -> None:
        """What should have been written to was not: no tensor that shares its memory has the value it should have."""
        shard = self.table.get(number)
        self.table[number] = failure
        if isinstance(shard, torch.Tensor):
            storage = shard.untyped_storage()._cdata
            for table in self._tables:
                for other, value in table.items():
                    if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage:
                        table[other] = failure

    # ---- commands

    def _operator(self, command: Command) -> None:
        holes = 0
        try:
            operator = self._get(command[0])
            holes = operator.holes
            table = self.table
            values = []
            for each in command[1 : holes + 1]:
                if type(each) is not int:
                    values.append(each[0])  # a number that varies
                    continue
                value = table[each]
                kind = type(value)
                values.append(self._value(each) if kind is Pending or kind is Failure else value)
            result = operator.call(values)
        except Exception as error:
            template: Any = getattr(self._known[command[0]], "template", None)
            results = (NEW,) if template is None else template.results
            mutated = () if template is None else tuple(command[1 + hole] for hole in template.mutates)
            self._fail(error, command[-1], results.count(NEW), mutated)
            return
        if operator.only_new:
            self.table[command[-1]] = result
            return
        number = command[-1]
        for kind, value in zip(operator.results, flat_results(result), strict=True):
            if kind == NEW:
                self.table[number] = value
                number += 1

    def _free(self, command: Command) -> None:
        for number in command[1:]:
            self.table.pop(number, None)

    def _forget(self, command: Command) -> None:
        for number in command[1:]:
            self._known.pop(number, None)

    def _call(self, command: Command) -> None:
        _, function, parts, refs, first, metas = command
        try:
            args, kwargs = self._arguments(parts, refs)
            self._set_results(self._get(function)(*args, **kwargs), first, metas)
        except Exception as error:
            self._fail(error, first, len(metas))

    def _arguments(self, parts: Sequence[Any], refs: Sequence[int]) -> Any:
        values = [self._value(ref) for ref in refs]
        return pytree.tree_map(lambda leaf: values[leaf.i] if type(leaf) is Hole else leaf, codec.decode(parts))

    def _set_results(self, result: Any, first: int, metas: Sequence[Meta]) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if len(tensors) != len(metas):
            raise TypeError(f"the function returned {len(tensors)} tensors, and its `propagate` said {len(metas)}")
        for number, (tensor, meta) in enumerate(zip(tensors, metas, strict=True), first):
            if tuple(tensor.shape) != meta.shape or tensor.dtype != meta.dtype:
                raise TypeError(
                    f"the function returned a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}, and its "
                    f"`propagate` said {meta.shape} and {meta.dtype}"
                )
            tensor = plain(tensor)
            if tensor.requires_grad:
                tensor = tensor.detach()
            if tensor.stride() != meta.stride and tensor.numel():
                tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=tensor.device).copy_(
                    tensor
                )
            self.table[number] = tensor

    def _coordinates(self) -> tuple[Region, list[int]]:
        region = self._known[self._lane].region
        return region, region._slice.coordinates(self.rank)

    def _peers(self, dims: Sequence[str]) -> tuple[int, ...]:
        region, at = self._coordinates()
        which = [region._labels.index(dim) for dim in dims]
        return tuple(region._slice.nditem(each) for each in members(region._slice._sizes, which, at))

    def _reduce(self, command: Command) -> None:
        _, ref, reduction, target, result = command
        shard, own = None, None
        try:
            shard = self._value(ref)
        except Failed as failed:
            own = failed.failure  # the others of the group wait for this member all the same
        try:
            group = self._groups.of(self._peers(reduction.dims), reduction.meta.device.type)
            if target == ref:
                group.reduce_in_place(shard, reduction)
                return
            reduced = group.reduce(shard, reduction)
            if own is not None:
                raise Failed(own)
            if target:
                self._value(target).copy_(reduced.get() if isinstance(reduced, Pending) else reduced)
                return
            if isinstance(reduced, Pending):
                reduced.issued = (self._lane, self._number)
            self.table[result] = reduced
        except Exception as error:
            failure = own or self._failure(error)
            if target:
                self._spoil(target, failure)
            else:
                self.table[result] = failure

    def _send(self, command: Command) -> None:
        _, ref, targets = command
        try:
            value: Any = plain(self._value(ref)).contiguous()
        except Failed as failed:
            value = failed.failure
        for rank, slot in targets.get(self.rank, ()):
            self._put(rank, slot, value.clone() if rank == self.rank and isinstance(value, torch.Tensor) else value)

    def _put(self, rank: int, slot: Slot, value: Any) -> None:
        """Fill a slot of another worker, or of this one."""
        if rank == self.rank:
            self._slots.put(slot, value)
            return
        put = self._puts.get(rank)
        if put is None:
            alone = self._depots._with_region(Region((), Slice(rank, (), ())))
            put = self._puts[rank] = alone.put.broadcast
        put(slot, value)

    def _receive(self, command: Command) -> None:
        _, slots, result = command
        try:
            self.table[result] = self._slots.take(slots[self.rank])
        except SlotsClosed as error:
            self._fail(error, result, 1)

    def _rank(self, command: Command) -> None:
        _, dims, result = command
        region, at = self._coordinates()
        rank = 0
        for axis in map(region._labels.index, dims):
            rank = rank * region._slice.sizes[axis] + at[axis]
        self.table[result] = torch.tensor(rank)

    def _alias(self, command: Command) -> None:
        _, ref, result = command
        try:
            self.table[result] = self._value(ref)
        except Failed as failed:
            self.table[result] = failed.failure

    def _publish(self, command: Command) -> None:
        _, slots, ref = command
        slot = slots.get(self.rank)
        if slot is None:
            return
        try:
            self._slots.put(slot, self._value(ref))
        except Failed as failed:
            self._slots.put(slot, failed.failure)

    def _take(self, command: Command) -> None:
        _, slot, first, metas = command
        try:
            taken = self._slots.take(slot)
            if isinstance(taken, Exception):
                raise taken
            self._set_results(taken[0], first, metas)
        except Exception as error:
            self._fail(error, first, len(metas))

    def _replay(self, command: Command) -> None:
        _, number, refs, first = command
        graph: Graph = self._get(number)
        whole, at = self.table, self._number
        self.table = {known: whole[ref] for known, ref in zip(graph.inputs, refs, strict=True)}
        self._tables.append(self.table)
        try:
            for each in graph.commands:
                self._operator(each) if each[0] > 0 else self._special[each[0]](each)
        finally:
            self.table, made = whole, self._tables.pop()
            self._number = at
        for known, ref in zip(graph.inputs, refs, strict=True):
            whole[ref] = made[known]  # it may have failed in there
        for ref, known in enumerate(graph.outputs, first):
            whole[ref] = made[known]

    def _group(self, command: Command) -> None:
        _, dims, name, result = command
        try:
            key = torch.zeros((), dtype=torch.int64)
            key.monarch_value = self._groups.process_group(self._peers(dims), name)  # type: ignore[attr-defined]
            self.table[result] = key
        except Exception as error:
            self._fail(error, result, 1)

    # ---- questions

    @endpoint
    def fetch(self, refs: Sequence[int]) -> list[Any] | Failure:
        """Shards, on the CPU."""
        try:
            return [self._value(ref).detach().cpu() for ref in refs]
        except Failed as failed:
            return failed.failure

    @endpoint
    def run(self, function: Function, parts: Sequence[Any], refs: Sequence[int]) -> Any:
        """The result of a function of the user's, as `(result,)`, or a Failure of its arguments."""
        try:
            args, kwargs = self._arguments(parts, refs)
        except Failed as failed:
            return failed.failure
        return (resolve(function)(*args, **kwargs),)

    @endpoint
    def holds(self) -> int:
        """How many shards there are."""
        return len(self.table)

    @endpoint
    def propagate(self, function: Function, parts: Sequence[Any], metas: Sequence[Meta]) -> Any:
        """What a function of the user's returns, with a Meta for each tensor. It runs on tensors without memory."""
        return propagated(resolve(function), codec.decode(parts), metas)


def settle_in(rank: int, hosts: Sequence[int]) -> None:
    """Give this process its part of the cores and CUDA devices of its host, unless the user has, and the environment
    that programs for torchrun look at."""
    local, size = list(hosts[:rank]).count(hosts[rank]), hosts.count(hosts[rank])
    names = {"RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": size}
    for name, value in names.items():
        os.environ.setdefault(name, str(value))
    if "OMP_NUM_THREADS" not in os.environ:
        # More threads than these wait for each other, busily.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    if (count := torch.cuda.device_count()) > 1 and not torch.cuda.is_initialized():
        # So that "cuda:0", as the controller says, is a device of this worker's own.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local % count]


def resolve(function: Function) -> Callable[..., Any]:
    """The function itself; a string is the dotted path of one.

    Raises:
        AttributeError, ImportError: there is none.
    """
    found: Any = codec.decode(function.parts)
    if not isinstance(found, str):
        return found  # type: ignore[no-any-return]
    module, _, name = found.rpartition(".")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def propagated(function: Callable[..., Any], call: Any, metas: Sequence[Meta]) -> Any:
    """What `function(*call[0], **call[1])` returns, with a Meta for each tensor. Holes are tensors like `metas`."""
    with without_memory(allow_non_fake_inputs=True) as mode:
        fakes = [meta.fake(mode) for meta in metas]
        args, kwargs = pytree.tree_map(lambda leaf: fakes[leaf.i] if type(leaf) is Hole else leaf, call)
        result = function(*args, **kwargs)
        return pytree.tree_map(lambda leaf: meta_of(plain(leaf)) if isinstance(leaf, torch.Tensor) else leaf, result)


def flat_results(result: Any) -> list[Any]:
    """The results of an operator, one after the other, those in lists too."""
    if isinstance(result, (tuple, list)):
        return [each for item in result for each in flat_results(item)]
    return [result]
