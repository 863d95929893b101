"""Meshes that outlive their actors: the reference to a child of a supervisor, by name, over restarts.

It looks and pickles like any mesh of actors. What it sends goes through the `Line` of the sending process, which hands
it to the incarnation that is up. What has been handed over and comes back has failed, for nobody here can know what it
has done; what waits has not been sent at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from attrs import define

from monarch.core.envelope import Envelope, Kind
from monarch.core.future import Future
from monarch.core.monitor import Down
from monarch.mesh.actor_mesh import ActorMesh
from monarch.mesh.child_line import Current, Line, Path, Refused, refused_error
from monarch.mesh.context import context
from monarch.mesh.members import Members
from monarch.mesh.shape import Region
from monarch.mesh.view import overridable

if TYPE_CHECKING:
    from monarch.mesh.context import Spawner

A = TypeVar("A")

WAIT_S: Final = 30.0
"""How long a call waits for a child that is being restarted, unless told otherwise."""


class _IncarnationMembers(Members):
    """Those who were called, in one incarnation. A failure that they report is also the line's."""

    __slots__ = ("_line", "_serial")

    def __init__(self, line: Line, serial: int, like: Members) -> None:
        self.like(like)
        self._line, self._serial = line, serial

    def error(self, rank: int, down: Down, *arguments: Any) -> Exception:
        self._line.lost(self._serial, down)
        return super().error(rank, down, *arguments)


class _RefusedMembers(Members):
    """Nobody was called: every answer is this error."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception, like: Members) -> None:
        self.like(like)
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
    chain: bytes

    def send(self, current: Current, may_wait: bool) -> None:
        view, members = self.mesh._in(current)
        if self.reply_port:
            sink: Any = self.sender.proc_runtime.ports.get(self.reply_port)
            if sink is None:
                return  # cancelled while it waited
            sink._members = _IncarnationMembers(self.line, current.serial, members(sink._members.method))
        view._cast(self.sender, self.parts, self.reply_port, self.only, self.chain, may_wait=may_wait)

    def refuse(self, refused: Refused) -> None:
        runtime = self.sender.proc_runtime
        sink: Any = runtime.ports.get(self.reply_port) if self.reply_port else None
        if sink is None:
            if self.reply_port:
                return  # cancelled while it waited
            if refused.quiet:
                return
            down = Down("failed", f"{self.line.path.text} {refused.reason}", actor=self.line.path.text)
            target = Envelope(Kind.CALL, 0, 0, 0, runtime.key, self.sender.actor_id.number, self.parts)
            self.sender.undeliverable(target, down.because(refused.down) if refused.down is not None else down)
            return
        sink._members = _RefusedMembers(refused_error(self.line.path, refused, sink._members.method), sink._members)
        ranks = range(len(sink._members.keys)) if self.only is None else (self.only,)
        for rank in ranks:
            sink.bounced(Envelope(Kind.BOUNCE, runtime.key, 0, self.reply_port, 0, 0, [], 0, rank), Down("failed", ""))


class SupervisedMesh(ActorMesh[A]):
    """A child of a supervisor, by name: an actor mesh whose actors may be replaced.

    Endpoints work as on any mesh, and views too. A call goes to the incarnation that is up. While there is none, it
    waits, for `wait_s` at most; then, or when the supervisor has ended, or the child for good, it fails with
    SupervisionError. A call that was under way when the child died has failed with SupervisionError, and is never
    repeated by the library: it may have run. The order of a sender's calls begins anew with each incarnation.

    It pickles, and works in any process. `stop()` is refused: the supervisor decides.
    """

    _replies_to_any_port = False

    def __init__(
        self, path: Path, cls: type[A] | bytes, class_name: str, whole: Region, region: Region, wait_s: float
    ) -> None:
        self._path = path
        self._wait_s = wait_s
        self._seen_in: tuple[int, ActorMesh[Any]] | None = None
        super().__init__(0, path.names[-1], cls, class_name, (), whole, region)

    def _with_region(self, region: Region) -> SupervisedMesh[A]:
        return SupervisedMesh(self._path, self._class_or_pickled(), self._class_name, self._whole, region, self._wait_s)

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
        targets = [(0, None)] * len(self._region._slice)
        return Members(0, targets, lambda rank: name, self._name, method, self._region)

    def _cast(
        self,
        sender: Spawner,
        parts: list[Any],
        reply_port: int,
        only: int | None = None,
        chain: bytes = b"",
        may_wait: bool = True,
    ) -> None:
        line = sender.proc_runtime.children.line(self._path)
        line.submit(_Call(self, line, sender, parts, reply_port, only, chain), self._wait_s)

    @overridable
    def initialized(self) -> Future[None]:
        """Resolves when the child is up, now or after its restart.

        Raises (the future): SupervisionError, as a call.
        """
        runtime = context().actor_instance.proc_runtime
        result: Future[None] = Future._pending(runtime.driver, lambda: f"{self._path.text}, to be up")
        runtime.children.line(self._path).submit(_UntilUp(self._path, result), self._wait_s)
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
