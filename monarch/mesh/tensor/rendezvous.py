"""Where the members of a group find each other: notes, which each of them leaves with all.

Groups of torch.distributed ask for a store. Its own ones listen on every device of a host, and know no secret; these
notes go as messages, between hosts too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as torch_distributed

from monarch.core.address import host_identity
from monarch.mesh.context import context
from monarch.mesh.network import address_of
from monarch.mesh.tensor.slots import Slots

TIMEOUT_S: Final = 300
_LOOPBACK: Final = "127.0.0.1"

Put = Callable[[int, str, Any], None]
"""Fills a slot of the worker with that rank, for good."""


dist: Any = torch_distributed


class Notes(dist.Store):  # type: ignore[misc]
    """The store of one member of one group.

    Args:
        name: of the group, the same at all members, and of no other group.
        ranks: of its members.
        slots: those of this process.
    """

    def __init__(self, name: str, ranks: Sequence[int], put: Put, slots: Slots) -> None:
        super().__init__()
        self._name, self._ranks, self._put, self._slots = name, ranks, put, slots

    def set(self, key: str, value: Any) -> None:
        for rank in self._ranks:
            self._put(rank, self._slot(key), value)

    def get(self, key: str) -> Any:
        """Raises: TimeoutError, when no member has set it within five minutes."""
        return self._slots.see(self._slot(key), TIMEOUT_S)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raises: TimeoutError."""
        for key in keys:
            self._slots.see(self._slot(key), TIMEOUT_S if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._slots.has(self._slot(key)) for key in keys)

    def send(self, member: int, key: str, value: Any) -> None:
        """As `set`, for one member, by its position."""
        self._put(self._ranks[member], self._slot(key), value)

    def take(self, key: str, timeout_s: float) -> Any:
        """Wait for a note, and remove it. Raises: TimeoutError."""
        return self._slots.take(self._slot(key), timeout_s)

    def _slot(self, key: str) -> str:
        return f"{self._name}/{key}"


def share_host(notes: Notes, rank: int, size: int) -> bool:
    """Whether all members are on one host. All of them ask."""
    notes.set(f"host/{rank}", host_identity())
    return len({notes.get(f"host/{each}") for each in range(size)}) == 1


def bind_address(within_host: bool) -> str:
    """Where this process listens for other members: the loopback device, or where other hosts reach it."""
    return _LOOPBACK if within_host else address_of(context().actor_instance.proc_runtime.gateway.places)


def shares_memory() -> bool:
    """Whether messages of this process to others of its host take large values in memory that both share."""
    return context().actor_instance.proc_runtime.gateway.transport.scheme in ("shm", "inproc")
