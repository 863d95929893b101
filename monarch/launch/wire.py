"""Small messages with descriptors between a launcher and its template, and what both say about errors of the system."""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import resource
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from attrs import define, field

Message = dict[str, Any]

_HEADER: Final = struct.Struct("!IB")  # bytes of JSON that follow, descriptors that came along
MAX_FDS: Final = 253  # SCM_MAX_FD, unix(7)


class Lost(OSError):
    """Descriptors that came with a message could not be taken in: this process may not open so many."""


@define(eq=False)
class Wire:
    """JSON messages with descriptors over one end of a stream socket pair. Nothing here blocks.

    The descriptors given to `send` are owned, and closed when they are on their way. A sender must call `flush` when
    the socket has room again while `pending` is true.
    """

    fd: int  # not a socket object: that would warn at interpreter exit, where it is right to leave it open
    closed: bool = False  # nothing more will arrive
    broken: bool = False  # nothing more can be sent
    _queued: deque[tuple[memoryview, list[int]]] = field(factory=deque)
    _arrived: bytearray = field(factory=bytearray)
    _fds: deque[list[int]] = field(factory=deque)
    _closer: weakref.finalize[..., Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        os.set_blocking(self.fd, False)
        self._closer = weakref.finalize(self, os.close, self.fd)
        self._closer.atexit = False

    def fileno(self) -> int:
        return self.fd

    @contextlib.contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=self.fd)
        try:
            yield sock
        finally:
            sock.detach()

    @property
    def pending(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._queued)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue one message; `flush` sends it."""
        body = json.dumps(message).encode()
        self._queued.append((memoryview(_HEADER.pack(len(body), len(fds)) + body), list(fds)))

    def flush(self) -> None:
        """Send what the socket takes."""
        while self._queued and not self.broken:
            data, fds = self._queued[0]
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                with self._socket() as sock:
                    sent = sock.sendmsg([data], control)
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno == errno.ETOOMANYREFS:  # too many descriptors are under way: the peer has to take some first
                    return
                self.broken = True
                self._drop()
                return
            close_all(fds)
            self._queued[0] = (data[sent:], [])
            if sent == len(data):
                self._queued.popleft()

    def receive(self) -> list[tuple[Message, list[int] | Lost]]:
        """All messages that have arrived, with their descriptors, which the caller owns. Sets `closed` at the end."""
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        while not self.closed:
            try:
                with self._socket() as sock:
                    data, control, got, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(4 * MAX_FDS), flags)
            except BlockingIOError:
                break
            except OSError:
                data, control, got = b"", [], 0
            fds = array.array("i")
            for _, _, part in control:
                fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
            if fds or got & socket.MSG_CTRUNC:
                self._fds.append(list(fds))
            self._arrived += data
            self.closed = not data
        messages: list[tuple[Message, list[int] | Lost]] = []
        while len(self._arrived) >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._arrived)
            end = _HEADER.size + size
            if len(self._arrived) < end:
                break
            message = json.loads(self._arrived[_HEADER.size : end])
            del self._arrived[:end]
            fds_or_lost: list[int] | Lost = self._fds.popleft() if count else []
            if isinstance(fds_or_lost, list) and len(fds_or_lost) != count:
                close_all(fds_or_lost)
                fds_or_lost = Lost(errno.EMFILE, os.strerror(errno.EMFILE))
            messages.append((message, fds_or_lost))
        return messages

    def close(self) -> None:
        """Close the socket and what was never sent."""
        self.closed = self.broken = True
        self._closer()
        self._drop()
        for fds in self._fds:
            close_all(fds)
        self._fds.clear()

    def hang_up(self) -> None:
        """End both directions, for the peer and for every copy of this socket, and keep it open."""
        if not self.closed:
            with contextlib.suppress(OSError), self._socket() as sock:
                sock.shutdown(socket.SHUT_RDWR)

    def _drop(self) -> None:
        for _, fds in self._queued:
            close_all(fds)
        self._queued.clear()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors, whatever state they are in."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def explain(error: OSError, doing: str) -> str:
    """`error` in words, with the limit that was met where it is one."""
    limits = {
        errno.EMFILE: ("RLIMIT_NOFILE", resource.RLIMIT_NOFILE, "the limit of open files, `ulimit -n`"),
        errno.EAGAIN: ("RLIMIT_NPROC", resource.RLIMIT_NPROC, "or the pids limit of the control group"),
    }
    text = f"{doing}: {error.strerror or error}"
    if error.errno in limits:
        name, number, hint = limits[error.errno]
        text += f" ({name} is {resource.getrlimit(number)[0]}, {hint})"
    if error.errno == errno.ENOENT:
        text += " (or the interpreter that its first line names)" if error.filename else ""
    return text


def memory_file(*parts: bytes) -> int:
    """A descriptor of an unnamed file in memory that holds `parts`, positioned at its start. The caller closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("monarch")
    else:
        import tempfile

        with tempfile.TemporaryFile() as f:
            fd = os.dup(f.fileno())
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd
