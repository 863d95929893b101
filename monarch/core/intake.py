"""What arrives from other processes: frames are taken in, in their order, and acknowledged; their messages go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from monarch.core.driver import Driver
from monarch.core.envelope import Envelope
from monarch.core.ids import ProcId
from monarch.core.limits import Limits
from monarch.core.peer import Peer
from monarch.core.protocol import FrameType, frame_type
from monarch.log import get_logger
from monarch.transports.base import Link

log = get_logger("monarch.intake")


class Intake:
    """See the module. All methods run on the driving thread.

    Args:
        deliver: takes the messages for this process.
        pass_on: takes those for others.
        call_later: calls back on the driving thread.
    """

    def __init__(
        self,
        proc: ProcId,
        driver: Driver,
        limits: Limits,
        *,
        deliver: Callable[[Envelope], None],
        pass_on: Callable[[Envelope], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._uid, self.key = proc.uid, proc.key
        self._driver, self._ack_interval_s = driver, limits.ack_interval_s
        self.deliver, self._pass_on, self._call_later = deliver, pass_on, call_later
        self._owing_acks: list[Peer] = []

    def take_from(self, peer: Peer, link: Link) -> None:
        """What a link that carries `peer`'s session has.

        Raises:
            TransportError, ProtocolError: as `Link.recv_nowait`.
            BaseException: as `take`.
        """
        now_s = time.monotonic()
        try:
            if link.deliver(self.deliver, self.key, now_s):
                return
        except Exception:
            log.exception("message.failed", proc=str(self._uid))
        self.take(peer, link.recv_nowait())
        due = peer.session.ack_due(now_s)
        if due:
            peer.say(FrameType.ACK)
        elif due is not None and not peer.session.ack_is_timed:
            self._acknowledge_later(peer)
        if peer.session.room_is_awaited:
            peer.tell_of_room()

    def take(self, peer: Peer, frames: list[Any]) -> None:
        """Frames of `peer`'s session, oldest first; in place of some the `Envelope`s that the link has made of them, in
        their order: see `Link.carry`.

        Raises:
            ProtocolError: they make no sense.
            BaseException: an interrupt of the thread that drives. The message that was being delivered, and those
                behind it, come again on a new link; whoever has one by then knows it by its number.
        """
        if not frames:
            return
        peer.heard = True
        if not self._driver.leads_aside:
            peer.burst = 0
        session, now_s = peer.session, time.monotonic()
        for frame in frames:
            message: Envelope | None = None
            if type(frame) is Envelope:
                message = frame
            elif (inner := session.accept(frame)) is not None:
                message = Envelope.parse(inner)
            if message is not None:
                size_bytes = message.size_bytes  # whoever has it may take it apart
                try:
                    if message.dst_proc == self.key:
                        self.deliver(message)
                    else:
                        self._pass_on(message)
                except Exception:  # a bug above must not cost the messages behind this one
                    log.exception("message.failed", proc=str(self._uid), kind=message.kind)
                session.took(size_bytes, now_s)
            elif frame_type(frame) == FrameType.GOODBYE:
                peer.said_goodbye = True
                peer.say(FrameType.ACK)
            elif frame_type(frame) == FrameType.HEARTBEAT:
                peer.say(FrameType.ACK)

    def _acknowledge_later(self, peer: Peer) -> None:
        if not self._owing_acks:
            self._call_later(self._ack_interval_s, self._acknowledge_all)
        self._owing_acks.append(peer)
        peer.session.ack_is_timed = True

    def _acknowledge_all(self) -> None:
        owing, self._owing_acks = self._owing_acks, []
        for peer in owing:
            peer.session.ack_is_timed = False
        for peer in owing:
            if peer.session.owes_ack:
                peer.say(FrameType.ACK)
