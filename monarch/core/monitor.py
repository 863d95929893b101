"""Monitors: tell me when X is gone, and why. The one primitive that everything which notices death is built on.

`X` is a process or an actor. A monitor fires once, with a `Down`, also when X is gone already. This module keeps the
books of one process; the evidence comes from the gateway (processes) and from the agents of the processes (actors).
"""

from __future__ import annotations

import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from attrs import define, evolve, field

from monarch.core.ids import Uid
from monarch.errors import MonarchError
from monarch.log import get_logger

log = get_logger("monarch.monitor")

_TOMBSTONES: Final = 2_000
_REQUESTS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@define(frozen=True)
class Down:
    """Why something is gone. A plain value: it pickles, and prints as the reason.

    Attributes:
        kind: "stopped" (on purpose), "failed" (an actor's own error), "exited", "killed" (a process), "unreachable".
        reason: in words.
        pid, host: of the process, 0 and "" where unknown.
        code, signal: how the process ended, where it did.
        error: type and text of the exception behind it, or "".
        traceback: as rendered where it was raised, or "".
        cause: what brought this about, or None.
        actor: `module.Class name{...}` of the actor that failed, "" for a process or where unknown.
        time_s: when it was noticed, in seconds since the epoch. Those who hear of it later hear the same time.
    """

    kind: str
    reason: str
    pid: int = 0
    host: str = ""
    code: int | None = None
    signal: int | None = None
    error: str = ""
    traceback: str = ""
    cause: Down | None = None
    actor: str = ""
    time_s: float = field(factory=time.time, eq=False)

    @property
    def stopped(self) -> bool:
        return self.kind == "stopped"

    @property
    def crashed(self) -> bool:
        """Whether this counts also where it was to end anyway: it did not end as it was asked to."""
        broken_off = self.signal is not None and self.signal not in _REQUESTS
        return self.kind == "failed" or bool(self.code) or broken_off

    @property
    def event(self) -> tuple[object, ...]:
        """What this comes down to: the same for all that the end of one process, say, has brought about."""
        if self.cause is not None:
            return self.cause.event
        if self.kind in ("exited", "killed"):
            return self.kind, self.pid, self.host
        return self.kind, self.pid, self.host, self.actor, self.reason

    def then(self, later: Down) -> Down:
        """Why something has ended that was about to end as this says when `later` came: the first failure counts."""
        return later if self.stopped else self

    def loss_of(self, uid: Uid) -> Down:
        """Why a process is gone whose host is, as this says."""
        kind = "stopped" if self.stopped else "unreachable"
        return Down(kind, f"process {uid} is lost with its host: {self.reason}", host=self.host).because(self)

    def because(self, cause: Down) -> Down:
        return evolve(self, cause=cause)

    def __str__(self) -> str:
        where = f" (process {self.pid})" if self.pid and str(self.pid) not in self.reason else ""
        return f"{self.reason}{where}" + (f"; caused by: {self.cause}" if self.cause else "")


Target = tuple[int, int]
"""(process key, actor number); actor number 0 stands for the process itself."""


class PeerGone(MonarchError):
    """The answer of a request to a process that is gone."""

    def __init__(self, down: Down) -> None:
        super().__init__(down)
        self.down = down


class Monitors:
    """Who wants to know of which end. Thread-safe; callbacks run in the thread that brings the evidence."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: dict[Target, dict[int, Callable[[Down], None]]] = {}
        self._due: dict[int, Callable[[Down], None]] = {}  # taken from the watchers, about to be called
        self._gone: OrderedDict[Target, Down] = OrderedDict()
        self._next = 0

    def watch(self, target: Target, callback: Callable[[Down], None]) -> Callable[[], None]:
        """Call `callback` once when `target` is gone, at once if it is; returns what cancels it.

        A cancelled monitor never fires.
        """
        with self._lock:
            down = self._gone.get(target) or self._gone.get((target[0], 0))
            if down is None:
                self._next += 1
                handle = self._next
                self._watchers.setdefault(target, {})[handle] = callback
        if down is not None:
            callback(down)
            return lambda: None

        def cancel() -> None:
            with self._lock:
                self._due.pop(handle, None)
                watchers = self._watchers.get(target)
                if watchers is not None:
                    watchers.pop(handle, None)
                    if not watchers:
                        del self._watchers[target]

        return cancel

    def gone(self, target: Target) -> Down | None:
        """Why `target` is gone, or None while it is not known to be."""
        down = self._gone.get(target)
        return down if down is not None or not target[1] else self._gone.get((target[0], 0))

    def fire(self, target: Target, down: Down) -> bool:
        """`target` is gone: tell all that watch it (a process takes its actors along). False if it was known."""
        proc, actor = target
        with self._lock:
            if target in self._gone:
                return False
            self._gone[target] = down
            while len(self._gone) > _TOMBSTONES:
                self._gone.popitem(last=False)
            due: dict[int, Callable[[Down], None]] = {}
            for each in [target] if actor else [t for t in self._watchers if t[0] == proc]:
                due.update(self._watchers.pop(each, {}))
            self._due.update(due)
        for handle in due:
            callback = self._due.pop(handle, None)
            if callback is None:
                continue  # cancelled by a callback before it, or by another thread
            try:
                callback(down)
            except Exception:
                log.exception("monitor.failed", reason=down.reason)
        return True

    def watched(self) -> int:
        """How many monitors are set."""
        with self._lock:
            return sum(map(len, self._watchers.values()))
