"""A message that came back although nobody waits for its answer: a broadcast, or a value sent to a port.

Its sender hears of it, if it is an actor that wants to. Otherwise it fails, where nothing else tells it
(`Spawner.must_hear_of`); elsewhere a warning says what did not arrive where, and how to have it otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from monarch.core.envelope import Envelope, Kind
from monarch.core.ids import ActorId, PortId
from monarch.core.monitor import Down
from monarch.log import get_logger

if TYPE_CHECKING:
    from monarch.mesh.context import Spawner

log = get_logger("monarch.actor")


@define(frozen=True)
class Undeliverable:
    """A message that came back, as `_handle_undeliverable_message` sees it."""

    _sender: str
    _dest: str
    _error: str
    _to_port: bool = False

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
        return cls(str(sender.actor_id), dest, str(down), bool(port))

    def sender(self) -> str:
        return self._sender

    def dest(self) -> str:
        """The actor, or the port."""
        return self._dest

    def what(self) -> str:
        return f"undeliverable message to {self._dest}"

    def error_msg(self) -> str:
        return f"{self.what()}: {self._error}"

    def warn(self, sender: str, down: Down) -> None:
        """Log it."""
        if self._to_port:
            hint = "return_undeliverable = False at the port drops such values in silence"
        else:
            hint = "call() in place of broadcast() raises; an actor may define _handle_undeliverable_message"
        log.warning("message.undeliverable", sender=sender, to=self._dest, reason=str(down), hint=hint)
