"""Where threads and processes hand over values: named slots of a process, filled once, and most of them
emptied once.

Each process that tensors live on has a worker, which runs commands, and a depot, whose only work is to put what other
processes send into slots, while the worker is busy or waits for just that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from monarch.errors import MonarchError
from monarch.mesh.actor import Actor
from monarch.mesh.context import context
from monarch.mesh.endpoint import endpoint

_ABANDONED: Final = 4096
Slot = int | str


class SlotsClosed(MonarchError):
    """What was to come will not come: the worker of this process has ended."""

    def __init__(self) -> None:
        super().__init__("the tensors of this mesh have ended, or their controller has")


class Slots:
    """Of one process, for one controller. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_closed = False
        self._on_close: list[Callable[[], None]] = []
        self._values: dict[Slot, Any] = {}
        self._taken: dict[Slot, None] = {}  # the last emptied ones, so that who comes late fills no slot for ever

    def put(self, slot: Slot, value: Any, *, if_empty: bool = False) -> None:
        """Fill a slot. With `if_empty`, a value that is there, or was, stays."""
        with self._changed:
            if self._is_closed:
                return
            if if_empty and (slot in self._values or slot in self._taken):
                return
            self._values[slot] = value
            self._changed.notify_all()

    def has(self, slot: Slot) -> bool:
        return slot in self._values

    def see(self, slot: Slot, timeout_s: float) -> Any:
        """Wait until the slot is filled, and leave it so. Raises: TimeoutError, SlotsClosed."""
        with self._changed:
            self._wait_for(slot, timeout_s)
            return self._values[slot]

    def take(self, slot: Slot, timeout_s: float | None = None) -> Any:
        """Wait until the slot is filled, and empty it. Raises: TimeoutError, SlotsClosed."""
        with self._changed:
            self._wait_for(slot, timeout_s)
            self._taken[slot] = None
            if len(self._taken) > _ABANDONED:
                del self._taken[next(iter(self._taken))]
            return self._values.pop(slot)

    def _wait_for(self, slot: Slot, timeout_s: float | None) -> None:
        if not self._changed.wait_for(lambda: slot in self._values or self._is_closed, timeout_s):
            raise TimeoutError(f"nobody has filled {slot!r} within {timeout_s:g} s")
        if slot not in self._values:
            raise SlotsClosed

    def close(self) -> None:
        """The worker has ended: whoever waits hears of it."""
        with self._changed:
            self._is_closed = True
            self._values.clear()
            self._changed.notify_all()
            called, self._on_close = self._on_close, []
        for each in called:
            each()

    def on_close(self, call: Callable[[], None]) -> None:
        with self._changed:
            if not self._is_closed:
                self._on_close.append(call)
                return
        call()


_slots: weakref.WeakKeyDictionary[Any, dict[int, Slots]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def slots_here(engine: int) -> Slots:
    """The slots of the current actor's process, for the controller with that engine."""
    runtime = context().actor_instance.proc_runtime
    with _lock:
        return _slots.setdefault(runtime, {}).setdefault(engine, Slots())


class Depot(Actor):
    """Takes in what the workers of other processes, and the controller, put into slots of this one. It ends after the
    worker of its process, which may need it to finish."""

    def __init__(self, engine: int) -> None:
        self._slots = slots_here(engine)
        own: Any = context().actor_instance
        own.stops_after = self._slots.on_close

    @endpoint
    def put(self, slot: Slot, value: Any, if_empty: bool = False) -> None:
        self._slots.put(slot, value, if_empty=if_empty)

    @endpoint
    def close(self) -> None:
        """Nothing more will come."""
        self._slots.close()
