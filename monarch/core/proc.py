"""The actors and ports of one process, between its gateway and the layers above.

A `Proc` delivers what the gateway hands it: calls to actors, values to ports, bounces to whoever waits, requests to
agents. It tells ports and monitors when another process is gone. Usually an OS process has one `Proc`; over `inproc`
the processes of a mesh are several `Proc`s in one.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, cast

from monarch import compiled
from monarch.core import codec, exceptions, inquiries
from monarch.core.actor_threads import Failed, Run, run_on_thread
from monarch.core.backpressure import Backpressure
from monarch.core.caster import Caster
from monarch.core.crossing import Crossings
from monarch.core.driver import make_driver
from monarch.core.envelope import MESSAGE_TTL, CallKey, Envelope, Flag, Kind
from monarch.core.future import Future
from monarch.core.gateway import Gateway
from monarch.core.held import undisturbed
from monarch.core.ids import ActorId, ProcId
from monarch.core.instance import Instance, Sender
from monarch.core.limits import Limits
from monarch.core.locator import Locator
from monarch.core.monitor import Down, Monitors, PeerGone
from monarch.core.peer import Peer
from monarch.core.probes import PendingCall
from monarch.core.relay import Relay
from monarch.log import get_logger
from monarch.transports import memory
from monarch.transports.base import Buffer, Transport

log = get_logger("monarch.proc")

PROC_AGENT: Final = 1
"""Actor number of every process's agent, which answers for the process itself."""


class Sink(Protocol):
    """What a port number stands for. All methods run on the driving thread and must not block."""

    def deliver(self, envelope: Envelope) -> None: ...

    def bounced(self, envelope: Envelope, down: Down) -> None:
        """A message with this reply port came back undelivered."""
        ...

    def proc_gone(self, key: int, down: Down) -> None:
        """A process has ended; answers from it will not come."""
        ...


