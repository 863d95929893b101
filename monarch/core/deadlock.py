"""Cycles of calls: an actor waits, through others, for a call to itself that it cannot take. Found, and refused.

Theory of operation. A call that an endpoint makes carries the chain of calls that led to it (`chain`). When it comes
back to an actor of this very chain that is busy, it may never be served; but only if everybody on the way waits. So a
probe goes back the way that the call came, and asks each caller:

```
    A.a ────► B.b ────► A.c, queued behind A.a
     ▲─────────▲─────────┘  probe: does B.b wait for A.c? does A.a wait for B.b? Then A refuses A.c
```

A `Wait` stands for one call that an endpoint has made, at the caller. It knows whether the endpoint waits for the
answer: blocked in `get`, or its task at an `await`. A probe that comes before it does stays until it does. So a call
whose answer nobody waits for is served in its time, and what comes from outside of actors costs nothing.

Calls of different origins that cross each other are found by `crossing`. Not seen: a wait in another thread, or for a
port; a task that the endpoint awaits in another way than `await` and `gather`. They wait, as any call, until a time-out
names who is busy.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Final

from attrs import define

from monarch.core import exceptions
from monarch.core.chain import ServedKey, comes_from, links_of
from monarch.core.envelope import CallKey, Envelope, Flag
from monarch.core.serving import Served
from monarch.errors import DeadlockError

if TYPE_CHECKING:
    from monarch.core.instance import Instance
    from monarch.core.proc import Proc

PROBE: Final = "probe"
_lock = threading.Lock()  # guards the probes of every Wait; held for some instructions only
_TRY_AGAIN_S: Final = 0.1


@define(frozen=True)
class Probe:
    """Attributes:
    origin: a call that the actor has served, or still does.
    newcomer: the one that comes from there, and is queued.
    """

    origin: ServedKey
    newcomer: CallKey


def suspect(instance: Instance, envelope: Envelope) -> None:
    """A call with a chain has been queued: send a probe if it comes from this very actor, and has to wait."""
    runtime = instance.proc_runtime
    origin = comes_from(envelope.chain, runtime.key, instance.actor_id.number)
    if origin is not None and instance.engaged:
        _ask_caller(runtime, envelope.call, Probe(origin, envelope.call))


def _ask_caller(runtime: Proc, call: CallKey, probe: Probe) -> None:
    """Does whoever made `call` wait for its answer?"""
    proc, reply_port = call
    runtime.tell_known(proc, PROBE, reply_port, probe)


def on_probe(runtime: Proc, reply_port: int, probe: Probe) -> None:
    """A probe has come to the process of the caller. Does not block."""
    call = runtime.pending_call(reply_port)
    if call is not None:
        call.caller_wait.arm(probe)


class Wait:
    """See the module. `begin` and `end` are called around every wait for the future, by whoever waits."""

    __slots__ = ("_blocked", "_bounded", "_probes", "_served", "_tasks", "begun")

    def __init__(self, served: Served) -> None:
        self._served = served
        self._blocked = self._bounded = False
        self.begun = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._probes: list[Probe] = []

    def arm(self, probe: Probe) -> None:
        with _lock:
            self._probes.append(probe)
        if self._blocked:
            self._go_on()
        else:
            self._served.actor_instance.post_control(self._go_on_for_tasks)

    @property
    def actor(self) -> Instance:
        return self._served.actor_instance

    @property
    def endpoint(self) -> str:
        """The one that waits, for people."""
        return f"{self.actor.member}.{self._served.endpoint}"

    @property
    def lasts(self) -> bool:
        """Whether the endpoint waits, and until there is an answer. From any thread."""
        return not self._bounded and self.holds(self._served)

    def holds(self, served: Served) -> bool:
        """Whether that endpoint of the same actor is not through before the answer is there. From any thread."""
        return self._blocked or any(_depends(served.task, task) for task in tuple(self._tasks))

    def holds_up(self, instance: Instance) -> bool:
        """Whether that actor serves no further call before the answer is there. From any thread."""
        if self._served.actor_instance is not instance:
            return False
        return self._blocked or any(self.holds(each) for each in tuple(instance.serving) if each.exclusive)

    # ---- on the thread that waits

    def begin(self, task: asyncio.Task[Any] | None, *, bounded: bool = False) -> None:
        """A wait begins: of a task, or of the whole thread. `bounded`: it ends without an answer, too."""
        instance = self._served.actor_instance
        if threading.get_ident() != instance.thread_id:
            return
        self.begun += 1
        instance.proc_runtime.crossings.scan_later()
        self._bounded = bounded
        if task is None:
            self._blocked = True
            if self._probes:
                self._go_on()
        else:
            self._tasks.append(task)
            if self._probes:
                self._go_on_for_tasks()

    def end(self, task: asyncio.Task[Any] | None) -> None:
        if threading.get_ident() != self._served.actor_instance.thread_id:
            return
        if task is None:
            self._blocked = False
        elif task in self._tasks:
            self._tasks.remove(task)

    def _go_on_for_tasks(self, again_s: float = _TRY_AGAIN_S) -> None:
        """On the actor's thread, where its tasks can be looked at."""
        if not self._probes or not self._tasks:
            return
        self._go_on()
        if self._probes:  # what waits is a task, and nobody for that; an endpoint may come to do so later
            asyncio.get_running_loop().call_later(again_s, self._go_on_for_tasks, min(2 * again_s, 2.0))

    def _go_on(self) -> None:
        with _lock:
            probes, self._probes = self._probes, []
        left = [probe for probe in probes if not self._passes(probe)]
        with _lock:
            self._probes += left

    def _passes(self, probe: Probe) -> bool:
        """Send a probe on, or close the cycle, if the endpoint waits."""
        served = self._served
        closes = probe.origin == served.key
        # Where the cycle closes, the endpoint that made the call may be through, and have left the future to another.
        waiting = [each for each in served.actor_instance.serving if (each.exclusive if closes else each is served)]
        if not waiting:
            return False
        if not self._blocked and not any(_depends(each.task, task) for each in waiting for task in self._tasks):
            return False
        if closes:
            refuse(served.actor_instance, probe)
        elif served.awaited:
            _ask_caller(served.actor_instance.proc_runtime, served.call, probe)
        return True


