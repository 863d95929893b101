"""Frames on a byte stream."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.errors import RemoteProtocolError
from monarch.transports.base import BIG_BYTES, Missing
from monarch.transports.framing import (
    COUNT,
    GOODBYE,
    JOIN_BELOW_BYTES,
    MARKER,
    FrameDecoder,
    Tail,
    encode,
    encode_joined,
    header,
)

sizes = st.one_of(
    st.integers(0, 300),
    st.sampled_from([JOIN_BELOW_BYTES - 1, JOIN_BELOW_BYTES, BIG_BYTES - 1, BIG_BYTES, 3 * BIG_BYTES]),
)
shapes = st.lists(st.lists(st.tuples(sizes, st.integers(0, 255)), max_size=6), max_size=8)

chunks = st.lists(st.integers(1, 200_000), max_size=5).map(lambda cuts: [*cuts, 100_000])


def build(shape: Sequence[Sequence[tuple[int, int]]]) -> list[list[bytes]]:
    """Frames by the size and content of their parts: short in the report of a failure."""
    return [[bytes([byte]) * size for size, byte in frame] for frame in shape]


def wire(frames: Sequence[Sequence[bytes]]) -> bytes:
    return b"".join(bytes(piece) for frame in frames for piece in encode(frame))


def decode(decoder: FrameDecoder, data: bytes, cuts: Sequence[int]) -> list[list[bytes]]:
    """Bring `data` to the decoder in pieces of the given sizes, the way a link does."""
    frames = []
    at = 0
    turn = 0
    while at < len(data):
        cut = cuts[turn % len(cuts)] if cuts else len(data)
        turn += 1
        view = decoder.get_buffer()
        if view is None:
            frames += decoder.feed(data[at : at + cut])
        else:
            cut = min(cut, len(view), len(data) - at)
            view[:cut] = data[at : at + cut]
            frames += decoder.advance(cut)
        at += cut
    return [[bytes(part) for part in frame] for frame in frames]


@given(shapes, chunks)
def test_any_chunking_gives_the_same_frames(shape, cuts):
    frames = build(shape)
    decoder = FrameDecoder()
    assert decode(decoder, wire(frames), cuts) == frames
    assert decoder.is_between_frames


@given(st.lists(st.lists(st.binary(max_size=20), max_size=4), max_size=6))
def test_byte_by_byte_gives_the_same_frames(frames):
    assert decode(FrameDecoder(), wire(frames), [1]) == frames


@given(shapes)
def test_feeding_alone_is_enough(shape):
    frames = build(shape)
    decoder = FrameDecoder()
    data = wire(frames)
    got = [frame for at in range(0, len(data), 50_000) for frame in decoder.feed(data[at : at + 50_000])]
    assert [[bytes(part) for part in frame] for frame in got] == frames


@given(shapes, chunks)
def test_a_stranger_may_send_frames_below_the_limit(shape, cuts):
    frames = build(shape)
    assert decode(FrameDecoder(max_frame_bytes=1 << 21), wire(frames), cuts) == frames


@given(shapes)
def test_joining_changes_nothing_on_the_wire(shape):
    frames = build(shape)
    joined = encode_joined(frames)
    assert b"".join(bytes(piece) for piece in joined) == wire(frames)


def test_large_parts_are_neither_joined_nor_copied():
    big = bytes(JOIN_BELOW_BYTES)
    assert [piece is big for piece in encode_joined([[b"a", big, b"b"], [b"c"]])] == [False, True, False]
    assert encode([big])[1] is big


def test_a_large_part_arrives_in_memory_of_its_own():
    decoder = FrameDecoder()
    data = wire([[bytes(BIG_BYTES), bytes(10)]])
    assert decoder.feed(data[:100]) == []
    view = decoder.get_buffer()
    assert view is not None and len(view) == BIG_BYTES - 100 + 20
    view[:] = data[100 : 20 + BIG_BYTES]
    assert decoder.advance(len(view)) == []
    assert decoder.get_buffer() is None
    (frame,) = decoder.feed(data[20 + BIG_BYTES :])
    assert type(frame[0]) is bytearray


@pytest.mark.parametrize("step", [1 << 20, 1000, 100_000])
def test_a_part_without_memory_is_skipped_and_the_next_frames_arrive(monkeypatch, step):
    monkeypatch.setattr(FrameDecoder, "reserve", staticmethod(Missing.of))
    decoder = FrameDecoder()
    data = wire([[b"head", bytes(BIG_BYTES + 7), b"tail", bytes(BIG_BYTES)], [b"next"]])
    frames = [frame for at in range(0, len(data), step) for frame in decoder.feed(data[at : at + step])]
    assert frames == [[b"head", b"", b"tail", b""], [b"next"]]
    assert [part.size_bytes for part in frames[0] if isinstance(part, Missing)] == [BIG_BYTES + 7, BIG_BYTES]
    assert decoder.is_between_frames


def test_a_part_that_fits_into_no_memory_is_nonsense():
    with pytest.raises(RemoteProtocolError, match="fits into no memory"):
        FrameDecoder().feed(header(1).pack(1, 1 << 60))


@pytest.mark.parametrize("sizes", [(1 << 60,), (600, 600), (BIG_BYTES,), ()])
def test_a_stranger_reserves_nothing(sizes):
    decoder = FrameDecoder(max_frame_bytes=1000)
    head = header(len(sizes)).pack(len(sizes), *sizes)
    if sizes:
        with pytest.raises(RemoteProtocolError, match="limit 1000"):
            decoder.feed(head)
    else:
        assert decoder.feed(head) == [[]]
    assert decoder.get_buffer() is None


def test_a_stranger_cannot_announce_many_parts():
    with pytest.raises(RemoteProtocolError, match="limit 1000"):
        FrameDecoder(max_frame_bytes=1000).feed(COUNT.pack(1000))


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1", b"\xff\xff\xff\xfe", COUNT.pack((1 << 20) + 1), GOODBYE[:-1] + b"x"]
)
def test_nonsense_is_refused(data):
    with pytest.raises(RemoteProtocolError):
        FrameDecoder().feed(data)


def test_what_cannot_fit_into_memory_is_refused():
    with pytest.raises(RemoteProtocolError, match="memory"):
        FrameDecoder().feed(header(1).pack(1, (1 << 62) + 5))


@pytest.mark.parametrize("cut", range(1, len(GOODBYE)))
def test_a_goodbye_may_come_in_pieces(cut):
    decoder = FrameDecoder()
    frames = decoder.feed(wire([[b"x"]]) + GOODBYE[:cut])
    assert frames == [[b"x"]]
    assert not decoder.goodbye and not decoder.is_between_frames
    assert decoder.feed(GOODBYE[cut:]) == []
    assert decoder.goodbye


def test_good_frames_before_nonsense_are_delivered():
    decoder = FrameDecoder()
    assert decoder.feed(wire([[b"x"]]) + b"\xee" * 8) == [[b"x"]]
    assert type(decoder.broken) is RemoteProtocolError


def test_nothing_follows_a_goodbye():
    with pytest.raises(RemoteProtocolError, match="after the goodbye"):
        FrameDecoder().feed(GOODBYE + b"x")


@given(st.binary(max_size=50), st.integers(1, 20))
def test_the_tail_of_a_discarded_stream_shows_a_goodbye(before, cut):
    data = before + MARKER
    tail = Tail()
    for at in range(0, len(data), cut):
        assert not tail.is_goodbye
        tail.feed(data[at : at + cut])
    assert tail.is_goodbye
    tail.feed(b"x")
    assert not tail.is_goodbye


@given(shapes, st.lists(st.integers(1, 60), max_size=5))
def test_parts_that_lie_elsewhere_keep_their_place(shape, cuts):
    frames = build(shape)
    places: list[bytes] = []

    def describe(part: bytes) -> bytes | None:
        if len(places) % 3 == 2:
            return None  # no room
        places.append(part)
        return b"%024d" % (len(places) - 1)

    def elsewhere(description: bytes, size_bytes: int) -> bytes:
        part = places[int(description)]
        assert len(part) == size_bytes
        return part

    data = b"".join(bytes(piece) for piece in encode_joined(frames, describe))
    assert decode(FrameDecoder(elsewhere=elsewhere), data, [*cuts, 100_000]) == frames


def test_a_part_elsewhere_is_refused_where_there_is_no_such_place():
    (data,) = encode_joined([[bytes(BIG_BYTES)]], lambda part: bytes(24))
    with pytest.raises(RemoteProtocolError, match="does not reach"):
        FrameDecoder().feed(bytes(data))
