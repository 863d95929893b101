"""Shared memory between processes of one host.

Decides which parts of a frame travel in it, and how they are described; leaves the memory to `segments`, and
connecting, small parts and the end of links to `ipc`.

A link is a unix socket with a `ring` beside it for small frames. Everything goes there but the parts of
`base.BIG_BYTES` and more. Such a part lies in a slot of the sender's pool, from the start when its memory was asked
of the pool, else after one copy, and the frame has its description: (segment, mark, offset, how it is lent). The
descriptor of a segment travels ahead of the first part in it, in the same stream (SCM_RIGHTS), so that what was sent
can still be read when the sender has died. A part that was put there for a single receiver is lent to it for good: it
may write there, and send it back in place of a copy, until it forks (`mappings`). Of one for several, each makes a
copy.

A process that has all its descriptors in use loses those that arrive. It opens the segment by the number that its owner
has for it, with a descriptor that was kept for that, and reads a copy.

Where the pool has no room, a part goes through the socket, which slows the sender down to the pace of the receiver.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from struct import Struct
from typing import Any, Final

from monarch.errors import RemoteProtocolError
from monarch.transports.base import Buffer, Missing, Viability
from monarch.transports.framing import DESCRIPTION_BYTES, FrameDecoder, encode_joined
from monarch.transports.ipc import UnixTransport
from monarch.transports.mappings import Mapping, forking
from monarch.transports.memory import Returned, copied
from monarch.transports.pool import Pool
from monarch.transports.ring_link import RingLink
from monarch.transports.segments import TakenBack, Unmapped, attach, borrow, can_share
from monarch.transports.stream import StreamLink, severed

_DESCRIPTION: Final = Struct("<IIQII")  # segment, mark, offset, kind of loan, descriptor of the owner
_FOR_GOOD, _TO_COPY, _RETURNED = range(3)
_MOST_FDS: Final = 253  # in one call, as many as the kernel takes; a pool has fewer segments
_FD: Final = array.array("i").itemsize
_FD_SPACE: Final = socket.CMSG_SPACE(_MOST_FDS * _FD)
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED: Final = int(socket.MSG_CTRUNC)  # `&` with the enum takes 2 us, for each bell
_LIMIT_BYTES: Final = 8 << 30
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)

assert _DESCRIPTION.size == DESCRIPTION_BYTES


class FdSocket(socket.socket):
    """A unix socket that takes descriptors along: `departing` go with the next bytes, `arrived` came with some."""

    def __init__(self, fd: int) -> None:
        super().__init__(fileno=fd)
        self.departing: list[int] = []
        """Borrowed."""
        self.arrived: deque[int] = deque()
        """Owned. Those of the first segments; from the first that was lost on, none."""
        self.peer_is_compiled = False
        self._lost_some = False

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
        data, ancillary, came, _ = self.recvmsg(size, _FD_SPACE, _CLOEXEC)
        if ancillary or came & _TRUNCATED:
            self._keep(ancillary, came)
        return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        got, ancillary, came, _ = self.recvmsg_into([buffer], _FD_SPACE, _CLOEXEC)
        if ancillary or came & _TRUNCATED:
            self._keep(ancillary, came)
        return got

    def _keep(self, ancillary: list[tuple[int, int, bytes]], came: int) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i", data[: len(data) - len(data) % _FD])
                if self._lost_some:
                    for fd in fds:
                        os.close(fd)
                else:
                    self.arrived.extend(fds)
        self._lost_some = self._lost_some or bool(came & _TRUNCATED)

    def close(self) -> None:
        super().close()
        self.departing.clear()
        while self.arrived:
            os.close(self.arrived.popleft())


class _Process:
    """The process at the other end of a link: a `segments.Holder`."""

    def __init__(self, sock: FdSocket, pid: int) -> None:
        self._sock = sock
        self._pid = pid
        self._born = _birth(self._pid)

    def open(self, fd: int) -> int:
        """A file that it has open, by the number that it has for it.

        Raises:
            OSError: it is gone, or no descriptor is free here.
        """
        return os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)

    @property
    def is_known(self) -> bool:
        """False for one whose end we could not see: nothing is lent to it."""
        return self._born is not None

    @property
    def is_gone(self) -> bool:
        # A link that ended is where to look further: what a living process holds, it will give back.
        return self._sock.fileno() < 0 and _birth(self._pid) != self._born

    @property
    def is_over(self) -> bool:
        return self._sock.peer_is_compiled and self._sock.fileno() < 0


def _birth(pid: int) -> bytes | None:
    """When a process began, in ticks since boot; None when there is no such process, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19]


