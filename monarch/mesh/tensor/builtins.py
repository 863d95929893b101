"""Remote functions that come with the library."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from monarch.mesh.actor import Actor
from monarch.mesh.context import context
from monarch.mesh.tensor.remote import remote


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _rank() -> int:
    return context().actor_instance.rank.rank


def _log(*args: Any, level: int = logging.WARNING) -> None:
    text, *rest = args
    logging.getLogger(Actor.__module__).log(level, text, *rest)


def _set_level(level: int) -> None:
    logging.getLogger().setLevel(level)


def _seed(seed: int, by_rank: bool = False) -> None:
    torch.manual_seed(seed + _rank() if by_rank else seed)


def _state() -> torch.Tensor:
    return torch.get_rng_state()


def _like_state() -> torch.Tensor:
    return torch.empty(_STATE_BYTES, dtype=torch.uint8)


def _set_state(state: torch.Tensor) -> None:
    torch.set_rng_state(state)


_STATE_BYTES = torch.get_rng_state().numel()

log_remote = remote(_log, propagate=_nothing)
"""`log_remote("step %d", 3, level=logging.INFO)` on every worker."""
set_logging_level_remote = remote(_set_level, propagate=_nothing)
set_manual_seed_remote = remote(_seed, propagate=_nothing)
"""`set_manual_seed_remote(7)`; with `by_rank=True` each worker adds its rank."""
get_rng_state_remote = remote(_state, propagate=_like_state)
set_rng_state_remote = remote(_set_state, propagate=_nothing)


def same_random_numbers() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For `checkpoint(function, x, use_reentrant=False, context_fn=same_random_numbers)` of `torch.utils.checkpoint`:
    what is computed a second time gets the random numbers of the first.

    Raises:
        ValueError: no mesh is active.
    """
    return nullcontext(), _again_from(get_rng_state_remote())


@contextmanager
def _again_from(state: Any) -> Iterator[None]:
    with state.mesh.activate():
        now = get_rng_state_remote()
        set_rng_state_remote(state)
        try:
            yield
        finally:
            set_rng_state_remote(now)
