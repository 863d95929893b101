"""Links over connected stream sockets, and the listener that lets in only who proves the job's secret.

Decides how frames are gathered into system calls, how much one call does at most, and how a stream ends; leaves the
layout of the bytes to `framing`, the proof to `auth`, and addresses to `ipc` and `tcp`.

How a link ends. `close` sends what is left, then `GOODBYE`, shuts down its sending side, and reads on until the peer
has done the same: closing a socket with unread bytes would reset the connection, and a reset may take our last frames
with it. The peer answers a goodbye as soon as it meets it, so this takes as long as the peer needs to read up to
there. A stream that ends without a goodbye, between frames or inside one, is severed: its process died.
"""

from __future__ import annotations

import errno
import itertools
import math
import select
import selectors
import socket
import struct
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import islice
from typing import Any, ClassVar, Final, Protocol

from attrs import define, field

from monarch.errors import AuthenticationError, LinkClosed, LinkSevered, ProtocolError, TransportError
from monarch.transports.auth import Handshake
from monarch.transports.base import Buffer, Frame, Link
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
    _sock: socket.socket
    peer: str
    _decoder: FrameDecoder = field(factory=FrameDecoder)
    encode: Callable[[Sequence[Sequence[Buffer]]], list[Buffer]] = encode_joined
    _room_event: int = select.POLLOUT  # how the descriptor says that there is room again
    _send_lock: AbstractContextManager[bool, None] = field(factory=threading.Lock)  # the receiver answers a goodbye
    _out: deque[Buffer] = field(factory=deque, init=False)
    _out_bytes: int = field(default=0, init=False)
    _end: TransportError | ProtocolError | None = field(default=None, init=False)
    _is_shut: bool = field(default=False, init=False)  # our goodbye is out, or nothing may be sent any more
    _fd: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._sock.setblocking(False)
        self._fd = self._sock.fileno()

    @property
    def blocked(self) -> bool:
        return bool(self._out)

    @property
    def is_between_frames(self) -> bool:
        """Whether the next byte is the first of a frame."""
        return self._decoder.is_between_frames

    def __repr__(self) -> str:
        return f"<StreamLink to {self.peer}>"

    def fileno(self) -> int:
        return self._fd

    def send_nowait(self, frames: Sequence[Sequence[Buffer]]) -> int:
        with self._send_lock:
            if self._is_shut:
                raise self._end or LinkClosed(f"the link to {self.peer} is closed")
            taken = self._room_for(frames) if len(frames) > 1 or self._out else len(frames)
            if taken:
                self._send(self.encode(frames if taken == len(frames) else frames[:taken]))
            else:
                self._flush()
            return taken

    def send_encoded(self, buffers: list[Buffer]) -> None:
        """As `send_nowait`, for what `encode` has returned; taken whatever the queue."""
        with self._send_lock:
            if self._is_shut:
                raise self._end or LinkClosed(f"the link to {self.peer} is closed")
            self._send(buffers)

    def send_empty(self, at_once: Callable[[int], bool]) -> None:
        """A frame of no parts; through `at_once(fileno)` where nothing is in its way, if that says it is done."""
        with self._send_lock:
            if self._is_shut:
                raise self._end or LinkClosed(f"the link to {self.peer} is closed")
            if self._out or not at_once(self._fd):
                self._send(encode([]))

    def _send(self, buffers: list[Buffer]) -> None:
        if len(buffers) == 1 and not self._out:  # the common case: a small frame, and room for it
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
        self._out += buffers
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
            while self._out and turn < TURN_BYTES:
                sent = send_some(self._sock, self._out)
                self._out_bytes -= sent
                turn += sent
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise self._broken(error) from error
        return not self._out

    def _broken(self, error: OSError) -> LinkSevered:
        # What the peer sent before it died is still to be read, and `recv_nowait` finds out how it ended.
        self._drop_output()
        return severed(self.peer, error)

    def _drop_output(self) -> None:
        self._out.clear()
        self._out_bytes = 0
        self._is_shut = True

    def recv_nowait(self) -> list[Frame]:
        if self._end is not None:
            raise self._end
        frames: list[Frame] = []
        decoder = self._decoder
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
                    self._out.append(GOODBYE)
                    self._finish_sending()
        with suppress(OSError):
            # Keeps the descriptor readable, so that whoever polls comes back for the error.
            self._sock.shutdown(socket.SHUT_RD)

    def _finish_sending(self) -> bool:
        """True once everything is out and the peer can see that it was the last."""
        try:
            while self._out:
                send_some(self._sock, self._out)
            self._sock.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self._out.clear()
        return True

    def close(self, timeout_s: float = 5.0) -> bool:
        if self._fd_is_closed():
            return self._end is None or isinstance(self._end, LinkClosed)
        deadline_s = time.monotonic() + timeout_s
        with self._send_lock:
            answering = self._end is not None  # there is nothing to wait for but room for our goodbye
            if not self._is_shut:
                self._is_shut = True
                self._out.append(GOODBYE)
            tail = Tail(self._decoder.pending)
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
                        self._out.clear()
                        self._out.append(GOODBYE)
            self._out.clear()
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
        self._out.clear()
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


