"""One running actor: a thread, a loop, a mailbox, one message at a time.

Theory of operation. The thread runs the actor's `ActorLoop`; its `turn` is called whenever asyncio has nothing ready:

```
    BORN ──construct──► SERVING ──stop, mailbox drained──► ENDING ──► ENDED
      └──────── construct failed, or an endpoint failed ─────┘
```

In a turn, control messages come first (supervision, stop), then calls, of which one is served at a time: while an
`async` endpoint waits, the loop runs other tasks and control messages, but no further call is taken. What an actor
does is its `Behavior`, which the layer above supplies; this module knows nothing of endpoints and pickles.

An actor that ends refuses what is still queued, releases what it owns, runs its cleanup, which has a time limit,
releases what that has made, and then reports a `Down` to its process, once. What fails meanwhile is not lost: it turns
a stop into a failure.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from attrs import evolve

from monarch.core import deadlock, exceptions
from monarch.core.driver import Signal
from monarch.core.envelope import CallKey, Envelope, Flag
from monarch.core.ids import ActorId
from monarch.core.loop import ActorLoop, hidden_loop
from monarch.core.mailbox import FEW, Mailbox
from monarch.core.monitor import Down
from monarch.core.serving import ActorState, Served
from monarch.core.stacks import Stack, waiting_tasks
from monarch.log import get_logger

if TYPE_CHECKING:
    from monarch.compiled import Targets
    from monarch.core.proc import Proc

log = get_logger("monarch.instance")


class Sender:
    """Who messages come from: an actor, or the client. Numbers what it sends to other processes, per destination."""

    def __init__(self, proc: Proc, actor_id: ActorId) -> None:
        self.proc_runtime = proc
        self.actor_id = actor_id
        self._counters: dict[tuple[int, int], itertools.count[int]] = {}

    def next_seq(self, proc_key: int, actor_number: int) -> int:
        """The number of this sender's next message to that actor. Atomic under the interpreter lock."""
        return next(self._counter(proc_key, actor_number))

    def _counter(self, proc_key: int, actor_number: int) -> itertools.count[int]:
        counter = self._counters.get((proc_key, actor_number))
        if counter is None:
            counter = self._counters.setdefault((proc_key, actor_number), itertools.count())
        return counter

    def on_lanes(self, members: Sequence[tuple[int, int]], actor_number: int) -> Targets | None:
        """Members of a mesh, as (process, rank), as `compiled.post` wants them; none of them where one of several is in
        this process. None: not all are known yet."""
        runtime = self.proc_runtime
        if any(key == runtime.key for key, _ in members):
            if len(members) > 1:
                return ()
            actor = runtime.actors.get(actor_number)
            return ((actor.mailbox, None, *members[0]),) if isinstance(actor, Instance) else None
        lanes = []
        for key, rank in members:
            peer = runtime.gateway.peers.get(key)
            if peer is None:
                return None  # as with each cast that agents pass on
            lanes.append((peer, self._counter(key, actor_number), key, rank))
        return tuple(lanes)

    def forget(self, proc_key: int, actor_number: int | None = None) -> None:
        """An actor, or all of a process, is gone: nothing more is sent there."""
        if actor_number is not None:
            self._counters.pop((proc_key, actor_number), None)
            return
        for target in [target for target in list(self._counters) if target[0] == proc_key]:
            self._counters.pop(target, None)

    def post(self, envelope: Envelope) -> Down | None:
        """Take a call; returns why it is refused, if it is."""
        return Down("failed", "the client has no endpoints")

    def undeliverable(self, envelope: Envelope, down: Down) -> None:
        """A message of this sender that nobody waits for came back. Runs on the driving thread."""
        log.debug("message.undeliverable", sender=str(self.actor_id), reason=down.reason)


class Work(Protocol):
    """What `Behavior.handle` gives back for a call that has to wait."""

    coro: Coroutine[Any, Any, Down | None]
    concurrent: bool


