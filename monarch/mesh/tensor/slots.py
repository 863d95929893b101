"""Where threads and processes hand over values: named slots of a process, filled once, and most of them
emptied once.

Each process that tensors live on has a worker, which runs commands, and a depot, whose only work is to put what other
processes send into slots, while the worker is busy or waits for just that.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

from monarch.mesh.actor import Actor
from monarch.mesh.context import context
from monarch.mesh.endpoint import endpoint

_ABANDONED: Final = 4096
Slot = int | str


class Slots:
    """Of one process. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[Slot, Any] = {}
        self._taken: dict[Slot, None] = {}  # the last emptied ones, so that who comes late fills no slot for ever

    def put(self, slot: Slot, value: Any, *, if_empty: bool = False) -> None:
        """Fill a slot. With `if_empty`, a value that is there, or was, stays."""
        with self._changed:
            if if_empty and (slot in self._values or slot in self._taken):
                return
            self._values[slot] = value
            self._changed.notify_all()

    def has(self, slot: Slot) -> bool:
        return slot in self._values

    def see(self, slot: Slot, timeout_s: float) -> Any:
        """Wait until the slot is filled, and leave it so. Raises: TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: slot in self._values, timeout_s):
                raise TimeoutError(f"nobody has filled {slot!r} within {timeout_s:g} s")
            return self._values[slot]

    def take(self, slot: Slot, timeout_s: float | None = None) -> Any:
        """Wait until the slot is filled, and empty it. Raises: TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: slot in self._values, timeout_s):
                raise TimeoutError(f"nobody has filled {slot!r} within {timeout_s:g} s")
            self._taken[slot] = None
            if len(self._taken) > _ABANDONED:
                del self._taken[next(iter(self._taken))]
            return self._values.pop(slot)


_slots: weakref.WeakKeyDictionary[Any, Slots] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def slots_here() -> Slots:
    """The slots of the current actor's process."""
    runtime = context().actor_instance.proc_runtime
    with _lock:
        found = _slots.get(runtime)
        if found is None:
            found = _slots[runtime] = Slots()
        return found


class Depot(Actor):
    """Takes in what the workers of other processes, and the controller, put into slots of this one."""

    @endpoint
    def put(self, slot: Slot, value: Any, if_empty: bool = False) -> None:
        slots_here().put(slot, value, if_empty=if_empty)
