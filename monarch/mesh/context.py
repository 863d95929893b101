"""Where am I: the actor whose code runs, and the message that it serves."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from attrs import define, evolve

from monarch.core import settings
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.ids import ActorId, ProcId
from monarch.core.instance import Instance as CoreInstance
from monarch.core.instance import Sender
from monarch.core.monitor import Down
from monarch.core.serving import Served
from monarch.mesh.lines import Origin
from monarch.mesh.shape import Extent, Point

if TYPE_CHECKING:
    from monarch.mesh.mesh_proc import MeshProc
    from monarch.mesh.ownership import Owned
    from monarch.mesh.proc_mesh import ProcMesh
    from monarch.supervision.failure import MeshFailure

_ONCE_OWNED: Final = 256

EMPTY_EXTENT = Extent((), ())
NOWHERE = Point(0, EMPTY_EXTENT)


@define(frozen=True)
class CreatorInstance:
    """Who spawned an actor, and who spawned that one: a chain of small records up to the client."""

    rank: Point
    name: str
    class_name: str
    proc_mesh: ProcMesh | None = None
    creator: CreatorInstance | None = None

    @property
    def proc(self) -> ProcMesh | None:
        return None if self.proc_mesh is None else self.proc_mesh._member(self.rank.rank)

    def __str__(self) -> str:
        return path_of(self.creator, self.class_name, self.name, self.rank)


def path_of(creator: CreatorInstance | None, class_name: str, name: str, rank: Point) -> str:
    if creator is None:
        return "<root>"
    place = str(rank) if len(rank) else ""
    return f"{creator}.<{class_name} {name}{place}>"


class Spawner(Sender):
    """An actor, or the client, as users see it: `context().actor_instance`."""

    proc_runtime: MeshProc
    name: str
    class_name: str
    rank: Point
    proc_mesh: ProcMesh
    creator: CreatorInstance | None

    def _init_spawner(
        self, name: str, class_name: str, rank: Point, proc_mesh: ProcMesh, creator: CreatorInstance | None
    ) -> None:
        self.name, self.class_name, self.rank = name, class_name, rank
        self.proc_mesh, self.creator = proc_mesh, creator
        self.owned: dict[int, Owned] = {}
        self.owned_once: deque[int] = deque(maxlen=_ONCE_OWNED)  # numbers of the last meshes that have ended
        self.on_release: Callable[[Down], None] | None = None  # stops what has an order of its own; blocks, bounded

    @property
    def proc_id(self) -> ProcId:
        return self.actor_id.proc

    @property
    def proc(self) -> ProcMesh:
        """The process this actor runs on, as a mesh of no dimensions."""
        return self.proc_mesh._member(self.rank.rank)

    @property
    def record(self) -> CreatorInstance:
        """This actor as the creator of others; the client is "root" there."""
        if self.creator is None:
            return CreatorInstance(self.rank, "root", self.class_name)
        return CreatorInstance(self.rank, self.name, self.class_name, self.proc_mesh, self.creator)

    def refuse_closed(self) -> None:
        """Raises: MeshError, when nothing can be spawned any more."""

    def must_hear_of(self, envelope: Envelope) -> bool:
        """Whether a message of this actor's that came back is a failure: it was surely not delivered, and the receiver
        is somebody else's, so that nothing else tells."""
        number = envelope.src_actor if envelope.kind == Kind.BOUNCE else envelope.dst_actor
        mine = number == self.actor_id.number or number in self.owned or number in self.owned_once
        return not mine and not envelope.flags & Flag.UNSURE and settings.get("undeliverable_fails_sender")

    def supervise(self, failure: MeshFailure) -> None:
        """Something that this actor owns has failed. Called from any thread."""
        raise NotImplementedError

    def stop(self, reason: str | None = None) -> None:
        """End this actor gracefully, once it has served what is queued."""
        raise NotImplementedError

    def abort(self, reason: str | None = None) -> None:
        """End this actor as failed; the report has the reason."""
        raise NotImplementedError

    def kill(self, reason: str | None = None) -> None:
        """As `abort`, without serving anything more."""
        self.abort(reason)

    def spawn_tensor_engine(self, proc_mesh: ProcMesh) -> ProcMesh:
        """Start the workers for distributed tensors now, and not with the first `activate()`. Returns the mesh."""
        proc_mesh._spawn_tensor_workers()
        return proc_mesh

    def __str__(self) -> str:
        return path_of(self.creator, self.class_name, self.name, self.rank)

    __repr__ = __str__


