"""What an operator makes of its arguments: found out once, with tensors that have no memory, and remembered by the
operator and what is known of the arguments. A look-up takes microseconds, propagation itself 170."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree

from monarch.mesh.tensor.commands import ALIASED, NEW, NOTHING, Hole, Template, fill
from monarch.mesh.tensor.errors import value_refused
from monarch.mesh.tensor.metadata import Meta, meta_of


class _Propagating(threading.local):
    here = False


_propagating = _Propagating()
fake_tensor.log.addFilter(lambda record: not _propagating.here)  # what it logs is raised, too


@contextmanager
def without_memory(allow_non_fake_inputs: bool = False) -> Iterator[fake_tensor.FakeTensorMode]:
    """Operators inside make tensors without memory."""
    before, _propagating.here = _propagating.here, True
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs) as mode:
            yield mode
    finally:
        _propagating.here = before


@define(eq=False)
class Plan:
    """How to issue an operator, and what it gives back.

    Attributes:
        function: the operator.
        number: of the template.
        single: the metadata of its only result, a new tensor; None for all other operators, which have `results`.
        results: for each tensor among the results: a Meta, None, or the index of the tensor argument that it is.
        new: how many of them are new tensors.
        spec: how results are arranged.
        mutates: indices of the tensor arguments that are written to.
        is_view: whether results share memory with the first of them.
    """

    function: Any
    number: int
    template: Template
    single: Meta | None
    results: tuple[Meta | int | None, ...]
    new: int
    spec: Any
    mutates: tuple[int, ...]
    is_view: bool


def plan(number: int, func: Any, args: Any, kwargs: dict[str, Any], metas: Sequence[Meta], extras: int) -> Plan:
    """Propagate. `args` and `kwargs` have holes where tensors were, and `extras` more for numbers that vary.

    Raises:
        NotImplementedError: the shape of the result depends on elements, or the operator changes the shape of its
        input. TypeError: it reads an element. Exception: whatever torch says about the arguments.
    """
    if func is torch.ops.aten._local_scalar_dense.default:
        raise value_refused()
    with without_memory() as mode:
        fakes = [meta.fake(mode) for meta in metas]
        values = [*fakes, *[1.0] * extras]
        try:
            result = func(*fill(tuple(args), values), **{name: fill(each, values) for name, each in kwargs.items()})
        except fake_tensor.DataDependentOutputException:
            raise value_refused() from None
        except fake_tensor.DynamicOutputShapeException as error:
            raise NotImplementedError(
                f"the shape of the result of {func} depends on elements of its input, which the controller lacks: "
                "use a remote function that returns a tensor of a fixed shape"
            ) from error
        for fake, meta in zip(fakes, metas, strict=True):
            if tuple(fake.shape) != meta.shape or fake.stride() != meta.stride:
                raise NotImplementedError(
                    f"{func} changes the shape of a distributed tensor in place, which is planned; use the form that "
                    "returns a new tensor"
                )
    leaves, spec = pytree.tree_flatten(result)
    by_id = {id(fake): at for at, fake in enumerate(fakes)}
    results: list[Meta | int | None] = []
    for leaf in leaves:
        if leaf is None:
            results.append(None)
        elif not isinstance(leaf, torch.Tensor):
            raise NotImplementedError(f"{func} returns a {type(leaf).__name__}, which no distributed tensor can be")
        else:
            at = by_id.get(id(leaf))
            results.append(meta_of(leaf) if at is None else at)
    kinds = tuple(NOTHING if r is None else ALIASED if isinstance(r, int) else NEW for r in results)
    mutates = _mutated(func, args, kwargs)
    if not metas and isinstance(result, torch.Tensor) and any(each.name == "dtype" for each in func._schema.arguments):
        kwargs = {**kwargs, "dtype": result.dtype}  # which may be the default here
    namespace, _, name = func._schema.name.partition("::")
    template = Template(
        (namespace, name, func._overloadname),
        tuple(args),
        kwargs,
        torch.get_default_dtype(),
        len(metas) + extras,
        kinds,
        mutates,
    )
    single = results[0] if kinds == (NEW,) and isinstance(result, torch.Tensor) else None
    return Plan(
        func,
        number,
        template,
        single if isinstance(single, Meta) else None,
        tuple(results),
        kinds.count(NEW),
        spec,
        mutates,
        any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns),
    )


def _mutated(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        found += [leaf.i for leaf in (value if isinstance(value, (list, tuple)) else (value,)) if type(leaf) is Hole]
    return tuple(found)