def _depends(task: Any, other: asyncio.Task[Any]) -> bool:
    """Whether `task` cannot go on before `other` does: it is it, or awaits it, itself or through others."""
    pending, seen = [task], 0
    while pending and seen < 10_000:
        each = pending.pop()
        seen += 1
        if each is other:
            return True
        if each is not None and not each.done():
            pending.append(getattr(each, "_fut_waiter", None))
            pending.extend(getattr(each, "_children", ()))  # of a gather
    return False


def refuse(instance: Instance, probe: Probe) -> None:
    """The cycle is closed: the newcomer is taken out of the queue, and answered with the error."""
    envelope = instance.withdraw(probe.newcomer)
    if envelope is None:
        return
    links = links_of(envelope.chain)
    begin = next((at for at, (key, _) in enumerate(links) if key == probe.origin), 0)
    cycle = [text for _, text in links[begin:]]
    busy = next((each.endpoint for each in tuple(instance.serving) if each.exclusive), "it")
    text = describe(cycle, f"{instance.member}.{instance.endpoint_of(envelope)}", f"{instance.member}.{busy}")
    parts = exceptions.encode_exception(DeadlockError(text, tuple(cycle)))
    instance.proc_runtime.send(envelope.reply(parts, Flag.ERROR | Flag.RAW_ERROR | Flag.SILENT), None, may_wait=False)


def describe(cycle: list[str], refused: str, busy: str) -> str:
    """`cycle` are the calls from the first that the actor served to the one that made the call which is `refused`."""
    if cycle == [busy]:
        return (
            f"deadlock: {busy} calls {refused} and waits for it, in its own actor, which takes no other call before "
            "this one is through. Call the method itself (self.method()), do not wait, or make the waiting one a "
            "@concurrent_endpoint"
        )
    return (
        f"deadlock, a cycle of calls that wait for each other: {' -> '.join([*cycle, refused])}. The last cannot be "
        f"served before {busy} is through, which waits for it. Do not wait in one of them (broadcast, a port), or make "
        "the first a @concurrent_endpoint"
    )
