"""Links between processes of a host: small frames through rings, beside a stream for everything else.

Theory of operation. Each side makes the `ring` that it reads from, and passes it on with the first byte of the
stream. A peer that can, pushes its small frames there, and large ones with descriptions in place of the parts that lie
elsewhere. What is large, or finds the ring full, goes over the stream, which slows a sender down, carries descriptors,
wakes, and tells how the link ends.

```
    writer:  push ──────────────── ring ───────────────► pop  :reader
               └─ asleep? ──── bell ──── epoll ──────────┘
    writer:  send ─────────────── stream ───────────────► recv :reader
```

- *Order.* A record in the ring says how many frames of the stream come before it; a frame of the stream begins with a
  part that says up to where the ring comes before it. Either waits for the other at the reader.
- *Lanes.* As long as all that was sent before is on its way, `compiled.post` pushes messages by itself (`lane`). At the
  other end the ring makes envelopes of those that are next in their session, in place of frames (`carry`).
- *Who looks.* A poller that knows of rings looks at them itself before it sleeps, and says so (`attended`): it is woken
  by the bell of its process. For others every pop that leaves nothing behind puts the reader to sleep, and what wakes
  it is a frame of the stream without even that first part.
- *Turns.* Where a poller looks, a pop or a delivery ends with some MiB of what lies elsewhere; the next one goes on.
- *Death.* A record is seen whole or not at all. What was pushed before the end of the stream is read before the end.

Where one side has no rings, all its frames go over the stream, and so do those of the other to it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, Protocol

from monarch import compiled
from monarch.errors import RemoteProtocolError, TransportError
from monarch.log import get_logger
from monarch.transports import ring
from monarch.transports.base import BIG_BYTES, Buffer, Frame
from monarch.transports.framing import DESCRIPTION_BYTES, Describe, Elsewhere, encode_joined
from monarch.transports.stream import StreamLink

if TYPE_CHECKING:
    from monarch.compiled import Lane, Reader, Writer

log = get_logger("monarch.ring")

_MARK: Final = Struct("<Q")  # before the parts of a frame of the stream
_SIZE: Final = Struct("<Q")  # of a part, before its description
_START: Final = _MARK.pack(0)
_WITH_RING: Final = b"r"
_WITHOUT: Final = b"-"


class Carrier(Protocol):
    """The socket of the stream: descriptors that are `departing` go with the next bytes, `arrived` came with some."""

    departing: list[int]
    arrived: deque[int]
    peer_is_compiled: bool
    """The process at the other end has the compiled part, as far as is known."""

    def send(self, data: bytes, flags: int = 0) -> int: ...
    def recv(self, size: int, flags: int = 0) -> bytes: ...


def _nowhere(part: Buffer) -> None:
    pass


def _find(elsewhere: Elsewhere, description: bytes) -> Buffer:
    if len(description) != _SIZE.size + DESCRIPTION_BYTES:
        raise RemoteProtocolError(f"a description of {len(description)} bytes of what lies elsewhere")
    return elsewhere(description[_SIZE.size :], *_SIZE.unpack_from(description))


class RingLink:
    """A `Link` over a stream with a ring each way, where both sides can. See the module."""

    def __init__(
        self, stream: StreamLink, carrier: Carrier, describe: Describe = _nowhere, elsewhere: Elsewhere | None = None
    ) -> None:
        """`describe`, `elsewhere`: for large parts that lie elsewhere; those of the stream, too."""
        self._stream, self._carrier = stream, carrier
        self._describe, self._elsewhere = describe, elsewhere
        self.peer = stream.peer
        self.fileno = stream.fileno
        self._fd = stream.fileno()
        self.flush_nowait = stream.flush_nowait
        self.ring: Reader | None = None
        self._writer: Writer | None = None
        self._lane: Lane | None = None
        self._carried: tuple[object, int] | None = None
        self._send_lock = threading.Lock()
        self._sent = 0  # frames over the stream
        self._received = 0  # likewise
        self._is_open = False  # the peer's first byte has come
        self._begin()

    def _begin(self) -> None:
        departing = self._carrier.departing
        if not ring.why_not:
            try:
                fds, self.ring = ring.offer()
                if self._elsewhere is not None:
                    self.ring.find = partial(_find, self._elsewhere)
                departing += fds
            except OSError as error:
                log.info("ring.refused", peer=self.peer, error=str(error))
        offered = list(departing)
        try:
            self._carrier.send(_WITH_RING if offered else _WITHOUT)
        except OSError:
            departing.clear()  # the peer is gone already: whoever reads finds out
        finally:
            for fd in offered:
                os.close(fd)

    @property
    def blocked(self) -> bool:
        return bool(self._stream.out)

    def __repr__(self) -> str:
        return f"<RingLink to {self.peer}>"

    # ---- sending

    def send_nowait(self, frames: Sequence[Sequence[Buffer]]) -> int:
        with self._send_lock:
            stream, writer = self._stream, self._writer
            if writer is None:
                return self._send(frames)
            count, sent, pushed = len(frames), 0, 0
            while sent < count and not stream.out:
                more = writer.push(frames[sent:] if sent else frames)
                sent, pushed = sent + more, pushed + more
                if sent == count or max(map(len, frames[sent]), default=0) < BIG_BYTES:
                    break  # all are out, or the ring is full
                pushed += self._send_large(writer, frames[sent])
                sent += 1
            if pushed and writer.rouse():
                stream.send_empty(ring.ring_bell)
            return sent if sent == count else sent + self._send(frames[sent:])

    def _send(self, frames: Sequence[Sequence[Buffer]]) -> int:
        """Over the stream."""
        mark = self._mark()
        taken = self._stream.send_nowait([[mark, *frame] for frame in frames])
        self._count_sent(taken)
        return taken

    def _count_sent(self, frames: int) -> None:
        self._sent += frames
        if self._writer is not None:
            self._writer.after = self._sent

    def _send_large(self, writer: Writer, frame: Sequence[Buffer]) -> bool:
        """Whether its large parts lie elsewhere, and the rest fitted into the ring. The stream takes it otherwise."""
        places = {at: self._describe(part) for at, part in enumerate(frame) if len(part) >= BIG_BYTES}
        described = [
            (_SIZE.pack(len(part)) + place,) if (place := places.get(at)) is not None else part
            for at, part in enumerate(frame)
        ]
        if not self._carrier.departing and writer.push([described]):
            return True
        known = iter(places.values())  # each is asked for once, in this order
        self._stream.send_encoded(encode_joined([[self._mark(), *frame]], lambda _: next(known)))
        self._count_sent(1)
        return False

    @property
    def lane(self) -> Lane | None:
        if self._lane is None and self._writer is not None and self._carried is not None:
            self._lane = compiled.part.Lane(self._writer, self._carried[0], self._fd, self._carried[1])
        return self._lane

    def carry(self, session: object, most_bytes: int) -> None:
        self._carried = session, most_bytes
        if self.ring is not None:
            self.ring.carry(session)

    def deliver(self, take: Callable[[Any], None], proc: int, now_s: float) -> bool:
        return self.ring is not None and self.ring.deliver(take, proc, now_s)

    def _mark(self) -> bytes:
        return _START if self._writer is None else _MARK.pack(self._writer.position)

    # ---- receiving

    def recv_nowait(self) -> list[Frame]:
        reader = self.ring
        frames: list[Frame] = []
        try:
            if reader is not None:
                frames = self._pop(reader)
            if not self._is_open and not self._open():
                return frames
            for frame in self._stream.recv_nowait():
                if not frame:
                    continue  # it was to wake whoever polls
                mark = frame.pop(0)
                if reader is not None and mark != _START:
                    place = self._place(mark)
                    while reader.position < place and (before := self._pop(reader)):
                        frames += before
                self._received += 1
                frames.append(frame)
            if reader is not None:
                frames += self._pop(reader)
        except TransportError:
            self._stop_writing()
            if reader is not None:
                with suppress(TransportError):
                    while left := self._pop(reader):  # what was pushed before the end
                        frames += left
            if not frames:
                raise
        return frames

    def _pop(self, reader: Reader) -> list[Frame]:
        try:
            return reader.pop(self._received)
        except ValueError as error:
            raise RemoteProtocolError(f"{self.peer}: {error}") from error

    def _place(self, mark: Buffer) -> int:
        if len(mark) != _MARK.size:
            raise RemoteProtocolError(f"{self.peer}: a frame without its place behind those in the ring")
        place: int = _MARK.unpack(mark)[0]
        return place

    def _open(self) -> bool:
        """Take the peer's first byte; False while it has not come."""
        try:
            first = self._carrier.recv(1)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True  # the stream tells how it ended
        self._is_open = True
        if first == _WITH_RING:
            self._carrier.peer_is_compiled = True
            fds = list(self._carrier.arrived)
            self._carrier.arrived.clear()
            self._accept(fds)
        return True

    def _accept(self, fds: list[int]) -> None:
        if ring.why_not:
            for fd in fds:
                os.close(fd)
            return
        try:
            self._writer = ring.accept(fds)
            self._writer.after = self._sent
        except (OSError, ValueError) as error:
            log.info("ring.refused", peer=self.peer, error=str(error))

    # ---- the end

    def close(self, timeout_s: float = 5.0) -> bool:
        self._stop_writing()
        return self._stream.close(timeout_s)

    def abort(self) -> None:
        self._stop_writing()
        self._stream.abort()

    def _stop_writing(self) -> None:
        self._writer = None
        if self._lane is not None:
            self._lane.close()
            self._lane = None