class Proc:
    """See the module.

    Attributes:
        monitors: who wants to know of which end.
        actors, ports: those of this process, by number. Numbers of ports are drawn here, those of actors by whoever
            spawns them.
        on_proc_gone: called with the key of a process that is gone, and why, after ports and monitors have heard.
        on_unborn: called with the number of an actor that a call is for and that is not there; may make it.
        run_actor: runs an actor's life on a thread, as `run_on_thread`.
        handlers: what an agent does with a request, by the first element of the request's tuple. A handler is called on
            the driving thread as `handler(envelope, *arguments)` and must not block.
    """

    def __init__(
        self,
        proc_id: ProcId,
        transport: Transport,
        secret: bytes,
        *,
        driver: str = "caller",
        limits: Limits | None = None,
    ) -> None:
        self.secret = secret
        self.driver = make_driver(driver)
        self.monitors = Monitors()
        self.actors: dict[int, Instance | Sender] = {}
        self.ports: dict[int, Sink] = {}
        self.handlers: dict[str, Callable[..., None]] = {
            "watch": self._on_watch,
            "proc_gone": lambda envelope, proc, down: self.gateway.peers.process_ended(proc, down),
        }
        self.cleanup_timeout_s = 3.0
        self.release_timeout_s = 10.0
        self.unborn_limit_s = 30.0
        self.message_ttl = MESSAGE_TTL
        self.on_proc_gone: list[Callable[[int, Down], None]] = []
        self.on_actor_ended: list[Callable[[int], None]] = []  # called before anybody hears of the end
        self.run_actor: Callable[[str, Run, Failed], None] = run_on_thread
        self.on_unborn: Callable[[int], None] = lambda number: None
        self.new_port: Callable[[], int] = itertools.count(16).__next__
        self._unborn: dict[int, list[Envelope]] = {}
        self._lock = threading.Lock()
        self.locator = Locator(self)
        self.caster = Caster(self)
        self.relay = Relay(self, self.caster)
        self.gateway = Gateway(
            proc_id,
            transport,
            secret,
            self.driver,
            deliver=compiled.delivery(self.deliver, self.actors, self.ports),
            forward=self.relay.forward,
            bounce=self.bounce,
            on_gone=self._on_gone,
            locate=self.locator.locate,
            limits=limits,
        )
        self.key = proc_id.key
        self.wait_for_room = self.gateway.wait_for_room
        self._shared = transport.memory
        self._for_one = self._memory_for(1) if self._shared is not None else None
        self.backpressure = Backpressure(self, self.gateway.limits.mailbox_bytes)
        self.crossings = Crossings(self)
        inquiries.install(self)

    @property
    def proc_id(self) -> ProcId:
        return self.gateway.proc

    def pending_calls(self) -> Iterator[PendingCall]:
        """Those that endpoints of this process have made."""
        for port in list(self.ports):
            call = self.pending_call(port)
            if call is not None:
                yield call

    def pending_call(self, port: int) -> PendingCall | None:
        """The one whose answer comes to that port."""
        sink = self.ports.get(port)
        return cast("PendingCall", sink) if getattr(sink, "caller_wait", None) is not None else None

    # ---- sending

    def memory_for(self, keys: Sequence[int]) -> codec.Allocate | None:
        """Where large buffers of a message to those processes are best put, for the encoder; None: anywhere."""
        if self._shared is None or all(map(self.gateway.peers.is_far, keys)):
            return None
        if len(keys) == 1:
            return self._for_one if keys[0] != self.key else None
        return self._memory_for(len(keys))

    def _memory_for(self, receivers: int) -> codec.Allocate:
        shared = self._shared

        def allocate(size_bytes: int) -> memoryview:
            with undisturbed():  # a slot is in nobody's books between two of them
                found = shared.allocate(size_bytes, receivers) if shared is not None else None
            return found if found is not None else memory.allocate(size_bytes)

        return allocate

    def send(self, envelope: Envelope, proc: ProcId | None, *, may_wait: bool = True) -> None:
        """Put a message on its way; one that cannot be delivered comes back as a bounce, also from here."""
        envelope.ttl = self.message_ttl
        if envelope.dst_proc == self.key:
            self.deliver(envelope)
            return
        if envelope.via:
            self.relay.choose_way(envelope)
        down = self.gateway.send(envelope, proc, may_wait=may_wait)
        if down is None:
            return
        if proc is None or not self.gateway.peers.keeps(proc) or self.gateway.is_closed:
            self.bounce(envelope, down)
        else:
            self.locator.when_known(proc.key, lambda: self._send_again(envelope))

    def reply(self, call: Envelope, parts: list[Buffer], flags: int = 0) -> None:
        """Answer a call, silently: that a caller is gone is no news for who answers. Blocks while the buffer of the
        caller's process is full."""
        key, flags = call.src_proc, flags | Flag.SILENT
        if key == self.key:
            self.deliver(call.reply(parts, flags))
            return
        peer = None if call.via or self.gateway.is_closed else self.gateway.peers.get(key)
        if peer is not None and peer.lane is not None:
            lanes, ttl = ((peer, None, key, call.rank),), self.message_ttl
            to, port, own, source = call.src_actor, call.reply_port, call.dst_proc, call.dst_actor
            sent = compiled.post(lanes, parts, b"", Kind.PORT, flags, ttl, to, port, own, source, 0)
            if sent == compiled.FULL:
                self.wait_for_room((key,))
            if sent:
                return
        self.send(call.reply(parts, flags), None)

    def _send_again(self, envelope: Envelope) -> None:
        down = self.gateway.send(envelope)
        if down is not None:
            self.bounce(envelope, down)

    def bounce(self, envelope: Envelope, down: Down) -> None:
        """Tell the sender of `envelope`, here or elsewhere, that it was not delivered; a bounce itself is dropped."""
        if envelope.kind == Kind.BOUNCE:
            log.debug("bounce.dropped", reason=down.reason)
            return
        if envelope.kind in (Kind.CAST, Kind.TAKEN):
            return  # whoever cast hears of the end of that agent itself
        if envelope.src_proc == self.key:
            self._bounced(envelope, down)
        else:
            back = envelope.bounce(codec.encode(down))
            self.gateway.send(back)

    def request(
        self, proc: ProcId, *message: Any, agent: int = PROC_AGENT, sender: int = PROC_AGENT
    ) -> Future[tuple[Any, ...]]:
        """Ask an agent of `proc`; the future has the tuple that it answers, or fails with PeerGone."""
        future: Future[tuple[Any, ...]] = Future._pending(self.driver, lambda: f"{message[0]} at {proc.uid}")
        port = self.new_port()
        self.ports[port] = _Answer(self, port, proc.key, future)
        parts = codec.encode(message)
        envelope = Envelope(Kind.SYSTEM, proc.key, agent, 0, self.key, sender, parts, reply_port=port)
        self.send(envelope, proc, may_wait=False)
        return future

    def tell(self, proc: ProcId, *message: Any, agent: int = PROC_AGENT) -> None:
        """Tell an agent of `proc` something that has no answer; dropped when it is gone."""
        self.send(self._news(proc.key, agent, message), proc, may_wait=False)

    def tell_known(self, key: int, *message: Any, via: int = 0) -> None:
        """As `tell`, to a process from which messages have come; by another, where they came by that."""
        news = self._news(key, PROC_AGENT, message)
        news.via = via
        self.send(news, None, may_wait=False)

    def _news(self, key: int, agent: int, message: tuple[Any, ...]) -> Envelope:
        parts = codec.encode(message)
        return Envelope(Kind.SYSTEM, key, agent, 0, self.key, PROC_AGENT, parts, Flag.SILENT)

    def answer(self, envelope: Envelope, *message: Any) -> None:
        """Answer a request."""
        if envelope.reply_port:
            self.send(envelope.reply(codec.encode(message)), None, may_wait=False)

    # ---- delivering, on the driving thread or the thread of a local sender

    def deliver(self, envelope: Envelope) -> None:
        kind = envelope.kind
        if kind == Kind.PORT:
            sink = self.ports.get(envelope.dst_port)
            if sink is not None:
                sink.deliver(envelope)
            elif not envelope.flags & Flag.SILENT:
                self.bounce(envelope, Down("unreachable", "nobody receives at this port any more"))
        elif kind == Kind.CALL:
            actor = self.actors.get(envelope.dst_actor) or self._awaited(envelope)
            if actor is not None:
                self._post(actor, envelope)
        elif kind == Kind.SYSTEM:
            self._deliver_request(envelope)
        elif kind == Kind.SPAWN:
            self._handle("spawn", envelope)
        elif kind == Kind.BOUNCE:
            self._bounced(envelope, codec.decode(envelope.parts))
        elif kind in (Kind.CAST, Kind.PASSED_ON, Kind.TAKEN):
            self.relay.deliver(envelope)

    def _awaited(self, envelope: Envelope) -> Instance | Sender | None:
        """The actor of a call for one that was not there a moment ago; None: it waits for it, or goes back."""
        number = envelope.dst_actor
        self.on_unborn(number)
        with self._lock:
            actor = self.actors.get(number)
            down = self.monitors.gone((self.key, number))
            if actor is None and down is None:
                # Its creator named it and told others before its own request to spawn it came through here.
                held = self._unborn.setdefault(number, [])
                held.append(envelope)
                if len(held) == 1:
                    self.gateway.call_later(self.unborn_limit_s, lambda: self._refuse_unborn(number))
                return None
        if actor is None:
            assert down is not None
            self.bounce(envelope, down)
        return actor

    def expects(self, number: int) -> bool:
        """Whether an actor of that number will be made here, however long it takes."""
        return False

    def _refuse_unborn(self, number: int) -> None:
        if self.expects(number):
            self.gateway.call_later(self.unborn_limit_s, lambda: self._refuse_unborn(number))
        else:
            self.never_born(number, Down("unreachable", f"nobody spawned this actor in {self.unborn_limit_s:g} s"))

    def _bounce_unborn(self, number: int, down: Down) -> None:
        with self._lock:
            held = self._unborn.pop(number, [])
        for envelope in held:
            self.bounce(envelope, down)

    def withdraw_unborn(self, number: int, call: CallKey) -> None:
        """A call to an actor that is not there yet has been given up."""
        with self._lock:
            for envelope in self._unborn.get(number, ()):
                if envelope.call == call:
                    envelope.flags |= Flag.SKIP  # its number still counts

    def never_born(self, number: int, down: Down) -> None:
        """An actor of that number will not be made: messages for it that came early go back."""
        self.monitors.fire((self.key, number), down)
        self._bounce_unborn(number, down)

    def _deliver_request(self, envelope: Envelope) -> None:
        try:
            name, *arguments = codec.decode(envelope.parts)
        except Exception as error:
            log.exception("request.unreadable")
            self.bounce(envelope, Down("failed", f"the request cannot be read: {error}"))
            return
        self._handle(name, envelope, *arguments)

    def _handle(self, name: str, envelope: Envelope, *arguments: Any) -> None:
        """Whoever waits for the answer hears also when there will be none."""
        handler = self.handlers.get(name)
        if handler is None:
            log.error("request.unknown", request=name)
            self.bounce(envelope, Down("failed", f"this process knows no request {name!r}"))
            return
        with undisturbed():  # an interrupt on its way could leave a process half launched
            try:
                handler(envelope, *arguments)
            except Exception as error:
                log.exception("request.failed", request=name)
                self.bounce(envelope, Down("failed", f"request {name} failed: {type(error).__name__}: {error}"))

    def _bounced(self, envelope: Envelope, down: Down) -> None:
        """A message that an actor here sent was not delivered: whoever waits for its answer hears, else its sender."""
        # A bounce from elsewhere has the reply port as its destination; one from here still is the message itself.
        port = envelope.dst_port if envelope.kind == Kind.BOUNCE else envelope.reply_port
        number = envelope.dst_actor if envelope.kind == Kind.BOUNCE else envelope.src_actor
        if port:
            sink = self.ports.get(port)
            if sink is not None:
                sink.bounced(envelope, down)
        elif not envelope.flags & Flag.SILENT and not down.stopped:
            sender = self.actors.get(number)
            if sender is not None:
                sender.undeliverable(envelope, down)

    # ---- actors

    def adopt(self, instance: Instance | Sender) -> None:
        """`instance` belongs to this process from now on; messages that came too early are delivered first."""
        number = instance.actor_id.number
        while True:
            with self._lock:
                held = self._unborn.pop(number, None)
                if held is None:
                    self.actors[number] = instance
                    return
            for envelope in held:
                self._post(instance, envelope)

    def _post(self, actor: Instance | Sender, envelope: Envelope) -> None:
        down = actor.post(envelope)
        if down is not None:
            self.bounce(envelope, down)

    def actor_ended(self, instance: Instance, down: Down) -> None:
        """An actor reports its end, once."""
        number = instance.actor_id.number
        instance.mailbox.close(down)
        for hook in list(self.on_actor_ended):
            try:
                hook(number)
            except Exception:
                log.exception("hook.failed", reason=down.reason)
        # First the tombstone: a message that finds neither the actor nor it would wait for an actor still to be born.
        self.monitors.fire((self.key, number), down)
        with self._lock:
            self.actors.pop(number, None)
        for envelope in instance.mailbox.drain():
            self.bounce(envelope, down)
        self.backpressure.ended(instance)

    def why_ending(self, number: int) -> Down | None:
        """Why an actor of this process has ended or is about to; set before anybody is told."""
        actor = self.actors.get(number)
        return actor.mailbox.closed if isinstance(actor, Instance) else self.monitors.gone((self.key, number))

    # ---- processes

    def _on_gone(self, peer: Peer, down: Down) -> None:
        key = peer.key
        self.backpressure.forget(key)
        self.monitors.fire((key, 0), down)
        for sink in list(self.ports.values()):
            try:
                sink.proc_gone(key, down)
            except Exception:
                log.exception("port.failed", reason=down.reason)
        for actor in list(self.actors.values()):
            actor.forget(key)
            if isinstance(actor, Instance):
                actor.mailbox.forget_sender(key)
        self.caster.proc_gone(peer, down)
        self.relay.proc_gone(peer, down)
        for hook in list(self.on_proc_gone):
            try:
                hook(key, down)
            except Exception:
                log.exception("hook.failed", reason=down.reason)

    def watch(self, actor: ActorId, callback: Callable[[Down], None]) -> Callable[[], None]:
        """Monitor an actor anywhere: `callback` runs once, with why it is gone; returns what cancels it."""
        cancel = self.monitors.watch((actor.proc.key, actor.number), callback)
        if actor.proc.key != self.key and self.monitors.gone((actor.proc.key, actor.number)) is None:
            asked = self.request(actor.proc, "watch", actor.number)

            def answered() -> None:
                error = asked.exception(0)
                down = error.down if isinstance(error, PeerGone) else None
                if error is None:
                    (down,) = asked.get(0)
                if down is not None:
                    self.monitors.fire((actor.proc.key, actor.number), down)

            asked._on_done(answered)
        return cancel

    def _on_watch(self, envelope: Envelope, number: int) -> None:
        self.monitors.watch((self.key, number), lambda down: self.answer(envelope, down))

    def close(self, timeout_s: float = 2.0) -> None:
        """Deliver what was sent, leave, and fail what is still waited for: no answer comes through closed links."""
        self.gateway.close(timeout_s)
        self.locator.close()
        self.backpressure.close()
        self.caster.close()
        down = Down("stopped", f"process {self.proc_id.uid}, which waits for it, has closed its links")
        for peer in self.gateway.peers:
            if peer.down is None:
                for sink in list(self.ports.values()):
                    sink.proc_gone(peer.key, down)

    def failed(self, reason: str, error: BaseException | None = None) -> Down:
        """A failure of something in this process; with the exception behind it, its text and traceback."""
        pid, host = self.whereabouts()
        if error is None:
            return Down("failed", reason, pid, host)
        trace = exceptions.format_remote(error)
        return Down("failed", reason, pid, host, error=exceptions.summary(error), traceback=trace)

    def whereabouts(self) -> tuple[int, str]:
        """(process id, host name) of this process, for people."""
        return os.getpid(), socket.gethostname()


class _Answer:
    """The reply port of a request."""

    def __init__(self, proc: Proc, port: int, key: int, future: Future[tuple[Any, ...]]) -> None:
        self._proc, self._port, self._key, self._future = proc, port, key, future

    def deliver(self, envelope: Envelope) -> None:
        self._proc.ports.pop(self._port, None)
        parts: list[Buffer] = envelope.parts
        self._future._complete(lambda: codec.decode(parts))

    def bounced(self, envelope: Envelope, down: Down) -> None:
        self._proc.ports.pop(self._port, None)
        self._future._fail(PeerGone(down))

    def proc_gone(self, key: int, down: Down) -> None:
        if key == self._key:
            self.bounced(Envelope(Kind.BOUNCE, 0, 0, 0, 0, 0, []), down)
