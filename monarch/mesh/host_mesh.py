"""Meshes of hosts: where processes are spawned."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from operator import index as as_int
from typing import TYPE_CHECKING, Any, Self

from attrs import evolve

from monarch.core import settings
from monarch.core.future import Future
from monarch.core.ids import ProcId, Uid, new_number
from monarch.core.monitor import PeerGone
from monarch.errors import MeshError, SupervisionError
from monarch.launch.bootstrap import BootstrapCommand, default_bootstrap_cmd
from monarch.mesh.actor import Actor
from monarch.mesh.context import ActorInstance, context
from monarch.mesh.dispatch import settle_result
from monarch.mesh.endpoint import endpoint
from monarch.mesh.lines import Origin
from monarch.mesh.members import describe_member
from monarch.mesh.ownership import OwnedProcs, check_ended, joined
from monarch.mesh.proc_mesh import ProcMesh, _spawn_callbacks
from monarch.mesh.shape import Extent, Point, Region, Slice
from monarch.mesh.starting import LaunchRequest
from monarch.mesh.view import MeshView, overridable

if TYPE_CHECKING:
    from monarch.mesh.attach import Attachment

Bootstrap = Callable[[], Any]
CommandFor = BootstrapCommand | Callable[[Point], BootstrapCommand]

_MOST_PROCS = 10_000  # on one host: a slip of the keyboard must not take the machine down
_BINDINGS = ("cpunodebind", "membind", "physcpubind", "cpus")


class _Setup(Actor):
    """Runs the bootstrap function of a process before any other actor is made there."""

    def __init__(self, function: Bootstrap) -> None:
        self._function = function
        self._error: BaseException | None = None

    @endpoint
    async def run(self) -> None:
        """Run it, and let the process go on, whatever comes of it."""
        from monarch.core.exceptions import text_of, type_name

        runtime: Any = context().actor_instance.proc_runtime
        try:
            await settle_result(self._function)
        except BaseException as error:
            self._error = error
            text = f"{type_name(error)}: {text_of(error)}"
            runtime.agent.setup_ended(runtime.failed(f"the bootstrap function of its process raised {text}", error))
        else:
            runtime.agent.setup_ended(None)

    @endpoint
    async def run_result(self) -> None:
        if self._error is not None:
            raise self._error


class HostMesh(MeshView):
    """Hosts, by named dimensions; `this_host()` has none. The mesh that `attach_to_workers` returned is owned: only it
    can be shut down."""

    def __init__(
        self,
        hosts: Sequence[ProcId],
        region: Region,
        *,
        command: CommandFor | None = None,
        attachments: Sequence[Attachment] | None = None,
    ) -> None:
        self._attachments = attachments
        self._ended: str | None = None
        self._hosts = hosts  # [position in the view]: the process in which the host's agent lives
        self._region = region
        self._command = command
        self._root: HostMesh = self  # what this is a view of

    @classmethod
    def _of_host(cls, host: ProcId) -> HostMesh:
        return cls([host], Region((), Slice(0, (), ())))

    def _with_region(self, region: Region) -> HostMesh:
        positions = self._region._slice
        return self._view([self._hosts[positions.index(base)] for base in region._slice], region, self._command)

    def _view(self, hosts: Sequence[ProcId], region: Region, command: CommandFor | None) -> HostMesh:
        self._refuse_ended()
        view = HostMesh(hosts, region, command=command)
        view._root = self._root
        return view

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Bootstrap | None = None,
        name: str | None = None,
        proc_bind: Sequence[Mapping[str, str]] | None = None,
        bootstrap_command: CommandFor | None = None,
    ) -> ProcMesh:
        """Start processes on every host of the view. Returns at once; what fails shows on `initialized` or first use.

        Args:
            per_host: label → size of the dimensions within a host; None for one process on each.
            bootstrap: function that runs in each process before any actor of the user's; may be async.
            name: of the mesh, for people.
            proc_bind: for each process of a host, what to bind it to, with the keys of `numactl` (cpunodebind, membind,
                physcpubind), or "cpus" for `taskset`.
            bootstrap_command: how to start the interpreter, or a function from the Point of the process to that.

        Raises:
            ValueError: a label is there twice, a size is not positive, or `proc_bind` has the wrong length.
            TypeError: an argument is not of its kind.
            MeshError: this mesh has been stopped, or the client shut down.
            RuntimeError: an actor's process imports the module that calls this.
        """
        self._refuse_ended()
        _refuse_import()
        per_host = _checked_sizes(per_host)
        _check_kinds(bootstrap, name, proc_bind, bootstrap_command)
        name = "anon" if name is None else name
        labels = [*self._region.labels, *per_host]
        if len(set(labels)) != len(labels):
            twice = sorted({label for label in labels if labels.count(label) > 1})
            raise ValueError(f"per_host repeats the dimension {', '.join(twice)} of the host mesh")
        extent = Extent(labels, [*self._region.extent.sizes, *per_host.values()])
        each = math.prod(per_host.values())
        if proc_bind is not None and len(proc_bind) != each:
            raise ValueError(f"proc_bind length ({len(proc_bind)}) must equal procs_per_host ({each})")
        command = bootstrap_command if bootstrap_command is not None else self._command
        forwarded = self.stream_logs
        requests = []
        for rank in range(extent.nelements):
            point = Point(rank, extent)
            proc = ProcId(Uid.instance(name), "", self._hosts[rank // each])
            start, env = _started_by(command, point, None if proc_bind is None else proc_bind[rank % each])
            title = f"monarch: {name}{point if labels else ''}"
            origin = Origin(name, rank) if forwarded else None
            requests.append(LaunchRequest(proc, title, env, start, bootstrap is not None, origin))

        mesh = _launched(name, extent.region, requests)
        if bootstrap is not None:
            mesh._setup = mesh._spawn("setup", _Setup, (bootstrap,), {}, is_setup=True)
            mesh._setup.run.call()
        for callback in list(_spawn_callbacks):
            callback(mesh)
        return mesh

    def with_python_executable(self, path: str | os.PathLike[str]) -> HostMesh:
        """The same hosts; processes spawned on this view run that interpreter."""
        command = evolve(default_bootstrap_cmd(), program=os.fspath(path))
        return self._view(self._hosts, self._region, command)

    @property
    def is_fake_in_process(self) -> bool:
        """Whether spawned "processes" are threads of this one, as over `inproc`."""
        runtime: Any = context().actor_instance.proc_runtime
        return runtime.gateway.transport.scheme == "inproc" and runtime.host in self._hosts

    @overridable
    def initialized(self) -> Future[bool]:
        """Resolves to True when every host has answered.

        Raises (the future): MeshError, when a worker could not be attached to; says which, and why.
        SupervisionError, when a host is gone.
        """
        self._refuse_ended()
        runtime = context().actor_instance.proc_runtime
        attachments = self._attachments or ()
        asked = [each.answer for each in attachments] or [
            runtime.request(host, "await_up", [host.key]) for host in self._hosts
        ]
        result: Future[bool] = Future._pending(runtime.driver, lambda: "the hosts of a mesh")
        all_answered = joined(runtime, asked)

        def check() -> bool:
            for each in attachments:
                failure = each.failure()
                if failure is not None:
                    raise failure
            try:
                all_answered.get(0)
            except PeerGone as error:
                raise SupervisionError(f"a host of the mesh is gone: {error.down}") from None
            return True

        all_answered._on_done(lambda: result._complete(check))
        return result

    def shutdown(self) -> Future[None]:
        """End all processes of these hosts, and the workers that serve them, for whatever clients.

        Raises:
            MeshError: this mesh is a reference, a view, or this host itself; or it has been shut down.
        """
        if self._attachments is None:
            raise MeshError(
                "cannot shut down `HostMesh` that is a reference instead of owned: shut down the whole mesh that was "
                "attached to, or its job (`kill`); the client's own host ends with it: shutdown_context()"
            )
        self._refuse_ended()
        return self._leave("shut down", shut_down=True)

    def stop(self) -> Future[None]:
        """End the processes that the current actor spawned on these hosts; on an owned mesh, all that were spawned
        through it. Workers go on, and other clients with them.

        Raises:
            MeshError: an owned mesh has been stopped or shut down.
        """
        self._refuse_ended()
        if self._attachments is not None:
            return self._leave("stopped", shut_down=False)
        owner = context().actor_instance
        return joined(owner.proc_runtime, [each.stop("the host mesh is stopped") for each in self._owned_by(owner)])

    def _owned_by(self, owner: Any) -> list[OwnedProcs]:
        """The process meshes of `owner` on these hosts."""
        hosts = set(self._hosts)
        return [
            each
            for each in list(owner.owned.values())
            if isinstance(each, OwnedProcs) and hosts.intersection(each.hosts)
        ]

    def _leave(self, ended: str, *, shut_down: bool) -> Future[None]:
        owner = context().actor_instance
        runtime = owner.proc_runtime
        for each in self._owned_by(owner):
            each.expect_end(f"its hosts are {ended}")
        self._ended = ended
        left = [each.leave(f"its hosts are {ended}", shut_down=shut_down) for each in self._attachments or ()]
        result: Future[None] = Future._pending(runtime.driver, lambda: f"a host mesh that is being {ended}")

        def check() -> None:
            for each in self._owned_by(owner):
                owner.owned.pop(each.number, None)
            try:
                for answer in left:
                    check_ended(answer)
            except Exception:
                self._ended = None
                raise

        joined(runtime, left)._on_done(lambda: result._complete(check))
        return result

    def _refuse_ended(self) -> None:
        if self._root._ended is not None:
            raise MeshError(f"HostMesh has already been {self._root._ended}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._root._ended is None:
            await (HostMesh.stop(self) if self._attachments is None else HostMesh.shutdown(self))

    async def sync_workspace(self, workspace: Any, conda: bool = False, auto_reload: bool = False) -> None:
        raise NotImplementedError("sync_workspace is planned; this version cannot copy files to hosts")

    @property
    def stream_logs(self) -> bool:
        """Whether what processes print, that are spawned now, comes through the client."""
        return settings.get("enable_log_forwarding") and not self.is_fake_in_process

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (tuple(self._hosts), self._region, self._command)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostMesh):
            return NotImplemented
        return list(self._hosts) == list(other._hosts) and self._region.extent == other._region.extent

    def __hash__(self) -> int:
        return hash((tuple(self._hosts), self._region.extent))

    def __repr__(self) -> str:
        return f"<HostMesh {dict(self._region.extent)}>"


def _refuse_import() -> None:
    """Raises: RuntimeError, where a process imports the class of an actor, and the module starts processes: they would
    import it, too, and start more."""
    actor = context().actor_instance
    if isinstance(actor, ActorInstance) and actor.is_importing:
        raise RuntimeError(
            f"spawn_procs() was called while {actor.class_name} was imported for the actor {actor.place}: a module "
            "that starts processes where it is imported does so in each of them; put that under "
            '`if __name__ == "__main__":`'
        )


def _checked_sizes(per_host: Mapping[str, int] | None) -> dict[str, int]:
    """Raises: TypeError for what is no mapping from labels to sizes, ValueError for sizes that cannot be."""
    if per_host is None:
        return {}
    if not isinstance(per_host, Mapping):
        example = {"gpus": per_host if isinstance(per_host, int) else 4}
        raise TypeError(f"per_host is {per_host!r}; it must name its dimensions: {example}")
    sizes: dict[str, int] = {}
    for label, size in per_host.items():
        if not isinstance(label, str) or not label:
            raise TypeError(f"per_host has the label {label!r}; it must be a non-empty str")
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"per_host has the size {size!r} for {label!r}; it must be an int")
        sizes[label] = as_int(size)
        if sizes[label] < 1:
            raise ValueError(f"per_host has the size {size} for {label!r}; it must be at least 1")
    if math.prod(sizes.values()) > _MOST_PROCS:
        raise ValueError(f"per_host is {sizes}: more than {_MOST_PROCS} processes on a host")
    return sizes


def _check_kinds(bootstrap: object, name: object, proc_bind: object, bootstrap_command: object) -> None:
    if bootstrap is not None and not callable(bootstrap):
        raise TypeError(f"bootstrap is {bootstrap!r}; it must be a function without arguments")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is {name!r}; it must be a str")
    if proc_bind is not None and (
        not isinstance(proc_bind, Sequence) or not all(isinstance(binding, Mapping) for binding in proc_bind)
    ):
        raise TypeError(f"proc_bind is {proc_bind!r}; it must be a list with a dict for each process of a host")
    if bootstrap_command is not None and not (
        callable(bootstrap_command) or isinstance(bootstrap_command, BootstrapCommand)
    ):
        raise TypeError(f"bootstrap_command is {bootstrap_command!r}; it must be a BootstrapCommand, or give one")


def _started_by(
    command: CommandFor | None, point: Point, binding: Mapping[str, str] | None
) -> tuple[BootstrapCommand | None, dict[str, str]]:
    """How the process at `point` starts, and its environment on top of the host's; None: it is forked."""
    start = command(point) if callable(command) else command
    if start is not None and not isinstance(start, BootstrapCommand):
        raise TypeError(f"bootstrap_command gave {start!r} for {point}; it must give a BootstrapCommand")
    if binding is not None:
        start = bound(start if start is not None else default_bootstrap_cmd(), binding)
    if start is None:
        return None, {}
    return None if start.is_default else start, dict(start.env)


