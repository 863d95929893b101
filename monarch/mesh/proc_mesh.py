"""Meshes of processes: where actors are spawned."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, cast, get_origin

from monarch.core import codec, duration
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.future import Future
from monarch.core.ids import ActorId, ProcId, new_number
from monarch.core.monitor import PeerGone
from monarch.errors import MeshError, SupervisionError
from monarch.mesh.actor import Actor, class_of
from monarch.mesh.actor_mesh import RESERVED, ActorMesh
from monarch.mesh.agent import Names, Parentage
from monarch.mesh.casting import send_to_all
from monarch.mesh.context import context
from monarch.mesh.lines import Origin
from monarch.mesh.members import describe_member, meet
from monarch.mesh.ownership import OwnedActors, OwnedProcs, joined
from monarch.mesh.shape import Point, Region
from monarch.mesh.view import MeshView, overridable
from monarch.transports.base import Buffer

if TYPE_CHECKING:
    from monarch.mesh.context import Spawner
    from monarch.mesh.host_mesh import HostMesh
    from monarch.mesh.tensor.dispatch import Activation
    from monarch.mesh.tensor.handle import Tensor

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")

_spawn_callbacks: list[Callable[[ProcMesh], None]] = []


def register_proc_mesh_spawn_callback(callback: Callable[[ProcMesh], None]) -> None:
    """Call `callback(mesh)` at every spawn of processes by this one."""
    _spawn_callbacks.append(callback)


def unregister_proc_mesh_spawn_callback(callback: Callable[[ProcMesh], None]) -> None:
    """Raises: ValueError when it is not registered."""
    _spawn_callbacks.remove(callback)


def spawnable(name: str, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> type[Any]:
    """The class that `ProcMesh.spawn` with these arguments makes actors of: `Box` for `Box[int]`.

    Raises:
        ValueError, TypeError: as `ProcMesh.spawn`.
    """
    cls = get_origin(cls) or cls
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise ValueError(f"spawn needs a subclass of Actor, not {cls!r}")
    if not isinstance(name, str):
        raise TypeError(f"the name of a mesh is a str, not {name!r}")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))  # type: ignore[attr-defined]
        raise TypeError(f"{cls.__qualname__} is abstract and cannot be spawned: it has no {missing}")
    known = class_of(cls)
    taken = sorted(n for n in known.endpoints if n.startswith("_") and (n in RESERVED or hasattr(ActorMesh, n)))
    if taken:
        raise ValueError(f"{known.name} has endpoints whose names meshes use themselves: {', '.join(taken)}")
    known.check_kinds()
    known.check_arguments(args, kwargs)
    return cls


class ProcMesh(MeshView):
    """Processes, by named dimensions: those of their hosts, then those within a host."""

    def __init__(
        self,
        name: str,
        procs: Sequence[ProcId],
        region: Region,
        owned: OwnedProcs | None = None,
        setup: ActorMesh[Any] | None = None,
    ) -> None:
        self._name = name
        self._procs = procs  # [position in the view]
        self._region = region
        self._owned = owned
        self._setup = setup
        self._root: ProcMesh = self  # what this is a view of
        self._engine: Any = None  # of distributed tensors, at the root (`monarch.mesh.tensor.engine`)
        self._known: tuple[ActorId, Region, Buffer] | None = None  # the last owner, and what `_parentage` says of it

    def _with_region(self, region: Region) -> ProcMesh:
        positions = self._region._slice
        setup = None if self._setup is None else self._setup._with_region(region)
        procs = [self._procs[positions.index(base)] for base in region._slice]
        view = ProcMesh(self._name, procs, region, None, setup)
        view._root = self._root
        return view

    def _for_owner(self) -> ProcMesh:
        """The same processes, for one more owner of what is made on them."""
        return ProcMesh(self._name, self._procs, self._region)

    def _member(self, position: int) -> ProcMesh:
        """One process, as a mesh of no dimensions."""
        base = self._region._slice[position]
        return self._with_region(Region((), type(self._region._slice)(base, (), ())))

    def _by_host(self) -> dict[ProcId, list[int]]:
        """The keys of the processes, by the process in which the agent of their host lives."""
        found: dict[ProcId, list[int]] = {}
        for proc in self._procs:
            found.setdefault(proc.keeper or proc, []).append(proc.key)
        return found

    # ---- actors

    def spawn(self, name: str, Class: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> A:
        """One actor of `Class` in each process, constructed there with these arguments. Returns at once.

        Messages may be sent at once; they wait for the constructor. The current actor becomes the owner.

        Raises:
            ValueError: `Class` is no subclass of Actor, or has sync and async endpoints where that is forbidden.
            TypeError: the arguments do not fit its constructor.
            MeshError: this mesh has been stopped, or the client shut down.
        """
        cls = spawnable(name, Class, args, kwargs)
        self._refuse_stopped()
        return cast(A, self._spawn(name, cls, args, kwargs))

    def _spawn(
        self, name: str, cls: type[Any], args: Any, kwargs: Any, number: int = 0, is_setup: bool = False
    ) -> ActorMesh[Any]:
        owner = context().actor_instance
        owner.refuse_closed()
        runtime = owner.proc_runtime
        number = number or new_number()
        class_name = class_of(cls).name
        whole, parentage = self._parentage(owner)
        parts = [*Names(name, class_name, is_setup).encode(), parentage, *codec.encode_call((cls, *args), kwargs)]
        books = runtime.books
        owned = OwnedActors(
            owner, books, number, name, self._procs, lambda base: describe_member(class_name, name, whole, base)
        )
        owner.owned[number] = books.meshes[number] = owned
        books.owners.setdefault(owner.actor_id.number, owner)
        source = owner.actor_id.number
        # Silent when it comes back: the end of a process is told by its monitors.
        spawn = Envelope(Kind.SPAWN, 0, number, 0, runtime.key, source, parts, Flag.SILENT)
        send_to_all(runtime, spawn, [(proc.key, proc) for proc in self._procs])
        for rank, proc in enumerate(self._procs):
            down = runtime.monitors.gone((proc.key, 0))
            if down is not None:
                # It was gone before this mesh could hear of it; who owns the process has heard already.
                told = any(isinstance(each, OwnedProcs) and proc.key in each.ranks for each in owner.owned.values())
                owned.member_down(rank, down, told=told)
        meet(number, name, class_name, self._procs, whole, whole)
        return ActorMesh(number, name, cls, class_name, self._procs, whole, whole, owned)

    def _parentage(self, owner: Spawner) -> tuple[Region, Buffer]:
        """The region of what `owner` spawns here, and the encoded `Parentage` of its members."""
        known = self._known
        if known is None or known[0] is not owner.actor_id:
            whole = Region(self._region.labels, type(self._region._slice).new_row_major(self._region._slice._sizes))
            members = ProcMesh(self._name, tuple(self._procs), whole)
            (encoded,) = codec.encode(Parentage(members, owner.actor_id, owner.record))
            known = self._known = owner.actor_id, whole, encoded
        return known[1:]

    # ---- life

    def _refuse_stopped(self) -> None:
        if self._owned is not None and self._owned.stopping is not None:
            raise MeshError(f"`ProcMesh` has already been stopped: {self._name!r}, {self._owned.stopping}")

    @overridable
    def initialized(self) -> Future[bool]:
        """Resolves to True when every process is up and its bootstrap function is through.

        Raises (the future): ActorError, when that raised; SupervisionError "error spawning proc mesh: statuses: ...",
        when a process could not start: of each host it names one.
        """
        self._refuse_stopped()
        runtime = context().actor_instance.proc_runtime
        hosts = self._by_host()
        asked = [runtime.request(host, "await_up", keys) for host, keys in hosts.items()]
        setup: list[Future[Any]] = [] if self._setup is None else [self._setup.run_result.call()]
        result: Future[bool] = Future._pending(runtime.driver, lambda: f"the start of process mesh {self._name!r}")

        def check() -> bool:
            statuses = []
            for keys, answer in zip(hosts.values(), asked, strict=True):
                try:
                    said = answer.get(0)
                except PeerGone as error:
                    said = "down", str(error.down), keys[0]
                if said[0] == "down":
                    statuses.append(f"{self._place(said[2])}: {said[1]}")
            if statuses:
                raise SupervisionError(f"error spawning proc mesh: statuses: {'; '.join(statuses)}")
            for answer in setup:
                answer.get(0)
            return True

        joined(runtime, [*asked, *setup])._on_done(lambda: result._complete(check))
        return result

    def _place(self, key: int) -> str:
        """Which process that is: `name{'gpus': 1/2}`."""
        position = next(i for i, proc in enumerate(self._procs) if proc.key == key)
        return f"{self._name}{Point(position, self._region.extent) if self._region.labels else ''}"

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Stop all actors gracefully, then the processes; resolves when every process is gone, or lost with its host.

        Raises:
            ValueError: this is a view or a reference; only what `spawn_procs` returned can be stopped.
        """
        if self._owned is None:
            raise ValueError(
                f"ProcMesh is not owned; must be stopped by an owner: {self._name!r} is a view or a reference"
            )
        return self._owned.stop(reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await ProcMesh.stop(self)

    @property
    def host_mesh(self) -> HostMesh:
        """The host of this process.

        Raises:
            NotImplementedError: the mesh has not exactly one process.
        """
        from monarch.mesh.host_mesh import HostMesh

        if len(self._procs) != 1:
            raise NotImplementedError(f"host_mesh works on a single process, and {self._name!r} has {len(self._procs)}")
        (proc,) = self._procs
        return HostMesh._of_host(proc.keeper or proc)

    # ---- distributed tensors

    def activate(self) -> Activation:
        """Run torch operators of this thread on these processes: `with procs.activate(): ...`.

        In force from this call on, until the `with` block is left. The first call spawns the workers.
        """
        from monarch.mesh.tensor import entry

        return entry.activate(self)

    def _spawn_tensor_workers(self) -> None:
        from monarch.mesh.tensor import entry

        entry.engine_of(self)

    def rank_tensor(self, dims: str | Sequence[str] | None) -> Tensor:
        """A distributed tensor that holds each process's coordinate; of several dimensions, or of all (None), the
        row-major rank in them.

        Raises:
            KeyError: no such dimension.
            ValueError: a dimension is there twice.
        """
        from monarch.mesh.tensor import entry

        return entry.rank_tensor(self, dims)

    def rank_tensors(self) -> dict[str, Tensor]:
        """`rank_tensor` of every dimension."""
        return {label: self.rank_tensor(label) for label in self._region._labels}

    # ---- output

    def logging_option(
        self, stream_to_client: bool = False, aggregate_window_sec: int | None = None, level: int = logging.INFO
    ) -> Coroutine[Any, Any, None]:
        """How the client shows what these processes print, where it is forwarded (setting `enable_log_forwarding`).

        It takes effect without an `await`, too; who awaits it knows that it has, and what went wrong.

        Args:
            stream_to_client: whether it shows it at all.
            aggregate_window_sec: equal lines that members of an actor mesh print within so many seconds are shown as
                one, which says how many there were and of which ranks. None shows each line as it comes.
            level: Python log records below it are not shown by the handlers of the processes' root loggers.

        Raises:
            ValueError: `level` is not from 0 to 255, or the window is not positive.
            TypeError: `level` is no int, or the window no number.
        """
        if not isinstance(level, int):
            raise TypeError(f"level is {level!r}; it must be an int, such as logging.INFO")
        if not 0 <= level <= 255:
            raise ValueError(f"level is {level}; it must be from 0 to 255")
        window_s = aggregate_window_sec
        if window_s is not None:
            duration.check("aggregate_window_sec", window_s, above_0=True)
        self._refuse_stopped()
        runtime = context().actor_instance.proc_runtime
        for proc in self._procs:
            runtime.tell(proc, "log_level", level)
        asked = [runtime.request(host, "forwards", keys) for host, keys in self._by_host().items()]
        shown: Future[bool] = Future._pending(runtime.driver)

        def show() -> None:
            forwarded = {key for answer in asked if answer.exception(0) is None for key in answer.get(0)[0]}
            ranked = zip(self._procs, self._region._slice, strict=True)
            origins = {proc.key: Origin(self._name, rank) for proc, rank in ranked if proc.key in forwarded}
            request = (runtime.root, "show_output", origins, bool(stream_to_client), window_s)
            told = [runtime.request(*request)] if origins else []

            def forwards_all() -> bool:
                for answer in (*asked, *told):
                    answer.get(0)
                return len(origins) == len(self._procs)

            joined(runtime, told)._on_done(lambda: shown._complete(forwards_all))

        joined(runtime, asked)._on_done(show)

        async def in_effect() -> None:
            if not await shown:
                warnings.warn(
                    f"log forwarding was not enabled when {self._name!r} was spawned: its processes "
                    "write to their host's output themselves. Call "
                    "monarch.config.configure(enable_log_forwarding=True) before.",
                    stacklevel=2,
                )

        return in_effect()

    async def sync_workspace(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("sync_workspace is a method of HostMesh")

    def to_table(self) -> str:
        """The processes, one a line: rank, coordinates, id."""
        rows = [("rank", "point", "process")]
        for position, base in enumerate(self._region._slice):
            point = self._region.point_of_base_rank(base)
            rows.append((str(base), str(point), str(self._procs[position].uid)))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        padded = (map(str.ljust, row, widths) for row in rows)
        return "\n".join("  ".join(cells).rstrip() for cells in padded)

    # ---- references

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcMesh, (self._name, tuple(self._procs), self._region)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcMesh):
            return NotImplemented
        return list(self._procs) == list(other._procs) and self._region == other._region

    def __hash__(self) -> int:
        return hash((tuple(self._procs), self._region))

    def __repr__(self) -> str:
        return f"<ProcMesh {self._name!r} {dict(self._region.extent)}>"
