"""What an actor does with a message: from the parts of a CALL to the user's method, and from its result to the reply.

The `Behavior` of `core.instance` for actors of user classes. Errors sort themselves here: an `Exception` of an endpoint
that somebody waits for goes to the caller and the actor lives on; everything else ends the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dis
import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final

from attrs import define, evolve

from monarch.core import codec, exceptions
from monarch.core.envelope import Envelope, Flag
from monarch.core.ids import ActorId, PortId
from monarch.core.instance import Phase
from monarch.core.loop import hidden_loop
from monarch.core.monitor import Down
from monarch.core.serving import Served
from monarch.errors import ActorError, SupervisionError
from monarch.launch import written
from monarch.log import get_logger
from monarch.mesh import breakpoints
from monarch.mesh.actor import ActorClass, class_of
from monarch.mesh.attribution import prefix_log_records
from monarch.mesh.context import ActorInstance, Context, current_context
from monarch.mesh.endpoint import EndpointSpec
from monarch.mesh.port import Port
from monarch.mesh.shape import Extent, Point
from monarch.mesh.undeliverable import Undeliverable
from monarch.supervision.failure import MeshFailure

log = get_logger("monarch.actor")

READY = "__ready__"
"""Name of an endpoint that every actor has: it answers once the constructor is through."""


_LET_OUT: Final = (
    ", a cancellation that no caller has asked for. To let one out ends an actor: catch it where a task or future is "
    "awaited that may be cancelled"
)


_IMPLIED: Final[Port[Any]] = Port(None)
"""Stands for the reply port that an envelope names: it is made only for an endpoint that gets it."""


@define(eq=False)
class Waiting:
    """A call that goes on as a task (see `core.instance.Work`)."""

    coro: Coroutine[Any, Any, Down | None]
    concurrent: bool


class _Called:
    """What the description of a call says.

    Attributes:
        extent: of the view that was called; `points` are its members, those that were needed so far.
        extra: what the caller wants beside.
        spec: the endpoint of that name, once it has been looked up.
        never_waits: whether it is `async def`, and has nothing to wait for.
    """

    __slots__ = ("extent", "extra", "name", "never_waits", "points", "spec")

    def __init__(
        self, name: str, labels: tuple[str, ...], sizes: tuple[int, ...], extra: dict[str, Any] | None
    ) -> None:
        self.name, self.extra = name, extra
        self.extent = Extent(labels, sizes)
        self.points: dict[int, Point] = {}
        self.spec: EndpointSpec | None = None
        self.never_waits = False

    def add_point(self, rank: int) -> Point:
        self.points[rank] = point = Point(rank, self.extent)
        return point


_DESCRIPTIONS: Final = 1024  # so many are kept for a class


@functools.lru_cache(maxsize=1024)
def _calls_of(cls: type) -> dict[bytes, _Called]:
    """What the descriptions of calls mean that actors of this class have had: to read one takes 20 us."""
    return {}


_WAITS: Final = frozenset(
    code
    for name, code in dis.opmap.items()
    if name.startswith(("GET_AWAITABLE", "SEND", "YIELD_VALUE", "GET_AITER", "GET_ANEXT", "BEFORE_ASYNC_WITH"))
)


def _never_waits(method: Callable[..., Any]) -> bool:
    """Whether a method, which is `async def`, has no `await`, `async for` or `async with`."""
    code = getattr(method, "__code__", None)
    return code is not None and bool(code.co_flags & inspect.CO_COROUTINE) and _WAITS.isdisjoint(code.co_code[::2])


_forks = 0


def _in_forked_child() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_in_forked_child)


class ActorBehavior:
    """See the module. `body` is the encoded call `class(*args, **kwargs)`."""

    def __init__(self, instance: ActorInstance, body: list[Any], release: Callable[[Down], None]) -> None:
        self._instance = instance
        self._body: list[Any] | None = body
        self._release = release
        self._class: ActorClass
        self._actor: Any = None
        self._calls: dict[bytes, _Called] = {}
        self._owed: set[Envelope] = set()
        self._forks = _forks

    # ---- birth

    def construct(self) -> Down | None:
        instance = self._instance
        prefix_log_records()
        breakpoints.install()
        body, self._body = self._body, None
        assert body is not None
        loop: Any = asyncio.get_running_loop()
        served = Context(instance, instance.rank, "__init__")
        instance.serving.append(served)
        current_context.set(served)
        written.tell()
        try:
            instance.is_importing = True
            (cls, *args), kwargs = codec.decode(body)
            instance.is_importing = False
            self._class = class_of(cls)
            self._calls = _calls_of(cls)
            loop.may_block = not self._class.is_async
            self._actor = cls(*args, **kwargs)
        except BaseException as error:
            return self._failed(f"{instance.class_name}.__init__() raised", error)
        finally:
            instance.is_importing = loop.may_block = False
            instance.finished(served)
        return None

    def _failed(self, what: str, error: BaseException) -> Down:
        if issubclass(type(error), SystemExit):
            what = f"the actor exited with status {exceptions.text_of(error) or 0}: {what}"
        text = f"{what} {exceptions.summary(error)}"
        if issubclass(type(error), asyncio.CancelledError):
            text += _LET_OUT
        down = self._instance.proc_runtime.failed(text, error)
        return evolve(down, actor=self._instance.member)

    # ---- calls

    def handle(self, envelope: Envelope) -> Waiting | Down | None:
        try:
            description = envelope.parts[0]
            called = self._calls.get(description) if type(description) is bytes else None
            if called is None:
                called = self._describe(bytes(description))
            name, extra = called.name, called.extra
            port = _IMPLIED if envelope.reply_port else None
            if extra is not None and "reply" in extra:
                port = codec.decode(extra["reply"])  # the caller's own, see `send`
                port._rank = envelope.rank
        except Exception as error:
            return self._reply_error(envelope, None, error)
        if name == READY:
            self._reply(envelope, port, [None])
            return None
        instance = self._instance
        try:
            spec = called.spec or self._look_up(called)
            point = called.points.get(envelope.rank)
            if point is None:
                point = called.add_point(envelope.rank)
            served = Context(instance, point, name, envelope, not spec.concurrent)
            current_context.set(served)
            # Who runs the endpoint takes them out, and nothing else here keeps what they are built over: what the
            # endpoint returns of it may be passed on as it is.
            parts = envelope.parts
            envelope.parts = parts[:1]
            try:
                box = [*codec.decode(parts[1:])]
            except Exception as error:
                with contextlib.suppress(Exception):
                    error.add_note(f"the arguments of {instance.member}.{name} could not be rebuilt there")
                raise
            del parts
            if spec.sends_itself:
                box[0] = (self._handed_out(envelope, port), *box[0])
        except Exception as error:
            return self._reply_error(envelope, port, error)
        if not spec.is_async:
            return self._run_sync(served, envelope, spec, port, box)
        coro = self._run_async(served, envelope, spec, port, box)
        return self._run_to_end(coro) if called.never_waits else Waiting(coro, spec.concurrent)

    def endpoint_of(self, envelope: Envelope) -> str:
        name = self._describe(bytes(envelope.parts[0])).name
        return "initialized" if name == READY else name

    def _handed_out(self, envelope: Envelope, port: Port[Any] | None) -> Port[Any]:
        """The reply port of a method that replies itself. What it still owes when the actor ends, is refused then."""
        if port is None:
            return Port(None)
        if envelope.reply_port:
            port = self._reply_port(envelope)
            self._owed.add(envelope)
            port._on_use = lambda: self._owed.discard(envelope)
        return port

    def _describe(self, description: bytes) -> _Called:
        """Which endpoint a call is for, the view that was called, and what the caller wants beside."""
        calls = self._calls
        found = calls.get(description)
        if found is None:
            found = _Called(*pickle.loads(description))
            if found.extra is None or not found.extra.keys() & {"reply", "wrap"}:
                if len(calls) >= _DESCRIPTIONS:
                    calls.clear()
                calls[description] = found
        return found

    def _look_up(self, called: _Called) -> EndpointSpec:
        """An endpoint as the caller wants it: also one that is not decorated, or with something around its method.

        Raises:
            AttributeError: there is none of that name.
        """
        spec = self._class.endpoints.get(called.name)
        extra = called.extra or {}
        if extra.get("plain"):
            spec = EndpointSpec.make(called.name, getattr(self._class.cls, called.name), extra["port"])
        if spec is None:
            raise AttributeError(f"{self._class.name} has no endpoint {called.name!r}")
        called.spec = spec = evolve(spec, method=extra["wrap"](spec.method)) if "wrap" in extra else spec
        called.never_waits = spec.is_async and _never_waits(spec.method)
        return spec

    def _reply_port(self, envelope: Envelope) -> Port[Any]:
        """The port that `envelope` wants its reply at."""
        runtime = self._instance.proc_runtime
        peer = runtime.gateway.peers.get(envelope.src_proc)
        proc = runtime.proc_id if envelope.src_proc == runtime.key else peer.proc if peer is not None else None
        assert proc is not None
        port = PortId(ActorId(proc, envelope.src_actor), envelope.reply_port)
        reply: Port[Any] = Port(port, envelope.rank, self._instance)
        reply.return_undeliverable = False  # that a caller is gone is no news for the actor which answers it
        return reply

    def _run_sync(
        self, served: Served, envelope: Envelope, spec: EndpointSpec, port: Port[Any] | None, box: list[Any]
    ) -> Down | None:
        instance = self._instance
        instance.serving.append(served)
        if not instance.loop.is_hidden:
            instance.loop.hide()
        try:
            kwargs, args = box.pop(), box.pop()
            box.append(spec.method(self._actor, *args, **kwargs))
            del args, kwargs
            if _forks != self._forks:
                self._end_if_forked(None)
        except Exception as error:
            self._end_if_forked(error)
            return self._endpoint_failed(served, envelope, spec, port, error)
        except BaseException as error:
            self._end_if_forked(error)
            return self._failed(f"endpoint {spec.name} raised", error)
        finally:
            instance.finished(served)
        if not spec.sends_itself:
            return self._reply(envelope, port, box)
        return None

    def _run_to_end(self, coro: Coroutine[Any, Any, Down | None]) -> Down | None:
        """A coroutine that never waits needs no task, which takes 6 us of 27."""
        if self._instance.loop.is_hidden:
            self._instance.loop.show()
        try:
            contextvars.copy_context().run(coro.send, None)
        except StopIteration as done:
            down: Down | None = done.value
            return down
        coro.close()
        raise RuntimeError("it waits")  # see `_never_waits`

    async def _run_async(
        self, served: Served, envelope: Envelope, spec: EndpointSpec, port: Port[Any] | None, box: list[Any]
    ) -> Down | None:
        served.task = asyncio.current_task()
        self._instance.serving.append(served)
        try:
            kwargs, args = box.pop(), box.pop()
            box.append(await spec.method(self._actor, *args, **kwargs))
            del args, kwargs
            if _forks != self._forks:
                self._end_if_forked(None)
        except Exception as error:
            self._end_if_forked(error)
            return self._endpoint_failed(served, envelope, spec, port, error)
        except BaseException as error:
            self._end_if_forked(error)
            cancelled = issubclass(type(error), asyncio.CancelledError)
            if cancelled and self._instance.down is not None:
                raise  # the actor is ending
            if cancelled and served.cancelled:
                self._owed.discard(envelope)
                return None
            if spec.concurrent and port is not None and not spec.sends_itself:
                wrapped = RuntimeError(f"the endpoint failed with a BaseException: {exceptions.type_name(error)}")
                wrapped.__cause__ = error
                return self._reply_error(envelope, port, wrapped)
            return self._broken(envelope, spec, error)
        finally:
            self._instance.finished(served)
        if not spec.sends_itself:
            return self._reply(envelope, port, box)
        return None

    def _end_if_forked(self, error: BaseException | None) -> None:
        """A child that the user forked in an endpoint came out of it: it ends here, as a script would at its last line,
        and does not answer in the actor's name."""
        if _forks == self._forks:
            return
        status = 0
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        elif error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _broken(self, envelope: Envelope, spec: EndpointSpec, error: BaseException) -> Down:
        down = self._failed(f"endpoint {spec.name} raised", error)
        self._instance.mailbox.close(down)
        if envelope.reply_port:
            envelope.flags |= Flag.BEGUN
            self.abandon(envelope, down)
        return down

    def _endpoint_failed(
        self, served: Served, envelope: Envelope, spec: EndpointSpec, port: Port[Any] | None, error: Exception
    ) -> Down | None:
        if served.cancelled:
            self._owed.discard(envelope)
            return None  # nobody waits, and nobody is to blame
        if issubclass(type(error), StopIteration):  # what an exception says of its class is the user's code
            wrapped = RuntimeError(f"endpoint {spec.name} raised StopIteration")
            wrapped.__cause__ = error
            error = wrapped
        if port is None or spec.sends_itself:
            stopped = self._instance.mailbox.closed
            if stopped is not None and stopped.stopped and _met_a_stop(error):
                return None  # it is to stop, too, and a stop is no failure
            return self._broken(envelope, spec, error)
        return self._reply_error(envelope, port, error)

    # ---- replies

    def _reply(self, envelope: Envelope, port: Port[Any] | None, box: list[Any]) -> Down | None:
        """`box`: the result, which is taken out."""
        if port is None:
            return None
        what = type(box[0])
        runtime = self._instance.proc_runtime
        receiver = envelope.src_proc if envelope.reply_port else port._proc_key
        try:
            parts = codec.encode_last(box, runtime.memory_for, (receiver,))
        except Exception as error:
            why = exceptions.text_of(error)
            wrapped = TypeError(f"the result of type {exceptions.name_of_type(what)} cannot be sent: {why}")
            wrapped.__cause__ = error
            return self._reply_error(envelope, port, wrapped)
        if envelope.reply_port:
            runtime.reply(envelope, parts)
        else:
            port._send(parts, 0)
        return None

    def _reply_error(self, envelope: Envelope, port: Port[Any] | None, error: Exception) -> Down | None:
        parts = exceptions.encode_exception(error)
        if envelope.reply_port:
            self._instance.proc_runtime.reply(envelope, parts, Flag.ERROR)
        elif port is not None:
            port._send(parts, Flag.ERROR)
        else:
            return self._failed("a message could not be read:", error)
        return None

    def abandon(self, envelope: Envelope, down: Down) -> None:
        self._instance.proc_runtime.bounce(envelope, down)

    def _hook(self, name: str) -> Any:
        """A method that the user's object may have, or None."""
        try:
            return getattr(self._actor, name, None)
        except Exception:  # of a `__getattr__` of the user's
            return None

    # ---- supervision, undeliverable messages

    def supervise(self, failure: MeshFailure) -> None:
        """Something this actor owns has failed. On the actor's thread, between messages or while an endpoint waits."""
        handler = self._hook("__supervise__")
        if handler is None or self._instance.phase is Phase.ENDED:
            self._unhandled(failure, None)
            return

        def answered(handled: object, error: BaseException | None) -> None:
            if not handled:
                self._unhandled(failure, error)

        self._ask(handler, failure, answered)

    def _ask(
        self, hook: Callable[[Any], Any], about: object, answered: Callable[[object, BaseException | None], None]
    ) -> None:
        """Call a hook of the actor's, sync or async; `answered` gets what it returned, or None and what it raised. An
        async one of an actor that has ended is not called."""
        current_context.set(Context(self._instance, self._instance.rank))
        try:
            if inspect.iscoroutinefunction(hook):
                if self._instance.phase is Phase.ENDED:
                    answered(None, None)
                else:
                    self._instance.start_beside(self._ask_async(hook, about, answered))
                return
            answer = hidden_loop(lambda: hook(about))
        except BaseException as error:
            answered(None, error)
        else:
            answered(answer, None)

    async def _ask_async(
        self, hook: Callable[[Any], Any], about: object, answered: Callable[[object, BaseException | None], None]
    ) -> None:
        try:
            answer = await hook(about)
        except BaseException as error:
            answered(None, error)
        else:
            answered(answer, None)

    def _unhandled(self, failure: MeshFailure, error: BaseException | None) -> None:
        member = self._instance.member
        if error is not None:
            down = self._failed(f"{member}: __supervise__ raised", error)
        else:
            verdict = "did not return True" if self._hook("__supervise__") is not None else "is not defined"
            verdict = "could not be asked any more" if self._instance.phase is Phase.ENDED else verdict
            text = (
                f"{member} did not handle a supervision event from its child {failure.member}: __supervise__ {verdict}"
            )
            down = evolve(self._instance.proc_runtime.failed(text), actor=member)
        child = evolve(failure.down, reason=f"{failure.member}: {failure.down.reason}")
        self._instance.end(down.because(child))

    def undeliverable(self, envelope: Envelope, down: Down) -> None:
        """A message of this actor's came back that nobody waits for the answer of."""
        message = Undeliverable.of(self._instance, envelope, down)

        def answered(handled: object, error: BaseException | None) -> None:
            if error is not None:
                log.exception("undeliverable.handler_failed", actor=self._instance.member)
            if not handled:
                self._came_back(envelope, message, down)

        if self._actor is None:
            self._came_back(envelope, message, down)
        else:
            self._ask(self._actor._handle_undeliverable_message, message, answered)

    def _came_back(self, envelope: Envelope, message: Undeliverable, down: Down) -> None:
        """A message of this actor's that it does not take care of."""
        if self._instance.must_hear_of(envelope):
            failed = self._instance.proc_runtime.failed(f"{self._instance.member}: {message.what()}")
            self._instance.end(failed.because(down))
        else:
            message.warn(self._instance.member, down, self._instance.proc_runtime.returned)

    # ---- the end

    def release(self, down: Down) -> None:
        for envelope in list(self._owed):
            envelope.flags |= Flag.BEGUN
            self.abandon(envelope, down)
        self._release(down)

    @property
    def has_cleanup(self) -> bool:
        return self._hook("__cleanup__") is not None

    def cleanup(self, down: Down) -> Coroutine[Any, Any, Down | None] | Down | None:
        handler = self._hook("__cleanup__")
        if handler is None:
            return None
        current_context.set(Context(self._instance, self._instance.rank))
        reason = None if down.stopped else Exception(str(down))
        if inspect.iscoroutinefunction(handler):
            return self._cleanup_async(handler, reason)
        try:
            hidden_loop(lambda: handler(reason))
        except BaseException as error:
            return self._failed(f"{self._instance.member}: __cleanup__ raised", error)
        return None

    async def _cleanup_async(self, handler: Callable[[Exception | None], Any], reason: Exception | None) -> Down | None:
        try:
            await handler(reason)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                raise  # its time is over
            return self._failed(f"{self._instance.member}: __cleanup__ raised", error)
        return None


def _met_a_stop(error: BaseException | None) -> bool:
    """Whether something that has been stopped, rather than failed, is behind `error`."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, SupervisionError) and error.failure is None:
            return True
        seen.append(error)
        error = error.exception if isinstance(error, ActorError) else error.__cause__ or error.__context__
    return False


async def settle_result(function: Callable[[], Any]) -> Any:
    """Call `function` and await what it returns if that can be awaited; a plain function may block."""
    result = hidden_loop(function) if not inspect.iscoroutinefunction(function) else function()
    return await result if inspect.isawaitable(result) else result