def _launched(name: str, region: Region, requests: Sequence[LaunchRequest]) -> ProcMesh:
    """Processes on their way, one for each rank of `region`, which the current actor owns."""
    owner = context().actor_instance
    owner.refuse_closed()
    runtime: Any = owner.proc_runtime
    asked: dict[Any, list[LaunchRequest]] = {}  # by host
    for request in requests:
        asked.setdefault(request.proc.keeper, []).append(request)
    hosts = {host: [request.proc for request in each] for host, each in asked.items()}
    number = new_number()
    owned = OwnedProcs(owner, number, name, hosts, lambda rank: describe_member("process", name, region, rank))
    owner.owned[number] = owned
    runtime.books.owners.setdefault(owner.actor_id.number, owner)
    for host, each in asked.items():
        for proc in hosts[host]:
            runtime.gateway.peers.of(proc)  # known from now on: it is gone when its host is
        runtime.tell(host, "launch", owner.actor_id, each)
    return ProcMesh(name, [request.proc for request in requests], region, owned)


def _received(hosts: tuple[ProcId, ...], region: Region, command: CommandFor | None) -> HostMesh:
    return HostMesh(hosts, region, command=command)


def bound(command: BootstrapCommand, binding: Mapping[str, str]) -> BootstrapCommand:
    """`command`, run under `numactl` or `taskset`.

    Raises:
        ValueError: a key that is not known, or "cpus" together with others.
    """
    unknown = [key for key in binding if key not in _BINDINGS]
    if unknown:
        raise ValueError(f"proc_bind has {', '.join(unknown)}; it can have {', '.join(_BINDINGS)}")
    if "cpus" in binding:
        if len(binding) > 1:
            raise ValueError("proc_bind has 'cpus' (for taskset) together with keys for numactl: use one or the other")
        wrapper = ["taskset", "-c", str(binding["cpus"])]
    else:
        wrapper = ["numactl", *(f"--{key}={value}" for key, value in binding.items())]
    return BootstrapCommand(wrapper[0], None, (*wrapper[1:], command.program, *command.args), command.env)


def this_host() -> HostMesh:
    """The host of the current actor, without dimensions: `this_host().spawn_procs({"gpus": 2})`."""
    runtime: Any = context().actor_instance.proc_runtime
    return HostMesh._of_host(runtime.host)


def this_proc() -> ProcMesh:
    """The process of the current actor, without dimensions."""
    return context().actor_instance.proc
