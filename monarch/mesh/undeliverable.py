"""A message that came back although nobody waits for its answer: a broadcast, or a value sent to a port.

It was not delivered, or that is not known: a process may end with what it has taken in and not acknowledged yet.

Its sender hears of it, if it is an actor that wants to. Otherwise it fails, where nothing else tells it
(`Spawner.must_hear_of`); elsewhere a warning says what came back from where, and how to have it otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final

from attrs import define

from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.ids import ActorId, PortId
from monarch.core.monitor import Down
from monarch.log import get_logger
from monarch.mesh import members

if TYPE_CHECKING:
    from monarch.mesh.context import Spawner

log = get_logger("monarch.actor")

_GATHER_S: Final = 0.1


@define(frozen=True)
class Undeliverable:
    """A message that came back, as `_handle_undeliverable_message` sees it.

    Attributes:
        maybe_delivered: it was on its way to a process that is gone, and may have been served or not.
    """

    _sender: str
    _dest: str
    _error: str
    _to_port: bool = False
    maybe_delivered: bool = False

    @classmethod
    def of(cls, sender: Spawner, envelope: Envelope, down: Down) -> Undeliverable:
        """`envelope` is the message itself, or the bounce that stands for it."""
        if envelope.kind == Kind.BOUNCE:
            key, number, port = envelope.src_proc, envelope.src_actor, envelope.reply_port
        else:
            key, number, port = envelope.dst_proc, envelope.dst_actor, envelope.dst_port
        runtime = sender.proc_runtime
        peer = runtime.gateway.peers.get(key)
        actor = ActorId(runtime.proc_id if peer is None else peer.proc, number)
        who = down.actor or members.find(number, key) or actor
        dest = f"port {PortId(actor, port)}" if port else f"actor {who}"
        return cls(str(sender.actor_id), dest, str(down), bool(port), bool(envelope.flags & Flag.UNSURE))

    def sender(self) -> str:
        return self._sender

    def dest(self) -> str:
        """The actor, or the port."""
        return self._dest

    def what(self, count: int = 1) -> str:
        """In words, if it stands for so many like it."""
        messages = "message" if count == 1 else f"{count} messages"
        if self.maybe_delivered:
            return f"{messages} to {self._dest}, which may have been delivered or not"
        return f"undeliverable {messages} to {self._dest}"

    def error_msg(self) -> str:
        return f"{self.what()}: {self._error}"

    def warn(self, sender: str, down: Down, returned: Returned, known: Callable[[], bool] = lambda: False) -> None:
        """Log it, with others that `returned` has, unless it is `known` by then why they came back."""
        if self._to_port:
            hint = "return_undeliverable = False at the port drops such values in silence"
        else:
            hint = "call() in place of broadcast() raises; an actor may define _handle_undeliverable_message"
        event = "message.maybe_delivered" if self.maybe_delivered else "message.undeliverable"
        facts = {"sender": sender, "to": self._dest, "reason": str(down), "hint": hint}

        def say(count: int) -> None:
            if not known():
                log.warning(event, **({"messages": count} if count > 1 else {}), **facts)

        returned.tell((event, *facts.values()), say)


class Returned:
    """Tells of equal messages together: a receiver that is flooded and dies gives back thousands. Thread-safe."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._call_later = call_later
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, tuple[int, Callable[[int], object]]] = {}

    def tell(self, key: Hashable, say: Callable[[int], object]) -> None:
        """Call `say` soon, with the number of those of the same `key`."""
        with self._lock:
            first = not self._waiting
            count, _ = self._waiting.get(key, (0, say))
            self._waiting[key] = count + 1, say
        if first:
            self._call_later(_GATHER_S, self.flush)

    def flush(self) -> None:
        """Tell of all now."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for count, say in waiting.values():
            say(count)
