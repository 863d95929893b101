"""What routers see of a message: a fixed head of numbers, and opaque parts.

A message on the wire is `[head, *parts]`. The head is 64 bytes that a router reads without unpickling anything; what
the parts are is agreed between the layer that encodes and the one that decodes (`mesh`), and nobody's business between.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, Self

from attrs import define

from monarch import compiled
from monarch.errors import RemoteProtocolError
from monarch.transports.base import Buffer

HEAD: Final = Struct("<BBHIQQQQQQQ")


class Kind:
    """Of a message. Plain ints: a look at a member of an enum costs ten times as much."""

    CALL: Final = 1
    """To an actor: parts are the call's description, then the encoded arguments."""
    PORT: Final = 2
    """To a port: parts are an encoded value, or an encoded error where `Flag.ERROR` is set."""
    BOUNCE: Final = 3
    """Back to the sender of a message that could not be delivered: parts are an encoded `Down`."""
    SYSTEM: Final = 4
    """To the agent of a process: parts are an encoded tuple, the name of the request first."""
    SPAWN: Final = 5
    """To a process: become the actor `dst_actor`. Parts are what the layer above needs for it."""
    CAST: Final = 6
    """To the agent of a host: pass it on to many (see `relay`)."""
    PASSED_ON: Final = 7
    """From the agent of its host to one of these: the first part says what it is and who sent it."""
    TAKEN: Final = 8
    """To who passed a cast on: those below have it."""


class Flag:
    """Bits of `Envelope.flags`. Plain ints: `&` with an enum's member costs 3 us, and is done for every message."""

    ERROR: Final = 1
    """A PORT message that carries an error and not a value."""
    RAW_ERROR: Final = 2
    """The error is to be raised as it is, unwrapped (`Port.exception`)."""
    SILENT: Final = 4
    """Do not report it when this message bounces."""
    BEGUN: Final = 16
    """The actor was serving this message when it ended."""
    UNSURE: Final = 64
    """It was on its way to a process that is gone, and may have arrived."""
    SKIP: Final = 32
    """Stands for a number of its sender's that no message will have."""
    SEQUENCED: Final = 8
    """`seq` counts this sender's messages to this actor; the receiver restores that order."""
    CHAINED: Final = 128
    """The last part on the wire is the call's `chain`."""


CallKey = tuple[int, int]
"""A call at the actor that was called: the process that waits for the answer, and the port there."""


MESSAGE_TTL: Final = 64


@define(eq=False)
class _Fields:
    """What an `Envelope` has; so it is in the compiled part, too."""

    kind: int
    dst_proc: int
    dst_actor: int
    dst_port: int
    src_proc: int
    src_actor: int
    parts: list[Buffer]
    flags: int = 0
    rank: int = 0
    seq: int = 0
    reply_port: int = 0
    ttl: int = MESSAGE_TTL
    chain: bytes = b""
    via: int = 0

    @classmethod
    def parse(cls, frame: list[Buffer]) -> Self:
        """The envelope of a frame `[head, *parts]`; the parts are not copied.

        Raises:
            RemoteProtocolError: the head is not one.
        """
        head = frame[0] if frame else b""
        if len(head) != HEAD.size:
            raise RemoteProtocolError(f"a message head of {len(head)} bytes, not {HEAD.size}")
        kind, flags, ttl, rank, dst_proc, dst_actor, dst_port, src_proc, src_actor, seq, reply = HEAD.unpack(head)
        parts = frame[1:]
        chain = b""
        if flags & Flag.CHAINED:
            if not parts:
                raise RemoteProtocolError("a message without the chain that it announces")
            chain = bytes(parts.pop())
            flags &= ~Flag.CHAINED
        return cls(kind, dst_proc, dst_actor, dst_port, src_proc, src_actor, parts, flags, rank, seq, reply, ttl, chain)

    @property
    def size_bytes(self) -> int:
        return HEAD.size + sum(len(part) for part in self.parts)


if not TYPE_CHECKING and compiled.part is not None:
    _Fields = compiled.part.Envelope


class Envelope(_Fields):
    """One message. `reply_port` is a port of the sender's process, 0 for none; `rank` is the receiver's number in the
    view that was called, and in a reply the number of the one who replies. `chain` are the calls that led to this one
    (see `core.chain`); empty for what comes from outside of actors, or has no answer that somebody could wait for.
    `via` is the process by which it came, where that was not the sender, and by which the answer goes; it does not
    travel."""

    __slots__ = ()

    @property
    def call(self) -> CallKey:
        return self.src_proc, self.reply_port

    def frame(self) -> list[Buffer]:
        """As it goes over a link."""
        chain = self.chain
        head = HEAD.pack(
            self.kind,
            self.flags | Flag.CHAINED if chain else self.flags,
            self.ttl,
            self.rank,
            self.dst_proc,
            self.dst_actor,
            self.dst_port,
            self.src_proc,
            self.src_actor,
            self.seq,
            self.reply_port,
        )
        return [head, *self.parts, chain] if chain else [head, *self.parts]

    def for_member(self, key: int, rank: int, seq: int, parts: list[Buffer]) -> Envelope:
        """The same message for one of several receivers."""
        member = Envelope(
            self.kind,
            key,
            self.dst_actor,
            self.dst_port,
            self.src_proc,
            self.src_actor,
            parts,
            self.flags,
            rank,
            seq,
            self.reply_port,
        )
        member.chain = self.chain
        return member

    def reply(self, parts: list[Buffer], flags: int = 0) -> Envelope:
        """The message that answers this one, to its reply port."""
        return Envelope(
            Kind.PORT,
            self.src_proc,
            self.src_actor,
            self.reply_port,
            self.dst_proc,
            self.dst_actor,
            parts,
            flags,
            self.rank,
            via=self.via,
        )

    def bounce(self, parts: list[Buffer]) -> Envelope:
        """The message that tells this one's sender that it was not delivered. It asks for no answer: its reply port is
        the port for which this one was meant."""
        return Envelope(
            Kind.BOUNCE,
            self.src_proc,
            self.src_actor,
            self.reply_port,
            self.dst_proc,
            self.dst_actor,
            parts,
            self.flags,
            self.rank,
            0,
            self.dst_port,
            via=self.via,
        )
