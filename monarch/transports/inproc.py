"""Links inside one process, for tests and debugging.

Decides when a queue is full and how readiness is signalled; `faults` can disturb what is decided here.

A link serialises: parts are copied as they pass, so the receiver owns its buffers as it does everywhere else. Each end
has a pipe whose reading end is `fileno`: readable when there are frames, an end to report, or, after `send_nowait` had
to refuse something, room again. It never polls as writable, so a poller that asks for both does not spin.

Locks: one per pair of ends, held for moments, never while calling out.
"""

from __future__ import annotations

import hmac
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Final

from attrs import define, field

from monarch.errors import AuthenticationError, LinkClosed, LinkSevered, TransportError
from monarch.transports.base import (
    BIG_BYTES,
    Buffer,
    Frame,
    Inherit,
    Link,
    Memory,
    Viability,
    carry_anything,
    deliver_nothing,
)
from monarch.transports.url import parse

QUEUE_BYTES: Final = 4 << 20
"""A direction takes no further frame once it holds this much; a single frame may be larger."""

QUEUE_FRAMES: Final = 16384


@define(eq=False)
class Bell:
    """A descriptor that is readable while it rings."""

    _read_fd: int = field(init=False)
    _write_fd: int = field(init=False)
    _rings: bool = field(default=False, init=False)
    _is_closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()

    def fileno(self) -> int:
        return self._read_fd

    def ring(self) -> None:
        if not self._rings and not self._is_closed:
            self._rings = True
            os.write(self._write_fd, b"!")

    def silence(self) -> None:
        if self._rings and not self._is_closed:
            self._rings = False
            os.read(self._read_fd, 1)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self._read_fd)
            os.close(self._write_fd)


@define(eq=False, repr=False)
class Direction:
    """Frames on their way from one end to the other. `faults.Faults` sets the lower fields."""

    reader_bell: Bell
    writer_bell: Bell
    lock: threading.Lock
    frames: deque[Frame] = field(factory=deque)
    size_bytes: int = 0
    end: type[TransportError] | None = None
    """How it ended, to be reported once the frames are read."""
    is_refusing: bool = False
    """The writer was refused and waits for room."""
    is_held: bool = False
    max_frames: int = QUEUE_FRAMES

    @property
    def has_room(self) -> bool:
        return not self.frames or (self.size_bytes < QUEUE_BYTES and len(self.frames) < self.max_frames)

    @property
    def has_work(self) -> bool:
        return not self.is_held and (bool(self.frames) or self.end is not None)

    def wake(self) -> None:
        """Ring for whoever has something to do; the lock is held."""
        if self.has_work:
            self.reader_bell.ring()
        if self.is_refusing and (self.has_room or self.end is not None):
            self.writer_bell.ring()


@define(eq=False, repr=False)
class InprocLink:
    """One end of a pair."""

    ring: ClassVar[None] = None
    lane: ClassVar[None] = None
    carry = carry_anything
    deliver = deliver_nothing
    peer: str
    outgoing: Direction
    incoming: Direction
    _bell: Bell
    _end: TransportError | None = None

    @property
    def blocked(self) -> bool:
        return self.outgoing.is_refusing

    def __repr__(self) -> str:
        return f"<InprocLink to {self.peer}>"

    def fileno(self) -> int:
        return self._bell.fileno()

    def send_nowait(self, frames: Sequence[Sequence[Buffer]]) -> int:
        way = self.outgoing
        with way.lock:
            if way.end is not None:
                raise self._end or self._error(way.end)
            taken = 0
            for frame in frames:
                if not way.has_room:
                    way.is_refusing = True
                    break
                way.frames.append([bytes(part) if len(part) < BIG_BYTES else bytearray(part) for part in frame])
                way.size_bytes += sum(map(len, frame))
                taken += 1
            way.wake()
            return taken

    def flush_nowait(self) -> bool:
        """Nothing that was taken is ever left here; this looks whether there is room again."""
        way = self.outgoing
        with way.lock:
            if way.end is not None:
                raise self._end or self._error(way.end)
            way.is_refusing = way.is_refusing and not way.has_room
            self._settle_bell()
        return True

    def recv_nowait(self) -> list[Frame]:
        way = self.incoming
        with way.lock:
            if self._end is not None:
                raise self._end
            frames: list[Frame] = []
            if not way.is_held:
                frames += way.frames
                way.frames.clear()
                way.size_bytes = 0
            if not frames and way.end is not None and not way.is_held:
                self._end = self._error(way.end)
                raise self._end
            self._settle_bell()
            way.wake()
            return frames

    def _settle_bell(self) -> None:
        way = self.outgoing
        if not self.incoming.has_work and not (way.is_refusing and way.has_room):
            self._bell.silence()

    def _error(self, kind: type[TransportError]) -> TransportError:
        return kind(f"{self.peer} closed the link" if kind is LinkClosed else f"the link to {self.peer} broke")

    def close(self, timeout_s: float = 5.0) -> bool:
        with self.outgoing.lock:
            ended_well = self.incoming.end is not LinkSevered and self.outgoing.end is not LinkSevered
            self._finish(LinkClosed)
        return ended_well

    def abort(self) -> None:
        with self.outgoing.lock:
            if self.outgoing.end is None:
                self.outgoing.frames.clear()
                self.outgoing.size_bytes = 0
            self._finish(LinkSevered)

    def _finish(self, kind: type[TransportError]) -> None:
        self._end = self._end or LinkClosed(f"the link to {self.peer} is closed")
        self._bell.close()
        for way in (self.outgoing, self.incoming):
            way.end = way.end or kind
            way.wake()
        self.incoming.frames.clear()