class Behavior(Protocol):
    """What an actor does. All methods but `endpoint_of` run on the actor's thread, in the context that `Instance` gives
    them, and none raises."""

    @property
    def has_cleanup(self) -> bool:
        """Whether the user's object has a cleanup hook. Asked once, when it has been made."""
        ...

    def construct(self) -> Down | None:
        """Make the user's object. Returns why it failed, or None."""
        ...

    def handle(self, envelope: Envelope) -> Work | Down | None:
        """Serve a call, completely or up to a `Work`. A `Down` means that it killed the actor."""
        ...

    def abandon(self, envelope: Envelope, down: Down) -> None:
        """A call that will not be served any more (or whose service was broken off): tell its sender."""
        ...

    def endpoint_of(self, envelope: Envelope) -> str:
        """The name of the endpoint that a call is for. From any thread."""
        ...

    def release(self, down: Down) -> None:
        """Stop what the actor owns; blocks, bounded. Called before and after the cleanup."""
        ...

    def cleanup(self, down: Down) -> Coroutine[Any, Any, Down | None] | Down | None:
        """Run the user's cleanup hook. Returns why it failed, or None."""
        ...


_MESSAGES_PER_TURN: Final = 100
"""An actor that is flooded with calls still looks at its timers after so many."""

_BLOCKED_S: Final = 0.5
"""A cleanup that is cancelled in time gets so long to end by itself."""


class Phase(Enum):
    """Of an actor's life."""

    BORN = "born"
    SERVING = "serving"
    ENDING = "ending"
    ENDED = "ended"


_BORN: Final = Phase.BORN
_SERVING: Final = Phase.SERVING  # the look at a member of an enum takes 0.08 us


