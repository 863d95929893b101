"""Frames on a byte stream, sans-IO. Decides how edges are kept; leaves sockets to `stream` and `tcp`.

On the wire a frame is the number of its parts (u32), the size of each part (u64), then the parts, all in network
order. Empty frames and empty parts are legal. The last thing on a stream that ends on purpose is `GOODBYE`; a stream
that ends without it was severed, even between two frames: that is what the death of a process looks like.

A part may also lie somewhere else, in memory that both sides can see: its size then has the bit `ELSEWHERE`, and in
its place comes a description of `DESCRIPTION_BYTES`, which `FrameDecoder.elsewhere` makes the part from.

The decoder is fed what arrived. While a part of `BIG_BYTES` or more is being received, `get_buffer` offers the rest of
its own memory, so that the socket writes there and the part is copied once, by the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final

from attrs import define, field

from monarch.errors import LinkSevered, RemoteProtocolError
from monarch.transports import memory
from monarch.transports.base import BIG_BYTES, Buffer, Frame, Missing

MAX_PARTS: Final = 1 << 20
MAX_PART_BYTES: Final = 1 << 47  # what a process can address

COUNT: Final = Struct("!I")

MARKER: Final = bytes.fromhex("b5a14d0e7c52f398 1e6b9d3fc0728a45")
"""The last bytes of a stream that ended on purpose. A closing side discards what still arrives and only looks for
this tail; that a payload ends in it at the very moment its sender dies is taken to be impossible."""

ELSEWHERE: Final = 1 << 63
DESCRIPTION_BYTES: Final = 24

GOODBYE_COUNT: Final = 0xFFFFFFFF
GOODBYE: Final = COUNT.pack(GOODBYE_COUNT) + MARKER

JOIN_BELOW_BYTES: Final = 8 << 10
"""Smaller buffers are joined before they go to the kernel: one copy of a few bytes costs less than one more entry in
the gather list."""


@lru_cache(maxsize=256)
def header(part_count: int) -> Struct:
    """The layout of the head of a frame: count, then sizes. Cached: building a Struct costs more than packing it."""
    return Struct(f"!I{part_count}Q")


def encode(parts: Sequence[Buffer]) -> list[Buffer]:
    """One frame as the buffers to send, in order; the parts are not copied."""
    count = len(parts)
    return [header(count).pack(count, *map(len, parts)), *parts]


Describe = Callable[[Buffer], bytes | None]
"""Puts a large part where the peer can see it, and describes the place; None to leave the part in the stream."""

Elsewhere = Callable[[bytes, int], Buffer]
"""Makes a part of its description and its size. Raises RemoteProtocolError, LinkSevered."""


def encode_joined(frames: Iterable[Sequence[Buffer]], describe: Describe | None = None) -> list[Buffer]:
    """Frames as buffers to send: small neighbours are joined, buffers from `JOIN_BELOW_BYTES` on are left uncopied.
    Those of `BIG_BYTES` and more that `describe` has a description for, are not among them."""
    out: list[Buffer] = []
    small: list[Buffer] = []
    for parts in frames:
        count = len(parts)
        sizes = list(map(len, parts))
        if not count or max(sizes) < JOIN_BELOW_BYTES:
            small.append(header(count).pack(count, *sizes))
            small += parts
            continue
        if describe is not None:
            parts = [_described(parts, sizes, at, describe) for at in range(count)]
        small.append(header(count).pack(count, *sizes))
        for part in parts:
            if len(part) < JOIN_BELOW_BYTES:
                small.append(part)
            else:
                if small:
                    out.append(small[0] if len(small) == 1 else b"".join(small))
                    small = []
                out.append(part)
    if small:
        out.append(small[0] if len(small) == 1 else b"".join(small))
    return out


def _described(parts: Sequence[Buffer], sizes: list[int], at: int, describe: Describe) -> Buffer:
    """What goes into the stream for the part at that place; its size is marked when that is a description."""
    description = describe(parts[at]) if sizes[at] >= BIG_BYTES else None
    if description is None:
        return parts[at]
    sizes[at] |= ELSEWHERE
    return description


@define(eq=False)
class FrameDecoder:
    """Cuts a byte stream back into frames, however the bytes arrive.

    While `max_frame_bytes` is set, the peer is a stranger: no memory is reserved on its word, and it holds at most that
    much of ours. After, it is trusted with the memory of what it announces.
    """

    max_frame_bytes: int | None = None
    elsewhere: Elsewhere | None = None
    goodbye: bool = field(default=False, init=False)
    """The peer ended the stream on purpose."""
    broken: RemoteProtocolError | LinkSevered | None = field(default=None, init=False)
    """What was wrong behind the frames that the last call returned."""
    pending: bytes = field(default=b"", init=False)
    """The start of something that is not whole yet."""
    is_between_frames: bool = field(default=True, init=False)
    """Whether the next byte is the first of a frame."""
    _sizes: tuple[int, ...] = field(default=(), init=False)  # of the frame that has begun
    _parts: Frame | None = field(default=None, init=False)  # its parts so far; None between frames
    filling: memoryview | None = field(default=None, init=False)
    """The big part on its way."""
    _filled_bytes: int = field(default=0, init=False)
    _skipped_bytes: int = field(default=0, init=False)
    """How much of a big part that there is no memory for is still on its way."""

    def get_buffer(self) -> memoryview | None:
        """Where the next bytes belong, or None if they are to be fed. What was written there is told to `advance`."""
        return None if self.filling is None else self.filling[self._filled_bytes :]

    def advance(self, size_bytes: int) -> list[Frame]:
        """`size_bytes` were written to the start of `get_buffer()`. Returns the frames this completes: none or one."""
        assert self.filling is not None
        self._filled_bytes += size_bytes
        if self._filled_bytes < len(self.filling):
            return []
        self.filling = None
        return self.feed(b"")

    def feed(self, data: bytes) -> list[Frame]:
        """Take `data` in and return the frames it completes, oldest first.

        Raises:
            RemoteProtocolError: no frame of ours looks like this; drop the link. Where good frames came first, they are
                returned and the error is left in `broken`.
            LinkSevered: likewise, what lay elsewhere is not there any more.
        """
        pos = 0
        frames: list[Frame] = []
        filling = self.filling
        if filling is not None:
            pos = min(len(data), len(filling) - self._filled_bytes)
            filling[self._filled_bytes : self._filled_bytes + pos] = data[:pos]
            self._filled_bytes += pos
            if self._filled_bytes < len(filling):
                return frames
            self.filling = None
        elif self._skipped_bytes:
            pos = min(len(data), self._skipped_bytes)
            self._skipped_bytes -= pos
            if self._skipped_bytes:
                return frames
        elif self.pending:
            data = self.pending + data
            self.pending = b""
        try:
            self._cut(data, pos, frames)
        except (RemoteProtocolError, LinkSevered) as error:
            if not frames:
                raise
            self.broken = error
        return frames

    def _cut(self, data: bytes, pos: int, frames: list[Frame]) -> None:
        end = len(data)
        while True:
            if self._parts is None:
                # Whole small frames, the common case, are cut out here without touching the state.
                if end - pos < 4:
                    break
                (count,) = COUNT.unpack_from(data, pos)
                if count > MAX_PARTS:
                    self._end(data, pos, count)
                    break
                body = pos + 4 + 8 * count
                if self.max_frame_bytes is not None and body - pos > self.max_frame_bytes:
                    raise RemoteProtocolError(f"a frame of {count} parts, limit {self.max_frame_bytes} bytes")
                if end < body:
                    break
                sizes = header(count).unpack_from(data, pos)[1:]
                total = sum(sizes)
                if self.max_frame_bytes is not None and body - pos + total > self.max_frame_bytes:
                    raise RemoteProtocolError(f"a frame of {total} bytes, limit {self.max_frame_bytes}")
                if total < BIG_BYTES and end - body >= total:
                    parts: Frame = []
                    pos = body
                    for size in sizes:
                        parts.append(data[pos : pos + size])
                        pos += size
                    frames.append(parts)
                    continue
                self._sizes, self._parts, pos = sizes, [], body
            pos = self._decode_parts(data, pos)
            if len(self._parts) < len(self._sizes) or self.filling is not None or self._skipped_bytes:
                break
            frames.append(self._parts)
            self._parts = None
        if pos < end:
            self.pending = data[pos:]
        self.is_between_frames = self._parts is None and pos == end

    def _decode_parts(self, data: bytes, pos: int) -> int:
        """Go on with the frame that has begun; returns how far it came."""
        assert self._parts is not None
        end = len(data)
        for size in self._sizes[len(self._parts) :]:
            if size < BIG_BYTES:
                if end - pos < size:
                    break
                self._parts.append(data[pos : pos + size])
                pos += size
                continue
            if size >= ELSEWHERE:
                if end - pos < DESCRIPTION_BYTES:
                    break
                if self.elsewhere is None:
                    raise RemoteProtocolError("a part lies where this link does not reach")
                self._parts.append(self.elsewhere(data[pos : pos + DESCRIPTION_BYTES], size ^ ELSEWHERE))
                pos += DESCRIPTION_BYTES
                continue
            here = min(end - pos, size)
            if here < size and self.max_frame_bytes is not None:
                break  # a stranger's: wait in `pending`, which `max_frame_bytes` bounds
            part = self.reserve(size)
            self._parts.append(part)
            if isinstance(part, Missing):
                self._skipped_bytes = size - here
            else:
                part_view = memoryview(part)
                part_view[:here] = memoryview(data)[pos : pos + here]
                if here < size:
                    self.filling, self._filled_bytes = part_view, here
            pos += here
            if here < size:
                break
        return pos

    @staticmethod
    def reserve(size_bytes: int, *, of_bytes: bool = False) -> bytearray | memoryview | Missing:
        """Memory for a large part; `of_bytes`: that `bytes` are to be made of.

        Raises:
            RemoteProtocolError: no machine could have it.
        """
        if size_bytes > MAX_PART_BYTES:
            raise RemoteProtocolError(f"a part of {size_bytes} bytes fits into no memory")
        try:
            if size_bytes < memory.LARGE_BYTES:
                return bytearray(size_bytes)
            return (memory.allocate_for_bytes if of_bytes else memory.allocate)(size_bytes)
        except MemoryError:
            return Missing.of(size_bytes)

    def _end(self, data: bytes, pos: int, count: int) -> None:
        rest = data[pos : pos + len(GOODBYE)]
        if count != GOODBYE_COUNT or not GOODBYE.startswith(rest):
            raise RemoteProtocolError(f"a frame of {count} parts: this is not our protocol, or the stream lost bytes")
        if len(data) - pos > len(GOODBYE):
            raise RemoteProtocolError("data after the goodbye")
        self.goodbye = len(rest) == len(GOODBYE)


@define
class Tail:
    """Watches a stream that is discarded, and says whether it ended on purpose."""

    _last: bytes = b""

    def feed(self, data: bytes) -> None:
        self._last = (self._last + data[-len(MARKER) :])[-len(MARKER) :]

    @property
    def is_goodbye(self) -> bool:
        return self._last == MARKER
