"""What a supervisor publishes of its children: which incarnation of which child is up, and why others are not.

A `Directory` is in the supervisor's process. The supervisor's thread writes it; questions of callers are answered on
the driving thread, so that an answer never waits behind code of the user's. One that has no answer yet is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import define

from monarch.core.monitor import Down

if TYPE_CHECKING:
    from monarch.mesh.actor_mesh import ActorMesh


@define(eq=False)
class _Entry:
    """A child, as its supervisor publishes it.

    Attributes:
        prototype: a mesh of its class and shape, of no actors.
        mesh: the incarnation that is up, or None.
        over: why it is not started again, or None.
        last: why the incarnation before ended, where that is known.
    """

    prototype: ActorMesh[Any]
    incarnation: int = 0
    mesh: ActorMesh[Any] | None = None
    over: Down | None = None
    last: Down | None = None


class Directory:
    """The children of one supervisor. Written on its thread, read on the driving thread.

    A question is a function that gives its answer, or None while there is none; it is asked again after each change.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._open = False
        self._ended: tuple[str, Down] | None = None
        self._questions: list[tuple[Callable[[], tuple[Any, ...] | None], Callable[..., None]]] = []

    # ---- by the supervisor

    def declare(self, name: str, prototype: ActorMesh[Any]) -> None:
        with self._lock:
            self._entries[name] = _Entry(prototype)

    def open(self) -> None:
        """The first children are declared: from now on a name that is not there is a mistake."""
        with self._lock:
            self._open = True
        self._settle()

    def prototype(self, name: str) -> ActorMesh[Any] | None:
        with self._lock:
            entry = self._entries.get(name)
        return None if entry is None else entry.prototype

    def up(self, name: str, incarnation: int, mesh: ActorMesh[Any]) -> None:
        with self._lock:
            entry = self._entries[name]
            entry.incarnation, entry.mesh = incarnation, mesh
        self._settle()

    def down(self, name: str, down: Down | None) -> None:
        """It is not to be called now; why, where that is known."""
        with self._lock:
            self._entries[name].mesh, self._entries[name].last = None, down
        self._settle()

    def over(self, name: str, down: Down) -> None:
        """It will not be called again."""
        with self._lock:
            self._entries[name].mesh, self._entries[name].over = None, down
        self._settle()

    def end(self, supervisor: str, down: Down) -> None:
        """The supervisor has ended, or is about to; the first reason counts."""
        with self._lock:
            self._ended = self._ended or (supervisor, down)
        self._settle()

    def restarts(self) -> dict[int, int]:
        """How often each child that is up was restarted, by the number of its incarnation's actors."""
        with self._lock:
            up = [(entry.mesh, entry.incarnation) for entry in self._entries.values() if entry.mesh is not None]
        return {mesh._number: incarnation - 1 for mesh, incarnation in up}

    # ---- questions

    def ask(self, name: str, after: int, answer: Callable[..., None]) -> None:
        """Answer once there is an incarnation newer than `after`, or never will be."""

        def found() -> tuple[Any, ...] | None:
            entry = self._entries.get(name)
            if self._ended is not None or entry is None:
                return self._nobody()
            if entry.over is not None:
                return "over", entry.over
            up = entry.mesh is not None and entry.incarnation > after
            return ("up", entry.incarnation, entry.mesh) if up else None

        self._put(found, answer)

    def watch(self, name: str, incarnation: int, answer: Callable[..., None]) -> None:
        """Answer once that incarnation is not up any more."""

        def lost() -> tuple[Any, ...] | None:
            entry = self._entries.get(name)
            there = entry is not None and entry.mesh is not None and entry.incarnation == incarnation
            return None if there and self._ended is None else ("lost", None if entry is None else entry.last)

        self._put(lost, answer)

    def shape(self, name: str, answer: Callable[..., None]) -> None:
        """Answer with the prototype."""

        def known() -> tuple[Any, ...] | None:
            entry = self._entries.get(name)
            return self._nobody() if entry is None else ("shape", entry.prototype)

        self._put(known, answer)

    def _nobody(self) -> tuple[Any, ...] | None:
        if self._ended is not None:
            return "ended", *self._ended
        return ("unknown", list(self._entries)) if self._open else None

    def _put(self, question: Callable[[], tuple[Any, ...] | None], answer: Callable[..., None]) -> None:
        with self._lock:
            self._questions.append((question, answer))
        self._settle()

    def _settle(self) -> None:
        """Give the answers that are known now, outside the lock."""
        due: list[_Later] = []
        with self._lock:
            for each in list(self._questions):
                question, answer = each
                found = question()
                if found is not None:
                    self._questions.remove(each)
                    due.append(_Later(answer, found))
        for later in due:
            later()


@define(frozen=True)
class _Later:
    answer: Callable[..., None]
    found: tuple[Any, ...]

    def __call__(self) -> None:
        self.answer(*self.found)
