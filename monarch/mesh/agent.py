"""The agent of a process: makes actors from SPAWN messages, stops them, and tells owners of their ends.

A SPAWN message is `[names, parentage, *body]`. Names and parentage are decoded here, on the driving thread, and hold
nothing of the user's; the body is the encoded (class, args, kwargs), which the actor's own thread decodes, so that a
slow import delays nobody. Actors by the thousand most often have the same parents: what is the same for all that one
owner spawns on one mesh is encoded once, and decoded once in each process.

Where a process has a bootstrap function, an actor of its own runs that: the setup. Others are made once it is through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import define, evolve

from monarch.core import codec, settings
from monarch.core.actor_threads import run_on_thread
from monarch.core.envelope import Envelope
from monarch.core.ids import ActorId
from monarch.core.instance import Instance
from monarch.core.monitor import Down
from monarch.launch import stack_signal
from monarch.mesh.context import ActorInstance, CreatorInstance
from monarch.mesh.dispatch import ActorBehavior
from monarch.mesh.inspector import ACTOR_THREAD
from monarch.mesh.ownership import release_owned
from monarch.mesh.shape import Point
from monarch.transports.base import Buffer

if TYPE_CHECKING:
    from monarch.mesh.mesh_proc import MeshProc
    from monarch.mesh.proc_mesh import ProcMesh

_PARENTAGES: Final = 8  # so many are kept; of a mesh of a thousand processes, one takes 46 KB
_TELL_BEFORE: Final = 0.75  # what will be cut off, is told when so much of the time for it is over


@define(frozen=True)
class Names:
    """What is called what; the same for all members of an actor mesh."""

    actor: str
    cls: str
    is_setup: bool = False

    def encode(self) -> list[Buffer]:
        return codec.encode((self.actor, self.cls, self.is_setup))

    @classmethod
    def of(cls, spawn: Envelope) -> Names:
        return cls(*codec.decode(spawn.parts[:1]))


@define(frozen=True)
class Parentage:
    """Where an actor comes from; the same for all actors that one owner spawns on one mesh."""

    proc_mesh: ProcMesh
    owner: ActorId
    creator: CreatorInstance


class ProcAgent:
    """See the module.

    Attributes:
        on_end: called once all actors have been stopped by "stop_all"; the process is to end then.
    """

    def __init__(self, runtime: MeshProc) -> None:
        self._runtime = runtime
        self.on_end: Callable[[], None] = lambda: None
        self._behind_setup: list[Envelope] | None = None  # actors that are made after it; None: it is through
        self._unprepared: Down | None = None  # the bootstrap function failed: no actor of others is made any more
        self._setup_lock = threading.RLock()  # the setup's thread is through, the driving thread adds
        self._parentages: dict[bytes, Parentage] = {}  # by what they are encoded as
        self._stopping_all = self._is_lost = False
        self._unheard: set[int] = set()  # actors that have failed, and whose owner has not heard of it for sure
        self._end_lock = threading.Lock()
        runtime.handlers["spawn"] = self._on_spawn
        runtime.handlers["stop_actor"] = self._on_stop_actor
        runtime.handlers["stop_all"] = lambda envelope, reason: self.stop_all(Down("stopped", reason))
        runtime.handlers["cut_short"] = lambda envelope, reason, left_s: self.cut_short(reason, left_s)
        runtime.on_proc_gone.append(self._on_proc_gone)

    # ---- spawning

    def await_setup(self) -> None:
        """Make no actors but the setup, and those that this process spawns on itself, until `setup_ended`."""
        self._behind_setup = []

    def setup_ended(self, down: Down | None) -> None:
        """With `down` the bootstrap function failed, and so do the actors that waited or come later."""
        with self._setup_lock:
            self._unprepared = down
            waiting, self._behind_setup = self._behind_setup or [], None
            for envelope in waiting:
                self._make(envelope, down)

    def expects(self, number: int) -> bool:
        """Whether an actor of that number waits for the setup."""
        return any(envelope.dst_actor == number for envelope in self._behind_setup or ())

    def _on_spawn(self, envelope: Envelope) -> None:
        own = envelope.src_proc == self._runtime.key
        with self._setup_lock:
            if self._behind_setup is not None and not own and not Names.of(envelope).is_setup:
                self._behind_setup.append(envelope)
                return
            down = None if own else self._unprepared
        self._make(envelope, down)

    def _make(self, envelope: Envelope, down: Down | None) -> None:
        """Make the actor, or, with `down` or where another reason is against it, tell its owner why not."""
        runtime = self._runtime
        names, parents = Names.of(envelope), self._parentage(envelope.parts[1])
        number = envelope.dst_actor
        down = down or self._objection(number)
        tell = partial(self._tell_owner, parents.owner, number, envelope.rank)
        runtime.monitors.watch((runtime.key, number), tell)
        if down is not None:
            runtime.never_born(number, down)
            return
        mesh = parents.proc_mesh._for_owner()
        rank = Point(envelope.rank, mesh._region.extent)
        actor_id = ActorId(runtime.proc_id, number, names.actor)
        instance = ActorInstance(runtime, actor_id, names.actor, names.cls, rank, mesh, parents.creator, names.is_setup)
        behavior = ActorBehavior(instance, list(envelope.parts[2:]), partial(release_owned, instance))
        instance.owner_key = parents.owner.proc.key
        instance.on_failure = behavior.supervise
        instance.on_undeliverable = behavior.undeliverable
        runtime.books.owners[number] = instance
        runtime.adopt(instance)
        runtime.on_actors_changed()
        run = run_on_thread if names.is_setup else runtime.run_actor  # the main thread is for the user's actors
        run(ACTOR_THREAD + names.actor, partial(_live, instance, behavior), partial(_has_no_thread, instance))

    def _parentage(self, encoded: Buffer) -> Parentage:
        encoded = bytes(encoded)
        found = self._parentages.get(encoded)
        if found is None:
            if len(self._parentages) >= _PARENTAGES:
                self._parentages.clear()
            found = self._parentages[encoded] = codec.decode([encoded])
        return found

    def _objection(self, number: int) -> Down | None:
        """Why an actor is not to be made here."""
        runtime = self._runtime
        stopped = runtime.monitors.gone((runtime.key, number))  # before its SPAWN came through here
        if stopped is not None:
            return stopped
        if self._stopping_all:
            return Down("stopped", "the process is being stopped")
        if settings.get("poison_failed_procs") and (failure := self._failure_here()) is not None:
            reason = "error spawning actor mesh: an actor of this process has failed before, and the setting "
            return Down("failed", reason + "poison_failed_procs refuses others since").because(failure)
        return None

    def _failure_here(self) -> Down | None:
        """Why an actor of this process has failed, or is about to end so: its callers have been told by then."""
        closed = (actor.mailbox.closed for actor in self._instances())
        return next((down for down in closed if down is not None and not down.stopped), self._runtime.last_failure)

    def _tell_owner(self, owner: ActorId, number: int, rank: int, down: Down) -> None:
        """A member has ended."""
        runtime = self._runtime

        def was_heard() -> None:
            self._unheard.discard(number)
            self.end_if_idle()

        if owner.proc.key == runtime.key:
            runtime.books.member_down(number, rank, down)
        elif self._is_lost:
            pass  # that its host is gone, it hears from others, of all processes there, and once
        elif down.stopped:
            runtime.tell(owner.proc, "member_down", number, rank, down)
        else:
            self._unheard.add(number)
            runtime.request(owner.proc, "member_down", number, rank, down)._on_done(was_heard)

    # ---- stopping

    def _on_stop_actor(self, envelope: Envelope, number: int, reason: str) -> None:
        runtime = self._runtime
        down = Down("stopped", reason)
        with self._setup_lock:
            waiting = [spawn for spawn in self._behind_setup or () if spawn.dst_actor == number]
            if waiting and self._behind_setup is not None:
                self._behind_setup = [spawn for spawn in self._behind_setup if spawn.dst_actor != number]
            actor = runtime.actors.get(number)
        for spawn in waiting:
            self._make(spawn, down)
        if isinstance(actor, Instance):
            actor.request_stop_behind(envelope, down)
        elif not waiting and runtime.monitors.gone((runtime.key, number)) is None:
            runtime.never_born(number, down)  # its SPAWN has not come through here

    def stop_all(self, down: Down) -> None:
        """Stop every actor gracefully, make no others, and call `on_end` when none is left; where that is no stop, but
        the loss of this process, the owners are not told. Does not block."""
        self._stopping_all, self._is_lost = True, not down.stopped
        for actor in self._instances():
            actor.request_stop(down)
        self.end_if_idle()

    def cut_short(self, reason: str, left_s: float) -> None:
        """This process ends in `left_s`: actors that have a cleanup to do shall come to it now, those that cannot are
        told to the client. Does not block."""
        down = Down("stopped", reason)
        for actor in self._instances():
            if actor.owes_cleanup:
                actor.request_end(down)
            else:
                actor.request_stop(down)
        self._runtime.gateway.call_later(_TELL_BEFORE * left_s, self._tell_cut_off)

    def _tell_cut_off(self) -> None:
        actors = [_unfinished(actor) for actor in self._instances() if actor.owes_cleanup]
        if actors:
            self._runtime.tell(self._runtime.root, "cut_off", actors)

    def end_if_idle(self) -> None:
        """Call `on_end`, once, if all actors were to stop and have. That this process has been stopped must not
        overtake the news that one of them has failed."""
        if not self._stopping_all or self._unheard or self._has_instances():
            return
        with self._end_lock:
            on_end, self.on_end = self.on_end, lambda: None
        on_end()

    def _instances(self) -> list[Instance]:
        return [actor for actor in list(self._runtime.actors.values()) if isinstance(actor, Instance)]

    def _has_instances(self) -> bool:
        """As `bool(_instances())`, and does not look at a thousand for each that ends."""
        return any(isinstance(actor, Instance) for actor in list(self._runtime.actors.values()))

    def _on_proc_gone(self, key: int, down: Down) -> None:
        """Actors whose owner's process is gone end with it; the process they run on may be somebody else's."""
        for actor in list(self._runtime.actors.values()):
            if isinstance(actor, ActorInstance) and actor.owner_key == key:
                actor.request_stop(Down("stopped", f"its owner's process is gone: {down.reason}"))


def _live(instance: ActorInstance, behavior: ActorBehavior) -> None:
    stack_signal.name_thread(instance.member)
    instance.run(behavior)


def _has_no_thread(instance: ActorInstance, error: Exception) -> None:
    """The system gives no more threads: nobody shall wait for this actor."""
    down = instance.proc_runtime.failed(f"no thread could be started for it: {error}")
    instance.stillborn(evolve(down, actor=instance.member))


def _unfinished(actor: Instance) -> str:
    """An actor whose cleanup is not over, and what keeps it, for people."""
    running = actor.snapshot().running
    if not running:
        return f"{actor.member} (in its __cleanup__, or the end of what it owns)"
    since = [(each.endpoint, each.for_s, datetime.fromtimestamp(each.since_s)) for each in running]
    doing = " and ".join(f"{name} has been running for {for_s:.1f} s, since {at:%H:%M:%S}" for name, for_s, at in since)
    return f"{actor.member} ({doing})"
