"""The head of a message: what goes in comes out, and nonsense is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.core.envelope import HEAD, MESSAGE_TTL, Envelope, Flag, Kind
from monarch.errors import RemoteProtocolError

u64 = st.integers(0, 2**64 - 1)
envelopes = st.builds(
    Envelope,
    st.integers(1, 255),
    u64,
    u64,
    u64,
    u64,
    u64,
    st.lists(st.binary(max_size=20), max_size=3),
    st.integers(0, 127),  # without Flag.CHAINED, which `frame` decides
    st.integers(0, 2**32 - 1),
    u64,
    u64,
    st.integers(0, 2**16 - 1),
    st.binary(max_size=20),
)
_FIELDS = "kind dst_proc dst_actor dst_port src_proc src_actor parts flags rank seq reply_port ttl chain".split()


@given(envelopes)
def test_head_and_parts_round_trip(envelope: Envelope) -> None:
    back = Envelope.parse(envelope.frame())

    assert [getattr(back, name) for name in _FIELDS] == [getattr(envelope, name) for name in _FIELDS]
    assert len(envelope.frame()[0]) == HEAD.size == 64
    assert envelope.size_bytes == 64 + sum(map(len, envelope.parts))


@pytest.mark.parametrize("frame", [[], [b""], [bytes(63)], [bytes(65)], [b"x", b"y"]])
def test_what_is_no_head_is_refused(frame: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError, match="message head of"):
        Envelope.parse(list(frame))


def test_a_chain_that_is_announced_and_missing_is_refused() -> None:
    call = _call()
    call.flags |= Flag.CHAINED
    with pytest.raises(RemoteProtocolError, match="chain"):
        Envelope.parse(call.frame()[:1])


def _call() -> Envelope:
    flags = Flag.SEQUENCED | Flag.SILENT
    return Envelope(Kind.CALL, 1, 2, 0, 3, 4, [b"call"], flags, rank=7, seq=8, reply_port=9, ttl=5)


def test_a_reply_goes_to_the_reply_port_of_the_sender_and_says_who_replies() -> None:
    reply = _call().reply([b"answer"], Flag.ERROR)

    assert (reply.kind, reply.dst_proc, reply.dst_actor, reply.dst_port) == (Kind.PORT, 3, 4, 9)
    assert (reply.src_proc, reply.src_actor, reply.rank, reply.flags) == (1, 2, 7, Flag.ERROR)
    assert (reply.reply_port, reply.seq, reply.ttl, reply.parts) == (0, 0, MESSAGE_TTL, [b"answer"])


def test_a_bounce_goes_to_the_reply_port_of_the_sender_and_keeps_the_flags() -> None:
    bounce = _call().bounce([b"down"])

    assert (bounce.kind, bounce.dst_proc, bounce.dst_actor, bounce.dst_port) == (Kind.BOUNCE, 3, 4, 9)
    assert (bounce.src_proc, bounce.src_actor, bounce.rank) == (1, 2, 7)
    assert bounce.flags & Flag.SILENT and bounce.reply_port == 0 and bounce.ttl == MESSAGE_TTL


def test_the_flags_are_different_bits_of_one_byte() -> None:
    bits = [value for name, value in vars(Flag).items() if name.isupper()]

    assert all(bit & (bit - 1) == 0 and bit < 256 for bit in bits)
    assert len(set(bits)) == len(bits)
