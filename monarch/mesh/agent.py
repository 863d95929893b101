"""The agent of a process: makes actors from SPAWN messages, stops them, and tells owners of their ends.

A SPAWN message is `[SpawnInfo, *body]`. The info is decoded here, on the driving thread, and holds nothing of the
user's; the body is the encoded (class, args, kwargs), which the actor's own thread decodes, so that a slow import
delays nobody.

A process may have a gate: while a bootstrap function runs in it, which came first, other actors are not made yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import define

from monarch.core import codec, settings
from monarch.core.envelope import Envelope
from monarch.core.gateway import Limits
from monarch.core.ids import ActorId, ProcId
from monarch.core.instance import Instance
from monarch.core.monitor import Down
from monarch.core.proc import Proc, run_on_thread
from monarch.launch import held
from monarch.log import get_logger
from monarch.mesh.breakpoints import Breakpoints
from monarch.mesh.child_line import ChildBook
from monarch.mesh.context import ActorInstance, CreatorInstance, Spawner
from monarch.mesh.dispatch import ActorBehavior
from monarch.mesh.inspector import ACTOR_THREAD, Respondent
from monarch.mesh.ownership import Books
from monarch.mesh.shape import Point
from monarch.transports.base import Transport
from monarch.verbs.node import prefer as prefer_device

if TYPE_CHECKING:
    from monarch.mesh.proc_mesh import ProcMesh
    from monarch.onesided.transfers import Transfers

log = get_logger("monarch.agent")


@define(frozen=True)
class SpawnInfo:
    """What a process must know to make its member of an actor mesh; the same for all members."""

    name: str
    class_name: str
    proc_mesh: ProcMesh
    owner: ActorId
    creator: CreatorInstance
    opens_gate: bool = False


def limits_from_settings() -> Limits:
    return Limits(
        settings.get("message_delivery_timeout"),
        settings.get("message_ack_time_interval"),
        settings.get("message_ack_every_n_messages"),
        settings.get("send_buffer_bytes"),
    )


class MeshProc(Proc):
    """A process that hosts members of meshes.

    Attributes:
        root: the process of the client that all this belongs to.
        books: the meshes owned by actors of this process.
        breakpoints: where its actors wait for a debugger.
        children: supervisors of this process, and the supervised children that it calls.
        on_actors_changed: called when there is one actor more or less.
        respondent: says what this process does.
        transfers: what carries out one-sided transfers; made at first use.
        on_end: called once all actors have been stopped by "stop_all"; the process is to end then.
        failed_actors: how many actors ended by a failure.
    """

    def __init__(self, proc_id: ProcId, transport: Transport, secret: bytes, *, root: ProcId | None = None) -> None:
        super().__init__(proc_id, transport, secret, driver=settings.get("link_driver"), limits=limits_from_settings())
        if transport.memory is not None:
            transport.memory.limit_bytes = settings.get("shared_memory_bytes")
        prefer_device(
            settings.get("rdma_ibverbs_target"),
            "rdma_disable_ibverbs is set" if settings.get("rdma_disable_ibverbs") else "",
        )
        self.cleanup_timeout_s = settings.get("cleanup_timeout")
        self.release_timeout_s = settings.get("process_exit_timeout")
        self.unborn_limit_s = settings.get("actor_spawn_max_idle")
        self.message_ttl = settings.get("message_ttl_default")
        self._root = root
        self.books = Books(self)
        self.breakpoints = Breakpoints(self)
        self.children = ChildBook(self)
        self.respondent = Respondent(self)
        self.transfers: Transfers | None = None
        self.failed_actors = 0
        self.last_failure: Down | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.on_actors_changed: Callable[[], None] = lambda: None
        self._gate: list[Envelope] | None = None
        self._unprepared: Down | None = None  # the bootstrap function failed: no actor of others is made any more
        self._gate_lock = threading.RLock()  # the setup actor's thread opens, the driving thread adds
        self._stopping_all = False
        self._end_lock = threading.Lock()
        self.handlers["spawn"] = self._on_spawn
        self.handlers["stop_actor"] = self._on_stop_actor
        self.handlers["stop_all"] = self._on_stop_all

    @property
    def root(self) -> ProcId:
        return self._root if self._root is not None else self.proc_id

    @property
    def host(self) -> ProcId:
        """The process in which the agent of this process's host lives."""
        keeper = self.proc_id.keeper
        return keeper if keeper is not None else self.proc_id

    # ---- spawning

    def close_gate(self) -> None:
        """Make no actors from now on but those that this process spawns on itself, until a `SpawnInfo.opens_gate`."""
        self._gate = []

    def open_gate(self, down: Down | None) -> None:
        """The bootstrap function is through; with `down` it failed, and so do the actors that waited or come later."""
        with self._gate_lock:
            self._unprepared = down
            held, self._gate = self._gate or [], None
            for envelope in held:
                self._make(envelope, down)

    def expects(self, number: int) -> bool:
        return any(envelope.dst_actor == number for envelope in self._gate or ())

    def _on_spawn(self, envelope: Envelope) -> None:
        with self._gate_lock:
            if self._gate is not None and envelope.src_proc != self.key:
                info: SpawnInfo = codec.decode(envelope.parts[:1])
                if not info.opens_gate:
                    self._gate.append(envelope)
                    return
            down = self._unprepared if envelope.src_proc != self.key else None
        self._make(envelope, down)

    def _make(self, envelope: Envelope, down: Down | None) -> None:
        info: SpawnInfo = codec.decode(envelope.parts[:1])
        number = envelope.dst_actor
        if down is None:
            down = self.monitors.gone((self.key, number))  # stopped before its SPAWN came through here
        if down is None and self._stopping_all:
            down = Down("stopped", "the process is being stopped")
        if down is None and settings.get("poison_failed_procs") and self.last_failure is not None:
            reason = "error spawning actor mesh: an actor of this process has failed before, and the setting "
            down = Down("failed", reason + "poison_failed_procs refuses others since").because(self.last_failure)
        owner_told = self._tell_owner(info.owner, number, envelope.rank)
        if down is not None:
            self.monitors.watch((self.key, number), owner_told)
            self.never_born(number, down)
            return
        rank = Point(envelope.rank, info.proc_mesh._region.extent)
        actor_id = ActorId(self.proc_id, number, info.name)
        instance = ActorInstance(
            self, actor_id, info.name, info.class_name, rank, info.proc_mesh, info.creator, info.opens_gate
        )
        behavior = ActorBehavior(instance, list(envelope.parts[1:]), lambda down: release_owned(instance, down))
        instance.owner_key = info.owner.proc.key
        instance.on_failure = behavior.supervise
        instance.on_undeliverable = behavior.undeliverable
        self.books.owners[number] = instance
        self.monitors.watch((self.key, number), owner_told)
        self.adopt(instance)
        self.on_actors_changed()

        def live() -> None:
            held.name_thread(instance.member)
            instance.run(behavior)

        run = run_on_thread if info.opens_gate else self.run_actor  # the main thread is for the user's actors
        run(ACTOR_THREAD + info.name, live)

    def _tell_owner(self, owner: ActorId, number: int, rank: int) -> Callable[[Down], None]:
        def told(down: Down) -> None:
            if owner.proc.key == self.key:
                self.books._on_member_down(None, number, rank, down)
            else:
                self.tell(owner.proc, "member_down", number, rank, down)

        return told

    # ---- stopping

    def _on_stop_actor(self, envelope: Envelope, number: int, reason: str) -> None:
        down = Down("stopped", reason)
        with self._gate_lock:
            held = [spawn for spawn in self._gate or () if spawn.dst_actor == number]
            if held and self._gate is not None:
                self._gate = [spawn for spawn in self._gate if spawn.dst_actor != number]
            actor = self.actors.get(number)
        for spawn in held:
            self._make(spawn, down)
        if isinstance(actor, Instance):
            actor.request_stop(down)
        elif not held and self.monitors.gone((self.key, number)) is None:
            self.never_born(number, down)  # its SPAWN has not come through here

    def _on_stop_all(self, envelope: Envelope, reason: str) -> None:
        self.stop_all(reason)

    def stop_all(self, reason: str) -> None:
        """Stop every actor gracefully, then call `on_end`. Does not block."""
        self._stopping_all = True
        down = Down("stopped", reason)
        for actor in list(self.actors.values()):
            if isinstance(actor, Instance):
                actor.request_stop(down)
        self._end_if_idle()

    def actor_ended(self, instance: Instance, down: Down) -> None:
        self.books.owners.pop(instance.actor_id.number, None)
        if not down.stopped:
            self.failed_actors += 1
            self.last_failure = down
        super().actor_ended(instance, down)
        self.breakpoints.forget(instance.actor_id.number)
        self.on_actors_changed()
        if self._stopping_all:
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if any(isinstance(actor, Instance) for actor in list(self.actors.values())):
            return
        with self._end_lock:
            on_end, self.on_end = self.on_end, lambda: None
        on_end()

    def _on_gone(self, peer: Any, down: Down) -> None:
        super()._on_gone(peer, down)
        # Actors whose owner's process is gone end with it; the process they run on may be somebody else's.
        for actor in list(self.actors.values()):
            if isinstance(actor, ActorInstance) and actor.owner_key == peer.key:
                actor.request_stop(Down("stopped", f"its owner's process is gone: {down.reason}"))


def release_owned(owner: Spawner, down: Down, limit_s: float | None = None) -> None:
    """Stop what `owner` owns, the youngest first, and wait for it: `release_timeout_s` for each mesh, or `limit_s` for
    all, after which nobody is surprised."""
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    if owner.on_release is not None:
        owner.on_release(down)
    runtime = owner.proc_runtime
    owned = list(reversed(owner.owned.values()))
    stops = [each.stop(f"its owner ended: {down.reason}") for each in owned]
    for each, future in zip(owned, stops, strict=True):
        try:
            left_s = runtime.release_timeout_s if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            future.get(timeout=left_s)
        except Exception as error:
            report = log.warning if deadline_s is None else log.debug
            report("release.failed", owner=str(owner), mesh=each.name, error=str(error))
