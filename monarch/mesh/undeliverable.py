"""A message that came back although nobody waits for its answer: a broadcast, or a value sent to a port.

It was not delivered, or that is not known: a process may end with what it has taken in and not acknowledged yet.

Its sender hears of it, if it is an actor that wants to. Otherwise it fails, where nothing else tells it
(`Spawner.must_hear_of`); elsewhere a warning says what came back from where, and how to have it otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.ids import ActorId, PortId
from monarch.core.monitor import Down
from monarch.log import get_logger

if TYPE_CHECKING:
    from monarch.mesh.context import Spawner

log = get_logger("monarch.actor")


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
        dest = f"port {PortId(actor, port)}" if port else f"actor {down.actor or actor}"
        return cls(str(sender.actor_id), dest, str(down), bool(port), bool(envelope.flags & Flag.UNSURE))

    def sender(self) -> str:
        return self._sender

    def dest(self) -> str:
        """The actor, or the port."""
        return self._dest

    def what(self) -> str:
        if self.maybe_delivered:
            return f"message to {self._dest}, which may have been delivered or not"
        return f"undeliverable message to {self._dest}"

    def error_msg(self) -> str:
        return f"{self.what()}: {self._error}"

    def warn(self, sender: str, down: Down) -> None:
        """Log it."""
        if self._to_port:
            hint = "return_undeliverable = False at the port drops such values in silence"
        else:
            hint = "call() in place of broadcast() raises; an actor may define _handle_undeliverable_message"
        event = "message.maybe_delivered" if self.maybe_delivered else "message.undeliverable"
        log.warning(event, sender=sender, to=self._dest, reason=str(down), hint=hint)