_numbers = itertools.count(1)


def pair(left_name: str = "left", right_name: str = "right") -> tuple[InprocLink, InprocLink]:
    """Two connected ends, without a listener."""
    left_bell, right_bell = Bell(), Bell()
    lock = threading.Lock()
    to_right = Direction(right_bell, left_bell, lock)
    to_left = Direction(left_bell, right_bell, lock)
    return InprocLink(right_name, to_right, to_left, left_bell), InprocLink(left_name, to_left, to_right, right_bell)


@define(eq=False, repr=False)
class InprocListener:
    """Hands out the other ends of what was dialled."""

    starved: ClassVar[None] = None
    url: str
    _transport: InprocTransport
    _secret: bytes
    _bell: Bell = field(factory=Bell, init=False)
    _waiting: deque[InprocLink] = field(factory=deque, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _is_closed: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        return f"<InprocListener at {self.url}>"

    def fileno(self) -> int:
        return self._bell.fileno()

    def hand_down(self) -> list[int]:
        return []

    def accept_nowait(self) -> list[Link]:
        with self._lock:
            links: list[Link] = list(self._waiting)
            self._waiting.clear()
            self._bell.silence()
            return links

    def connect(self, secret: bytes) -> InprocLink:
        """Called by the dialer, in its thread."""
        if not hmac.compare_digest(secret, self._secret):
            raise AuthenticationError(f"{self.url}: the listener there belongs to another job")
        with self._lock:
            if self._is_closed:
                raise ConnectionRefusedError(f"nobody listens at {self.url}")
            dialer, acceptor = pair(f"dialer {next(_numbers)} at {self.url}", self.url)
            self._waiting.append(acceptor)
            self._bell.ring()
            return dialer

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._bell.close()
        self._transport.forget(self.url)
        for link in self._waiting:
            link.abort()


@define(eq=False, repr=False)
class InprocTransport:
    """Links between the threads of this process."""

    scheme: str = "inproc"
    memory: Memory | None = None
    inherit: Inherit | None = None
    _listeners: dict[str, InprocListener] = field(factory=dict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def viability(self) -> Viability:
        return Viability(True)

    def listen(self, url: str, secret: bytes) -> InprocListener:
        name = parse(url, "inproc").local.name or f"listener-{next(_numbers)}"
        address = f"inproc://{name}"
        with self._lock:
            if address in self._listeners:
                raise OSError(f"cannot listen at {address}: somebody does already")
            listener = self._listeners[address] = InprocListener(address, self, secret)
            return listener

    def dial(self, url: str, secret: bytes, timeout_s: float) -> InprocLink:
        address = f"inproc://{parse(url, 'inproc').name}"
        with self._lock:
            listener = self._listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        return listener.connect(secret)

    def forget(self, address: str) -> None:
        """A listener tells that it is gone."""
        with self._lock:
            self._listeners.pop(address, None)


TRANSPORT: Final = InprocTransport()