class Acceptor(Protocol):
    """What a listener needs of a listening socket."""

    def fileno(self) -> int: ...

    def setblocking(self, flag: bool, /) -> None: ...

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises: BlockingIOError, when nobody is there."""
        ...

    def close(self) -> None: ...


@define(eq=False)
class Spare:
    """A descriptor to live on when all are used: a connection that is not accepted keeps its listener readable, and
    who polls it spinning."""

    _sock: socket.socket | None = field(factory=socket.socket)

    def turn_away(self, acceptor: Acceptor) -> bool:
        """Refuse who is next. False: another thread has taken the descriptor since."""
        self.close()
        with suppress(OSError):
            acceptor.accept()[0].close()
        with suppress(OSError):
            self._sock = socket.socket()
        return self._sock is not None

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


@define(eq=False, repr=False)
class _Newcomer:
    sock: socket.socket
    handshake: Handshake | None  # None: it has nothing to prove
    deadline_s: float
    unsent: bytes
    greeting_bytes: int
    network: str = ""  # where it comes from
    greeting: bytes = b""  # what it sent after the handshake

    def greet(self) -> None:
        """Say what we say first, which fits into an empty socket; TLS comes before it, where there is any."""
        with suppress(BlockingIOError):
            self.unsent = self.unsent[self.sock.send(self.unsent) :] if self.unsent else b""


def network_of(address: Any) -> str:
    """Whoever has one address of a network can have the others, too: over IPv6 there are 2^64. "" for unix sockets."""
    if not isinstance(address, tuple):
        return ""
    host: str = address[0]
    if ":" not in host:
        return host
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return (packed[:8] if any(packed[:8]) else packed).hex()  # those without are IPv4 addresses, or loopback


@define(eq=False, repr=False)
class StreamListener:
    """Accepts connections on a listening socket, which it owns, and hands out those that proved the secret.

    Nothing here blocks and no thread is needed: `fileno` is a selector over the socket and all newcomers, and
    `accept_nowait` moves every one of them on as far as its bytes allow. At most `max_newcomers` are unfinished at a
    time; one more pushes out the oldest, because a friend needs milliseconds and the oldest is most likely a stranger
    that says nothing: the oldest of the network that most come from, so that a flood pushes out itself.
    """

    _sock: Acceptor
    _secret: bytes
    url: str
    _adopt: Callable[[socket.socket, bytes], Link | None]
    """Makes a link of an authenticated, non-blocking socket, which it owns, and a greeting. None: not now, or never."""
    _greeting_bytes: int = 0
    """The dialer sends this much after the handshake, for `adopt`."""
    _is_welcome: Callable[[socket.socket], bool] = lambda sock: True
    _wrap: Callable[[socket.socket], socket.socket] = lambda sock: sock
    """Puts on a new, non-blocking connection what the proof is to travel in. Raises: OSError."""
    _on_refused: Callable[[Exception], None] = lambda error: None
    """Hears why a newcomer was turned away."""
    _on_close: Callable[[], None] = lambda: None
    _connections: Callable[[], list[tuple[socket.socket, socket.socket]]] = list
    """Makes connections of this process with itself, as many as a link has. Raises: OSError."""
    _heir_bytes: int = 0
    """An heir sends this much as its greeting."""
    _clock: Callable[[], float] = time.monotonic
    _handshake_s: float = 10.0
    _max_newcomers: int = 128
    selector: selectors.BaseSelector = field(factory=selectors.DefaultSelector, init=False)
    """Whatever else `adopt` has to wait for may be registered here, with a callable that raises nothing as data."""
    starved: OSError | None = field(default=None, init=False)
    _newcomers: OrderedDict[int, _Newcomer] = field(factory=OrderedDict, init=False)
    _heirs: set[_Newcomer] = field(factory=set, init=False)  # of whom nothing was heard yet
    _spare: Spare = field(factory=Spare, init=False)
    _is_closed: bool = field(default=False, init=False)
    _fd: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._sock.setblocking(False)
        self.selector.register(self._sock, selectors.EVENT_READ)
        self._fd = self.selector.fileno()  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<StreamListener at {self.url}>"

    def fileno(self) -> int:
        return self._fd

    @property
    def newcomer_count(self) -> int:
        return len(self._newcomers)

    def hand_down(self) -> list[int]:
        """As `Listener.hand_down`. Our end waits for the first bytes of the heir, as long as it takes to come up."""
        pairs = [] if self._is_closed else self._connections()
        heirs: list[_Newcomer] = []
        try:
            for near, _ in pairs:
                near.setblocking(False)
                heir = _Newcomer(near, None, math.inf, b"", self._heir_bytes)
                self.selector.register(near, selectors.EVENT_READ, heir)
                heirs.append(heir)
        except BaseException:
            for heir in heirs:
                self.selector.unregister(heir.sock)
            for end in itertools.chain(*pairs):
                end.close()
            raise
        self._heirs.update(heirs)
        return [far.detach() for _, far in pairs]

    def accept_nowait(self) -> list[Link]:
        links: list[Link] = []
        if self._is_closed:
            return links
        for key, _ in self.selector.select(0):
            if key.fileobj is self._sock:
                self._accept()
            elif isinstance(key.data, _Newcomer):
                if key.data.sock.fileno() >= 0:
                    self._advance(key.data, links)
            else:
                link = key.data()
                if link is not None:
                    links.append(link)
        now_s = self._clock()
        while self._newcomers and (oldest := next(iter(self._newcomers.values()))).deadline_s <= now_s:
            self._forget(oldest)
        if links:
            self.starved = None
        return links

    def starves(self, error: Exception) -> None:
        """Note `error`, which ended somebody who came, if it is that no descriptor was left."""
        if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
            self.starved = error

    def _accept(self) -> None:
        for _ in range(self._max_newcomers):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in NO_DESCRIPTOR:
                    self.starves(error)
                    if not self._make_room():
                        return
                    continue
                if error.errno in (errno.EBADF, errno.EINVAL):
                    return
                continue  # the connection died in the queue, see accept(2)
            if not self._is_welcome(sock):
                sock.close()
                continue
            sock.setblocking(False)
            handshake = Handshake("acceptor", self._secret)
            try:
                sock = self._wrap(sock)
                deadline_s = self._clock() + self._handshake_s
                newcomer = _Newcomer(
                    sock, handshake, deadline_s, handshake.greeting, self._greeting_bytes, network_of(address)
                )
                newcomer.greet()
            except OSError as error:
                self._on_refused(error)
                sock.close()
                continue
            if len(self._newcomers) >= self._max_newcomers:
                self._push_one_out()
            self._newcomers[sock.fileno()] = newcomer
            self.selector.register(sock, selectors.EVENT_READ, newcomer)

    def _make_room(self) -> bool:
        """No descriptor is free: give up a newcomer, else refuse the next one."""
        if self._newcomers:
            self._push_one_out()
            return True
        return self._spare.turn_away(self._sock)

    def _advance(self, newcomer: _Newcomer, links: list[Link]) -> None:
        handshake, sock = newcomer.handshake, newcomer.sock
        try:
            newcomer.greet()
            if newcomer.unsent:
                return
            while handshake is not None and not handshake.done:
                data = sock.recv(handshake.missing_bytes)
                if not data:
                    return self._forget(newcomer)
                answer = handshake.feed(data)
                if answer and sock.send(answer) < len(answer):
                    return self._forget(newcomer)
            while len(newcomer.greeting) < newcomer.greeting_bytes:
                data = sock.recv(newcomer.greeting_bytes - len(newcomer.greeting))
                if not data:
                    return self._forget(newcomer)
                newcomer.greeting += data
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, AuthenticationError, ProtocolError) as error:
            self._on_refused(error)
            return self._forget(newcomer)
        self._forget(newcomer, close=False)
        try:
            link = self._adopt(sock, newcomer.greeting)
        except (OSError, TransportError) as error:  # it is gone already, or cannot be kept
            self.starves(error)
            return sock.close()
        if link is not None:
            links.append(link)

    def _push_one_out(self) -> None:
        newcomers = self._newcomers.values()
        ((most, _),) = Counter(each.network for each in newcomers).most_common(1)
        self._forget(next(each for each in newcomers if each.network == most))

    def _forget(self, newcomer: _Newcomer, close: bool = True) -> None:
        self.selector.unregister(newcomer.sock)
        if newcomer.handshake is None:
            self._heirs.discard(newcomer)
        else:
            del self._newcomers[newcomer.sock.fileno()]
        if close:
            newcomer.sock.close()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._on_close()
        for newcomer in [*self._newcomers.values(), *self._heirs]:
            self._forget(newcomer)
        self._sock.close()
        self.selector.close()
        self._spare.close()
