"""Any part of a mesh, any program, any reduction, any move: against torch, on the shards of all processes at once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch import fetch_shard
from monarch.actor import ProcMesh, this_host
from monarch.testing import TestClient

SIZES = {"hosts": 2, "gpus": 3}
SHAPE = (2, 2)
Part = dict[str, int | slice]
Folds = dict[str, Callable[[torch.Tensor], torch.Tensor]]

# Each works on one shard, and on many along dimensions in front.
STEPS: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y,
    lambda x, y: x * 2 - y,
    lambda x, y: torch.maximum(x, y.flip(-1)),
    lambda x, y: torch.where(x > y, x, y * 3),
    lambda x, y: (x @ y.transpose(-1, -2)) % 7,
    lambda x, y: x.cumsum(-1) % 11,
    lambda x, y: torch.cat([x[..., :1], y[..., 1:]], -1),
    lambda x, y: x.clone().add_(y).clamp_(max=9),
]
REDUCTIONS: Folds = {
    "sum": lambda group: group.sum(0),
    "avg": lambda group: group.sum(0) // len(group),
    "product": lambda group: group.prod(0),
    "min": lambda group: group.amin(0),
    "max": lambda group: group.amax(0),
    "bxor": lambda group: functools.reduce(torch.bitwise_xor, group),
    "stack": lambda group: group,
}


@pytest.fixture(scope="module")
def wide(tensor_client: TestClient) -> ProcMesh:
    return this_host().spawn_procs(SIZES, name="wide")


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Arguments for `slice`."""
    chosen: Part = {}
    for dim, size in SIZES.items():
        first = draw(st.integers(0, size - 1))
        kind = draw(st.sampled_from([None, first, slice(first, None, 2), slice(first, None), slice(0, first + 1)]))
        if kind is not None:
            chosen[dim] = kind
    return chosen


def everywhere(tensor: Any) -> torch.Tensor:
    """The shards of all processes, along the dimensions of the mesh."""
    sizes = dict(tensor.mesh.sizes)
    futures = [fetch_shard(tensor, dict(point)) for point in tensor.mesh.extent.points()]
    found = [future.get(30) for future in futures]
    return torch.stack(found).view(*sizes.values(), *found[0].shape)


def apply(program: list[tuple[Callable[..., Any], int, int]], start: Any) -> Any:
    values = [start, start + 1]
    for step, at, other in program:
        values.append(step(values[at % len(values)], values[other % len(values)]))
    return values[-1]


def reduced(shards: torch.Tensor, dims: list[int], count: int, fold: Callable[..., Any]) -> torch.Tensor:
    """What each process has after a reduction over these of the first `count` dimensions."""
    sizes, results = shards.shape[:count], []
    for point in itertools.product(*map(range, sizes)):
        members = itertools.product(*(range(n) if dim in dims else [point[dim]] for dim, n in enumerate(sizes)))
        results.append(fold(torch.stack([shards[member] for member in members])))
    return torch.stack(results).view(*sizes, *results[0].shape)


@settings(max_examples=25)
@given(
    part=parts(),
    program=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5), st.integers(0, 5)), max_size=6),
    how=st.sampled_from(sorted(REDUCTIONS)),
    chosen=st.sets(st.sampled_from(sorted(SIZES))),
    elsewhere=st.fixed_dictionaries({dim: st.integers(0, size - 1) for dim, size in SIZES.items()}),
)
def test_any_part_of_a_mesh_does_what_torch_does(
    wide: ProcMesh, part: Part, program: Any, how: str, chosen: set[str], elsewhere: dict[str, int]
) -> None:
    with wide.activate():
        whole = torch.arange(4).view(SHAPE) + wide.rank_tensor("hosts") * 30 + wide.rank_tensor("gpus") * 10
    shards = (torch.arange(6) * 10)[:, None, None] + torch.arange(4).view(SHAPE)
    shards = shards.view(*SIZES.values(), *SHAPE)[tuple(part.get(dim, slice(None)) for dim in SIZES)]

    made = apply(program, whole.slice_mesh(**part) if part else whole)
    wanted = apply(program, shards)
    assert torch.equal(everywhere(made), wanted)

    labels = list(made.mesh.sizes)
    dims = [dim for dim in labels if dim in chosen]
    over = [labels.index(dim) for dim in dims] or list(range(len(labels)))
    assert torch.equal(everywhere(made.reduce(dims or None, how)), reduced(wanted, over, len(labels), REDUCTIONS[how]))

    other = {dim: elsewhere[dim] if type(where) is int else where for dim, where in part.items()}
    moved = made.to_mesh(wide.slice(**other) if other else wide)
    assert torch.equal(everywhere(moved + 1), wanted + 1)