class Instance(Sender):
    """See the module. Thread-safe from outside: `post`, `request_stop`, `request_end`, `post_control`."""

    def __init__(self, proc: Proc, actor_id: ActorId) -> None:
        super().__init__(proc, actor_id)
        self.signal = Signal()
        self.mailbox = Mailbox(self.signal, proc.backpressure.limit_bytes)
        self.phase = Phase.BORN
        self.down: Down | None = None
        self.serving: list[Served] = []
        """What the behavior runs now, the oldest first; kept by the behavior, on the actor's thread."""
        self.thread_id = 0
        """Identity of the thread that runs it; 0 before."""
        self.stops_after: Callable[[Callable[[], None]], None] | None = None
        """What takes a request to stop until it may take effect: others still need this actor to finish."""
        self._served_numbers = itertools.count(1)
        self._cancelled: set[CallKey] = set()
        self._behavior: Behavior
        self.loop: ActorLoop
        self._current: asyncio.Task[Any] | None = None
        self._current_envelope: Envelope | None = None
        self._concurrent: dict[asyncio.Task[Any], Envelope] = {}
        self._beside: set[asyncio.Task[Any]] = set()
        self._stopping: Down | None = None
        self._owes_cleanup = self._cleans_up = False
        self._told: set[tuple[object, ...]] = set()  # what has made it fail, and what has gone wrong since
        self._reported = threading.Lock()

    # ---- from any thread

    def post(self, envelope: Envelope) -> Down | None:
        """Queue a call; returns why it is refused, if it is."""
        mailbox = self.mailbox
        down = mailbox.put(envelope)
        if mailbox.come_bytes > mailbox.weigh_at_bytes:
            mailbox.weigh_at_bytes = self.proc_runtime.backpressure.arrived(self, envelope)
        if envelope.chain and down is None:
            deadlock.suspect(self, envelope)
        return down

    def cancel(self, call: CallKey) -> None:
        """Its caller has given it up: take it out of the queue, or interrupt the endpoint at its next await. A sync one
        finds it in `Served.cancelled`."""
        # First the mark, then the look into the queue: the actor's thread takes from there, then looks for marks.
        self._cancelled.add(call)
        if self.withdraw(call) is not None:
            self._cancelled.discard(call)
        else:
            self.mailbox.control(lambda: self._interrupt(call))

    def withdraw(self, call: CallKey) -> Envelope | None:
        """Take a call out of the queue; None when it is not there (any more)."""
        found = self.mailbox.withdraw(call)
        if found is not None and self.mailbox.told_full:
            self.proc_runtime.backpressure.taken(self, found)
        return found

    @property
    def engaged(self) -> bool:
        """Whether the call that was queued last has to wait for others."""
        return self._current_envelope is not None or len(self.mailbox) > 1 or self.phase is Phase.BORN

    def is_cancelled(self, call: CallKey) -> bool:
        return call in self._cancelled

    def post_control(self, action: Callable[[], None]) -> bool:
        """Have the actor's thread do something; False when it has ended."""
        return self.mailbox.control(action)

    def request_stop_behind(self, message: Envelope, down: Down) -> None:
        """As `request_stop`, once all that the sender of `message` had sent to this actor before has come."""
        sender = message.src_proc, message.src_actor
        self.mailbox.when_at(sender, message.seq, lambda: self.request_stop(down))

    def request_stop(self, down: Down) -> None:
        """Refuse new calls, serve those that are queued, then end. See `stops_after`."""
        after, self.stops_after = self.stops_after, None
        if after is not None:
            after(lambda: self.request_stop(down))
            return
        self.mailbox.close(down)

        def begin() -> None:
            if self._stopping is None:
                self._stopping = down

        self.mailbox.control(begin)

    def request_end(self, down: Down) -> None:
        """End before the next call is served. What is being served is cancelled at its next await."""
        self.mailbox.close(down)
        self.mailbox.control(lambda: self.end(down))

    @property
    def owes_cleanup(self) -> bool:
        """Whether it has a cleanup that has not come to its end. From any thread."""
        return self._owes_cleanup and self.phase is not Phase.ENDED

    @property
    def member(self) -> str:
        """As people know it."""
        return self.actor_id.name

    def endpoint_of(self, envelope: Envelope) -> str:
        return self._behavior.endpoint_of(envelope)

    # ---- on the actor's thread

    def next_served(self) -> int:
        return next(self._served_numbers)

    def finished(self, served: Served) -> None:
        """The behavior is through with a call."""
        self.serving.remove(served)
        if self._cancelled:
            self._cancelled.discard(served.call)

    def _interrupt(self, call: CallKey) -> None:
        for served in self.serving:
            if served.call == call and served.task is not None:
                served.task.cancel()
                return
        self._cancelled.discard(call)  # it is over, or never came

    def start_beside(self, coro: Coroutine[Any, Any, Any]) -> None:
        """Run `coro` beside the calls, in the current context. The actor's end waits for it, as for its cleanup."""
        task = self._start_now(coro)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _start_now(self, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Its first step is made at once."""
        self.loop.show()
        return self.loop.start_now(coro, contextvars.copy_context())

    def stillborn(self, down: Down) -> None:
        """Instead of `run`: there is no thread for it."""
        self.phase, self.down = Phase.ENDED, down
        self._report(down)

    def cut_off(self) -> None:
        """End at once, without anything more: no release and no cleanup where they have not been."""
        if self.phase is not Phase.ENDED:  # else what is left is cancelled now, on the loop
            self.phase = Phase.ENDED
            self.loop.stop()

    def run(self, behavior: Behavior) -> None:
        """Live. Returns when the actor has ended."""
        self._behavior = behavior
        self.loop = ActorLoop(self.signal, self.proc_runtime.driver, self._serve_some, self._on_loop_error)
        self.thread_id = threading.get_ident()
        context = contextvars.copy_context()
        context.run(self._live)

    def _live(self) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        try:
            self._run_loop()
        except BaseException as error:
            self.down = self.down or self._broken("run", error)
            raise
        finally:
            self._finish_loop()
            asyncio.set_event_loop(None)

    def _run_loop(self) -> None:
        """Run until the actor has ended, also where its own code stops the loop. asyncio lets a SystemExit or
        KeyboardInterrupt of any task through: it ends the actor, and not the process."""
        while self.phase is not Phase.ENDED:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                text = f"a task of the actor raised {exceptions.summary(error)}"
                self.end(self.proc_runtime.failed(text, error))

    def _broken(self, what: str, error: BaseException) -> Down:
        """A behavior that raises, which none may, ends its actor: nobody shall wait for it for ever."""
        log.error("behavior.raised", actor=self.member, method=what, error=exceptions.summary(error))
        return self.proc_runtime.failed(f"{what} raised", error)

    def _construct(self) -> None:
        try:
            down = self._behavior.construct()
        except BaseException as error:
            down = self._broken("construct", error)
        if self.phase is not Phase.BORN:
            return
        self.phase = Phase.SERVING
        self._owes_cleanup = down is None and self._behavior.has_cleanup
        if down is not None:
            self.end(down, constructed=False)

    def _serve_some(self) -> None:
        """Serve control messages and calls until there is nothing to do now; the constructor comes first."""
        if self.phase is _BORN:
            contextvars.copy_context().run(self._construct)
            if self.loop.ready:
                return
        mailbox = self.mailbox
        for _ in range(_MESSAGES_PER_TURN):
            phase = self.phase
            if phase is not _SERVING and phase is Phase.ENDED:
                return
            if mailbox.controls and (action := mailbox.take_control()) is not None:
                self.loop.show()
                action()
                continue
            if phase is not _SERVING or self._current is not None:
                return
            calls = mailbox.calls
            if mailbox.in_turns or (mailbox.is_mixed and len(calls) > FEW):
                envelope = mailbox.take_in_turn()
                if envelope is None:
                    continue
            elif calls:
                try:
                    envelope = calls.popleft()
                except IndexError:
                    continue  # another thread has just withdrawn it
            else:
                if self._stopping is not None:
                    self.end(self._stopping)
                return
            if mailbox.told_full:
                self.proc_runtime.backpressure.taken(self, envelope)
            self._serve(envelope)
            if self.loop.ready:
                return  # let asyncio have its turn
        self.signal.notify()  # there may be more; timers and descriptors that are due go first

    def _serve(self, envelope: Envelope) -> None:
        self._current_envelope = envelope
        if self._cancelled and envelope.call in self._cancelled:
            self._cancelled.discard(envelope.call)
            self._current_envelope = None
            return
        try:
            outcome = self._behavior.handle(envelope)
        except BaseException as error:
            outcome = self._broken("handle", error)
        if outcome is None:
            self._current_envelope = None
            return
        if isinstance(outcome, Down):
            self.end(outcome)
            return
        task = self._start_now(outcome.coro)
        if task.done():
            self._current_envelope = None
            self._after(task)
        elif outcome.concurrent:
            self._current_envelope = None
            self._concurrent[task] = envelope
            task.add_done_callback(self._concurrent_done)
        else:
            self._current = task
            task.add_done_callback(self._current_done)

    def _current_done(self, task: asyncio.Task[Any]) -> None:
        self._current = None
        if self.phase is Phase.SERVING:
            self._current_envelope = None
        self._after(task)

    def _concurrent_done(self, task: asyncio.Task[Any]) -> None:
        self._concurrent.pop(task, None)
        self._after(task)

    def _after(self, task: asyncio.Task[Any]) -> None:
        try:
            down = None if task.cancelled() else task.result()
        except BaseException as error:
            down = self._broken("handle", error)
        if down is not None:
            self.end(down)

    def end(self, down: Down, *, constructed: bool = True) -> None:
        """Refuse what is left, release, clean up, report. On the actor's thread; of two reasons see `Down.then`."""
        if self.phase in (Phase.ENDING, Phase.ENDED):
            self._also(down)
            return
        self.phase = Phase.ENDING
        self.down = down
        self.mailbox.close(down)
        behavior = self._behavior
        # One that was begun has been delivered: only who waits for its answer is told.
        if self._current_envelope is not None and self._current_envelope.reply_port:
            self._current_envelope.flags |= Flag.BEGUN
            behavior.abandon(self._current_envelope, down)
        for envelope in self.mailbox.drain():
            behavior.abandon(envelope, down)
        self.proc_runtime.backpressure.ended(self)
        for task, envelope in list(self._concurrent.items()):
            task.cancel()
            if envelope.reply_port:
                envelope.flags |= Flag.BEGUN
                behavior.abandon(envelope, down)
        if self._current is not None:
            self._current.cancel()
        task = self.loop.create_task(self._wind_up(constructed))
        task.add_done_callback(lambda _: self.cut_off())

    def _also(self, later: Down) -> None:
        """Something more has happened to an actor that ends."""
        if self.down is None or later.stopped:  # None: it was cut off
            return
        self._told.add(self.down.event)
        if later.event in self._told:
            return
        self._told.add(later.event)
        if not self.down.stopped or self._reported.locked():
            log.warning("actor.failed_again", actor=self.member, ended=str(self.down), again=str(later))
        self.down = self.down.then(later)

    async def _wind_up(self, constructed: bool) -> None:
        others = [t for t in (self._current, *self._concurrent) if t is not None]
        if others:
            await asyncio.wait(others, timeout=1.0)
        await self._release()
        if constructed:
            await self._clean_up()
            await self._release()

    async def _release(self) -> None:
        """Nothing that the actor owns is left after it, and what came of that has been dealt with."""
        down = self.down
        assert down is not None
        try:
            hidden_loop(lambda: self._behavior.release(down))
        except Exception:
            log.exception("release.failed", actor=self.actor_id.name)
        dealt_with = asyncio.Event()
        self.post_control(dealt_with.set)  # behind all that the release has brought
        await dealt_with.wait()
        if self._beside:
            await asyncio.wait(self._beside, timeout=self.proc_runtime.cleanup_timeout_s)

    async def _clean_up(self) -> None:
        assert self.down is not None
        limit_s = self.proc_runtime.cleanup_timeout_s
        self._cleans_up = True
        self.proc_runtime.gateway.call_later(limit_s + _BLOCKED_S, partial(_blocked, weakref.ref(self)))
        try:
            cleanup = self._behavior.cleanup(self.down)
            failed = cleanup if isinstance(cleanup, Down | None) else await asyncio.wait_for(cleanup, limit_s)
        except TimeoutError:
            failed = None if self._reported.locked() else self._cleanup_overdue("was cancelled")
        self._cleans_up = self._owes_cleanup = False
        if failed is not None:
            self._also(failed)

    def _cleanup_overdue(self, fate: str) -> Down:
        limit_s = self.proc_runtime.cleanup_timeout_s
        text = f"{self.member}: __cleanup__ has not ended within {limit_s:g} s (setting cleanup_timeout), and {fate}"
        return evolve(self.proc_runtime.failed(text), actor=self.member)

    def _finish_loop(self) -> None:
        """Cancel what the user left on the loop, close it, and report."""
        loop = self.loop
        self.phase = Phase.ENDED
        try:
            left = [t for t in asyncio.all_tasks(loop) if not t.done()]
            for task in left:
                task.cancel()
            if left:
                loop.turn = lambda: None
                loop.run_until_complete(asyncio.wait(left, timeout=1.0))
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException:
            log.exception("loop.unclean", actor=self.actor_id.name)
        finally:
            loop.close()
            self._finish_control()
            self._report(self.down if self.down is not None else Down("stopped", "the actor has ended"))

    def _finish_control(self) -> None:
        while (action := self.mailbox.take_control(last=True)) is not None:
            try:
                action()
            except Exception:
                log.exception("control.failed", actor=self.actor_id.name)

    def _report(self, down: Down) -> None:
        if self._reported.acquire(blocking=False):
            self.proc_runtime.actor_ended(self, down)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.phase in (Phase.BORN, Phase.SERVING):
            loop.default_exception_handler(context)

    # ---- for people

    def snapshot(self) -> ActorState:
        """What this actor does right now. From any thread; never waits."""
        running = tuple(each.running() for each in tuple(self.serving))
        return ActorState(self.actor_id.name, self.actor_id.number, self.phase.value, running, len(self.mailbox))

    def waiting(self) -> tuple[Stack, ...]:
        """The stacks of its tasks that wait at an `await`. From any thread, once `thread_id` is set."""
        return tuple(waiting_tasks(self.loop))


def _blocked(instance: weakref.ref[Instance]) -> None:
    """The time for a cleanup is over: report the actor's end, though its thread is still busy with that."""
    found = instance()
    if found is not None and found._cleans_up:
        assert found.down is not None
        found._report(found.down.then(found._cleanup_overdue("blocks its thread")))
