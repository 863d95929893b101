"""The supervisor: an actor that owns children by specification, and carries out what `supervision.restarts` decides.

The decisions are made there; who calls a child over its restarts is in `supervised`. Here is the shell between them and
the runtime: it spawns incarnations, watches all their members, stops them within their time, and turns what it hears
into events, one at a time, on the supervisor's own thread.

An incarnation is a whole mesh. When one member fails, the rest of it is stopped, and its processes, where they are the
supervisor's, with it: the next one starts on fresh processes, once nothing is left of the last.
"""

from __future__ import annotations

import asyncio
import copy
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, overload

from attrs import define, field

from monarch.core import settings
from monarch.core.future import Future
from monarch.core.ids import ActorId
from monarch.core.monitor import Down
from monarch.errors import MeshError
from monarch.log import get_logger
from monarch.mesh.actor import Actor, MeshMethod, class_of
from monarch.mesh.actor_mesh import ActorMesh, describe_member
from monarch.mesh.context import ActorInstance, Context, _context, context
from monarch.mesh.endpoint import concurrent_endpoint
from monarch.mesh.host_mesh import HostMesh, this_host
from monarch.mesh.proc_mesh import ProcMesh
from monarch.mesh.shape import Extent, Region, Slice
from monarch.mesh.supervised import (
    WAIT_S,
    ChildBook,
    Current,
    Directory,
    Path,
    Refused,
    SupervisedMesh,
    _refused,
    refused_error,
)
from monarch.supervision.failure import MeshFailure
from monarch.supervision.policy import Action, Escalate, Exit, Forget, Restart, Rule, Start, Stop, Strategy, Window
from monarch.supervision.restarts import Phase, Restarts

log = get_logger("monarch.supervisor")

A = TypeVar("A", bound=Actor)
E = TypeVar("E", Restart, Strategy)

SHUTDOWN_S: Final = 5.0


