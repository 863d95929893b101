"""TCP for a process that nobody can dial: it opens every connection itself, to the `proxy` of a friend.

That dials others for it, and is dialed in its place. Links are those of `tcp`, from end to end.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, Final

from attrs import evolve

from monarch.errors import AuthenticationError, NotViable, ProtocolError, TransportError
from monarch.log import get_logger
from monarch.transports import nng, pairing, proxy, tcp
from monarch.transports.base import Inherit, Memory, Viability
from monarch.transports.listener import StreamListener
from monarch.transports.nng import set_options
from monarch.transports.stream import severed
from monarch.transports.tcp_link import TcpLink
from monarch.transports.url import Url, parse
from monarch.wake import Wake

log = get_logger("monarch.tunnel")

_ASK_S: Final = 10.0
_AGAIN_S: Final = 0.5


class _Arrivals:
    """A listening socket, as far as `StreamListener` sees: those who dial our port at the proxy. A thread keeps the
    port open, and goes for each of them."""

    def __init__(self, tunnel: Tunnel, secret: bytes) -> None:
        self._tunnel, self._secret = tunnel, secret
        self._here: deque[socket.socket] = deque()
        self._wake = Wake()
        self._lock = threading.Lock()
        self._is_closed = False
        self.port = 0
        self._asking = self._ask()
        threading.Thread(target=self._run, name="monarch-tunnel", daemon=True).start()

    def _ask(self) -> socket.socket:
        """Raises: what `Transport.dial` does."""
        deadline_s = time.monotonic() + _ASK_S
        key = proxy.PORT.pack(self.port).ljust(proxy.ID_BYTES, b"\0")
        sock = self._tunnel.ask(proxy.LISTEN, key, self._secret, deadline_s)
        try:
            got = pairing.received(sock, proxy.PORT.size, self._tunnel.url, deadline_s)
        except BaseException:
            sock.close()
            raise
        (self.port,) = proxy.PORT.unpack(got)
        sock.settimeout(None)
        return sock

    def _run(self) -> None:
        while True:
            with suppress(OSError):
                while key := self._asking.recv(proxy.ID_BYTES, socket.MSG_WAITALL):
                    threading.Thread(target=self._go_for, args=(key,), name="monarch-tunnel-take", daemon=True).start()
            if self._is_closed:
                return
            log.info("tunnel.lost", proxy=self._tunnel.url)
            while not self._is_closed:
                with suppress(OSError, TransportError, ProtocolError, AuthenticationError):
                    self._asking = self._ask()
                    break
                time.sleep(_AGAIN_S)
            if self._is_closed:
                self._asking.close()

    def _go_for(self, key: bytes) -> None:
        with suppress(OSError, TransportError, ProtocolError, AuthenticationError):
            sock = self._tunnel.ask(proxy.TAKE, key, self._secret, time.monotonic() + _ASK_S)
            with self._lock:
                if self._is_closed:
                    sock.close()
                    return
                self._here.append(sock)
                self._wake.set()

    # ---- as a socket

    def fileno(self) -> int:
        return self._wake.fileno()

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def accept(self) -> tuple[socket.socket, Any]:
        with self._lock:
            if not self._here:
                self._wake.clear()
                raise BlockingIOError(errno.EAGAIN, "nobody is there")
            return self._here.popleft(), None

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            waiting = list(self._here)
            self._wake.close()
        for sock in waiting:
            sock.close()
        with suppress(OSError):
            self._asking.shutdown(socket.SHUT_RDWR)
        self._asking.close()


class Tunnel:
    """The transport of a process whose proxy is at `url`, which `tcp` serves."""

    scheme = "tcp"
    memory: Memory | None = None
    inherit: Inherit | None = None

    def __init__(self, url: str) -> None:
        address = evolve(parse(url), bind=None)
        if address.scheme != "tcp":
            raise NotViable(f"{url}: only tcp goes through another process; attach to tcp://HOST:PORT")
        self._proxy = address
        self.url = str(address)

    def viability(self) -> Viability:
        return pairing.viability()

    def ask(self, kind: int, key: bytes, secret: bytes, deadline_s: float) -> socket.socket:
        """A connection to the proxy for that purpose. Raises: what `Transport.dial` does."""
        greeting = tcp.GREETING.pack(kind, key)
        return pairing.connected(self._proxy, self.url, secret, deadline_s, prepare=_prepared, greeting=greeting)

    def listen(self, url: str, secret: bytes) -> StreamListener:
        """At a port of the proxy's host, whatever `url` says."""
        pairing.check(url, self.viability())
        nng.load()
        arrivals = _Arrivals(self, secret)
        return tcp.accepting(arrivals, secret, str(Url("tcp", self._proxy.host, arrivals.port)))

    def dial(self, url: str, secret: bytes, timeout_s: float) -> TcpLink:
        return tcp.dialing(url, secret, timeout_s, partial(self._open, secret))

    def _open(self, secret: bytes, target: tuple[str, int], timeout_s: float) -> socket.socket:
        """As `socket.create_connection`."""
        deadline_s = time.monotonic() + timeout_s
        text = f"{target[0]}:{target[1]}".encode()
        sock = self.ask(proxy.CONNECT, bytes(proxy.ID_BYTES), secret, deadline_s)
        try:
            sock.settimeout(timeout_s)
            sock.sendall(proxy.PORT.pack(len(text)) + text)
            answer = pairing.received(sock, 1, self.url, deadline_s)
            if answer != proxy.OK:
                (size,) = proxy.PORT.unpack(pairing.received(sock, proxy.PORT.size, self.url, deadline_s))
                why = pairing.received(sock, size, self.url, deadline_s).decode(errors="replace")
                if answer == proxy.REFUSED:
                    raise ConnectionRefusedError(errno.ECONNREFUSED, why)
                raise severed(f"{target[0]}:{target[1]}, through {self.url},", why)
        except BaseException:
            sock.close()
            raise
        return sock


def _prepared(sock: socket.socket) -> socket.socket:
    set_options(sock, small_frames=False)
    return sock
