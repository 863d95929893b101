"""Meshes that outlive their actors: the reference to a child of a supervisor, by name, over restarts.

Theory of operation. Three parts, one for each side and one between:

- `Directory`, in the supervisor's process: which incarnation of which child is up. The supervisor writes it. The
  `ChildBook` of the process answers questions about it on the driving thread, so that an answer never waits behind
  code of the user's; a question for an incarnation that is not up yet is kept until it is, or never will be.
- `Line`, in a caller's process, one for each child that is called from there: the current incarnation, or the calls
  that wait for the next one. It learns that an incarnation is over from the supervisor (a question that is answered
  then), from the end of the process, and from its own calls that come back, whichever is first; then it asks for a
  newer one when the next call comes.
- `SupervisedMesh`, which users hold: a view like any other mesh of actors. It sends through the line.

A call is handed to one incarnation, once. What has been handed over and comes back has failed, for nobody here can
know what it has done; what waits has not been sent at all. Calls of one sender reach an incarnation in their order:
while one waits or is on its way out of the queue, later ones queue behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from attrs import define, field

from monarch.core.envelope import Envelope, Kind
from monarch.core.future import Future
from monarch.core.gateway import PeerGone
from monarch.core.ids import ActorId, ProcId
from monarch.core.monitor import Down
from monarch.core.proc import Proc
from monarch.errors import MeshError, SupervisionError
from monarch.log import get_logger
from monarch.mesh.actor_mesh import ActorMesh
from monarch.mesh.context import context
from monarch.mesh.port import Members
from monarch.mesh.shape import Region
from monarch.mesh.view import overridable
from monarch.supervision.failure import MeshFailure

if TYPE_CHECKING:
    from monarch.mesh.context import Spawner

log = get_logger("monarch.supervised")

A = TypeVar("A")

WAIT_S: Final = 30.0
"""How long a call waits for a child that is being restarted, unless told otherwise."""


# ---- the supervisor's side


@define(eq=False)
class _Entry:
    """A child, as its supervisor publishes it.

    Attributes:
        prototype: a mesh of its class and shape, of no actors.
        mesh: the incarnation that is up, or None.
        over: why it is not started again, or None.
    """

    prototype: ActorMesh[Any]
    incarnation: int = 0
    mesh: ActorMesh[Any] | None = None
    over: Down | None = None


class Directory:
    """The children of one supervisor. Written on its thread, read on the driving thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._wanted: list[tuple[str, int, Callable[..., None]]] = []  # name, newer than, answer
        self._watched: list[tuple[str, int, Callable[..., None]]] = []  # name, while that is up, answer
        self._ended: tuple[str, Down] | None = None

    # ---- by the supervisor

    def declare(self, name: str, prototype: ActorMesh[Any]) -> None:
        with self._lock:
            self._entries[name] = _Entry(prototype)

    def prototype(self, name: str) -> ActorMesh[Any] | None:
        with self._lock:
            entry = self._entries.get(name)
        return None if entry is None else entry.prototype

    def up(self, name: str, incarnation: int, mesh: ActorMesh[Any]) -> None:
        with self._lock:
            entry = self._entries[name]
            entry.incarnation, entry.mesh = incarnation, mesh
        self._settle()

    def down(self, name: str) -> None:
        """It is not to be called now."""
        with self._lock:
            self._entries[name].mesh = None
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

    # ---- questions

    def ask(self, name: str, after: int, answer: Callable[..., None]) -> None:
        """Answer once there is an incarnation newer than `after`, or never will be."""
        with self._lock:
            self._wanted.append((name, after, answer))
        self._settle()

    def watch(self, name: str, incarnation: int, answer: Callable[..., None]) -> None:
        """Answer once that incarnation is not up any more."""
        with self._lock:
            self._watched.append((name, incarnation, answer))
        self._settle()

    def shape(self, name: str, answer: Callable[..., None]) -> None:
        """Answer with the prototype."""
        with self._lock:
            entry, names, ended = self._entries.get(name), list(self._entries), self._ended
        if entry is not None:
            answer("shape", entry.prototype)
        elif ended is not None:
            answer("ended", *ended)
        else:
            answer("unknown", names)

    def _settle(self) -> None:
        """Give the answers that are known now, outside the lock."""
        due: list[Callable[[], None]] = []
        with self._lock:
            for kept, decide in ((self._wanted, self._found), (self._watched, self._lost)):
                for question in list(kept):
                    found = decide(question[0], question[1])
                    if found is not None:
                        kept.remove(question)
                        due.append(_Later(question[2], found))
        for each in due:
            each()

    def _found(self, name: str, after: int) -> tuple[Any, ...] | None:
        entry = self._entries.get(name)
        if self._ended is not None:
            return "ended", *self._ended
        if entry is None:
            return "unknown", list(self._entries)
        if entry.over is not None:
            return "over", entry.over
        return ("up", entry.incarnation, entry.mesh) if entry.mesh is not None and entry.incarnation > after else None

    def _lost(self, name: str, incarnation: int) -> tuple[Any, ...] | None:
        entry = self._entries.get(name)
        up = self._ended is None and entry is not None and entry.mesh is not None and entry.incarnation == incarnation
        return None if up else ("lost",)


@define(frozen=True)
class _Later:
    answer: Callable[..., None]
    found: tuple[Any, ...]

    def __call__(self) -> None:
        self.answer(*self.found)


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

    def _on_question(self, envelope: Envelope, what: str, number: int, *arguments: Any) -> None:
        def answer(*message: Any) -> None:
            self._runtime.answer(envelope, *message)

        directory = self.directory(number)
        {"ask": directory.ask, "watch": directory.watch, "shape": directory.shape}[what](*arguments, answer)

    def line(self, path: Path) -> Line:
        with self._lock:
            found = self._lines.get(path)
        if found is not None:
            return found
        parent = self.line(path.parent) if len(path.names) > 1 else None
        with self._lock:
            return self._lines.setdefault(path, Line(self._runtime, path, parent))


# ---- the caller's side


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
    """

    reason: str
    down: Down | None = None
    supervisor: str = ""
    misuse: bool = False


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
            refused = _refused(kind, found, self.path)
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
            self.lost(serial, error.down if isinstance(error, PeerGone) else None)

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


def _refused(kind: str, found: Sequence[Any], path: Path) -> Refused:
    if kind == "unknown":
        return Refused(f"does not exist; there is {', '.join(map(repr, found[0])) or 'none'}", misuse=True)
    if kind == "over":
        return Refused(f"has ended for good: {found[0]}", found[0])
    name, down = found
    if down.stopped:
        return Refused(f"is gone, because the supervisor was stopped: {down.reason}", down)
    return Refused(f"is not restarted any more, because the supervisor has failed: {down}", down, name or "supervisor")


@define(eq=False)
class _Lookup:
    """A line to the child of a child asks its own supervisor, which it reaches by the line to that."""

    _line: Line

    def send(self, current: Current, may_wait: bool) -> None:
        (proc,) = current.mesh._procs
        self._line.ask_at(proc, current.mesh._number, current)

    def refuse(self, refused: Refused) -> None:
        self._line.refuse_all(Refused(f"cannot be reached, because its supervisor {refused.reason}", refused.down))


# ---- what users hold


class _IncarnationMembers(Members):
    """Those who were called, in one incarnation. A failure that they report is also the line's."""

    __slots__ = ("_line", "_serial")

    def __init__(self, line: Line, serial: int, like: Members) -> None:
        super().__init__(like.keys, like.describe, like.mesh_name, like.method, like.region)
        self._line, self._serial = line, serial

    def error(self, rank: int, down: Down, *arguments: Any) -> Exception:
        self._line.lost(self._serial, down)
        return super().error(rank, down, *arguments)


class _RefusedMembers(Members):
    """Nobody was called: every answer is this error."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception, like: Members) -> None:
        super().__init__(like.keys, like.describe, like.mesh_name, like.method, like.region)
        self._error = error

    def error(self, rank: int, down: Down, *arguments: Any) -> Exception:
        return self._error


@define(eq=False)
class _Call:
    """One CALL to a supervised mesh, encoded, until an incarnation takes it."""

    mesh: SupervisedMesh[Any]
    line: Line
    sender: Spawner
    parts: list[Any]
    reply_port: int
    only: int | None

    def send(self, current: Current, may_wait: bool) -> None:
        view, members = self.mesh._in(current)
        if self.reply_port:
            sink: Any = self.sender.proc_runtime.ports.get(self.reply_port)
            if sink is not None:
                sink._members = _IncarnationMembers(self.line, current.serial, members(sink._members.method))
        view._cast(self.sender, self.parts, self.reply_port, self.only, may_wait=may_wait)

    def refuse(self, refused: Refused) -> None:
        runtime = self.sender.proc_runtime
        sink: Any = runtime.ports.get(self.reply_port) if self.reply_port else None
        if sink is None:
            down = Down("failed", f"{self.line.path.text} {refused.reason}")
            target = Envelope(Kind.CALL, 0, 0, 0, runtime.key, self.sender.actor_id.number, self.parts)
            self.sender.undeliverable(target, down.because(refused.down) if refused.down is not None else down)
            return
        sink._members = _RefusedMembers(refused_error(self.line.path, refused, sink._members.method), sink._members)
        ranks = range(len(sink._members.keys)) if self.only is None else (self.only,)
        for rank in ranks:
            sink.bounced(Envelope(Kind.BOUNCE, runtime.key, 0, self.reply_port, 0, 0, [], 0, rank), Down("failed", ""))


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


class SupervisedMesh(ActorMesh[A]):
    """A child of a supervisor, by name: an actor mesh whose actors may be replaced.

    Endpoints work as on any mesh, and views too. A call goes to the incarnation that is up. While there is none, it
    waits, for `wait_s` at most; then, or when the supervisor has ended, or the child for good, it fails with
    SupervisionError. A call that was under way when the child died has failed with SupervisionError, and is never
    repeated by the library: it may have run. The order of a sender's calls begins anew with each incarnation.

    It pickles, and works in any process. `stop()` is refused: the supervisor decides.
    """

    def __init__(
        self, path: Path, cls: type[A] | bytes, class_name: str, whole: Region, region: Region, wait_s: float
    ) -> None:
        self._path = path
        self._wait_s = wait_s
        self._seen_in: tuple[int, ActorMesh[Any]] | None = None
        super().__init__(0, path.names[-1], cls, class_name, (), whole, region)

    def _with_region(self, region: Region) -> SupervisedMesh[A]:
        return SupervisedMesh(self._path, self._class_or_pickled(), self._class_name, self._whole, region, self._wait_s)

    def _class_or_pickled(self) -> Any:
        return self._cls if self._known is None else self._known.cls

    def _in(self, current: Current) -> tuple[ActorMesh[Any], Callable[[str], Members]]:
        """This view of that incarnation."""
        found = self._seen_in
        if found is None or found[0] != current.serial or found[1]._number != current.mesh._number:
            found = self._seen_in = current.serial, ActorMesh._with_region(current.mesh, self._region)
        view = found[1]
        return view, lambda method: ActorMesh._members(view, method)

    def _members(self, method: str) -> Members:
        name = self._path.text
        # Nobody yet: no process has the key 0.
        return Members([0] * len(self._region._slice), lambda rank: name, self._name, method, self._region)

    def _cast(
        self, sender: Spawner, parts: list[Any], reply_port: int, only: int | None = None, *, may_wait: bool = True
    ) -> None:
        book: ChildBook = sender.proc_runtime.children  # type: ignore[attr-defined]
        line = book.line(self._path)
        line.submit(_Call(self, line, sender, parts, reply_port, only), self._wait_s)

    @overridable
    def initialized(self) -> Future[None]:  # type: ignore[override]
        """Resolves when the child is up, now or after its restart.

        Raises (the future): SupervisionError, as a call.
        """
        runtime = context().actor_instance.proc_runtime
        result: Future[None] = Future._pending(runtime.driver, lambda: f"{self._path.text}, to be up")
        book: ChildBook = runtime.children  # type: ignore[attr-defined]
        book.line(self._path).submit(_UntilUp(self._path, result), self._wait_s)
        return result

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Raises: NotImplementedError. Use `supervisor.stop_child.call_one(name)`."""
        raise NotImplementedError(
            f"{self._path.text} is stopped by its supervisor: supervisor.stop_child.call_one({self._path.names[-1]!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self._path, self._pickled_class(), self._class_name, self._whole, self._region, self._wait_s)
        return SupervisedMesh, arguments

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SupervisedMesh):
            return NotImplemented
        return self._path == other._path and self._region == other._region

    def __hash__(self) -> int:
        return hash((self._path, self._region))

    def __repr__(self) -> str:
        return f"<SupervisedMesh {self._path.text}, of {self._class_name} {dict(self._region.extent)}>"


@define(eq=False)
class _UntilUp:
    _path: Path
    _result: Future[None]

    def send(self, current: Current, may_wait: bool) -> None:
        self._result._complete(lambda: None)

    def refuse(self, refused: Refused) -> None:
        self._result._fail(refused_error(self._path, refused, None))
