"""`breakpoint()` in an actor: pdb, whose terminal is a `monarch debug` elsewhere.

The actor's thread waits in pdb; the links of its process do not, so that nobody takes it for dead. What pdb prints goes
to the driver as messages, and the lines that it reads come from there (`debugger`). An actor that is to stop, or whose
driver ends, leaves pdb with a BdbQuit, which its endpoint fails with.

Outside any actor, in the driver, `breakpoint()` is what it was; so it is where PYTHONBREAKPOINT says what to do.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from attrs import define

from monarch.core.envelope import Envelope
from monarch.core.ids import ProcId, new_number
from monarch.core.loop import hidden_loop
from monarch.mesh.attribution import running_actor
from monarch.mesh.context import ActorInstance

if TYPE_CHECKING:
    from monarch.mesh.mesh_proc import MeshProc
    from monarch.mesh.remote_pdb import RemotePdb

PDB_PROMPT: Final = "(Pdb) "
_ANSWER_S: Final = 10.0


@define(frozen=True)
class Waiter:
    """An actor in its debugger.

    Attributes:
        id: of this visit to pdb.
        point: where it stands in its mesh, as coordinates.
    """

    id: int
    proc: ProcId
    name: str
    rank: int
    point: tuple[tuple[str, int], ...]
    host: str

    def __str__(self) -> str:
        return f"{self.name}[{self.rank}]"


@define(frozen=True)
class Place:
    """Where it waits."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@define(eq=False)
class _Visit:
    """An actor in pdb."""

    waiter: Waiter
    actor: int
    lines: queue.SimpleQueue[str]
    pdb: RemotePdb | None = None


class Breakpoints:
    """The debugging sessions of one process."""

    def __init__(self, runtime: MeshProc) -> None:
        self._runtime = runtime
        self._visits: dict[int, _Visit] = {}  # by id
        self._ended: set[int] = set()  # actors that are to stop
        runtime.handlers["debug_input"] = self._on_input

    def _on_input(self, envelope: Envelope, id: int, line: str) -> None:
        if id in self._visits:
            self._visits[id].lines.put(line)

    def quit(self, actor: int) -> None:
        """The actor is to stop: it leaves the debugger, and comes into none again."""
        self._ended.add(actor)
        for visit in self._of(actor):
            visit.lines.put("")  # as at the end of a file

    def forget(self, actor: int) -> None:
        """The actor has ended."""
        for visit in self._of(actor):
            self._tell("debug_resumed", visit.waiter.id, True)
            self._over(visit)
        self._ended.discard(actor)

    def where(self, actor: int) -> str:
        """Where an actor waits for its debugger; empty where it does not."""
        places = [visit.pdb.waits_at for visit in self._of(actor) if visit.pdb is not None]
        return next((str(place) for place in places if place is not None), "")

    def _of(self, actor: int) -> list[_Visit]:
        return [visit for visit in list(self._visits.values()) if visit.actor == actor]

    def enter(self, actor: ActorInstance, frame: FrameType) -> None:
        """Stop in `frame`, at its next line.

        Raises:
            RuntimeError: nobody can attach, and why.
        """
        number = actor.actor_id.number
        why = "the actor is being stopped" if number in self._ended else self._refusal()
        if why:
            raise RuntimeError(f"breakpoint() in {actor.member}: {why}")
        visit = next(iter(self._of(number)), None) or self._visit(actor)
        if number in self._ended:  # meanwhile
            visit.lines.put("")
        assert visit.pdb is not None
        visit.pdb.set_trace(frame)

    def _visit(self, actor: ActorInstance) -> _Visit:
        from monarch.mesh.remote_pdb import RemotePdb  # pdb takes a while to import

        point = tuple(dict(actor.rank).items())
        waiter = Waiter(new_number(), actor.proc_id, actor.name, actor.rank.rank, point, socket.gethostname())
        visit = self._visits[waiter.id] = _Visit(waiter, actor.actor_id.number, queue.SimpleQueue())
        visit.pdb = RemotePdb(waiter, visit.lines.get, self._tell, lambda: self._over(visit))
        return visit

    def _over(self, visit: _Visit) -> None:
        self._visits.pop(visit.waiter.id, None)

    def _tell(self, *message: Any) -> None:
        self._runtime.tell(self._runtime.root, *message)

    def _refusal(self) -> str:
        asked = self._runtime.request(self._runtime.root, "debug_open")
        try:
            (why,) = hidden_loop(lambda: asked.get(_ANSWER_S))
        except Exception as error:
            return f"the driver does not answer: {error}"
        return str(why)


_installed = False


def install() -> None:
    """From now on, `breakpoint()` in actors of this process waits for `monarch debug`."""
    global _installed
    if _installed:
        return
    _installed = True
    before = sys.breakpointhook

    def hook(*args: Any, **kwargs: Any) -> Any:
        actor = running_actor()
        if actor is None or os.environ.get("PYTHONBREAKPOINT"):
            return before(*args, **kwargs)
        return actor.proc_runtime.breakpoints.enter(actor, sys._getframe(1))

    sys.breakpointhook = hook