class ActorInstance(Spawner, CoreInstance):
    """A running actor.

    Attributes:
        prepares: it only runs the bootstrap function of its process.
        is_importing: its class is being unpickled, and with it, most often, a module imported.
        owner_key: the process of its owner.
        on_failure, on_undeliverable: what it does about a failure of something it owns, and about a message that came
            back; called on its thread. Whoever makes the actor sets them, before it runs.
    """

    def __init__(
        self,
        runtime: MeshProc,
        actor_id: ActorId,
        name: str,
        class_name: str,
        rank: Point,
        proc_mesh: ProcMesh,
        creator: CreatorInstance,
        prepares: bool = False,
    ) -> None:
        CoreInstance.__init__(self, runtime, actor_id)
        self.prepares = prepares
        self.is_importing = False
        self._init_spawner(name, class_name, rank, proc_mesh, creator)
        self.owner_key = 0
        self.on_failure: Callable[[MeshFailure], None]
        self.on_undeliverable: Callable[[Envelope, Down], None]

    @functools.cached_property
    def origin(self) -> Origin:
        """Who it is in forwarded output."""
        return Origin(self.name, self.rank.rank)

    @property
    def member(self) -> str:
        """As in reports: `module.Class name{'gpus': 1/2}`."""
        return f"{self.class_name} {self.place}"

    @property
    def place(self) -> str:
        """Its name, and where it is in its mesh: `name{'gpus': 1/2}`."""
        return f"{self.name}{self.rank}" if len(self.rank) else self.name

    def supervise(self, failure: MeshFailure) -> None:
        if not self.post_control(lambda: self.on_failure(failure)):
            self.proc_runtime.unowned(failure)

    def stop(self, reason: str | None = None) -> None:
        self.request_stop(Down("stopped", reason or "stopped by itself"))

    def abort(self, reason: str | None = None) -> None:
        text = f"actor explicitly aborted due to: {reason or 'no reason provided'}"
        self.request_end(evolve(self.proc_runtime.failed(text), actor=self.member))

    def request_stop(self, down: Down) -> None:
        super().request_stop(down)
        self._leave_debugger()

    def request_end(self, down: Down) -> None:
        super().request_end(down)
        self._leave_debugger()

    def _leave_debugger(self) -> None:
        self.proc_runtime.breakpoints.quit(self.actor_id.number)

    def undeliverable(self, envelope: Envelope, down: Down) -> None:
        self.post_control(lambda: self.on_undeliverable(envelope, down))


class Context(Served):
    """What `context()` gives: the call that is served, or, without an `endpoint`, whose code runs. Not to change.

    Attributes:
        actor_instance: the running actor, or the client outside any.
        message_rank: where the receiver stands in the view that the message was sent to.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        actor_instance: Spawner  # type: ignore[assignment]
        message_rank: Point

        def __init__(
            self,
            actor_instance: Spawner,
            message_rank: Point,
            endpoint: str = "",
            envelope: Envelope | None = None,
            exclusive: bool = True,
        ) -> None: ...

    @property
    def _caller(self) -> Served | None:
        """The endpoint that a call comes from which is made now; None outside of any, or once it is through."""
        return self if self.endpoint and self.going_on else None


current_context: contextvars.ContextVar[Context | None] = contextvars.ContextVar("monarch_context", default=None)
_client: Context | None = None
_make_client: Callable[[], Context]
_client_lock = threading.RLock()


def context() -> Context:
    """The current context. On a thread without one, the client's, which the first call makes, once per process."""
    found = current_context.get()
    if found is not None:
        return found
    return _client if _client is not None else _bootstrap()


def _bootstrap() -> Context:
    global _client
    with _client_lock:
        if _client is None:
            _client = _make_client()
        return _client


def client_is_made_by(make: Callable[[], Context]) -> None:
    """What makes the client's context at its first use."""
    global _make_client
    _make_client = make


def client_context() -> Context | None:
    """The client's context, or None while nobody has asked for it."""
    return _client


def set_client_context(value: Context | None) -> None:
    global _client
    _client = value


def current_rank() -> Point:
    """Where the running actor stands in the view that the message was sent to; in `__init__`, in the mesh spawned."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """The sizes of that view, by label."""
    return dict(context().message_rank.extent)


def current_actor_name() -> str:
    """Address of the running actor, as text."""
    return str(context().actor_instance.actor_id)


class _Forked(Spawner):
    """What a fork of a process that uses monarch has instead of a client."""

    def __init__(self) -> None:
        pass

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise RuntimeError(
            "this process was forked (os.fork, or multiprocessing's fork method) from one that uses monarch; it has no "
            "connections of its own. Use multiprocessing's spawn method, or spawn processes with monarch"
        )


def mark_forked() -> None:
    """This process is a fork of one with a context: from now on, using one raises a RuntimeError that says so."""
    set_client_context(Context(_Forked(), NOWHERE))
    current_context.set(None)
