"""Unix sockets between processes of one host.

Decides how addresses become sockets and who may connect; leaves frames and the end of links to `stream`. `shm` listens
and dials through it, too.

A name in the abstract namespace leaves nothing behind however its process ends, so it is what a listener picks by
itself where the kernel has it (Linux). A path is a file of mode 0600, removed at close; the file of a listener that
died is replaced. The kernel tells the user of the peer, and a peer of another user is refused before a byte of it is
read; the secret is proved on top, because on one host many jobs run as one user.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from monarch.errors import AuthenticationError, NotViable
from monarch.transports.base import Link, Memory, Viability
from monarch.transports.listener import StreamListener
from monarch.transports.stream import StreamLink, authenticate, severed
from monarch.transports.url import Url, parse

_HAS_ABSTRACT: Final = sys.platform == "linux"
_PATH_BYTES: Final = 107 if sys.platform == "linux" else 103
_BACKLOG: Final = 1024
_UCRED: Final = struct.Struct("3i")
_PID: Final = struct.Struct("i")
_BUFFER_BYTES: Final = 1 << 20


class UnixTransport:
    """Links over unix stream sockets; `make_link(sock, peer, pid)` says what they are."""

    memory: Memory | None = None

    def __init__(self, scheme: str, make_link: Callable[[socket.socket, str, int], Link]) -> None:
        self.scheme = scheme
        self._make_link = make_link

    def viability(self) -> Viability:
        if not hasattr(socket, "AF_UNIX"):
            return Viability(False, "this platform has no unix sockets")
        return Viability(True)

    def listen(self, url: str, secret: bytes) -> StreamListener:
        viability = self.viability()
        if not viability.ok:
            raise NotViable(f"{url}: {viability.reason}")
        address = parse(url, self.scheme).local
        folder = None
        if not address.name:
            if _HAS_ABSTRACT:
                address = Url(self.scheme, name=f"@monarch-{secrets.token_hex(12)}")
            else:
                folder = tempfile.mkdtemp(prefix="monarch-")  # mode 0700
                address = Url(self.scheme, name=f"{folder}/socket")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _bind(sock, address)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        identity = None if address.is_abstract else _identity(address.name)

        def remove_file() -> None:
            # Only our own: somebody may have put another socket at the path meanwhile.
            if identity is not None and _identity(address.name) == identity:
                with suppress(FileNotFoundError):  # gone in between, with its folder
                    os.unlink(address.name)
            if folder is not None:
                os.rmdir(folder)

        public = parse(url, self.scheme)
        shown = str(address if public.bind is None else Url(self.scheme, name=public.name))

        def adopt(newcomer: socket.socket, heir: bytes) -> Link:
            pid = _PID.unpack(heir)[0] if heir else _peer_pid(newcomer)
            return self._link(newcomer, f"process {pid or 'unknown'} at {shown}", pid)

        return StreamListener(
            sock,
            secret,
            shown,
            adopt,
            is_welcome=_is_same_user,
            on_close=remove_file,
            connections=lambda: [socket.socketpair()],
            heir_bytes=_PID.size,
        )

    def inherit(self, fds: Sequence[int], url: str, timeout_s: float) -> Link:
        (fd,) = fds
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fd)
        try:
            sock.send(_PID.pack(os.getpid()))  # the kernel knows the other end as the process that made both
            sock.setblocking(False)
            return self._link(sock, url, _peer_pid(sock))
        except OSError as error:
            sock.close()
            raise severed(url, error) from error

    def dial(self, url: str, secret: bytes, timeout_s: float) -> Link:
        deadline_s = time.monotonic() + timeout_s
        address = parse(url, self.scheme)
        if not address.name:
            raise ValueError(f"{url!r}: the name to dial is missing")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect(sock, address, deadline_s)
            if not _is_same_user(sock):
                raise AuthenticationError(f"{url}: a process of another user listens there")
            authenticate(sock, secret, url, deadline_s)
            return self._link(sock, url, _peer_pid(sock))
        except BaseException:
            sock.close()
            raise

    def _link(self, sock: socket.socket, peer: str, pid: int) -> Link:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        return self._make_link(sock, peer, pid)


def _sockaddr(address: Url) -> str:
    name = address.name
    if len(os.fsencode(name)) > _PATH_BYTES:
        raise OSError(
            errno.ENAMETOOLONG,
            f"a unix socket's path has at most {_PATH_BYTES} bytes, this has {len(os.fsencode(name))}",
            name,
        )
    if not address.is_abstract:
        return name
    if not _HAS_ABSTRACT:
        raise NotViable(f"{address}: names in the abstract namespace exist on Linux only; use ipc:///path")
    return "\0" + name[1:]


def _bind(sock: socket.socket, address: Url) -> None:
    sockaddr = _sockaddr(address)
    try:
        try:
            sock.bind(sockaddr)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or address.is_abstract or not _is_stale(address.name):
                raise
            os.unlink(address.name)
            sock.bind(sockaddr)
        if not address.is_abstract:
            os.chmod(address.name, 0o600)  # in time, whatever the umask: nobody can connect before `listen`
    except OSError as error:
        raise OSError(error.errno, f"cannot listen at {address}: {error.strerror or error}") from error


def _is_stale(path: str) -> bool:
    """A socket that nobody listens at: its listener died."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _connect(sock: socket.socket, address: Url, deadline_s: float) -> None:
    sockaddr = _sockaddr(address)
    pause_s = 0.001
    while True:
        sock.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        try:
            return sock.connect(sockaddr)
        except BlockingIOError:
            # The queue of the listener is full, and the kernel offers no way to wait for room in it.
            if time.monotonic() + pause_s >= deadline_s:
                raise TimeoutError(f"{address} did not accept in time: its queue is full") from None
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {address}") from error
        except TimeoutError as error:
            raise TimeoutError(f"{address} did not accept in time") from error
        except OSError as error:
            raise severed(str(address), error) from error


def credentials(sock: socket.socket) -> tuple[int, int] | None:
    """Process and user of the peer as of its connect or listen, or None where the kernel does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def _is_same_user(sock: socket.socket) -> bool:
    found = credentials(sock)
    return found is None or found[1] == os.geteuid()


def _peer_pid(sock: socket.socket) -> int:
    """0 where the kernel does not tell."""
    return (credentials(sock) or (0, 0))[0]


TRANSPORT: Final = UnixTransport("ipc", lambda sock, peer, pid: StreamLink(sock, peer))