def _one_of(kind: type[E], value: E | str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{value!r} is none of {', '.join(repr(each.value) for each in kind)}") from None


class Child(Generic[A]):
    """What a supervisor must know to start a child, again and again.

    `Child("store", Store, "/data")` is a `Store("/data")` on a process that the supervisor starts for it, so that its
    crash takes nothing else along, and that is replaced when it dies. `options` says otherwise.

    Args:
        name: what it is called by; unique in its supervisor.
        Class, args, kwargs: as for `procs.spawn`. They are sent once, with the supervisor, and each incarnation is
            constructed from a copy.

    Raises:
        ValueError: `Class` is no subclass of Actor, or has sync and async endpoints where that is forbidden.
        TypeError: the arguments do not fit its constructor.
    """

    def __init__(self, name: str, Class: type[A], /, *args: Any, **kwargs: Any) -> None:
        if not (isinstance(Class, type) and issubclass(Class, Actor)):
            raise ValueError(f"child {name!r} needs a subclass of Actor, not {Class!r}")
        known = class_of(Class)
        known.check_kinds()
        known.check_arguments(args, kwargs)
        self.name = name
        self.Class = Class
        self.args = args
        self.kwargs = kwargs
        self.restart = Restart.PERMANENT
        self.shutdown_s = SHUTDOWN_S
        self.per_host: dict[str, int] = {}
        self.on: ProcMesh | HostMesh | None = None

    def options(
        self,
        *,
        restart: Restart | str | None = None,
        shutdown_s: float | None = None,
        per_host: Mapping[str, int] | None = None,
        on: ProcMesh | HostMesh | None = None,
    ) -> Child[A]:
        """The same child with other options; what is not given stays.

        Args:
            restart: "permanent" (the default) restarts it after any end, "transient" after a failure only,
                "temporary" never.
            shutdown_s: seconds it has to serve what is queued and clean up, when it is stopped. Then its processes are
                killed. On processes that are not the supervisor's it is left behind: its thread ends when it can, and
                nobody reaches it any more.
            per_host: an actor on each of so many processes of its own, by named dimensions, as for `spawn_procs`.
            on: processes that exist, where it is spawned each time; they are not replaced. Or hosts, for processes
                of its own there; the default is the supervisor's host.

        Raises:
            ValueError: a value makes no sense, or `per_host` is given together with processes.
        """
        self = copy.copy(self)
        if restart is not None:
            self.restart = _one_of(Restart, restart)
        if shutdown_s is not None:
            if not 0 <= shutdown_s < float("inf"):
                raise ValueError(f"shutdown_s is {shutdown_s!r}; it must be a number of seconds, not negative")
            self.shutdown_s = shutdown_s
        if per_host is not None:
            self.per_host = dict(per_host)
        if on is not None:
            self.on = on
        if isinstance(self.on, ProcMesh) and self.per_host:
            raise ValueError(f"child {self.name!r}: per_host is for processes of its own, and `on` gives it processes")
        if any(size < 1 for size in self.per_host.values()):
            raise ValueError(f"per_host is {self.per_host}; every size must be at least 1")
        return self

    @property
    def _rule(self) -> Rule:
        return Rule(self.name, self.restart)

    @property
    def _region(self) -> Region:
        on = Extent((), ()) if self.on is None else self.on._region.extent
        labels = [*on.labels, *self.per_host]
        return Region(labels, Slice.new_row_major([*on.sizes, *self.per_host.values()]))

    def _prototype(self) -> ActorMesh[Any]:
        region = self._region
        return ActorMesh(0, self.name, self.Class, class_of(self.Class).name, (), region, region)

    def __repr__(self) -> str:
        return f"<Child {self.name!r} of {class_of(self.Class).name}, {self.restart.value}>"


@define(frozen=True)
class ChildStatus:
    """How a child is.

    Attributes:
        state: "up", "starting", "stopping" or "waits to be started".
        restarts: how often it was restarted, for itself or along with others.
        last_failure: why it ended last, or "".
    """

    name: str
    state: str
    restarts: int
    last_failure: str = ""


@define(eq=False)
class _Incarnation:
    """One life of a child, from the spawn until nothing is left of it."""

    child: Child[Any]
    number: int
    mesh: ActorMesh[Any]
    procs: ProcMesh | None  # its own, which end with it
    downs: dict[int, Down] = field(factory=dict)  # by base rank
    failure: Down | None = None  # the first that was not asked for
    stopping: bool = False
    closing: bool = False


class _Shell:
    """Between the machine and the runtime. All methods but `post` run on the supervisor's thread."""

    def __init__(self, instance: ActorInstance, machine: Restarts) -> None:
        self._instance = instance
        self._runtime: Any = instance.proc_runtime
        self._machine = machine
        book: ChildBook = self._runtime.children
        self.directory: Directory = book.directory(instance.actor_id.number)
        self.children: dict[str, Child[Any]] = {}
        self._incarnations: dict[str, _Incarnation] = {}
        self._last: dict[str, Down] = {}
        self._events: queue.SimpleQueue[Callable[[], list[Action]]] = queue.SimpleQueue()
        self._settling: dict[str, list[asyncio.Future[Down | None]]] = {}
        instance.on_release = self.release

    # ---- events

    def post(self, event: Callable[[], list[Action]]) -> None:
        """From any thread: `event` is called on the supervisor's, and gives the actions that follow."""
        self._events.put(event)
        self._instance.post_control(self._drain)

    def _drain(self) -> None:
        _context.set(Context(self._instance, self._instance.rank))
        while not self._events.empty():
            self.carry_out(self._events.get()())

    def begin(self, children: Sequence[Child[Any]]) -> None:
        for child in children:
            self._declare(child)
        self.carry_out(self._machine.begin([child._rule for child in children]))

    def add(self, child: Child[Any]) -> None:
        actions = self._machine.add(child._rule)
        self._declare(child)
        self.carry_out(actions)

    def _declare(self, child: Child[Any]) -> None:
        self.children[child.name] = child
        self.directory.declare(child.name, child._prototype())

    def remove(self, name: str) -> None:
        self.carry_out(self._machine.remove(name, "it was stopped by stop_child"))

    async def settled(self, name: str) -> Down | None:
        """Wait until a child is up (None) or over (why)."""
        waiter: asyncio.Future[Down | None] = asyncio.get_running_loop().create_future()
        self._settling.setdefault(name, []).append(waiter)
        return await waiter

    def _settle(self, name: str, down: Down | None) -> None:
        for waiter in self._settling.pop(name, []):
            if not waiter.done():
                waiter.set_result(down)

    def status(self) -> list[ChildStatus]:
        return [
            ChildStatus(name, phase.value, restarts, str(self._last.get(name, "")))
            for name, phase, restarts in self._machine.status()
        ]

    def known(self, name: str) -> bool:
        """Whether there is such a child, and it is not over."""
        return any(each == name for each, _, _ in self._machine.status())

    # ---- actions

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(action)
            elif isinstance(action, Stop):
                self._stop(action)
            elif isinstance(action, Forget):
                self._forget(action)
            else:
                self._escalate(action)

    def _start(self, action: Start) -> None:
        child = self.children[action.name]
        log.info("child.start", supervisor=self._instance.name, child=child.name, incarnation=action.incarnation)
        procs: ProcMesh | None = None
        try:
            if isinstance(child.on, ProcMesh):
                places = child.on
            else:
                places = procs = (child.on or this_host()).spawn_procs(child.per_host, name=child.name)
            mesh = cast("ActorMesh[Any]", places.spawn(child.name, child.Class, *child.args, **child.kwargs))
        except Exception as error:
            self._last[child.name] = Down("failed", f"could not be spawned: {type(error).__name__}: {error}")
            if procs is not None:
                procs.stop("its actor could not be spawned")
            gone = partial(self._machine.gone, child.name, action.incarnation, Exit.FAILED)
            self.post(lambda: gone(time.monotonic()))
            return
        incarnation = _Incarnation(child, action.incarnation, mesh, procs)
        self._incarnations[child.name] = incarnation
        for rank, proc in enumerate(mesh._procs):
            watched = ActorId(proc, mesh._number, child.name)
            self._runtime.watch(watched, partial(self._heard, incarnation, rank))
        ready: Future[None] = ActorMesh.__dict__["initialized"].__get__(mesh, ActorMesh)
        ready._on_done(lambda: self.post(lambda: self._ready(incarnation, ready.exception(0))))

    def _heard(self, incarnation: _Incarnation, rank: int, down: Down) -> None:
        self.post(lambda: self._member_down(incarnation, rank, down))

    def _ready(self, incarnation: _Incarnation, error: BaseException | None) -> list[Action]:
        name = incarnation.child.name
        if self._incarnations.get(name) is not incarnation or incarnation.stopping or incarnation.closing:
            return []
        if error is not None:
            # Its end is coming, and is the event. In case it is not: end it.
            self._close(incarnation, f"it could not be started: {error}")
            return []
        log.info("child.up", supervisor=self._instance.name, child=name, incarnation=incarnation.number)
        self.directory.up(name, incarnation.number, incarnation.mesh)
        actions = self._machine.up(name, incarnation.number)
        self._settle(name, None)
        return actions

    def _member_down(self, incarnation: _Incarnation, rank: int, down: Down) -> list[Action]:
        if self._incarnations.get(incarnation.child.name) is not incarnation or rank in incarnation.downs:
            return []
        incarnation.downs[rank] = down
        if not down.stopped and not incarnation.stopping and incarnation.failure is None:
            incarnation.failure = down
            self._last[incarnation.child.name] = self._told_of(incarnation, rank, down)
        all_down = len(incarnation.downs) == len(incarnation.mesh._procs)
        if not all_down and incarnation.failure is None:
            return []  # one member stopped by itself; the others go on
        self.directory.down(incarnation.child.name)
        if all_down and incarnation.procs is None:
            return self._gone(incarnation)
        self._close(incarnation, "the child has ended" if all_down else f"another member failed: {down.reason}")
        return []

    def _told_of(self, incarnation: _Incarnation, rank: int, down: Down) -> Down:
        mesh = incarnation.mesh
        member = describe_member(mesh._class_name, mesh._name, mesh._whole, rank)
        log.info("child.failed", supervisor=self._instance.name, child=incarnation.child.name, reason=down.reason)
        return Down(
            down.kind,
            f"{member}: {down.reason}",
            down.pid,
            down.host,
            down.code,
            down.signal,
            down.error,
            down.traceback,
            down.cause,
        )

    def _stop(self, action: Stop) -> None:
        incarnation = self._incarnations[action.name]
        incarnation.stopping = True
        self.directory.down(action.name)
        self._close(incarnation, f"stopped by its supervisor {self._instance.name!r}")

    def _close(self, incarnation: _Incarnation, reason: str) -> None:
        """End what is left of an incarnation, within its time; `_gone` follows."""
        if incarnation.closing:
            return
        incarnation.closing = True
        shutdown_s = incarnation.child.shutdown_s
        if incarnation.procs is not None:
            assert incarnation.procs._owned is not None
            stopped = incarnation.procs._owned.stop(reason, shutdown_s)
            stopped._on_done(lambda: self.post(lambda: self._gone(incarnation)))
        else:
            assert incarnation.mesh._owned is not None
            incarnation.mesh._owned.stop(reason)
            self._runtime.gateway.call_later(shutdown_s, lambda: self.post(lambda: self._overdue(incarnation)))

    def _overdue(self, incarnation: _Incarnation) -> list[Action]:
        if self._incarnations.get(incarnation.child.name) is not incarnation:
            return []
        log.warning("child.overdue", supervisor=self._instance.name, child=incarnation.child.name)
        return self._gone(incarnation)

    def _gone(self, incarnation: _Incarnation) -> list[Action]:
        name = incarnation.child.name
        if self._incarnations.get(name) is not incarnation:
            return []
        del self._incarnations[name]
        if incarnation.failure is not None:
            exit = Exit.FAILED
        else:
            exit = Exit.NORMAL
            ends = list(incarnation.downs.values())
            if ends and not incarnation.stopping:
                self._last[name] = ends[-1]
        return self._machine.gone(name, incarnation.number, exit, time.monotonic())

    def _forget(self, action: Forget) -> None:
        cause = self._last.get(action.name)
        down = Down("stopped", action.reason)
        down = down.because(cause) if cause is not None else down
        self.directory.over(action.name, down)
        self._settle(action.name, down)

    def _escalate(self, action: Escalate) -> None:
        pid, host = self._runtime.whereabouts()
        text = f"{self._instance.member} gave up on its child {action.name!r}: {action.reason}"
        cause = self._last.get(action.name)
        down = Down("failed", text, pid, host)
        log.info("supervisor.gave_up", supervisor=self._instance.name, child=action.name, reason=action.reason)
        self._instance.request_failure(down.because(cause) if cause is not None else down)

    # ---- the end

    def release(self, down: Down) -> None:
        """The supervisor is ending: stop the children, one by one. Blocks; each takes its time at most."""
        self.directory.end(self._instance.member, down)
        _context.set(Context(self._instance, self._instance.rank))
        self.carry_out(self._machine.shut_down())
        grace_s = settings.get("mesh_terminate_timeout") + 5.0  # what a host takes to kill, and some
        while not self._machine.finished:
            limit_s = max((each.child.shutdown_s for each in self._incarnations.values()), default=0.0) + grace_s
            try:
                event = self._events.get(timeout=limit_s)
            except queue.Empty:
                log.warning("supervisor.children_left", supervisor=self._instance.name, left=list(self._incarnations))
                return
            self.carry_out(event())

    def supervise(self, failure: MeshFailure) -> bool:
        """The monitors have told it, or will; the owner's own way of hearing is only told that it is dealt with."""
        return failure.mesh_name in self.children


def _child(self: Any, which: Any, *, wait_s: float = WAIT_S) -> Any:
    """See `Supervisor.child`. `self` is the supervisor, or a mesh of it."""
    if isinstance(self, Supervisor):
        path = Path(self._shell._instance.actor_id, ())
    elif isinstance(self, SupervisedMesh):
        path = self._path
    elif len(self._procs) == 1:
        path = Path(ActorId(self._procs[0], self._number, self._name), ())
    else:
        raise ValueError(f"{self!r} has {len(self._procs)} supervisors, each with its own children: take a slice")
    name = which.name if isinstance(which, Child) else which
    path = path.child(name)
    prototype = which._prototype() if isinstance(which, Child) else _shape(self, path, wait_s)
    region = prototype._region
    cls = prototype._cls if prototype._known is None else prototype._known.cls
    return SupervisedMesh(path, cls, prototype._class_name, region, region, wait_s)


def _shape(self: Any, path: Path, wait_s: float) -> ActorMesh[Any]:
    name = path.names[-1]
    if isinstance(self, Supervisor):
        prototype = self._shell.directory.prototype(name)
        if prototype is None:
            raise MeshError(f"{path.text} does not exist")
        return prototype
    runtime: Any = context().actor_instance.proc_runtime
    if isinstance(self, SupervisedMesh):
        asked: Future[ActorMesh[Any]] = Future._pending(runtime.driver, lambda: path.text)
        runtime.children.line(self._path).submit(_AskShape(runtime, path, asked), wait_s)
        return asked.get(wait_s + 1.0)
    answer = runtime.request(path.root.proc, "child", "shape", path.root.number, name)
    return _read_shape(path, *answer.get(wait_s))


def _read_shape(path: Path, kind: str, *found: Any) -> ActorMesh[Any]:
    if kind == "shape":
        prototype: ActorMesh[Any] = found[0]
        return prototype
    raise refused_error(path, _refused(kind, found, path), None)


@define(eq=False)
class _AskShape:
    """The shape of the child of a child, asked for when its supervisor is up."""

    _runtime: Any
    _path: Path
    _asked: Future[ActorMesh[Any]]

    def send(self, current: Current, may_wait: bool) -> None:
        (proc,) = current.mesh._procs
        answer = self._runtime.request(proc, "child", "shape", current.mesh._number, self._path.names[-1])
        answer._on_done(lambda: self._asked._complete(lambda: _read_shape(self._path, *answer.get(0))))

    def refuse(self, refused: Refused) -> None:
        text = f"cannot be reached, because its supervisor {refused.reason}"
        self._asked._fail(refused_error(self._path, Refused(text, refused.down), None))


class Supervisor(Actor):
    """Owns children by specification, starts them in order, restarts them when they end, and stops them in the end.

    ```python no-run
    supervisor = this_proc().spawn(
        "shop", Supervisor, [Child("store", Store, "/data"), Child("clerks", Clerk).options(per_host={"gpus": 4})]
    )
    store = supervisor.child("store")  # goes on working over restarts
    store.put.call_one("apples", 3).get()
    ```

    Order: children start in the order of their list, each when the one before it is up, and stop in the opposite order.
    The supervisor is constructed when the first start has been asked for; whether all are up, shows on first use, or by
    `supervisor.child(name).initialized`. A child that cannot be started the first time makes the supervisor fail.

    Restarts: a child that ends is restarted or not by its `restart`; by `strategy`, others are restarted with it. They
    are stopped first, the youngest first, then all are started, the oldest first. The next restart after `max_restarts`
    within `within_s` seconds makes the supervisor give up: it fails, stops its children, and its own owner hears, with
    the cause. A supervisor can be a child of another, which restarts it then.

    A killed process is noticed by the kernel's evidence; a small actor in a new process is up some hundredth of a
    second later. There is no pause before a restart.

    Args:
        children: at first; see also `start_child`.
        strategy: "one_for_one" restarts the child that ended, "one_for_all" all of them, "rest_for_one" it and those
            after it in the list. A temporary child that is stopped along with others is not started again.
        max_restarts, within_s: the intensity: how many restarts, of all children together, in a sliding window.

    Raises:
        ValueError: two children have one name, or a value makes no sense.
    """

    def __init__(
        self,
        children: Sequence[Child[Any]] = (),
        strategy: Strategy | str = Strategy.ONE_FOR_ONE,
        *,
        max_restarts: int = 3,
        within_s: float = 5.0,
    ) -> None:
        if max_restarts < 0 or not within_s > 0:
            raise ValueError(f"max_restarts is {max_restarts}, within_s is {within_s}; not negative, and above 0")
        instance = context().actor_instance
        if not isinstance(instance, ActorInstance):
            raise RuntimeError("a Supervisor is an actor: procs.spawn(name, Supervisor, children)")
        machine = Restarts(_one_of(Strategy, strategy), Window(max_restarts, within_s))
        self._shell = _Shell(instance, machine)
        self._shell.begin(list(children))

    if TYPE_CHECKING:

        @overload
        def child(self, which: Child[A], *, wait_s: float = ...) -> A: ...
        @overload
        def child(self, which: str, *, wait_s: float = ...) -> Any: ...
        def child(self, which: Any, *, wait_s: float = WAIT_S) -> Any:
            """A child by name, as a mesh that goes on working over restarts: see `SupervisedMesh`.

            Called on what `spawn` returned, or in the supervisor itself. By name it asks the supervisor what the child
            looks like, and blocks for that: one round trip, which waits for the supervisor's constructor and for no
            other code of it. By the `Child` itself it asks nothing, and the type is known. In async code use that, or
            `await supervisor.get_child.call_one(name)`.

            Args:
                wait_s: how long a call waits while the child is being restarted.

            Raises:
                MeshError: there is no child of that name.
                SupervisionError: the supervisor has ended.
                TimeoutError: it has not answered within `wait_s`.
                ValueError: the mesh has several supervisors.
            """

    else:
        child = MeshMethod(_child)

    @concurrent_endpoint
    async def get_child(self, name: str, wait_s: float = WAIT_S) -> Any:
        """As `child`, for async code. An unknown name is a MeshError, inside an ActorError."""
        return self.child(name, wait_s=wait_s)

    @concurrent_endpoint
    async def start_child(self, child: Child[Any]) -> Any:
        """One more child, the youngest. Answers when it is up, with what `child` gives.

        Raises (inside an ActorError): ValueError, when the name is taken or the supervisor is ending; RuntimeError,
        when it could not be started, and then it is forgotten.
        """
        self._shell.add(child)
        down = await self._shell.settled(child.name)
        if down is not None:
            raise RuntimeError(f"child {child.name!r} was not started: {down}")
        return self.child(child.name)

    @concurrent_endpoint
    async def stop_child(self, name: str) -> None:
        """Stop a child, within its time, and forget it. Answers when nothing of it is left.

        Raises (inside an ActorError): ValueError, when there is none.
        """
        if not self._shell.known(name):
            raise ValueError(f"there is no child {name!r} to stop")
        self._shell.remove(name)
        while self._shell.known(name):
            await self._shell.settled(name)

    @concurrent_endpoint
    async def children(self) -> list[ChildStatus]:
        """All children that are not over, oldest first."""
        return self._shell.status()

    def __supervise__(self, failure: MeshFailure) -> bool:
        """A subclass that owns more than its children asks this first."""
        return self._shell.supervise(failure)


__all__ = ["Child", "ChildStatus", "Phase", "Supervisor"]
