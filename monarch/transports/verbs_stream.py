"""A byte stream over a queue pair, which looks like a socket. `StreamLink` makes frames and an orderly end of it.

Each message is a head (credits handed back, what it is) and up to `SLOT_BYTES` of the stream. Both sides have posted a
ring of receives before the first message comes, and `credits` sees to it that no message meets an empty ring. A slot is
posted again when the reader has copied its bytes out: a reader that does not read stops the sender.

The control connection beside it, over which the two sides told each other their queue pairs, tells when the process at
the other end is gone; an idle queue pair never would.

The descriptor is readable when the completion channel or the control connection is, or when something has arrived that
has not been read yet, or when there is room again for a sender that met none.

What a message costs is system calls. So the completion queue is looked at first, which costs none; its event is taken,
and the next one asked for, once for all that was found; and one message in `_SIGNAL_EVERY` completes at its sender, and
frees the slots of those before it.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from struct import Struct
from typing import Final

from monarch.errors import RemoteProtocolError
from monarch.transports.base import Buffer
from monarch.transports.credits import RESERVED, Credits
from monarch.verbs.adapter import FLUSHED, POLLED, SUCCESS, Completion, Opcode
from monarch.verbs.node import Wire
from monarch.verbs.registrations import register
from monarch.wake import Wake

DEPTH: Final = 64
SLOT_BYTES: Final = 8 << 10
READY: Final = b"\x06"  # over the control connection: this side has posted its receives

_SIGNAL_EVERY: Final = 16
_LINGER_S: Final = 2.0
_LINGER_POLL_S: Final = 0.01

_HEAD: Final = Struct("<HH")
_DATA, _CREDITS, _FIN = range(3)
_MESSAGE_BYTES: Final = _HEAD.size + SLOT_BYTES
_SEND: Final = 1 << 62  # in a wr_id: a send, with its number, and not a receive


def _cheap_lock() -> AbstractContextManager[bool, None]:
    """A reentrant lock that makes no system call unless two threads meet. Those of `threading` look at the clock each
    time, which is a system call where the kernel has no vDSO."""
    try:
        return multiprocessing.get_context("fork").RLock()
    except OSError:  # there is no place for semaphores
        return threading.RLock()


class VerbsStream:
    """See the module. As with a non-blocking socket, one thread may send while another receives.

    It owns the control connection and the queue pair.

    Attributes:
        lock: held by whatever is called; reentrant, so that a link may hold it for its own sake.
    """

    def __init__(self, control: socket.socket, wire: Wire) -> None:
        """The queue pair is connected. Raises: TransferError, OSError."""
        self._control, self._wire = control, wire
        self._queue_pair = wire.queue_pair
        self._ring = bytearray(2 * DEPTH * _MESSAGE_BYTES)  # receives, then sends
        self._view = memoryview(self._ring)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._ring))
        self._region = register(wire.node.device, self._address, len(self._ring))
        self._credits = Credits(DEPTH)
        self._posted = self._confirmed = self._awaited = 0  # sends: all, completed, and up to the last that will tell
        self._arrived: deque[tuple[int, int, int]] = deque()  # slot, and the part of it that is not read yet
        self._peer_is_ready = self._peer_is_gone = False
        self._ended = False  # nothing more will arrive
        self._error: OSError | None = None
        self._wants_room = False
        self._is_shut = False
        self._lingers = True
        self.lock = _cheap_lock()
        self._notice = Wake()
        self._noticed = False
        self._looks = True  # at the descriptors, when nothing has completed
        self._epoll = select.epoll()
        self._fd = self._epoll.fileno()
        for fd in (self._queue_pair.fileno(), control.fileno(), self._notice.fileno()):
            self._epoll.register(fd, select.EPOLLIN)
        control.setblocking(False)
        self._receives = [
            self._queue_pair.receive(slot, self._address + slot * _MESSAGE_BYTES, _MESSAGE_BYTES, self._region.lkey)
            for slot in range(DEPTH)
        ]
        for receive in self._receives:
            self._queue_pair.post_recv(receive)
        self._queue_pair.arm()

    # ---- what a socket has

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """SO_LINGER: what is on its way need not arrive."""
        self._control.setsockopt(level, option, value)
        self._lingers = self._lingers and option != socket.SO_LINGER

    def fileno(self) -> int:
        return self._fd

    def send(self, data: Buffer) -> int:
        """As `sendmsg`; the short way for what fits into one message."""
        size = len(data)
        if not 0 < size <= SLOT_BYTES:
            return self.sendmsg((data,))
        with self.lock:
            if not self._has_room:
                self._take_in()
                if not self._has_room:
                    return self._after_send(0, wants_room=True)
            start = (DEPTH + self._posted % DEPTH) * _MESSAGE_BYTES + _HEAD.size
            self._view[start : start + size] = data
            self._post(_DATA, _HEAD.size + size)
            return self._after_send(size, wants_room=False)

    def sendmsg(self, buffers: Iterable[Buffer]) -> int:
        """Raises: BlockingIOError when there is no room; OSError when the connection is broken."""
        with self.lock:
            if not self._has_room:  # a look costs a system call, and whoever receives looks anyway
                self._take_in()
            sent = 0
            slot, at = -1, 0
            for buffer in buffers:
                done = 0
                while done < len(buffer):
                    if slot < 0:
                        if not self._has_room:
                            self._take_in()
                        if not self._has_room:
                            return self._after_send(sent, wants_room=True)
                        slot, at = self._posted % DEPTH, _HEAD.size
                    size = min(len(buffer) - done, _MESSAGE_BYTES - at)
                    start = (DEPTH + slot) * _MESSAGE_BYTES + at
                    self._view[start : start + size] = memoryview(buffer)[done : done + size]
                    at, done, sent = at + size, done + size, sent + size
                    if at == _MESSAGE_BYTES:
                        self._post(_DATA, at)
                        slot = -1
            if slot >= 0:
                self._post(_DATA, at)
            return self._after_send(sent, wants_room=False)

    def _after_send(self, sent: int, *, wants_room: bool) -> int:
        if self._error is not None:
            raise self._error
        self._wants_room = wants_room
        self._notify()
        if wants_room and not sent:
            raise BlockingIOError
        return sent

    @property
    def _has_room(self) -> bool:
        unconfirmed = self._posted - self._confirmed
        may_send = self._peer_is_ready and self._error is None
        return may_send and self._credits.available > 0 and unconfirmed < DEPTH - RESERVED

    def _post(self, kind: int, size_bytes: int) -> None:
        """Send what the next slot has."""
        handed_back = self._credits.hand_back() if kind == _CREDITS else self._credits.spend()
        start = (DEPTH + self._posted % DEPTH) * _MESSAGE_BYTES
        _HEAD.pack_into(self._ring, start, handed_back, kind)
        self._posted = number = self._posted + 1
        tells = not number % _SIGNAL_EVERY or kind == _FIN
        if tells:
            self._awaited = number
        address = self._address + start
        try:
            self._queue_pair.post_send(
                Opcode.SEND, _SEND | number, address, size_bytes, self._region.lkey, signalled=tells
            )
        except OSError as error:
            self._fail(f"the queue pair takes no message: {error}")

    def recv(self, size_bytes: int) -> bytes:
        """b"" at the end of the stream. Raises: BlockingIOError when nothing is there; OSError as `sendmsg`."""
        with self.lock:
            self._take_in()
            found: list[bytes] = []
            while size_bytes and self._arrived:
                found.append(bytes(self._read(size_bytes)))
                self._consumed(len(found[-1]))
                size_bytes -= len(found[-1])
            if not found:
                self._nothing_arrived()
            self._notify()
            return b"".join(found)

    def recv_into(self, buffer: memoryview) -> int:
        """0 at the end of the stream. Raises: as `recv`."""
        with self.lock:
            self._take_in()
            done = 0
            while done < len(buffer) and self._arrived:
                part = self._read(len(buffer) - done)
                size = len(part)
                buffer[done : done + size] = part
                self._consumed(size)
                done += size
            if not done:
                self._nothing_arrived()
            self._notify()
            return done

    def _read(self, most_bytes: int) -> memoryview:
        slot, start, stop = self._arrived[0]
        base = slot * _MESSAGE_BYTES
        return self._view[base + start : base + min(stop, start + most_bytes)]

    def _consumed(self, size_bytes: int) -> None:
        slot, start, stop = self._arrived[0]
        if start + size_bytes < stop:
            self._arrived[0] = slot, start + size_bytes, stop
            return
        self._arrived.popleft()
        if self._error is not None:
            return
        self._queue_pair.post_recv(self._receives[slot])
        self._credits.owed += 1
        self._hand_back()

    def _hand_back(self) -> None:
        if self._credits.is_deep_in_debt and self._peer_is_ready and self._posted - self._confirmed < DEPTH:
            self._post(_CREDITS, _HEAD.size)

    def _nothing_arrived(self) -> None:
        if self._ended:
            return
        if self._error is not None:
            raise self._error
        self._notify()
        raise BlockingIOError

    def shutdown(self, how: int) -> None:
        """Raises: BlockingIOError: there is no room yet to say that it was the last."""
        with self.lock:
            if how == socket.SHUT_RD:
                self._ended = True
                self._notify()
                return
            if self._is_shut:
                return
            self._take_in()
            if not self._has_room and self._error is None:
                self._wants_room = True
                self._notify()
                raise BlockingIOError
            if self._error is None:
                self._is_shut = True
                self._wants_room = False
                self._post(_FIN, _HEAD.size)
            self._notify()  # what was taken in meanwhile has to be read

    def close(self) -> None:
        with self.lock:
            if self._fd < 0:
                return
            deadline_s = time.monotonic() + _LINGER_S
            while self._is_unconfirmed and time.monotonic() < deadline_s:
                # The end of a queue pair takes along what it has sent and nobody has confirmed.
                self._epoll.poll(_LINGER_POLL_S)
                self._take_in()
            self._fd = -1
            self._epoll.close()
            self._wire.close()
            self._region.close()
            self._control.close()
            self._notice.close()

    @property
    def _is_unconfirmed(self) -> bool:
        """Whether something that was sent, and will tell, is on its way to somebody."""
        return self._lingers and not self._peer_is_gone and self._error is None and self._confirmed < self._awaited

    # ---- completions

    def _take_in(self) -> None:
        """Whatever has completed; and if nothing has, what the control connection says."""
        if self._fd < 0:
            raise OSError(errno.EBADF, "the connection is closed")
        found = self._drain()
        if not found and not self._looks:
            self._looks = True  # whoever was told that there is something comes again
            return
        self._looks = not found
        if not found:
            ready = [fd for fd, _ in self._epoll.poll(0)]
            if self._control.fileno() in ready:
                self._look_at_control()
            found = self._queue_pair.fileno() in ready
        # In this order no event is lost: take it, arm, and look again. One that is late is found by the descriptor.
        while found and self._error is None and self._queue_pair.take_event():
            self._queue_pair.arm()
            found = self._drain()

    def _drain(self) -> bool:
        """Take all completions. Whether there was one."""
        found = False
        while self._error is None:
            completions = self._queue_pair.poll()
            for done in completions:
                self._on_completion(done)
            found = found or bool(completions)
            if len(completions) < POLLED:
                break
        return found

    def _on_completion(self, done: Completion) -> None:
        if done.status != SUCCESS:
            if done.status != FLUSHED or self._error is None:
                self._fail(done.text)
            return
        if done.wr_id & _SEND:
            self._confirmed = done.wr_id ^ _SEND  # and so are those before it
            self._hand_back()  # there may have been no slot for it
            return
        slot = done.wr_id
        granted, kind = _HEAD.unpack_from(self._ring, slot * _MESSAGE_BYTES)
        try:
            self._credits.granted(granted)
        except RemoteProtocolError as error:
            self._fail(str(error))
            return
        if kind == _DATA:
            self._arrived.append((slot, _HEAD.size, done.size_bytes))
        elif kind == _CREDITS:
            self._queue_pair.post_recv(self._receives[slot])
        else:
            self._ended = True

    def _look_at_control(self) -> None:
        try:
            said = self._control.recv(1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            said = b""
        if said == READY:
            self._peer_is_ready = True
            self._hand_back()
        else:
            # What it sent before it ended has arrived by now, or never will.
            self._drain()
            self._ended = self._peer_is_gone = True
            self._epoll.unregister(self._control.fileno())

    def _fail(self, text: str) -> None:
        if self._error is None:
            self._error = ConnectionResetError(errno.ECONNRESET, text)

    def _notify(self) -> None:
        """Keep the descriptor readable for as long as somebody has something to do."""
        wanted = bool(self._arrived) or self._ended or self._error is not None or (self._wants_room and self._has_room)
        if wanted and not self._noticed:
            self._notice.set()
        elif self._noticed and not wanted:
            self._notice.clear()
        self._noticed = wanted
