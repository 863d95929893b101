"""A link over an nng pair and the plain connection beside it.

Decides what travels where and how the link ends; leaves nng itself to `nng`, and connecting and accepting to `tcp`.

```
nng    messages: frames joined; a frame is count (u32), sizes (u64 each), parts. A size with the top bit set says
       that this part comes over the plain connection, the next bit that it was sent as `bytes`. A count of 0xFFFFFFFF
       says goodbye.
plain  the large parts, in the order in which the messages announce them; at the end MARKER, which tells a goodbye
       from a death
```

The plain connection earns its descriptor three times. Its end is evidence of death from the kernel, also when nng has
nothing to do; large parts go over it uncopied (nng copies four times); and it carries the acknowledgement of `close`,
because nng drops what it has not sent when its socket is closed. Order is kept because the messages alone say what
comes next: behind a large part, the rest of its message waits.

Small frames that are queued at the same time leave as one message, and a lone one leaves at once: nng moves some ten
thousand messages a second, whatever their size.

`fileno` is an epoll over nng's receive descriptor, the plain socket, a wake-up, and, while sending is blocked,
nng's send descriptor. It polls as readable for all of them, also for "room again", and never as writable.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import ClassVar, Final, Protocol

from attrs import define, field

from monarch.errors import LinkClosed, LinkSevered, ProtocolError, RemoteProtocolError, TransportError
from monarch.transports.base import Buffer, Frame, Missing, carry_anything, deliver_nothing
from monarch.transports.framing import COUNT, GOODBYE_COUNT, MARKER, MAX_PARTS, FrameDecoder, Tail, header
from monarch.transports.stream import QUEUE_BYTES, RECV_BYTES, TURN_BYTES, discard, send_some, severed
from monarch.wake import Wake

PLAIN_BYTES: Final = 64 << 10
"""Parts of this size and above take the plain connection. From here on `Link.recv_nowait` promises writable memory,
which nng does not give; an echo of 32, 64 and 128 KiB took 279, 308 and 295 us, so speed asks for no other value."""

MESSAGE_BYTES: Final = 256 << 10
"""Frames are joined up to this; what a frame has beyond it takes the plain connection too."""

_AT_ONCE_BYTES: Final = 1 << 20
"""Of a large part so much is to be there before the receiver wakes. 256 MiB wake it 170 times, and not 350."""

_ON_PLAIN: Final = 1 << 63
_OF_BYTES: Final = 1 << 62
_SIZE_MASK: Final = _OF_BYTES - 1
_GOODBYE: Final = COUNT.pack(GOODBYE_COUNT)


class Pair(Protocol):
    """What a link needs of nng. Nothing here blocks but `close`, which takes some milliseconds."""

    wake: Wake
    """Set when `is_gone` changes."""
    is_gone: bool
    """The connection has ended; what arrived before can still be received."""
    recv_fd: int
    send_fd: int

    def send(self, message: bytes) -> bool:
        """False when there is no room now. Raises LinkSevered."""
        ...

    def recv(self) -> bytes | None:
        """The next message, None when there is none now. Raises LinkSevered."""
        ...

    def check_end(self) -> None:
        """The plain connection has ended, and nothing is left to receive: `is_gone` will tell whether this one has."""
        ...

    def close(self) -> None: ...


@define(eq=False, repr=False)
class TcpLink:
    """A `Link` over one nng pair and the plain connection beside it; owns both."""

    ring: ClassVar[None] = None
    lane: ClassVar[None] = None
    carry = carry_anything
    deliver = deliver_nothing
    _plain: socket.socket
    _pair: Pair
    peer: str
    _epoll: select.epoll = field(factory=select.epoll, init=False)
    _fd: int = field(init=False)
    _end: TransportError | ProtocolError | None = field(default=None, init=False)
    _is_closed: bool = field(default=False, init=False)
    # Sending: encoded frames that wait for nng, the message it had no room for, parts that wait for the plain socket.
    _send_lock: threading.Lock = field(factory=threading.Lock, init=False)  # the receiving side answers a goodbye
    _pieces: deque[bytes] = field(factory=deque, init=False)
    _message: bytes | None = field(default=None, init=False)
    _plain_out: deque[Buffer] = field(factory=deque, init=False)
    _out_bytes: int = field(default=0, init=False)
    _is_shut: bool = field(default=False, init=False)
    _waits_for_pair: bool = field(default=False, init=False)
    # Receiving.
    _incoming: Iterator[Frame | None] = field(init=False)
    _arrived_bytes: int = field(default=0, init=False)
    _plain_has_ended: bool = field(default=False, init=False)
    # What the epoll looks for on the plain socket: the receiver and the sender both have a say.
    _mask_lock: threading.Lock = field(factory=threading.Lock, init=False)
    _mask: int = field(default=select.EPOLLRDHUP, init=False)

    def __attrs_post_init__(self) -> None:
        self._plain.setblocking(False)
        self._fd = self._epoll.fileno()
        self._epoll.register(self._pair.recv_fd, select.EPOLLIN)
        self._epoll.register(self._pair.wake.fileno(), select.EPOLLIN)
        self._epoll.register(self._plain, self._mask)
        self._incoming = self._frames()

    def __repr__(self) -> str:
        return f"<TcpLink to {self.peer}>"

    def fileno(self) -> int:
        return self._fd

    # ---- sending

    @property
    def blocked(self) -> bool:
        return bool(self._pieces or self._plain_out or self._message is not None)

    def send_nowait(self, frames: Sequence[Sequence[Buffer]]) -> int:
        with self._send_lock:
            if self._is_shut:
                raise self._end or LinkClosed(f"the link to {self.peer} is closed")
            taken = 0
            for frame in frames:
                if self._out_bytes >= QUEUE_BYTES:
                    break
                self._encode(frame)
                taken += 1
            self._flush()
            return taken

    def flush_nowait(self) -> bool:
        with self._send_lock:
            if self._is_shut and self._end is not None:
                raise self._end
            return self._flush()

    def _encode(self, frame: Sequence[Buffer]) -> None:
        """Put a frame into the queues."""
        sizes = list(map(len, frame))
        total = sum(sizes)
        count = len(sizes)
        if total < PLAIN_BYTES:
            piece = b"".join((header(count).pack(count, *sizes), *frame))
        else:
            inline: list[Buffer] = []
            inline_bytes = 0
            for i, part in enumerate(frame):
                size = sizes[i]
                if size >= PLAIN_BYTES or (size and inline_bytes + size > MESSAGE_BYTES):
                    sizes[i] |= _ON_PLAIN | _OF_BYTES if type(part) is bytes else _ON_PLAIN
                    self._plain_out.append(part)
                else:
                    inline.append(part)
                    inline_bytes += size
            piece = b"".join((header(count).pack(count, *sizes), *inline))
        self._pieces.append(piece)
        self._out_bytes += total + 4 + 8 * count

    def _flush(self) -> bool:
        try:
            self._flush_pair()
            if self._plain_out:
                self._flush_plain()
        except (OSError, LinkSevered) as error:
            # What the peer sent before it died is still to be read, and `recv_nowait` finds out how it ended.
            self._drop_output()
            raise severed(self.peer, error) from error
        return not self.blocked

    def _flush_pair(self) -> None:
        while True:
            message = self._message
            if message is None:
                if not self._pieces:
                    break
                message = self._join()
            if not self._pair.send(message):
                self._message = message
                if not self._waits_for_pair:
                    self._waits_for_pair = True
                    self._epoll.register(self._pair.send_fd, select.EPOLLIN)
                return
            self._message = None
            self._out_bytes -= len(message)
        if self._waits_for_pair:
            self._waits_for_pair = False
            self._epoll.unregister(self._pair.send_fd)

    def _join(self) -> bytes:
        first = self._pieces.popleft()
        if not self._pieces:
            return first
        pieces = [first]
        size = len(first)
        while self._pieces and size + len(self._pieces[0]) <= MESSAGE_BYTES:
            piece = self._pieces.popleft()
            size += len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def _flush_plain(self) -> None:
        turn = 0
        try:
            while self._plain_out and turn < TURN_BYTES:
                sent = send_some(self._plain, self._plain_out)
                self._out_bytes -= sent
                turn += sent
        except (BlockingIOError, InterruptedError):
            pass
        self._watch(select.EPOLLOUT, bool(self._plain_out))

    def _watch(self, event: int, wanted: bool) -> None:
        with self._mask_lock:
            mask = self._mask | event if wanted else self._mask & ~event
            if mask != self._mask:
                self._mask = mask
                self._epoll.modify(self._plain, mask)

    def _drop_output(self) -> None:
        self._pieces.clear()
        self._plain_out.clear()
        self._message = None
        self._out_bytes = 0
        self._is_shut = True
        if self._waits_for_pair:
            self._waits_for_pair = False
            self._epoll.unregister(self._pair.send_fd)

    # ---- receiving

    def recv_nowait(self) -> list[Frame]:
        if self._end is not None:
            raise self._end
        frames: list[Frame] = []
        self._arrived_bytes = 0
        try:
            for frame in self._incoming:
                if frame is None:
                    break
                frames.append(frame)
                if self._arrived_bytes >= TURN_BYTES:
                    self._pair.wake.set()  # the rest of a message is in our hands, no descriptor tells of it
                    break
        except (TransportError, ProtocolError) as error:
            self._end = error
        except OSError as error:
            self._end = severed(self.peer, error)
        if self._end is not None:
            self._answer_the_end()
            if not frames:
                raise self._end
            self._pair.wake.set()
        return frames

    def _frames(self) -> Iterator[Frame | None]:
        """All frames that will ever arrive; None when nothing more is there now. Ends by raising how the link ended."""
        plain = self._plain
        while True:
            message = self._receive()
            if message is None:
                yield None
                continue
            pos, end = 0, len(message)
            self._arrived_bytes += end
            while pos < end:
                try:
                    (count,) = COUNT.unpack_from(message, pos)
                    if count == GOODBYE_COUNT:
                        raise LinkClosed(f"{self.peer} closed the link")
                    if count > MAX_PARTS:
                        raise RemoteProtocolError(f"{self.peer} announces a frame of {count} parts")
                    layout = header(count)
                    sizes = layout.unpack_from(message, pos)[1:]
                except struct.error:
                    raise RemoteProtocolError(f"{self.peer} sent a message that ends inside a frame") from None
                pos += layout.size
                parts: Frame = []
                for size in sizes:
                    if size & _ON_PLAIN:
                        left = size & _SIZE_MASK
                        part = FrameDecoder.reserve(left, of_bytes=bool(size & _OF_BYTES))
                        view = memoryview(bytearray(RECV_BYTES) if isinstance(part, Missing) else part)
                        while left:
                            try:
                                got = plain.recv_into(view, min(left, len(view)))
                            except (BlockingIOError, InterruptedError):
                                least = min(max(left - RECV_BYTES, 1), _AT_ONCE_BYTES)  # TLS may hold some of the rest
                                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
                                self._watch(select.EPOLLIN, True)
                                yield None
                                continue
                            if not got:
                                raise severed(self.peer, "it ended inside a frame")
                            self._arrived_bytes += got
                            left -= got
                            if not isinstance(part, Missing):
                                view = view[got:]
                        self._watch(select.EPOLLIN, False)
                        parts.append(part)
                    else:
                        parts.append(message[pos : pos + size])
                        pos += size
                if pos > end:
                    raise RemoteProtocolError(f"{self.peer} sent a message that ends inside a frame")
                yield parts

    def _receive(self) -> bytes | None:
        """The next message of nng. Raises LinkSevered when there will be none."""
        message = self._pair.recv()
        if message is not None:
            return message
        # Nothing is there, so this wake-up may be about the end. nng notices the end of its connection only behind the
        # last message, and its pipe is gone once it has: then, and only then, has everything been received.
        for fd, events in self._epoll.poll(0):
            if fd == self._pair.wake.fileno():
                self._pair.wake.clear()
            elif fd == self._plain.fileno() and events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                self._plain_has_ended = True
                with self._mask_lock:
                    self._mask = 0
                    self._epoll.modify(self._plain, select.EPOLLET)
        is_gone = self._pair.is_gone
        message = self._pair.recv()
        if message is None and is_gone:
            raise severed(self.peer, "it ended without a goodbye")
        if message is None and self._plain_has_ended:
            self._pair.check_end()
        return message

    def _answer_the_end(self) -> None:
        """Say goodbye to one who said it, even inside a large part: it only waits for our end of the stream."""
        with self._send_lock:
            if not self._is_shut:
                self._drop_output()
                if isinstance(self._end, LinkClosed):
                    self._plain_out.append(MARKER)
                    self._finish_sending()

    # ---- ending

    def _finish_sending(self) -> bool:
        """True once everything is out and the peer can see that it was the last."""
        try:
            self._flush_pair()
            while self._plain_out:
                send_some(self._plain, self._plain_out)
            if self.blocked:
                return False
            self._plain.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            return False
        except (OSError, LinkSevered):
            self._drop_output()
        return True

    def close(self, timeout_s: float = 5.0) -> bool:
        if self._is_closed:
            return isinstance(self._end, LinkClosed)
        deadline_s = time.monotonic() + timeout_s
        with self._send_lock:
            answering = self._end is not None  # there is nothing to wait for but room for our goodbye
            if not self._is_shut:
                self._is_shut = True
                self._pieces.append(_GOODBYE)
                self._plain_out.append(MARKER)
            tail = Tail()
            ended = False
            while not (sent := self._finish_sending()) or not (answering or ended):
                poll = select.poll()
                poll.register(
                    self._plain, (0 if answering else select.POLLIN) | (select.POLLOUT if self._plain_out else 0)
                )
                if not answering:
                    poll.register(self._pair.recv_fd, select.POLLIN)
                if self._waits_for_pair:
                    poll.register(self._pair.send_fd, select.POLLIN)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not poll.poll(left_s * 1e3):
                    break
                if not answering:
                    self._discard_messages()
                    if discard(self._plain, tail):
                        ended = True
                        if not sent:  # it closed first, reads no more, and waits for our end of the stream
                            answering = True
                            self._drop_output()
                            self._plain_out.append(MARKER)
        self._teardown()
        if self._end is not None:
            return isinstance(self._end, LinkClosed)
        self._end = LinkClosed(f"the link to {self.peer} is closed")
        return tail.is_goodbye

    def _discard_messages(self) -> None:
        """A peer that closes at the same time can only get rid of its goodbye if we make room for it."""
        try:
            for _ in range(64):
                if self._pair.recv() is None:
                    return
        except LinkSevered:
            pass

    def abort(self) -> None:
        if self._is_closed:
            return
        with suppress(OSError):
            self._plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._is_shut = True
        self._end = self._end or LinkClosed(f"the link to {self.peer} was aborted")
        self._teardown()

    def _teardown(self) -> None:
        self._is_closed = True
        self._drop_state()
        discard(self._plain, Tail())  # closing with unread bytes would turn our answer into a reset
        self._epoll.close()
        self._plain.close()
        self._pair.close()

    def _drop_state(self) -> None:
        self._pieces.clear()
        self._plain_out.clear()
        self._message = None
