"""The supervisor: an actor that owns children by specification.

The decisions are made in `supervision.restarts`, and carried out in `incarnations`; how a child is called over its
restarts is in `supervised`. Here is what users see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from attrs import define

from monarch.core import duration
from monarch.core.future import Future
from monarch.core.ids import ActorId
from monarch.errors import MeshError
from monarch.mesh.actor import Actor, MeshMethod, checked_by
from monarch.mesh.actor_mesh import ActorMesh
from monarch.mesh.child_line import Current, Path, Refused, refused_by, refused_error
from monarch.mesh.child_spec import Child, ChildStatus, one_of
from monarch.mesh.context import ActorInstance, context
from monarch.mesh.endpoint import concurrent_endpoint
from monarch.mesh.incarnations import Shell
from monarch.mesh.mesh_proc import MeshProc
from monarch.mesh.supervised import WAIT_S, SupervisedMesh
from monarch.supervision.failure import MeshFailure
from monarch.supervision.policy import Strategy, Window
from monarch.supervision.restarts import Restarts, refuse_twins

A = TypeVar("A", bound=Actor)


def _child(self: Any, which: Any, *, wait_s: float = WAIT_S) -> Any:
    """See `Supervisor.child`. `self` is the supervisor, or a mesh of it."""
    if isinstance(self, Supervisor):
        path = Path(self._shell.instance.actor_id, ())
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
    return SupervisedMesh(path, prototype._class_or_pickled(), prototype._class_name, region, region, wait_s)


def _shape(self: Any, path: Path, wait_s: float) -> ActorMesh[Any]:
    name = path.names[-1]
    if isinstance(self, Supervisor):
        prototype = self._shell.directory.prototype(name)
        if prototype is None:
            raise MeshError(f"{path.text} does not exist")
        return prototype
    runtime = context().actor_instance.proc_runtime
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
    raise refused_error(path, refused_by(kind, found, path), None)


@define(eq=False)
class _AskShape:
    """The shape of the child of a child, asked for when its supervisor is up."""

    _runtime: MeshProc
    _path: Path
    _asked: Future[ActorMesh[Any]]

    def send(self, current: Current, may_wait: bool) -> None:
        (proc,) = current.mesh._procs
        answer = self._runtime.request(proc, "child", "shape", current.mesh._number, self._path.names[-1])
        answer._on_done(lambda: self._asked._complete(lambda: _read_shape(self._path, *answer.get(0))))

    def refuse(self, refused: Refused) -> None:
        self._asked._fail(refused_error(self._path, refused.of_children(), None))


def _machine(
    children: Sequence[Child[Any]] = (),
    strategy: Strategy | str = Strategy.ONE_FOR_ONE,
    *,
    max_restarts: int = 3,
    within_s: float = 5.0,
) -> Restarts:
    """Of the arguments of a `Supervisor`. Raises: ValueError, TypeError, when they make no sense."""
    if max_restarts < 0:
        raise ValueError(f"max_restarts is {max_restarts}; it must not be negative")
    duration.check("within_s", within_s, above_0=True)
    for child in children:
        if not isinstance(child, Child):
            raise TypeError(f"a Supervisor takes Child(name, Class, ...), not {child!r}")
    refuse_twins([child.name for child in children])
    return Restarts(one_of(Strategy, strategy), Window(max_restarts, within_s))


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

    The kernel tells of a killed process at once; a small actor on a new one usually answers within 0.1 s of the kill,
    one whose old process has yet to end within 0.2 s. There is no pause before a restart.

    Args:
        children: at first; see also `start_child`.
        strategy: "one_for_one" restarts the child that ended, "one_for_all" all of them, "rest_for_one" it and those
            after it in the list. A temporary child that is stopped along with others is not started again.
        max_restarts, within_s: the intensity: how many restarts, of all children together, in a sliding window.

    Raises:
        ValueError, TypeError: two children have one name, or a value makes no sense. At the spawn.
    """

    @checked_by(_machine)
    def __init__(
        self,
        children: Sequence[Child[Any]] = (),
        strategy: Strategy | str = Strategy.ONE_FOR_ONE,
        *,
        max_restarts: int = 3,
        within_s: float = 5.0,
    ) -> None:
        machine = _machine(children, strategy, max_restarts=max_restarts, within_s=within_s)
        instance = context().actor_instance
        if not isinstance(instance, ActorInstance):
            raise RuntimeError("a Supervisor is an actor: procs.spawn(name, Supervisor, children)")
        self._shell = Shell(instance, machine)
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

        Raises (inside an ActorError): ValueError, when the name is taken or the supervisor is ending; MeshError, when
        it could not be started, and then it is forgotten.
        """
        self._shell.add(child)
        down = await self._shell.settled(child.name)
        if down is not None:
            raise MeshError(f"child {child.name!r} was not started: {down}")
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


__all__ = ["Child", "ChildStatus", "Supervisor"]
