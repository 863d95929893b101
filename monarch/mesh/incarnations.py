"""Between the decisions of a supervisor and the runtime: spawns incarnations, watches them, stops them in their time.

An incarnation is a whole mesh. When one member fails, the rest of it is stopped, and its processes, where they are the
supervisor's, with it: the next one starts on fresh processes, once nothing is left of the last. Whatever is heard of
it, from any thread, becomes an event for `supervision.restarts`, one at a time, on the supervisor's own thread.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from attrs import define, evolve, field

from monarch.core import settings
from monarch.core.future import Future
from monarch.core.ids import ActorId
from monarch.core.monitor import Down
from monarch.log import get_logger
from monarch.mesh.actor_mesh import ActorMesh
from monarch.mesh.child_spec import Child, ChildStatus
from monarch.mesh.context import ActorInstance, Context, current_context
from monarch.mesh.host_mesh import this_host
from monarch.mesh.members import describe_member
from monarch.mesh.proc_mesh import ProcMesh
from monarch.supervision.failure import MeshFailure
from monarch.supervision.policy import Action, Escalate, Exit, Forget, Start, Stop
from monarch.supervision.restarts import Restarts

log = get_logger("monarch.supervisor")


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


class Shell:
    """Between the machine and the runtime. All methods but `post` run on the supervisor's thread."""

    def __init__(self, instance: ActorInstance, machine: Restarts) -> None:
        self._runtime = instance.proc_runtime
        self._machine = machine
        self.instance = instance
        self.directory = self._runtime.children.directory(instance.actor_id.number)
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
        self.instance.post_control(self._drain)

    def _drain(self) -> None:
        current_context.set(Context(self.instance, self.instance.rank))
        while not self._events.empty():
            self.carry_out(self._events.get()())

    def begin(self, children: Sequence[Child[Any]]) -> None:
        actions = self._machine.begin([child._rule for child in children])
        for child in children:
            self._declare(child)
        self.directory.open()
        self.carry_out(actions)

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
        log.info("child.start", supervisor=self.instance.name, child=child.name, incarnation=action.incarnation)
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
            # Its end may have been told already, or be about to be: whichever is first counts.
            failure = getattr(error.__cause__, "failure", None)
            if failure is not None and incarnation.failure is None:
                rank = failure.crashed_ranks[0]
                incarnation.failure = failure.down
                self._last[name] = self._told_of(incarnation, rank, failure.down)
            self._close(incarnation, f"it could not be started: {error}")
            return []
        log.info("child.up", supervisor=self.instance.name, child=name, incarnation=incarnation.number)
        self.directory.up(name, incarnation.number, incarnation.mesh)
        actions = self._machine.up(name, incarnation.number)
        self._settle(name, None)
        return actions

    def _member_down(self, incarnation: _Incarnation, rank: int, down: Down) -> list[Action]:
        if self._incarnations.get(incarnation.child.name) is not incarnation or rank in incarnation.downs:
            return []
        incarnation.downs[rank] = down
        if incarnation.stopping:
            if down.crashed:  # changes nothing, and must not be missed
                named = {"supervisor": self.instance.name, "child": incarnation.child.name}
                log.warning("child.failed_while_stopped", **named, reason=str(down))
        elif not down.stopped and incarnation.failure is None:
            incarnation.failure = down
            self._last[incarnation.child.name] = self._told_of(incarnation, rank, down)
        all_down = len(incarnation.downs) == len(incarnation.mesh._procs)
        if not all_down and incarnation.failure is None:
            return []  # one member stopped by itself; the others go on
        self.directory.down(incarnation.child.name, incarnation.failure or down)
        if all_down and incarnation.procs is None:
            return self._gone(incarnation)
        self._close(incarnation, "the child has ended" if all_down else f"another member failed: {down.reason}")
        return []

    def _told_of(self, incarnation: _Incarnation, rank: int, down: Down) -> Down:
        mesh = incarnation.mesh
        member = describe_member(mesh._class_name, mesh._name, mesh._whole, rank)
        log.info("child.failed", supervisor=self.instance.name, child=incarnation.child.name, reason=down.reason)
        return evolve(down, reason=f"{member}: {down.reason}")

    def _stop(self, action: Stop) -> None:
        incarnation = self._incarnations[action.name]
        incarnation.stopping = True
        self.directory.down(action.name, None)
        self._close(incarnation, f"stopped by its supervisor {self.instance.name!r}")

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
        log.warning("child.overdue", supervisor=self.instance.name, child=incarnation.child.name)
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
        text = f"{self.instance.member} gave up on its child {action.name!r}: {action.reason}"
        cause = self._last.get(action.name)
        down = self._runtime.failed(text)
        log.info("supervisor.gave_up", supervisor=self.instance.name, child=action.name, reason=action.reason)
        self.instance.request_end(down.because(cause) if cause is not None else down)

    # ---- the end

    def release(self, down: Down) -> None:
        """The supervisor is ending: stop the children, one by one. Blocks; each takes its time at most."""
        self.directory.end(self.instance.member, down)
        current_context.set(Context(self.instance, self.instance.rank))
        self.carry_out(self._machine.shut_down())
        grace_s = settings.get("mesh_terminate_timeout") + 5.0  # what a host takes to kill, and some
        while not self._machine.finished:
            limit_s = max((each.child.shutdown_s for each in self._incarnations.values()), default=0.0) + grace_s
            try:
                event = self._events.get(timeout=limit_s)
            except queue.Empty:
                log.warning("supervisor.children_left", supervisor=self.instance.name, left=list(self._incarnations))
                return
            self.carry_out(event())

    def supervise(self, failure: MeshFailure) -> bool:
        """The monitors have told it, or will; the owner's own way of hearing is only told that it is dealt with."""
        return failure.mesh_name in self.children
