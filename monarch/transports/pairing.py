"""Links over nng on their way up: what `tcp` and `tls` share.

A plain connection has proved the secret, and waits for the pair beside it; a link is handed out when both ends of the
pair are up, because until then nng would not tell that the peer is gone. Listening sockets, and connecting to them, are
here too.
"""

from __future__ import annotations

import errno
import importlib.util
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable
from typing import Final

from attrs import define, field

from monarch.errors import LinkSevered, NotViable
from monarch.log import get_logger
from monarch.transports.base import Link, Viability
from monarch.transports.listener import StreamListener
from monarch.transports.nng import Pair
from monarch.transports.stream import NO_DESCRIPTOR, authenticate, recv_some, send_all, severed
from monarch.transports.tcp_link import TcpLink
from monarch.transports.url import Url

log = get_logger("monarch.pairing")

PAIRING_S: Final = 10.0
MAX_PAIRING: Final = 128

_BACKLOG: Final = 4096  # many come at once, and who is busy lets them wait

Opener = Callable[[tuple[str, int], float], socket.socket]
"""Connects to a host and port, within seconds. Raises: OSError."""

_INSTALLED: Final = importlib.util.find_spec("pynng") is not None  # without importing it
_READY: Final = b"\x06"  # the acceptor's end of the link is complete


def viability() -> Viability:
    if not hasattr(select, "epoll") or sys.platform != "linux":
        return Viability(False, "it needs epoll, which only Linux has")
    if not _INSTALLED:
        return Viability(False, "the package pynng is not installed")
    return Viability(True)


def check(url: str, found: Viability) -> None:
    """Raises: NotViable."""
    if not found.ok:
        raise NotViable(f"{url}: {found.reason}")


# ---- the acceptor


@define(eq=False)
class Pairings:
    """Links of a listener that have all but a pair that is up. Bounded like the handshakes before it: one more pushes
    out the oldest."""

    _scheme: str
    _url: str
    listener: StreamListener | None = None
    _waiting: dict[Pair, tuple[float, socket.socket]] = field(factory=dict, init=False)

    def add(self, plain: socket.socket, pair: Pair) -> None:
        """Hand out a link when `pair` is up; it owns both, also when this raises. Raises: OSError."""
        now_s = time.monotonic()
        for old, (deadline_s, _) in list(self._waiting.items()):
            if deadline_s <= now_s or len(self._waiting) >= MAX_PAIRING:
                self._drop(old)
        assert self.listener is not None
        try:
            self.listener.selector.register(pair.wake.fileno(), selectors.EVENT_READ, lambda: self._finish(pair))
        except OSError:
            plain.close()
            pair.close()
            raise
        self._waiting[pair] = now_s + PAIRING_S, plain

    def _finish(self, pair: Pair) -> Link | None:
        """The pair is up, so nothing but the link is to be waited for any more. None: it failed, and is closed."""
        plain = self._forget(pair)
        pair.wake.clear()
        try:
            pair.shut_the_door()
            host, port = plain.getpeername()[:2]
            plain.send(_READY)
            return TcpLink(plain, pair, f"{Url(self._scheme, host, port)} at {self._url}")
        except OSError as error:
            if self.listener is not None:
                self.listener.starves(error)
            log.info("pairing.failed", address=self._url, reason=str(error))
            plain.close()
            pair.close()
            return None

    def _forget(self, pair: Pair) -> socket.socket:
        if self.listener is not None:
            self.listener.selector.unregister(pair.wake.fileno())
        return self._waiting.pop(pair)[1]

    def _drop(self, pair: Pair) -> None:
        self._forget(pair).close()
        pair.close()

    def close(self) -> None:
        for pair in list(self._waiting):
            self._drop(pair)


def listening(url: str, address: Url) -> socket.socket:
    """Raises: OSError, with the address in it."""
    local = address.local
    if local.fd is not None:
        return _inherited(url, local.fd)
    family = socket.AF_INET6 if ":" in local.host else socket.AF_INET
    try:
        return socket.create_server((local.host, local.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen at {local}: {error.strerror or error}") from error


def shown(scheme: str, address: Url, sock: socket.socket) -> str:
    """What others dial who are to reach `sock`, which listens for `address`."""
    return str(Url(scheme, address.host, address.port or sock.getsockname()[1]))


def _inherited(url: str, fd: int) -> socket.socket:
    """Raises: OSError, when descriptor `fd` is no listening TCP socket."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise OSError(error.errno, f"{url}: descriptor {fd} is no socket: {error.strerror}") from error
    if sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.detach()
        raise OSError(errno.EINVAL, f"{url}: descriptor {fd} is no listening TCP socket")
    return sock


# ---- the dialer


def connected(
    address: Url,
    at: str,
    secret: bytes,
    deadline_s: float,
    *,
    prepare: Callable[[socket.socket], socket.socket],
    greeting: bytes = b"",
    opener: Opener = socket.create_connection,
) -> socket.socket:
    """A connection that has proved the secret and sent `greeting`. `prepare` sets its options, or puts TLS around it;
    `opener` opens it.

    Raises: what `Transport.dial` does.
    """
    try:
        sock = opener((address.host, address.port), max(deadline_s - time.monotonic(), 1e-3))
    except ConnectionRefusedError as error:
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {at}") from error
    except TimeoutError as error:
        raise TimeoutError(f"{at} did not answer in time") from error
    except socket.gaierror as error:
        raise LinkSevered(f"{at}: the name {address.host!r} does not resolve: {error.strerror}") from error
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        raise LinkSevered(f"{at} cannot be reached: {error.strerror or error}") from error
    try:
        sock = prepare(sock)
        authenticate(sock, secret, at, deadline_s)
        send_all(sock, greeting, deadline_s)
    except TimeoutError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise severed(at, error) from error
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def received(plain: socket.socket, size_bytes: int, at: str, deadline_s: float, late: str = "") -> bytes:
    """What the acceptor says before the link is ready; `late` says what is wrong when that takes too long.

    Raises: TimeoutError, LinkSevered.
    """
    data = b""
    try:
        while len(data) < size_bytes:
            more = recv_some(plain, size_bytes - len(data), deadline_s)
            if not more:
                raise LinkSevered(f"{at} closed the connection before the link was ready")
            data += more
    except TimeoutError as error:
        raise TimeoutError(late or f"{at} did not accept the link in time") from error
    except OSError as error:
        raise severed(at, error) from error
    return data


def completed(plain: socket.socket, pair: Pair, at: str, deadline_s: float, late: str = "") -> TcpLink:
    """The link, once both ends are up. Raises: as `received`; OSError, when this process has no descriptor left."""
    received(plain, len(_READY), at, deadline_s, late)
    poll = select.poll()
    poll.register(pair.wake.fileno(), select.POLLIN)
    while not pair.is_up:
        if pair.is_gone:
            raise LinkSevered(f"{at} closed the connection before the link was ready")
        if not poll.poll(max(deadline_s - time.monotonic(), 0) * 1e3):
            raise TimeoutError(late or f"{at} did not accept the link in time")
        pair.wake.clear()
    pair.shut_the_door()
    return TcpLink(plain, pair, at)