class _Spare:
    """A descriptor to live on when all are used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = self._take()

    def _take(self) -> int | None:
        with suppress(OSError):
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return None

    @contextmanager
    def freed(self) -> Iterator[None]:
        """For the block, this process has a descriptor to spare, unless another thread is quicker."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            try:
                yield
            finally:
                self._fd = self._take()


class _Sharing:
    """What one link knows of shared memory: of ours, what it has lent; of the peer's, how to see it."""

    def __init__(self, sock: FdSocket, peer: str, pid: int, pool: Pool, spare: _Spare) -> None:
        self._sock, self._peer, self._pool, self._spare = sock, peer, pool, spare
        self._process = _Process(sock, pid)
        self._announced: set[int] = set()  # numbers of our segments that the peer has, or will have
        self._segments: dict[int, Mapping | Unmapped] = {}  # the peer's

    def lend(self, part: Buffer) -> bytes | None:
        """The description of a part for the peer, or None: it goes through the socket."""
        if not self._process.is_known:
            return None
        if (theirs := self._returned(part)) is not None:
            return theirs
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
        return _DESCRIPTION.pack(segment.number, mark, slot.offset, kind, segment.fd)

    def _returned(self, part: Buffer) -> bytes | None:
        """The description of a part that the peer has lent, over this link, and can have back."""
        returned = part.obj if type(part) is memoryview else None
        if type(returned) is Returned:
            hold = returned.loan.hold
            with forking:
                for number, segment in self._segments.items():
                    if segment is hold.mapping:  # which has none any more where a fork has made it private
                        hold.is_passed_on = True
                        return _DESCRIPTION.pack(number, hold.mark, 0, _RETURNED, 0)
        return None

    def borrowed(self, description: bytes, size_bytes: int) -> Buffer:
        """The part that a description stands for.

        Raises:
            RemoteProtocolError: there is no such memory.
            LinkSevered: the peer has given this link up.
        """
        number, mark, offset, kind, fd = _DESCRIPTION.unpack(description)
        segment = self._segments.get(number)
        try:
            if kind == _RETURNED:
                return self._pool.returned(number, mark, size_bytes, self._process)
            if segment is None:
                segment = self._attach(fd)
                if segment is None:
                    return self._copy_of(fd, offset, size_bytes, mark)
                self._segments[number] = segment
            if isinstance(segment, Unmapped):
                return segment.read(offset, size_bytes, mark)
            memory = borrow(segment, offset, size_bytes, mark)
            return memory if kind == _FOR_GOOD else copied(memory)
        except MemoryError:
            return Missing.of(size_bytes)
        except TakenBack:
            raise severed(self._peer, "it has been given up there, with what was on its way") from None
        except (OSError, ValueError) as error:
            raise RemoteProtocolError(f"shared memory of {self._peer} cannot be used: {error}") from error

    def _attach(self, fd: int) -> Mapping | Unmapped | None:
        """The segment that its owner knows by `fd`; None when no descriptor is free for it here."""
        if self._sock.arrived:
            return attach(self._sock.arrived.popleft())
        try:
            return attach(self._process.open(fd))
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
            return None

    def _copy_of(self, fd: int, offset: int, size_bytes: int, mark: int) -> Buffer:
        try:
            with self._spare.freed():
                return Unmapped(self._process.open(fd)).read(offset, size_bytes, mark)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
            return Missing.of(size_bytes, "no descriptor is free (see `ulimit -n`)")


class ShmTransport:
    """Unix sockets with rings for small frames, pooled shared memory for large parts."""

    scheme = "shm"

    def __init__(self) -> None:
        self.memory = Pool(_LIMIT_BYTES)
        self._spare: _Spare | None = None  # with the first link
        self._sockets = UnixTransport(self.scheme, self._link)
        self.listen = self._sockets.listen
        self.dial = self._sockets.dial
        self.inherit = self._sockets.inherit
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_forked_child)

    def viability(self) -> Viability:
        reason = can_share()
        return Viability(False, reason) if reason else self._sockets.viability()

    def _link(self, sock: socket.socket, peer: str, pid: int) -> RingLink:
        carrier = FdSocket(sock.detach())
        self._spare = self._spare or _Spare()
        sharing = _Sharing(carrier, peer, pid, self.memory, self._spare)
        encode = partial(encode_joined, describe=sharing.lend)
        stream = StreamLink(carrier, peer, FrameDecoder(elsewhere=sharing.borrowed), encode)
        return RingLink(stream, carrier, sharing.lend, sharing.borrowed)

    def _in_forked_child(self) -> None:
        limit = self.memory.limit
        self.memory = Pool(_LIMIT_BYTES)
        self.memory.limit = limit


TRANSPORT: Final = ShmTransport()
