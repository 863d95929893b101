"""The way of calls to a child of a supervisor, from one process: to the incarnation that is up, or into a queue.

Theory of operation. A `Line` has the current incarnation, or the calls that wait for the next one:

```
    CLOSED ──a call comes──► ASKING ──up──► CURRENT ──lost──► CLOSED
                               │ over, ended, unknown: what waits is refused, ► CLOSED
```

It learns that an incarnation is over from the supervisor (a question that is answered then), from the end of a process
of it, and from calls that come back, whichever is first. What it asks for is an incarnation newer than the one that it
knows to be gone; so it does not matter whether it has heard of the end before its supervisor.

A call is handed to one incarnation, once. Calls reach an incarnation in the order in which they came: while one waits,
or is on its way out of the queue, later ones queue behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field

from monarch.core.envelope import Envelope
from monarch.core.future import Future
from monarch.core.ids import ActorId, ProcId
from monarch.core.monitor import Down, PeerGone
from monarch.core.proc import Proc
from monarch.errors import MeshError, SupervisionError
from monarch.log import get_logger
from monarch.mesh.child_directory import Directory
from monarch.supervision.failure import MeshFailure

if TYPE_CHECKING:
    from monarch.mesh.actor_mesh import ActorMesh

log = get_logger("monarch.supervised")


@define(frozen=True)
class Path:
    """A child by name, in a supervisor: itself an actor, or a child by name in turn.

    Attributes:
        root: the outermost supervisor; it is never another actor.
        names: from there down.
    """

    root: ActorId
    names: tuple[str, ...]

    @property
    def parent(self) -> Path:
        return Path(self.root, self.names[:-1])

    def child(self, name: str) -> Path:
        return Path(self.root, (*self.names, name))

    @property
    def text(self) -> str:
        return f"child {self.names[-1]!r} of supervisor {'.'.join((self.root.name, *self.names[:-1]))!r}"


@define(frozen=True)
class Refused:
    """Why calls to a child will not be served.

    Attributes:
        reason: ends the sentence that begins with the child's name.
        down: the end behind it, of the child or of its supervisor.
        supervisor: as people know it, where it is its end.
        misuse: there is no such child.
        quiet: nobody has failed; a message that no answer is expected to is dropped without a word.
    """

    reason: str
    down: Down | None = None
    supervisor: str = ""
    misuse: bool = False
    quiet: bool = False

    def of_children(self) -> Refused:
        """The same for calls to its children, where the child that is refused is a supervisor."""
        return Refused(f"cannot be reached, because its supervisor {self.reason}", self.down)


@define(frozen=True)
class Current:
    """An incarnation, as a line knows it. `serial` tells those of different supervisors apart too."""

    serial: int
    number: int
    mesh: ActorMesh[Any]
    supervisor: tuple[ProcId, int]


class Waiting(Protocol):
    """A call that needs an incarnation. One of both is called, once, and may not block."""

    def send(self, current: Current, may_wait: bool) -> None: ...

    def refuse(self, refused: Refused) -> None: ...


def _guarded(step: Callable[..., None], *arguments: Any) -> None:
    """One call that fails must not keep the others from their turn."""
    try:
        step(*arguments)
    except Exception:
        log.exception("supervised.call_failed")


@define(eq=False)
class Line:
    """See the module. Thread-safe."""

    _runtime: Proc
    path: Path
    _parent: Line | None
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _current: Current | None = field(default=None, init=False)
    _queue: dict[int, Waiting] = field(factory=dict, init=False)
    _tickets: int = field(default=0, init=False)
    _serials: int = field(default=0, init=False)
    _asking: bool = field(default=False, init=False)
    _flushing: bool = field(default=False, init=False)
    _seen: tuple[tuple[ProcId, int] | None, int] = field(default=(None, 0), init=False)
    """The newest incarnation that is known to be gone, and the supervisor that counts it."""
    last_down: Down | None = field(default=None, init=False)
    _monitors: list[Callable[[], None]] = field(factory=list, init=False)

    def submit(self, call: Waiting, wait_s: float | None) -> None:
        """Send `call` to the current incarnation, or keep it until there is one, for `wait_s` at most."""
        with self._lock:
            current = self._current
            if current is None or self._queue or self._flushing:
                current = None
                self._tickets += 1
                ticket = self._tickets
                self._queue[ticket] = call
        if current is not None:
            call.send(current, True)
            return
        if wait_s is not None:
            self._runtime.gateway.call_later(wait_s, lambda: self._expire(ticket, wait_s))
        self._flush()

    def _expire(self, ticket: int, wait_s: float) -> None:
        with self._lock:
            call = self._queue.pop(ticket, None)
        if call is not None:
            last = f", after its last end: {self.last_down}" if self.last_down is not None else ""
            call.refuse(Refused(f"was not up within {wait_s:g} s{last}", self.last_down))

    def lost(self, serial: int, down: Down | None) -> None:
        """That incarnation is over: the next call waits for a newer one."""
        with self._lock:
            current = self._current
            if current is None or current.serial != serial:
                return
            self._current = None
            self._seen = current.supervisor, current.number
            self.last_down = down or self.last_down
            monitors, self._monitors = self._monitors, []
        for cancel in monitors:
            cancel()

    # ---- the queue

    def _flush(self, refused: Refused | None = None) -> None:
        """Send or refuse what waits, one after the other; ask for an incarnation where there is none."""
        with self._lock:
            if self._flushing:
                return  # whoever does it looks again before it ends
            self._flushing = True
            doomed = list(self._queue.values()) if refused is not None else []
            if doomed:
                self._queue.clear()
        for call in doomed:
            assert refused is not None
            _guarded(call.refuse, refused)
        while True:
            with self._lock:
                current = self._current
                if current is None or not self._queue:
                    self._flushing = False
                    ask = bool(self._queue) and not self._asking
                    self._asking = self._asking or ask
                    break
                call = self._queue.pop(next(iter(self._queue)))
            _guarded(call.send, current, False)
        if ask:
            self._ask()

    # ---- questions

    def _ask(self) -> None:
        if self._parent is None:
            self.ask_at(self.path.root.proc, self.path.root.number, None)
        else:
            self._parent.submit(_Lookup(self), None)

    def ask_at(self, proc: ProcId, number: int, parent: Current | None) -> None:
        """Ask that supervisor for an incarnation which is not known to be gone."""
        seen_at, seen = self._seen
        after = seen if seen_at == (proc, number) else 0
        asked = self._runtime.request(proc, "child", "ask", number, self.path.names[-1], after)
        asked._on_done(lambda: self._answered(asked, proc, number, parent))

    def _answered(self, asked: Future[Any], proc: ProcId, number: int, parent: Current | None) -> None:
        try:
            kind, *found = asked.get(0)
        except PeerGone as error:
            kind, found = "ended", ["", error.down]
        except Exception as error:
            kind, found = "ended", ["", Down("failed", f"its supervisor cannot be asked: {error}")]
        if kind == "ended" and parent is not None and self._parent is not None:
            # The supervisor is a child itself: perhaps there will be another.
            self._parent.lost(parent.serial, found[1])
            self._ask()
            return
        refused: Refused | None = None
        with self._lock:
            self._asking = False
            if kind == "up":
                self._serials += 1
                incarnation, mesh = found
                self._current = current = Current(self._serials, incarnation, mesh, (proc, number))
        if kind == "up":
            self._watch(current)
        else:
            refused = refused_by(kind, found, self.path)
        self._flush(refused)

    def refuse_all(self, refused: Refused) -> None:
        with self._lock:
            self._asking = False
        self._flush(refused)

    def _watch(self, current: Current) -> None:
        """Hear of its end: from its supervisor, and of that of its processes from whoever knows first."""
        proc, number = current.supervisor
        serial = current.serial
        asked = self._runtime.request(proc, "child", "watch", number, self.path.names[-1], current.number)

        def told() -> None:
            error = asked.exception(0)
            down = error.down if isinstance(error, PeerGone) else None if error is not None else asked.get(0)[1]
            self.lost(serial, down)

        asked._on_done(told)
        set_ = [
            self._runtime.monitors.watch((key, 0), lambda down: self.lost(serial, down))
            for key in {proc.key for proc in current.mesh._procs}
        ]
        with self._lock:
            if self._current is current:
                self._monitors = set_
                return
        for cancel in set_:
            cancel()


def refused_by(kind: str, found: Sequence[Any], path: Path) -> Refused:
    if kind == "unknown":
        return Refused(f"does not exist; there is {', '.join(map(repr, found[0])) or 'none'}", misuse=True)
    if kind == "over":
        return Refused(f"has ended for good: {found[0]}", found[0], quiet=True)
    name, down = found
    if down.stopped:
        return Refused(f"is gone, because the supervisor was stopped: {down.reason}", down, quiet=True)
    return Refused(f"is not restarted any more, because the supervisor has failed: {down}", down, name or "supervisor")


@define(eq=False)
class _Lookup:
    """A line to the child of a child asks its own supervisor, which it reaches by the line to that."""

    _line: Line

    def send(self, current: Current, may_wait: bool) -> None:
        (proc,) = current.mesh._procs
        self._line.ask_at(proc, current.mesh._number, current)

    def refuse(self, refused: Refused) -> None:
        self._line.refuse_all(refused.of_children())


def refused_error(path: Path, refused: Refused, method: str | None) -> Exception:
    """The error of a call that was never sent."""
    text = f"{path.text} {refused.reason}"
    if refused.misuse:
        return MeshError(text)
    failure = None
    if refused.down is not None and not refused.down.stopped:
        member = refused.supervisor or path.text
        mesh_name = (path.root.name, *path.names)[-2 if refused.supervisor else -1]
        failure = MeshFailure(mesh_name, [0], member, refused.down)
    return SupervisionError(f"{text}. The call was not sent.", method and f"{path.names[-1]}.{method}", failure)


class ChildBook:
    """What a process knows of supervised children: the directories of its own supervisors, and its lines to others."""

    def __init__(self, runtime: Proc) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._directories: dict[int, Directory] = {}
        self._lines: dict[Path, Line] = {}
        runtime.handlers["child"] = self._on_question

    def directory(self, number: int) -> Directory:
        """That of the supervisor with this number, made by whoever is first: a question may come before it is there."""
        with self._lock:
            found = self._directories.get(number)
            if found is not None:
                return found
            made = self._directories[number] = Directory()

        def ended(down: Down) -> None:
            made.end("", down)
            with self._lock:
                self._directories.pop(number, None)

        self._runtime.monitors.watch((self._runtime.key, number), ended)
        return made

    def restarts(self) -> dict[int, int]:
        """How often the children of this process's supervisors that are up were restarted, by their numbers."""
        with self._lock:
            directories = list(self._directories.values())
        return {number: count for each in directories for number, count in each.restarts().items()}

    def _on_question(self, envelope: Envelope, what: str, number: int, *arguments: Any) -> None:
        def answer(*message: Any) -> None:
            self._runtime.answer(envelope, *message)

        directory = self.directory(number)
        ask: dict[str, Callable[..., None]]
        ask = {"ask": directory.ask, "watch": directory.watch, "shape": directory.shape}
        ask[what](*arguments, answer)

    def line(self, path: Path) -> Line:
        with self._lock:
            found = self._lines.get(path)
        if found is not None:
            return found
        parent = self.line(path.parent) if len(path.names) > 1 else None
        with self._lock:
            return self._lines.setdefault(path, Line(self._runtime, path, parent))
