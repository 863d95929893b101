"""Meshes of actors: the reference that endpoints are called on, whole or in views.

An `ActorMesh` is a list of processes and one number: each member is the actor of that number in its process. It holds
no live object, so that it pickles; only the one that `spawn` returned may stop its actors.

An endpoint wins over a method of the mesh that has its name. The mesh's own is then reached through the class:
`ActorMesh.stop(actors)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch import compiled
from monarch.core import codec
from monarch.core.cast import Branch
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.future import Future
from monarch.core.held import undisturbed
from monarch.core.ids import ProcId
from monarch.errors import SupervisionError, it_has
from monarch.mesh.actor import ActorClass, MeshMethod, class_of
from monarch.mesh.casting import LARGE_BYTES, Routes, routes
from monarch.mesh.context import context
from monarch.mesh.dispatch import READY
from monarch.mesh.endpoint import Endpoint, PlainMethod, describe_call
from monarch.mesh.members import Members, describe_member, meet
from monarch.mesh.replies import MeshReply
from monarch.mesh.shape import Region
from monarch.mesh.view import MeshView, overridable
from monarch.supervision.failure import Member

if TYPE_CHECKING:
    from monarch.mesh.context import Spawner
    from monarch.mesh.mesh_proc import MeshProc
    from monarch.mesh.ownership import OwnedActors

A = TypeVar("A")
_OWN_NAMES = frozenset(
    ["slice", "split", "flatten", "rename", "size", "sizes", "extent", "region", "stop", "initialized"]
)

_FIELDS = (
    "_class_name",
    "_cls",
    "_known",
    "_lanes",
    "_name",
    "_number",
    "_owned",
    "_procs",
    "_region",
    "_routes",
    "_targets",
    "_whole",
)
_FIELDS_OF_SUPERVISED = ("_path", "_seen_in", "_wait_s")
RESERVED = frozenset([*_FIELDS, *_FIELDS_OF_SUPERVISED, READY])
"""Attributes of meshes that an endpoint cannot have the name of."""


class ActorMesh(MeshView, Generic[A]):
    """Actors of one class, one in each process of a mesh. Its attributes are the endpoints of the class."""

    def __init__(
        self,
        number: int,
        name: str,
        cls: type[A] | bytes,
        class_name: str,
        procs: Sequence[ProcId],
        whole: Region,
        region: Region,
        owned: OwnedActors | None = None,
    ) -> None:
        self._number, self._name, self._class_name = number, name, class_name
        self._procs = procs  # [position in the view]
        self._whole = whole  # the region that was spawned
        self._region = region
        self._owned = owned
        self._cls = cls  # the class, or what it is pickled as
        self._known: ActorClass | None = None
        self._targets: list[tuple[int, ProcId]] = [(proc.key, proc) for proc in procs]
        self._routes: tuple[int, Routes, Routes] | None = None  # from which process, for small messages, for large ones
        self._lanes: tuple[Spawner, int | None, compiled.Targets] | None = None  # who sent last, to whom, and how
        if not isinstance(cls, bytes):
            self._install(class_of(cls))

    def _install(self, known: ActorClass) -> None:
        self._known = known
        for name in _OWN_NAMES.intersection(known.endpoints):
            self.__dict__[name] = Endpoint(self, known.endpoints[name])

    def _actor_class(self) -> ActorClass:
        if self._known is None:
            assert isinstance(self._cls, bytes)
            self._install(class_of(codec.decode([self._cls])))
            assert self._known is not None
        return self._known

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name.endswith("__")) or name in ("_known", "_cls"):
            raise AttributeError(name)
        known = self._actor_class()
        spec = known.endpoints.get(name)
        if spec is not None:
            found: Endpoint[Any, Any] = Endpoint(self, spec)
            self.__dict__[name] = found
            return found
        method = inspect.getattr_static(known.cls, name, None)
        if isinstance(method, MeshMethod):
            return method.bound(self)
        if callable(method):
            return PlainMethod(self, name, method)
        raise AttributeError(
            f"actor mesh {self._name!r} of {self._class_name} has no endpoint {name!r}; "
            + it_has(sorted(known.endpoints), name)
        )

    def __dir__(self) -> list[str]:
        return list({*super().__dir__(), *self._actor_class().endpoints})

    # ---- views

    def _with_region(self, region: Region) -> ActorMesh[A]:
        positions = self._region._slice
        procs = [self._procs[positions.index(base)] for base in region._slice]
        cls = self._class_or_pickled()
        view: ActorMesh[A] = ActorMesh(self._number, self._name, cls, self._class_name, procs, self._whole, region)
        view._owner_of_view = self._owned or self.__dict__.get("_owner_of_view")
        return view

    _owner_of_view: Any = None
    _replies_to_any_port = True  # also to one that is not the sink of a call

    @overridable
    def initialized(self) -> Future[None]:
        """Resolves when every member is constructed.

        Raises (the future): SupervisionError "error spawning actor mesh ...", when one could not be.
        """
        here = context()
        owner = here.actor_instance
        reply: MeshReply[None] = MeshReply(here, ActorMesh._members(self, "__init__"))
        extent = self._region.extent
        description = describe_call(READY, extent._labels, extent._sizes)
        ActorMesh._cast(self, owner, [description, *codec.encode_call((), {})], reply.number, None, reply.chain)
        result: Future[None] = Future._pending(owner.proc_runtime.driver, call=reply)

        def ready() -> None:
            try:
                reply.get(0)
            except SupervisionError as error:
                text = f"error spawning actor mesh {self._name!r}: {error}"
                raise SupervisionError(text, failure=error.failure) from error

        reply._on_done(lambda: result._complete(ready))
        return result

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Stop all actors gracefully: each serves what is queued, cleans up, and ends. Their processes live on.

        Raises:
            NotImplementedError: this is a reference or a view; only what `spawn` returned can be stopped.
        """
        owned = self._owned
        if owned is None:
            what = "a view" if self._owner_of_view is not None else "a reference"
            raise NotImplementedError(
                f"actor mesh {self._name!r} is {what}; stop() works on the mesh that spawn() returned, at its owner"
            )
        return owned.stop(reason)

    # ---- sending, for endpoints

    def _members(self, method: str) -> Members:
        class_name, name, whole, bases = self._class_name, self._name, self._whole, self._region._slice

        def describe(position: int) -> Member:
            return describe_member(class_name, name, whole, bases[position])

        return Members(self._number, self._targets, describe, name, method, self._region)

    def _cast(
        self,
        sender: Spawner,
        parts: list[Any],
        reply_port: int,
        only: int | None = None,
        chain: bytes = b"",
        may_wait: bool = True,
    ) -> None:
        """Send a CALL to every member, or `only` to the one at that position. The sender's order per member is given
        here, before anything is sent. `chain`: the calls that it comes from (`core.chain`)."""
        runtime, known = sender.proc_runtime, self._lanes
        if known is None or known[0] is not sender or known[1] != only:
            known = self._find_lanes(sender, only)
        sent = 0
        if not runtime.gateway.is_closed:
            lanes, ttl, own, source = known[2], runtime.message_ttl, runtime.key, sender.actor_id.number
            kind, flags = Kind.CALL, Flag.SEQUENCED
            # One by one, and not from a tuple, which costs 0.25 us more.
            sent = compiled.post(lanes, parts, chain, kind, flags, ttl, self._number, 0, own, source, reply_port)
        if not sent:
            self._send(sender, parts, reply_port, only, chain, may_wait)
        elif sent == compiled.FULL and may_wait:
            runtime.wait_for_room([key for key, *_ in known[2]])
        if may_wait and runtime.backpressure.full:
            for key, _ in self._targets if only is None else (self._targets[only],):
                runtime.backpressure.wait(key, self._number, sender, self._name)

    def _find_lanes(self, sender: Spawner, only: int | None) -> tuple[Spawner, int | None, compiled.Targets]:
        """From whom, to whom, and how to send to all of these in one step that nothing interrupts."""
        ranks = range(len(self._targets)) if only is None else (only,)
        lanes = sender.on_lanes([(self._targets[rank][0], rank) for rank in ranks], self._number)
        if lanes is None:
            return sender, only, ()
        self._lanes = found = sender, only, lanes
        return found

    def _send(
        self, sender: Spawner, parts: list[Any], reply_port: int, only: int | None, chain: bytes, may_wait: bool
    ) -> None:
        """As `_cast`, in any way."""
        runtime = sender.proc_runtime
        ranks: Sequence[int] = ()
        branches: Sequence[Branch] = ()
        if only is None:
            found = self._found_routes(runtime, parts)
            ranks, branches = found.direct, found.branches
        else:
            ranks = (only,)
        # An exception from a signal's handler between a number and its message would leave a hole in the order.
        with undisturbed():
            self._send_all(sender, parts, reply_port, ranks, branches, chain)
        if may_wait:
            # Room is wanted on the links, then on the way by the agents (which say TAKEN), then in the mailboxes.
            runtime.wait_for_room([self._targets[rank][0] for rank in ranks])
            runtime.caster.wait_for_taken(branches)

    def _call_for_tensors(self, endpoint: Endpoint[Any, Any], args: Any, kwargs: Any) -> Any:
        from monarch.mesh.tensor import entry

        return entry.rref(endpoint, args, kwargs)

    def _found_routes(self, runtime: MeshProc, parts: list[Any]) -> Routes:
        """How such a cast from that process reaches the members."""
        known = self._routes
        if known is None or known[0] != runtime.key:
            small, large = routes(runtime, self._targets), routes(runtime, self._targets, few=1)
            known = runtime.key, small, small if small == large else large
            if small.lasting and large.lasting:
                self._routes = known
        _, small, large = known
        return small if small is large or sum(map(len, parts)) < LARGE_BYTES else large

    def _send_all(
        self,
        sender: Spawner,
        parts: list[Any],
        reply_port: int,
        ranks: Sequence[int],
        branches: Sequence[Branch],
        chain: bytes,
    ) -> None:
        runtime = sender.proc_runtime
        own, source, number, targets = runtime.key, sender.actor_id.number, self._number, self._targets
        if branches:
            call = Envelope(Kind.CALL, 0, number, 0, own, source, parts, Flag.SEQUENCED, reply_port=reply_port)
            call.chain = chain
            passed_on = (rank for branch in branches for host in branch.hosts() for rank in host.ranks)
            seqs = {rank: sender.next_seq(targets[rank][0], number) for rank in passed_on}
            try:
                runtime.caster.cast(call, branches, seqs)
            except BaseException:
                for rank, seq in seqs.items():
                    self._skip(sender, rank, seq)
                raise
        for rank in ranks:
            key, proc = targets[rank]
            if key == own:
                each = parts
                if len(ranks) + len(branches) > 1:
                    # It would write to the very memory that is still on its way to the others.
                    each = [parts[0], *codec.private_parts(parts[1:])]
                call = Envelope(Kind.CALL, key, number, 0, own, source, each, 0, rank, 0, reply_port)
                call.chain = chain
                runtime.deliver(call)
                continue
            seq = sender.next_seq(key, number)
            try:
                call = Envelope(Kind.CALL, key, number, 0, own, source, parts, Flag.SEQUENCED, rank, seq, reply_port)
                call.chain = chain
                runtime.send(call, proc, may_wait=False)
            except BaseException:
                self._skip(sender, rank, seq)
                raise

    def _skip(self, sender: Spawner, rank: int, seq: int) -> None:
        """Later messages must not wait for the number of one that may not be on its way; of two the first counts."""
        runtime, (key, proc) = sender.proc_runtime, self._targets[rank]
        flags, source = Flag.SEQUENCED | Flag.SKIP | Flag.SILENT, sender.actor_id.number
        runtime.send(Envelope(Kind.CALL, key, self._number, 0, runtime.key, source, [], flags, rank, seq), proc)

    # ---- references

    def _class_or_pickled(self) -> Any:
        """The class, if it is known by now, else what it is pickled as."""
        return self._cls if self._known is None else self._known.cls

    def _pickled_class(self) -> bytes:
        if not isinstance(self._cls, bytes):
            (pickled,) = codec.encode(self._cls)
            self._cls = bytes(pickled)
        return self._cls

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self._number, self._name, self._pickled_class(), self._class_name, tuple(self._procs))
        shadowed = tuple(sorted(_OWN_NAMES.intersection(self._actor_class().endpoints)))
        return _received, (*arguments, self._whole, self._region, shadowed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActorMesh):
            return NotImplemented
        return self._number == other._number and self._region == other._region

    def __hash__(self) -> int:
        return hash((self._number, self._region))

    def __repr__(self) -> str:
        return f"<ActorMesh {self._name!r} of {self._class_name} {dict(self._region.extent)}>"


def _received(*arguments: Any) -> ActorMesh[Any]:
    """A reference that came in a message. Its class is unpickled at the first look at an endpoint; where endpoints have
    names of the mesh's own methods, which would be found first, at once."""
    *fields, shadowed = arguments
    mesh: ActorMesh[Any] = ActorMesh(*fields)
    meet(mesh._number, mesh._name, mesh._class_name, mesh._procs, mesh._region, mesh._whole)
    if shadowed:
        mesh._actor_class()
    return mesh
