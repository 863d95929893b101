"""TCP between hosts, through nng. Decides how two processes get a link; leaves what travels over it to `tcp_link`, the
proof of the secret to `auth`, and accepting to `stream`. The one module that knows nng.

A dialer opens two connections to the one port of the listener, and proves the secret on both. After the proof each
says which it is and to which link it belongs, and the second one is given to nng: both ends adopt the connected socket
into a `Pair0` (nng's `socket://` transport). So nothing of nng ever listens or dials: a stranger does not reach it, one
port is all that a firewall has to let through, and nng cannot redial behind our back, so that a pipe that is gone is
the death of the link. `Pair0` because the polyamorous `Pair1` drops messages for a slow peer. A link is handed out
when both ends of its pair are up: until then nng would not tell that the peer is gone.

nng starts its threads with the first link. A process that has used it and forks leaves a child in which any call of nng
aborts or hangs: there, `_disown` makes what is left of it inert. pynng ends nng in an exit handler of its own, which it
registers when it is imported, and which would run before the handlers of those who still have links to close; so it is
imported before anybody can have a link, by `listen`, and ended by `_end`, once.
"""

from __future__ import annotations

import atexit
import errno
import importlib.util
import os
import secrets
import select
import selectors
import socket
import sys
import threading
import time
import weakref
from struct import Struct
from typing import Any, Final

from attrs import define

from monarch.errors import LinkSevered, NotViable, TransportError
from monarch.transports.base import Link, Memory, Viability
from monarch.transports.stream import StreamListener, authenticate, recv_some, send_all, severed
from monarch.transports.tcp_link import TcpLink, Wake
from monarch.transports.url import Url, parse

_READY: Final = b"\x06"  # the acceptor's end of the link is complete
_GREETING: Final = Struct("!B16s")  # which connection, of which link
_PLAIN, _NNG = 1, 2
_PAIRING_S: Final = 10.0
_MAX_PAIRING: Final = 128
_USER_TIMEOUT_MS: Final = 20_000

_INSTALLED: Final = importlib.util.find_spec("pynng") is not None  # without importing it

_start_lock: Final = threading.Lock()
_pynng: Any = None


def _load() -> Any:
    """pynng, imported and set up by the first caller."""
    global _pynng
    if _pynng is None:
        with _start_lock:
            if _pynng is None:
                import pynng

                lib = pynng.lib
                # Before the first socket: 7 threads (counted with 2 CPUs), not one set per CPU, at the same latency.
                for name, value in (
                    ("NNG_INIT_NUM_TASK_THREADS", 2),
                    ("NNG_INIT_MAX_TASK_THREADS", 2),
                    ("NNG_INIT_NUM_EXPIRE_THREADS", 1),
                    ("NNG_INIT_MAX_EXPIRE_THREADS", 1),
                    ("NNG_INIT_NUM_POLLER_THREADS", 1),
                    ("NNG_INIT_MAX_POLLER_THREADS", 1),
                    ("NNG_INIT_NUM_RESOLVER_THREADS", 1),
                ):
                    if hasattr(lib, name):
                        lib.nng_init_set_parameter(getattr(lib, name), value)
                atexit.unregister(pynng.nng._pynng_atexit)
                atexit.register(_end)
                os.register_at_fork(after_in_child=_disown)
                _pynng = pynng
    return _pynng


_used_by: int | None = None  # the process that has started nng
_pairs: Final[weakref.WeakSet[_Pair]] = weakref.WeakSet()


def _end() -> None:
    """End nng's threads, so that none of them calls into an interpreter that is being taken down."""
    if _used_by == os.getpid():
        for pair in list(_pairs):
            pair.close()
        _pynng.lib.nng_fini()


def _disown() -> None:
    """In a forked child: the sockets of the parent must not be closed by this process, not even when collected."""
    for pair in list(_pairs):
        pair._socket.close = _nothing
    _pairs.clear()


def _nothing() -> None:
    pass


