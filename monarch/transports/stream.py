"""Links over connected stream sockets, and how a dialer gets one.

Decides how frames are gathered into system calls, how much one call does at most, and how a stream ends; leaves the
layout of the bytes to `framing`, the proof to `auth`, accepting to `listener`, and addresses to `ipc` and `tcp`.

How a link ends. `close` sends what is left, then `GOODBYE`, shuts down its sending side, and reads on until the peer
has done the same: closing a socket with unread bytes would reset the connection, and a reset may take our last frames
with it. The peer answers a goodbye as soon as it meets it, so this takes as long as the peer needs to read up to
there. A stream that ends without a goodbye, between frames or inside one, is severed: its process died.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import islice
from typing import ClassVar, Final

from attrs import define, field

from monarch.errors import AuthenticationError, LinkClosed, LinkSevered, ProtocolError, TransportError
from monarch.transports.auth import Handshake
from monarch.transports.base import Buffer, Frame, carry_anything, deliver_nothing
from monarch.transports.framing import GOODBYE, FrameDecoder, Tail, encode, encode_joined

QUEUE_BYTES: Final = 1 << 20
"""A link that waits for room takes no further frame once it holds this much."""

TURN_BYTES: Final = 4 << 20
"""What one call of `flush_nowait` or `recv_nowait` moves at most, so that one busy link does not starve the others."""

RECV_BYTES: Final = 64 << 10
"""Room for one read. malloc takes more than 128 KiB from the kernel and gives it back each time: 12 us, and not 1."""

IOV_MAX: Final = 1024

NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What says that nothing more can be opened now."""


def severed(peer: str, error: BaseException | str) -> LinkSevered:
    """The one place where the errors of drivers become ours."""
    if isinstance(error, OSError):
        error = error.strerror or str(error)
    return LinkSevered(f"the connection to {peer} broke: {error}")


def send_some(sock: socket.socket, out: deque[Buffer]) -> int:
    """Send from the front of `out` what the socket takes in one call, and drop it there. Returns the bytes sent.

    Raises: BlockingIOError when the socket takes nothing; OSError when it is broken.
    """
    sent = left = sock.sendmsg(out if len(out) <= IOV_MAX else islice(out, IOV_MAX))
    while left:
        first = out[0]
        size = len(first)
        if left < size:
            out[0] = memoryview(first)[left:]
            break
        left -= size
        out.popleft()
    while out and not len(out[0]):  # empty buffers are sent by any call
        out.popleft()
    return sent


def discard(sock: socket.socket, tail: Tail) -> bool:
    """Read and forget what has arrived. True at the end of the stream, whichever way it ended."""
    try:
        for _ in range(64):
            data = sock.recv(RECV_BYTES)
            if not data:
                return True
            tail.feed(data)
        return False
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


