"""Ports: typed addresses that values are sent to.

A `Port` is a reference: it pickles, and where it is unpickled it belongs to the actor that unpickles it, so that a
bounce goes to the right sender. Its `PortReceiver` stays where it was opened. The ports of calls are in `replies`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from monarch.core import codec, exceptions
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.future import Future
from monarch.core.ids import ActorId, PortId
from monarch.core.monitor import Down
from monarch.core.proc import Proc
from monarch.mesh.context import Spawner, context, current_context
from monarch.mesh.replies import decode_value, fate_of
from monarch.supervision.failure import call_failed

T = TypeVar("T")


class Port(Generic[T]):
    """Where values of type T can be sent, from any process, any number of times (a reply port: once)."""

    __slots__ = ("_on_use", "_owner", "_port", "_rank", "return_undeliverable")

    def __init__(
        self,
        port: PortId | None,
        rank: int = 0,
        owner: Spawner | None = None,
        on_use: Callable[[], None] | None = None,
    ) -> None:
        self._port = port  # None: nobody waits for what is sent here
        self._rank = rank
        self._owner = owner
        self._on_use = on_use  # hears once that something was sent, or that the port was handed on
        self.return_undeliverable = True
        """Whether a value that cannot be delivered becomes an error at its sender."""

    @property
    def number(self) -> int:
        """Within its process; 0 where nobody waits for what is sent here."""
        return 0 if self._port is None else self._port.number

    @property
    def _proc_key(self) -> int:
        """The process in which what is sent here arrives."""
        return 0 if self._port is None else self._port.actor.proc.key

    def _is_of(self, runtime: Proc) -> bool:
        return self._proc_key == runtime.key

    def send(self, value: T) -> None:
        """Send a value. It has left when this returns; values of one sender arrive in order.

        Raises:
            Exception: what pickling `value` raised, unchanged.
        """
        if self._port is None:
            return
        owner = self._owner if self._owner is not None else context().actor_instance
        self._send(codec.encode(value, owner.proc_runtime.memory_for, (self._proc_key,)), 0)

    def exception(self, error: BaseException) -> None:
        """Send an exception: whoever receives gets exactly it, raised."""
        if not isinstance(error, BaseException):
            raise TypeError(f"Port.exception sends an exception, not {error!r}; values go by send()")
        self._send(exceptions.encode_exception(error), Flag.ERROR | Flag.RAW_ERROR)

    def _send(self, parts: list[Any], flags: int) -> None:
        if self._port is None:
            return
        self._used()
        owner = self._owner if self._owner is not None else context().actor_instance
        actor = self._port.actor
        if not self.return_undeliverable:
            flags |= Flag.SILENT
        runtime = owner.proc_runtime
        runtime.relay.speaks_to(actor.proc.key)
        runtime.send(
            Envelope(
                Kind.PORT,
                actor.proc.key,
                actor.number,
                self._port.number,
                runtime.key,
                owner.actor_id.number,
                parts,
                flags,
                self._rank,
            ),
            actor.proc,
        )

    def _used(self) -> None:
        on_use, self._on_use = self._on_use, None
        if on_use is not None:
            on_use()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        self._used()
        return _unpickled, (self._port, self._rank, self.return_undeliverable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Port) and self._port == other._port

    def __hash__(self) -> int:
        return hash(self._port)

    def __repr__(self) -> str:
        return f"<Port {self._port}>"


def _unpickled(port: PortId | None, rank: int, return_undeliverable: bool) -> Port[Any]:
    found = current_context.get()
    self: Port[Any] = Port(port, rank, found.actor_instance if found is not None else None)
    self.return_undeliverable = return_undeliverable
    return self


class _Inbox:
    """What a channel's port number stands for: values that have arrived, and futures that want one. It outlives its
    receiver only while a future still waits."""

    def __init__(self, runtime: Proc, number: int, once: bool, ranked: bool) -> None:
        self._runtime, self._number, self._once = runtime, number, once
        self.ranked = ranked
        self._forgotten = False
        self._lock = threading.Lock()
        self._arrived: deque[Envelope] = deque()
        # Weakly: a future that nobody waits for any more, after a time-out, say, does not take the next value along.
        self._wanted: deque[weakref.ref[Future[Any]]] = deque()

    def next(self) -> Future[Any]:
        future: Future[Any] = Future._pending(self._runtime.driver, lambda: "a value on a port")
        with self._lock:
            if not self._arrived:
                self._wanted.append(weakref.ref(future))
                return future
            envelope = self._arrived.popleft()
        future._complete(lambda: self._decode(envelope))
        return future

    def forget(self) -> None:
        """The receiver is gone: what comes after the values that are still waited for, goes back."""
        with self._lock:
            self._forgotten = True
            if not any(wanted() for wanted in self._wanted):
                self._runtime.ports.pop(self._number, None)

    def _decode(self, envelope: Envelope) -> Any:
        value = decode_value(envelope)
        return (envelope.rank, value) if self.ranked else value

    def deliver(self, envelope: Envelope) -> None:
        if self._once:
            self._runtime.ports.pop(self._number, None)
        with self._lock:
            future = self._longest_waiting()
            if future is None:
                self._arrived.append(envelope)
            if self._forgotten and not self._wanted:
                self._runtime.ports.pop(self._number, None)
        if future is not None:
            future._complete(lambda: self._decode(envelope))

    def _longest_waiting(self) -> Future[Any] | None:
        while self._wanted:
            future = self._wanted.popleft()()
            if future is not None:
                return future
        return None

    def bounced(self, envelope: Envelope, down: Down) -> None:
        """A message that was to be answered here was not delivered."""
        error = call_failed("that was asked", envelope.rank, "", down, None, fate_of(envelope))
        with self._lock:
            future = self._longest_waiting()
        if future is not None:
            future._fail(error)

    def proc_gone(self, key: int, down: Down) -> None:
        pass  # others may still send here


class PortReceiver(Generic[T]):
    """The receiving half of a channel: FIFO, and not sendable. Once it is collected, what is sent to its port goes back
    to the senders."""

    def __init__(self, inbox: _Inbox) -> None:
        self._inbox = inbox
        weakref.finalize(self, inbox.forget).atexit = False

    def recv(self) -> Future[T]:
        """The next value that nobody has taken; may be called ahead of its arrival, and again and again.

        A future that is dropped before its value came, after a time-out for instance, leaves the value to the next.
        """
        return self._inbox.next()

    def ranked(self) -> PortReceiver[tuple[int, T]]:
        """The same port; values come as `(rank of the sender, value)` from now on."""
        self._inbox.ranked = True
        return self  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a PortReceiver stays where it was opened; send its Port instead")


class Channel(Generic[T]):
    """Makes pairs of a port and its receiver."""

    @staticmethod
    def open(once: bool = False) -> tuple[Port[T], PortReceiver[T]]:
        """A port and its receiver, owned by the current actor. With `once` the port takes a single value."""
        return _open(once, ranked=False)

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[T], PortReceiver[tuple[int, T]]]:
        """As `open`, with a receiver that yields `(rank, value)`."""
        return _open(once, ranked=True)


def _open(once: bool, ranked: bool) -> tuple[Port[Any], PortReceiver[Any]]:
    if not isinstance(once, bool):
        raise TypeError(f"once is {once!r}; it must be True or False (a channel has no name)")
    owner = context().actor_instance
    runtime = owner.proc_runtime
    number = runtime.new_port()
    inbox = _Inbox(runtime, number, once, ranked)
    runtime.ports[number] = inbox
    receiver: PortReceiver[Any] = PortReceiver(inbox)
    return Port(PortId(ActorId(runtime.proc_id, owner.actor_id.number), number), 0, owner), receiver