class _Pair:
    """A `Pair0` over a connected socket, which it owns. Calls never block, and errors are return values: raising
    TryAgain for every wake-up would cost more than the call."""

    def __init__(self, sock: socket.socket) -> None:
        global _used_by
        pynng = _load()
        if _used_by not in (None, os.getpid()):
            sock.close()
            raise NotViable("nng cannot be used here: this process was forked from one that uses it")
        _used_by = os.getpid()
        self._lib, self._ffi = pynng.lib, pynng.ffi
        self._closed = False
        self.wake = Wake()
        self.is_up = False
        """Both ends have agreed to talk."""
        self.is_gone = False
        """The connection has ended; what arrived before can still be received."""
        fd = sock.detach()
        try:
            self._socket = pynng.Pair0(recv_max_size=0)
        except BaseException:
            os.close(fd)
            raise
        _pairs.add(self)
        self._socket.add_post_pipe_connect_cb(self._on_up)
        self._socket.add_post_pipe_remove_cb(self._on_gone)
        self._id = self._socket.socket
        listener = self._ffi.new("nng_listener *")
        code = self._lib.nng_listener_create(listener, self._id, b"socket://")
        if code == 0:
            code = self._lib.nng_listener_start(listener[0], 0)
        if code == 0:
            code = self._lib.nng_listener_set_int(listener[0], b"socket:fd", fd)
        if code != 0:
            os.close(fd)
            self.close()
            raise NotViable(f"nng cannot adopt a connected socket: {self.describe(code)}")
        self.recv_fd: int = self._socket.recv_fd
        self.send_fd: int = self._socket.send_fd
        self._data, self._size = self._ffi.new("char **"), self._ffi.new("size_t *")
        self._recv_flags = self._lib.NNG_FLAG_ALLOC | self._lib.NNG_FLAG_NONBLOCK
        self._send_flags = self._lib.NNG_FLAG_NONBLOCK
        self._again = self._lib.NNG_EAGAIN

    def _on_up(self, _: object) -> None:
        """On a thread of nng."""
        self.is_up = True
        self.wake.set()

    def _on_gone(self, _: object) -> None:
        """On a thread of nng."""
        self.is_gone = True
        self.wake.set()

    def send(self, message: bytes) -> bool:
        """False when there is no room now. Raises LinkSevered."""
        code = self._lib.nng_send(self._id, message, len(message), self._send_flags)
        if code:
            if code != self._again:
                raise LinkSevered(self.describe(code))
            return False
        return True

    def recv(self) -> bytes | None:
        """The next message, None when there is none now. Raises LinkSevered."""
        code = self._lib.nng_recv(self._id, self._data, self._size, self._recv_flags)
        if code:
            if code != self._again:
                raise LinkSevered(self.describe(code))
            return None
        data, size = self._data[0], self._size[0]
        message: bytes = self._ffi.unpack(data, size)
        self._lib.nng_free(data, size)
        return message

    def describe(self, code: int) -> str:
        text: bytes = self._ffi.string(self._lib.nng_strerror(code))
        return text.decode()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._socket.close()
            self._socket.close = _nothing  # it would close again when it is collected, maybe in a fork
            _pairs.discard(self)
            self.wake.close()


@define(eq=False)
class _Pairing:
    """What a listener has of one link that is not complete."""

    deadline_s: float
    plain: socket.socket | None = None
    other: socket.socket | None = None
    pair: _Pair | None = None

    def drop(self) -> None:
        for end in (self.plain, self.other, self.pair):
            if end is not None:
                end.close()


class _Adopter:
    """Brings the two connections of each newcomer together. Bounded like the handshakes before it."""

    def __init__(self, url: str) -> None:
        self.listener: StreamListener | None = None
        self._url = url
        self._pairings: dict[bytes, _Pairing] = {}

    def adopt(self, sock: socket.socket, greeting: bytes) -> None:
        kind, link_id = _GREETING.unpack(greeting)
        now_s = time.monotonic()
        for key, old in list(self._pairings.items()):
            if old.deadline_s <= now_s or len(self._pairings) > _MAX_PAIRING:
                self._drop(key)
        pairing = self._pairings.setdefault(link_id, _Pairing(now_s + _PAIRING_S))
        if kind == _PLAIN and pairing.plain is None:
            pairing.plain = sock
        elif kind == _NNG and pairing.other is None and pairing.pair is None:
            pairing.other = sock
        else:
            sock.close()
        if pairing.plain is not None and pairing.other is not None:
            other, pairing.other = pairing.other, None
            try:
                pairing.pair = _Pair(other)
            except TransportError:
                return self._drop(link_id)
            assert self.listener is not None
            self.listener.selector.register(
                pairing.pair.wake.fd, selectors.EVENT_READ, lambda: self._finish(link_id, pairing)
            )

    def _finish(self, link_id: bytes, pairing: _Pairing) -> Link | None:
        """The pair is up, so nothing but the link is to be waited for any more."""
        assert pairing.plain is not None and pairing.pair is not None and self.listener is not None
        self.listener.selector.unregister(pairing.pair.wake.fd)
        del self._pairings[link_id]
        pairing.pair.wake.clear()
        try:
            host, port = pairing.plain.getpeername()[:2]
            pairing.plain.send(_READY)
        except OSError:
            pairing.drop()
            return None
        return TcpLink(pairing.plain, pairing.pair, f"{Url('tcp', host, port)} at {self._url}")

    def _drop(self, link_id: bytes) -> None:
        pairing = self._pairings.pop(link_id)
        if pairing.pair is not None and self.listener is not None:
            self.listener.selector.unregister(pairing.pair.wake.fd)
        pairing.drop()

    def close(self) -> None:
        for link_id in list(self._pairings):
            self._drop(link_id)