@define(eq=False, repr=False)
class StreamLink:
    """A `Link` over a connected, non-blocking stream socket, which it owns."""

    ring: ClassVar[None] = None
    lane: ClassVar[None] = None
    carry = carry_anything
    deliver = deliver_nothing
    _sock: socket.socket
    peer: str
    decoder: FrameDecoder = field(factory=FrameDecoder)
    encode: Callable[[Sequence[Sequence[Buffer]]], list[Buffer]] = encode_joined
    _room_event: int = select.POLLOUT  # how the descriptor says that there is room again
    _send_lock: AbstractContextManager[bool, None] = field(factory=threading.Lock)  # the receiver answers a goodbye
    out: deque[Buffer] = field(factory=deque, init=False)
    """What waits for room; to look at."""
    _out_bytes: int = field(default=0, init=False)
    _end: TransportError | ProtocolError | None = field(default=None, init=False)
    _is_shut: bool = field(default=False, init=False)  # our goodbye is out, or nothing may be sent any more
    _fd: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._sock.setblocking(False)
        self._fd = self._sock.fileno()

    @property
    def blocked(self) -> bool:
        return bool(self.out)

    def __repr__(self) -> str:
        return f"<StreamLink to {self.peer}>"

    def fileno(self) -> int:
        return self._fd

    def send_nowait(self, frames: Sequence[Sequence[Buffer]]) -> int:
        with self._send_lock:
            if self._is_shut:
                raise self._why_shut()
            taken = self._room_for(frames) if len(frames) > 1 or self.out else len(frames)
            if taken:
                self._send(self.encode(frames if taken == len(frames) else frames[:taken]))
            else:
                self._flush()
            return taken

    def send_encoded(self, buffers: list[Buffer]) -> None:
        """As `send_nowait`, for what `encode` has returned; taken whatever the queue."""
        with self._send_lock:
            if self._is_shut:
                raise self._why_shut()
            self._send(buffers)

    def send_empty(self, at_once: Callable[[int], bool]) -> None:
        """A frame of no parts; through `at_once(fileno)` where nothing is in its way, if that says it is done."""
        with self._send_lock:
            if self._is_shut:
                raise self._why_shut()
            if self.out or not at_once(self._fd):
                self._send(encode([]))

    def _why_shut(self) -> Exception:
        return self._end or LinkClosed(f"the link to {self.peer} is closed")

    def _send(self, buffers: list[Buffer]) -> None:
        if len(buffers) == 1 and not self.out:  # the common case: a small frame, and room for it
            buffer = buffers[0]
            try:
                sent = self._sock.send(buffer)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                raise self._broken(error) from error
            if sent == len(buffer):
                return
            buffers = [memoryview(buffer)[sent:]]
        self.out += buffers
        self._out_bytes += sum(map(len, buffers))
        self._flush()

    def _room_for(self, frames: Sequence[Sequence[Buffer]]) -> int:
        """How many of the frames are taken: one after the other, until the queue is full."""
        taken, size = 0, self._out_bytes
        for frame in frames:
            if size >= QUEUE_BYTES:
                break
            size += 4 + 8 * len(frame) + sum(map(len, frame))
            taken += 1
        return taken

    def flush_nowait(self) -> bool:
        with self._send_lock:
            if self._is_shut and self._end is not None:
                raise self._end
            return self._flush()

    def _flush(self) -> bool:
        turn = 0
        try:
            while self.out and turn < TURN_BYTES:
                sent = send_some(self._sock, self.out)
                self._out_bytes -= sent
                turn += sent
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise self._broken(error) from error
        return not self.out

    def _broken(self, error: OSError) -> LinkSevered:
        # What the peer sent before it died is still to be read, and `recv_nowait` finds out how it ended.
        self._drop_output()
        return severed(self.peer, error)

    def _drop_output(self) -> None:
        self.out.clear()
        self._out_bytes = 0
        self._is_shut = True

    def recv_nowait(self) -> list[Frame]:
        if self._end is not None:
            raise self._end
        frames: list[Frame] = []
        decoder = self.decoder
        turn = 0
        try:
            while turn < TURN_BYTES:
                view = decoder.get_buffer() if decoder.filling is not None else None
                if view is None:
                    data = self._sock.recv(RECV_BYTES)
                    count = len(data)
                    if not count:
                        raise severed(self.peer, "it ended without a goodbye")
                    frames += decoder.feed(data)
                    if decoder.broken is not None:
                        raise decoder.broken
                    if decoder.goodbye:
                        raise LinkClosed(f"{self.peer} closed the link")
                    if count < RECV_BYTES and decoder.filling is None:
                        break  # a short read emptied the socket
                else:
                    count = self._sock.recv_into(view)
                    if not count:
                        raise severed(self.peer, "it ended inside a frame")
                    frames += decoder.advance(count)
                turn += count
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._end = severed(self.peer, error)
        except (TransportError, ProtocolError) as error:
            self._end = error
        if self._end is not None:
            self._answer_the_end()
            if not frames:
                raise self._end
        return frames

    def _answer_the_end(self) -> None:
        """Say goodbye to one who said it, even in the middle of a frame: it only waits for our end of the stream."""
        with self._send_lock:
            if not self._is_shut:
                self._drop_output()
                if isinstance(self._end, LinkClosed):
                    self.out.append(GOODBYE)
                    self._finish_sending()
        with suppress(OSError):
            # Keeps the descriptor readable, so that whoever polls comes back for the error.
            self._sock.shutdown(socket.SHUT_RD)

    def _finish_sending(self) -> bool:
        """True once everything is out and the peer can see that it was the last."""
        try:
            while self.out:
                send_some(self._sock, self.out)
            self._sock.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.out.clear()
        return True

    def close(self, timeout_s: float = 5.0) -> bool:
        if self._fd_is_closed():
            return self._end is None or isinstance(self._end, LinkClosed)
        deadline_s = time.monotonic() + timeout_s
        with self._send_lock:
            answering = self._end is not None  # there is nothing to wait for but room for our goodbye
            if not self._is_shut:
                self._is_shut = True
                self.out.append(GOODBYE)
            tail = Tail(self.decoder.pending)
            ended = False
            while not (sent := self._finish_sending()) or not (answering or ended):
                poll = select.poll()
                poll.register(self._sock, (0 if answering else select.POLLIN) | (0 if sent else self._room_event))
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not poll.poll(left_s * 1e3):
                    break
                if not answering and discard(self._sock, tail):
                    ended = True
                    if not sent:  # it closed first, reads no more, and waits for our end of the stream
                        answering = True
                        self.out.clear()
                        self.out.append(GOODBYE)
            self.out.clear()
        self._sock.close()
        if self._end is not None:
            return isinstance(self._end, LinkClosed)
        self._end = LinkClosed(f"the link to {self.peer} is closed")
        return tail.is_goodbye

    def _fd_is_closed(self) -> bool:
        return self._sock.fileno() < 0

    def abort(self) -> None:
        if self._fd_is_closed():
            return
        with suppress(OSError):
            # TCP: reset instead of an orderly end. Unix sockets ignore it.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._is_shut = True
        self._end = self._end or LinkClosed(f"the link to {self.peer} was aborted")
        self.out.clear()
        self._sock.close()


def authenticate(sock: socket.socket, secret: bytes, url: str, deadline_s: float) -> None:
    """The dialer's handshake, blocking.

    Raises:
        AuthenticationError, RemoteProtocolError: somebody else listens there.
        LinkSevered, TimeoutError: it did not get that far.
    """
    handshake = Handshake("dialer", secret)
    try:
        send_all(sock, handshake.greeting, deadline_s)
        while not handshake.done:
            data = recv_some(sock, handshake.missing_bytes, deadline_s)
            if not data:
                raise LinkSevered(f"{url} closed the connection during the handshake")
            answer = handshake.feed(data)
            if answer:
                send_all(sock, answer, deadline_s)
    except TimeoutError as error:
        raise TimeoutError(f"{url} did not answer the handshake in time") from error
    except OSError as error:
        raise severed(url, error) from error
    except (AuthenticationError, ProtocolError) as error:
        raise type(error)(f"{url}: {error}") from None


def send_all(sock: socket.socket, data: bytes, deadline_s: float) -> None:
    """Raises: TimeoutError, OSError."""
    sock.settimeout(max(deadline_s - time.monotonic(), 1e-3))
    sock.sendall(data)


def recv_some(sock: socket.socket, size_bytes: int, deadline_s: float) -> bytes:
    """Raises: TimeoutError, OSError."""
    sock.settimeout(max(deadline_s - time.monotonic(), 1e-3))
    return sock.recv(size_bytes)
