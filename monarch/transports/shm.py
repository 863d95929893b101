"""Shared memory between processes of one host. Decides which parts of a frame travel in it, and how they are described;
leaves the memory to `segments`, and connecting, small parts and the end of links to `ipc`.

A link is a unix socket, over which everything goes but the parts of `SMALLEST_BYTES` and more. Such a part lies in a
slot of the sender's pool, from the start when its memory was asked of the pool, else after one copy, and the frame has
its description: (segment, mark, offset, how it is lent). The descriptor of a segment travels ahead of the first part in
it, in the same stream (SCM_RIGHTS), so that what was sent can still be read when the sender has died. A part that was
put there for a single receiver is lent to it for good: it may write there. Of one for several, each makes a copy.

Where the pool has no room, a part goes through the socket, which slows the sender down to the pace of the receiver.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from functools import partial
from struct import Struct
from typing import Any, Final

from monarch.errors import RemoteProtocolError
from monarch.transports.base import Buffer, Missing, Viability
from monarch.transports.framing import DESCRIPTION_BYTES, FrameDecoder, encode_joined
from monarch.transports.ipc import UnixTransport, credentials
from monarch.transports.memory import allocate, copy
from monarch.transports.pool import Pool
from monarch.transports.segments import Mapping, Unmapped, attach, borrow, can_share
from monarch.transports.stream import StreamLink

_DESCRIPTION: Final = Struct("<IIQII")  # segment, mark, offset, kind of loan, 0
_FOR_GOOD, _TO_COPY = range(2)
_MOST_FDS: Final = 253  # in one call, as many as the kernel takes; a pool has fewer segments
_FD: Final = array.array("i").itemsize
_FD_SPACE: Final = socket.CMSG_SPACE(_MOST_FDS * _FD)
_LIMIT_BYTES: Final = 8 << 30

assert _DESCRIPTION.size == DESCRIPTION_BYTES


class FdSocket(socket.socket):
    """A unix socket that takes descriptors along: `departing` go with the next bytes, `arrived` came with some."""

    def __init__(self, fd: int) -> None:
        super().__init__(fileno=fd)
        self.departing: list[int] = []
        """Borrowed."""
        self.arrived: deque[int] = deque()
        """Owned."""

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg((data,)) if self.departing else super().send(data)

    def sendmsg(self, buffers: Any, *ancillary: Any) -> int:
        if not self.departing:
            return super().sendmsg(buffers)
        fds = self.departing[:_MOST_FDS]
        sent = super().sendmsg(buffers, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        if sent:
            del self.departing[: len(fds)]
        return sent

    def recv(self, size: int, flags: int = 0) -> bytes:
        data, ancillary, _, _ = self.recvmsg(size, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        if ancillary:
            self._keep(ancillary)
        return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        got, ancillary, _, _ = self.recvmsg_into([buffer], _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        if ancillary:
            self._keep(ancillary)
        return got

    def _keep(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.arrived.extend(array.array("i", data[: len(data) - len(data) % _FD]))

    def close(self) -> None:
        super().close()
        self.departing.clear()
        while self.arrived:
            os.close(self.arrived.popleft())


class _Process:
    """The process at the other end of a link: a `segments.Holder`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid, _ = credentials(sock) or (0, 0)
        self._born = _birth(self._pid)

    @property
    def is_known(self) -> bool:
        """False for one whose end we could not see: nothing is lent to it."""
        return self._born is not None

    @property
    def is_gone(self) -> bool:
        # A link that ended is where to look further: what a living process holds, it will give back.
        return self._sock.fileno() < 0 and _birth(self._pid) != self._born


def _birth(pid: int) -> bytes | None:
    """When a process began, in ticks since boot; None when there is no such process, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19]


class _Sharing:
    """What one link knows of shared memory: of ours, what it has lent; of the peer's, how to see it."""

    def __init__(self, sock: FdSocket, pool: Pool) -> None:
        self._sock, self._pool = sock, pool
        self._process = _Process(sock)
        self._announced: set[int] = set()  # numbers of our segments that the peer has, or will have
        self._segments: dict[int, Mapping | Unmapped] = {}  # the peer's

    def lend(self, part: Buffer) -> bytes | None:
        """The description of a part for the peer, or None: it goes through the socket."""
        if not self._process.is_known:
            return None
        slot = self._pool.slot_of(part)
        if slot is None:
            copied = self._pool.copied(part)  # its lease ends here, and the loan begins before
            slot = self._pool.slot_of(copied) if copied is not None else None
        if slot is None or (mark := slot.lend(self._process)) is None:
            return None
        segment = slot.segment
        if segment.number not in self._announced:
            self._announced.add(segment.number)
            self._sock.departing.append(segment.fd)
        kind = _FOR_GOOD if slot.receivers == 1 else _TO_COPY
        return _DESCRIPTION.pack(segment.number, mark, slot.offset, kind, 0)

    def borrowed(self, description: bytes, size_bytes: int) -> Buffer:
        """The part that a description stands for.

        Raises:
            RemoteProtocolError: there is no such memory.
        """
        number, mark, offset, kind, _ = _DESCRIPTION.unpack(description)
        segment = self._segments.get(number)
        try:
            if segment is None:
                segment = self._segments[number] = self._attach()
            if isinstance(segment, Unmapped):
                return segment.read(offset, size_bytes, mark)
            memory = borrow(segment, offset, size_bytes, mark)
            return memory if kind == _FOR_GOOD else _copied(memory)
        except MemoryError:
            return Missing.of(size_bytes)
        except (OSError, ValueError, IndexError) as error:
            raise RemoteProtocolError(f"shared memory of the peer cannot be read: {error}") from error

    def _attach(self) -> Mapping | Unmapped:
        if not self._sock.arrived:
            raise IndexError("its descriptor has not arrived; this process may have too many open files (`ulimit -n`)")
        return attach(self._sock.arrived.popleft())


def _copied(memory: memoryview) -> memoryview:
    own = allocate(len(memory))
    copy(own, memory)
    return own


class ShmTransport:
    """Unix sockets for small frames, pooled shared memory for large parts."""

    scheme = "shm"

    def __init__(self) -> None:
        self.memory = Pool(_LIMIT_BYTES)
        self._sockets = UnixTransport(self.scheme, self._link)
        self.listen = self._sockets.listen
        self.dial = self._sockets.dial
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_forked_child)

    def viability(self) -> Viability:
        reason = can_share()
        return Viability(False, reason) if reason else self._sockets.viability()

    def _link(self, sock: socket.socket, peer: str) -> StreamLink:
        carrier = FdSocket(sock.detach())
        sharing = _Sharing(carrier, self.memory)
        encode = partial(encode_joined, describe=sharing.lend)
        return StreamLink(carrier, peer, FrameDecoder(elsewhere=sharing.borrowed), encode)

    def _in_forked_child(self) -> None:
        self.memory = Pool(self.memory.limit_bytes)


TRANSPORT: Final = ShmTransport()
