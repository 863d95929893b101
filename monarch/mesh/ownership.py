"""Who spawned it owns it: what an owner's process keeps about the meshes it owns, and how it learns of their ends.

Each process that hosts a member tells the owner's process when the member has ended (`member_down`); when the process
itself is gone, the owner's process knows by itself. Either way a member's end is reported to its owner exactly once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch.core import codec, settings
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.future import Future
from monarch.core.ids import ProcId
from monarch.core.monitor import Down, PeerGone
from monarch.core.proc import PROC_AGENT, Proc
from monarch.log import get_logger
from monarch.mesh.casting import send_to_all
from monarch.supervision.failure import Member, MeshFailure

if TYPE_CHECKING:
    from monarch.mesh.context import Spawner

log = get_logger("monarch.ownership")


class Owned(Protocol):
    number: int
    name: str

    def stop(self, reason: str) -> Future[None]: ...

    def proc_gone(self, key: int, down: Down) -> bool:
        """A process has ended; True if that was reported as the failure of a member."""
        ...


class OwnedActors:
    """An actor mesh, as its owner keeps it: which members live, by base rank."""

    def __init__(
        self,
        owner: Spawner,
        books: Books,
        number: int,
        name: str,
        procs: Sequence[ProcId],
        describe: Callable[[int], Member],
    ) -> None:
        self.owner, self.number, self.name = owner, number, name
        self._books = books
        self.procs = procs  # [base rank]
        self.downs: dict[int, Down] = {}
        self._describe = describe
        self._told: set[int] = set()
        self._when_told: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._ending = False
        self._stopping: str | None = None
        self._stopped = self._new_stop()

    def member_down(self, rank: int, down: Down, *, told: bool = False) -> bool:
        """A member has ended: note it, and tell the owner unless it was stopped, or the owner has been told."""
        with self._lock:
            if rank in self.downs:
                return False
            self.downs[rank] = down
            all_down = len(self.downs) == len(self.procs)
            ends = self._ending or self._stopping is not None
            expected = told or down.stopped or (ends and not down.crashed)
        self.owner.forget(self.procs[rank].key, self.number)
        if all_down:
            self.owner.owned.pop(self.number, None)
            self.owner.owned_once.append(self.number)
            self._books.meshes.pop(self.number, None)
        if not expected:
            self.owner.supervise(MeshFailure(self.name, [rank], self._describe(rank), down))
        if all_down:
            self._stopped._complete(lambda: None)  # who waits for the end shall know of the failures
        with self._lock:
            self._told.add(rank)
            then = self._when_told.pop(rank, None)
        if then is not None:
            then()
        return not expected

    def left(self) -> list[tuple[Member, ProcId]]:
        """The members that have not ended, and where they are."""
        return [(self._describe(rank), proc) for rank, proc in enumerate(self.procs) if rank not in self.downs]

    def when_told(self, rank: int, then: Callable[[], None]) -> None:
        """Call `then` once the end of a member has been dealt with here; at once if it has. One waits for each."""
        with self._lock:
            if rank not in self._told:
                self._when_told[rank] = then
                return
        then()

    def proc_gone(self, key: int, down: Down) -> bool:
        reported = False
        for rank, proc in enumerate(self.procs):
            if proc.key == key:
                reported = self.member_down(rank, down) or reported
        return reported

    def expect_end(self) -> None:
        """Its processes are being stopped."""
        self._ending = True

    def stop(self, reason: str) -> Future[None]:
        with self._lock:
            first = self._stopping is None
            self._stopping = reason
            left = [proc for rank, proc in enumerate(self.procs) if rank not in self.downs]
        if first:
            runtime = self.owner.proc_runtime
            source = self.owner.actor_id.number
            parts = codec.encode(("stop_actor", self.number, reason))
            stop = Envelope(Kind.SYSTEM, 0, PROC_AGENT, 0, runtime.key, source, parts, Flag.SILENT)
            targets = [(proc.key, proc) for proc in left]
            # Numbered as the owner's messages to these actors are: those before it are served.
            seqs = {at: self.owner.next_seq(key, self.number) for at, (key, _) in enumerate(targets)}
            send_to_all(runtime, stop, targets, seqs)
            limit_s = settings.get("stop_actor_timeout")
            runtime.gateway.call_later(limit_s, lambda: self._give_up(limit_s))
        return self._stopped

    def _give_up(self, limit_s: float) -> None:
        with self._lock:
            left = [rank for rank in range(len(self.procs)) if rank not in self.downs]
        if left:
            text = f"{self._describe(left[0])} has not stopped within {limit_s:g} s (setting stop_actor_timeout)"
            others = f", and {len(left) - 1} more" if len(left) > 1 else ""
            self._stopped._fail(TimeoutError(text + others))
            with self._lock:
                self._stopping = None  # it can be tried again
                self._stopped = self._new_stop()

    def _new_stop(self) -> Future[None]:
        return Future._pending(self.owner.proc_runtime.driver, lambda: f"the stop of {self.name!r}")


class OwnedProcs:
    """A process mesh, as its owner keeps it."""

    def __init__(
        self,
        owner: Spawner,
        number: int,
        name: str,
        hosts: dict[ProcId, list[ProcId]],
        describe: Callable[[int], Member],
    ) -> None:
        self.owner, self.number, self.name = owner, number, name
        self.hosts = hosts
        self._describe = describe
        self.ranks = {proc.key: rank for rank, proc in enumerate(p for procs in hosts.values() for p in procs)}
        self.stopping: str | None = None

    def proc_gone(self, key: int, down: Down) -> bool:
        rank = self.ranks.get(key)
        if rank is None or down.stopped or (self.stopping is not None and not down.crashed):
            return False
        self.owner.supervise(MeshFailure(self.name, [rank], self._describe(rank), down))
        return True

    def expect_end(self, reason: str) -> None:
        """It ends with its hosts, and what its owner has there."""
        self.stopping = self.stopping or reason
        for each in list(self.owner.owned.values()):
            if isinstance(each, OwnedActors) and any(proc.key in self.ranks for proc in each.procs):
                each.expect_end()

    def stop(self, reason: str, grace_s: float | None = None) -> Future[None]:
        """Stop the actors, then the processes; resolves when all are gone. After `grace_s` they are signalled."""
        if self.stopping is None:
            self.stopping = reason
        runtime = self.owner.proc_runtime
        result: Future[None] = Future._pending(runtime.driver, lambda: f"the stop of {self.name!r}")
        why = f"actor mesh is stopped due to proc mesh shutdown: {reason}"

        def ask() -> None:
            asked = [
                runtime.request(host, "stop_procs", [p.key for p in procs], why, grace_s)
                for host, procs in self.hosts.items()
            ]

            def check() -> None:
                for answer in asked:
                    check_ended(answer)

            joined(runtime, asked, self._forget)._on_done(lambda: result._complete(check))

        runtime.caster.when_taken(ask)
        return result

    def _forget(self) -> None:
        self.owner.owned.pop(self.number, None)


def check_ended(answer: Future[Any]) -> None:
    """Raises: what an agent that was asked to end something has failed with, unless it is gone, and that with it."""
    error = answer.exception(0)
    if error is not None and not (isinstance(error, PeerGone) and error.down.kind != "failed"):
        raise error


def joined(runtime: Proc, futures: Sequence[Future[Any]], then: Callable[[], None] | None = None) -> Future[None]:
    """A future that is done when all of `futures` are; fails with the first error among them."""
    result: Future[None] = Future._pending(runtime.driver)
    left = [len(futures)]
    lock = threading.Lock()

    def check() -> None:
        for future in futures:
            future.get(0)

    def finish() -> None:
        if then is not None:
            then()
        result._complete(check)  # what was answered is decoded by whoever looks

    def one_done() -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        finish()

    for future in futures:
        future._on_done(one_done)
    if not futures:
        finish()
    return result


class Books:
    """What the actors of one process own.

    Attributes:
        meshes: the actor meshes among it, by number.
        owners: the actors, and the client, by number.
    """

    def __init__(self, runtime: Proc) -> None:
        self.meshes: dict[int, OwnedActors] = {}
        self.owners: dict[int, Spawner] = {}
        runtime.handlers["member_down"] = self._on_member_down
        runtime.on_proc_gone.append(self._on_proc_gone)

        self._runtime = runtime

    def _on_member_down(self, envelope: Envelope, number: int, rank: int, down: Down) -> None:
        self.member_down(number, rank, down)
        self._runtime.answer(envelope)

    def member_down(self, number: int, rank: int, down: Down) -> None:
        """A member of the mesh with this number has ended."""
        mesh = self.meshes.get(number)
        if mesh is not None:
            mesh.member_down(rank, down)

    def _on_proc_gone(self, key: int, down: Down) -> None:
        """Each owner hears of a lost process by its actor meshes there; by the process mesh where it has none."""
        for owner in list(self.owners.values()):
            owned = list(owner.owned.values())
            actors = [each for each in owned if isinstance(each, OwnedActors)]
            reported = [mesh for mesh in actors if mesh.proc_gone(key, down)]
            if not reported:
                for each in owned:
                    if isinstance(each, OwnedProcs):
                        each.proc_gone(key, down)


def stop_owned(owner: Spawner, down: Down) -> dict[Owned, Future[None]]:
    """Stop what `owner` owns, the youngest first."""
    on_release, owner.on_release = owner.on_release, None
    if on_release is not None:
        on_release(down)
    return {each: each.stop(f"its owner ended: {down.reason}") for each in reversed(list(owner.owned.values()))}


def release_owned(owner: Spawner, down: Down) -> None:
    """Stop what `owner` owns, and wait for it, `release_timeout_s` for each mesh."""
    for mesh, stop in stop_owned(owner, down).items():
        try:
            stop.get(timeout=owner.proc_runtime.release_timeout_s)
        except Exception as error:
            log.warning("release.failed", owner=str(owner), mesh=mesh.name, error=str(error))