class TcpTransport:
    """Links over TCP, through nng."""

    scheme = "tcp"
    memory: Memory | None = None

    def viability(self) -> Viability:
        if not hasattr(select, "epoll") or sys.platform != "linux":
            return Viability(False, "it needs epoll, which only Linux has")
        if not _INSTALLED:
            return Viability(False, "the package pynng is not installed")
        return Viability(True)

    def _check(self, url: str) -> None:
        viability = self.viability()
        if not viability.ok:
            raise NotViable(f"{url}: {viability.reason}")

    def listen(self, url: str, secret: bytes) -> StreamListener:
        self._check(url)
        _load()
        address = parse(url, "tcp")
        sock = _inherited(url, address.local.fd) if address.local.fd is not None else _bound(address.local)
        port = sock.getsockname()[1]
        shown = str(Url("tcp", address.host, address.port or port))
        adopter = _Adopter(shown)

        def adopt(newcomer: socket.socket, greeting: bytes) -> None:
            _set_options(newcomer, _GREETING.unpack(greeting)[0])
            return adopter.adopt(newcomer, greeting)

        listener = StreamListener(sock, secret, shown, adopt, greeting_bytes=_GREETING.size, on_close=adopter.close)
        adopter.listener = listener
        return listener

    def dial(self, url: str, secret: bytes, timeout_s: float) -> TcpLink:
        self._check(url)
        deadline_s = time.monotonic() + timeout_s
        address = parse(url, "tcp")
        shown = str(Url("tcp", address.host, address.port))
        link_id = secrets.token_bytes(16)
        plain = _connect(address, shown, secret, _GREETING.pack(_PLAIN, link_id), deadline_s)
        pair: _Pair | None = None
        try:
            pair = _Pair(_connect(address, shown, secret, _GREETING.pack(_NNG, link_id), deadline_s))
            try:
                ready = recv_some(plain, 1, deadline_s)
            except TimeoutError as error:
                raise TimeoutError(f"{shown} did not accept the link in time") from error
            except OSError as error:
                raise severed(shown, error) from error
            if ready != _READY:
                raise LinkSevered(f"{shown} closed the connection before the link was ready")
            _wait_until_up(pair, shown, deadline_s)
            return TcpLink(plain, pair, shown)
        except BaseException:
            plain.close()
            if pair is not None:
                pair.close()
            raise


def _bound(local: Url) -> socket.socket:
    family = socket.AF_INET6 if ":" in local.host else socket.AF_INET
    try:
        return socket.create_server((local.host, local.port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen at {local}: {error.strerror or error}") from error


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


def _wait_until_up(pair: _Pair, shown: str, deadline_s: float) -> None:
    poll = select.poll()
    poll.register(pair.wake.fd, select.POLLIN)
    while not pair.is_up:
        if pair.is_gone:
            raise LinkSevered(f"{shown} closed the connection before the link was ready")
        if not poll.poll(max(deadline_s - time.monotonic(), 0) * 1e3):
            raise TimeoutError(f"{shown} did not accept the link in time")
        pair.wake.clear()


def _connect(address: Url, shown: str, secret: bytes, greeting: bytes, deadline_s: float) -> socket.socket:
    """One authenticated connection that has said which it is."""
    try:
        sock = socket.create_connection((address.host, address.port), max(deadline_s - time.monotonic(), 1e-3))
    except ConnectionRefusedError as error:
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {shown}") from error
    except TimeoutError as error:
        raise TimeoutError(f"{shown} did not answer in time") from error
    except socket.gaierror as error:
        raise LinkSevered(f"{shown}: the name {address.host!r} does not resolve: {error.strerror}") from error
    except OSError as error:
        raise severed(shown, error) from error
    try:
        _set_options(sock, _GREETING.unpack(greeting)[0])
        authenticate(sock, secret, shown, deadline_s)
        send_all(sock, greeting, deadline_s)
    except TimeoutError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise severed(shown, error) from error
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _set_options(sock: socket.socket, kind: int) -> None:
    """For both connections: no delay, and a machine that vanished is noticed in seconds, idle or not. A peer that is
    busy, and takes in no large part for long, is no reason to cut it off: only nng's connection, of small frames, has a
    limit for what the other kernel does not take."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if kind == _NNG:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


TRANSPORT: Final = TcpTransport()
