"""TCP between hosts, through nng.

Decides which connections make a link; leaves how it comes up to `pairing`, what travels over it to `tcp_link`, the
proof of the secret to `auth`, accepting to `listener`, and nng to `nng`.

A dialer opens two connections to the one port of the listener, and proves the secret on both. After the proof each
says which it is and to which link it belongs, and the second one is given to nng: both ends adopt the connected socket
into a pair. So nothing of nng ever listens or dials: a stranger does not reach it, and one port is all that a firewall
has to let through.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

from attrs import define, evolve, field

from monarch.transports import nng, pairing
from monarch.transports.base import Memory, Viability
from monarch.transports.listener import Acceptor, StreamListener
from monarch.transports.nng import Pair, set_options
from monarch.transports.proxy import Proxy
from monarch.transports.stream import severed
from monarch.transports.tcp_link import TcpLink
from monarch.transports.url import parse

GREETING: Final = Struct("!B16s")  # which connection, of which link; or what a friend asks a proxy for
_PLAIN, _NNG = 1, 2
_LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_S: Final = 1.0

Connection = tuple[socket.socket, socket.socket]
"""Both ends."""


@define(eq=False)
class _Half:
    """The first connection of a link whose second has not come yet."""

    kind: int
    sock: socket.socket
    deadline_s: float


@define(eq=False)
class _Halves:
    """Brings the two connections of each newcomer together. Bounded like the handshakes before it."""

    _pairings: pairing.Pairings
    _proxy: Proxy | None = field(default=None, init=False)  # for friends that nobody can dial
    _waiting: dict[bytes, _Half] = field(factory=dict, init=False)

    def adopt(self, sock: socket.socket, greeting: bytes) -> None:
        kind, link_id = GREETING.unpack(greeting)
        set_options(sock, small_frames=kind == _NNG)
        if kind not in (_PLAIN, _NNG):
            self._proxy = self._proxy or Proxy()
            self._proxy.serve(kind, link_id, sock)
            return
        now_s = time.monotonic()
        for key, old in list(self._waiting.items()):
            if key != link_id and (old.deadline_s <= now_s or len(self._waiting) > pairing.MAX_PAIRING):
                self._waiting.pop(key).sock.close()
        half = self._waiting.pop(link_id, None)
        if half is None:
            self._waiting[link_id] = _Half(kind, sock, now_s + pairing.PAIRING_S)
            return
        ends = {half.kind: half.sock, kind: sock}
        if ends.keys() != {_PLAIN, _NNG}:
            half.sock.close()
            sock.close()
            return
        try:
            pair = Pair.over(ends[_NNG])
        except BaseException:
            ends[_PLAIN].close()
            raise
        self._pairings.add(ends[_PLAIN], pair)

    def close(self) -> None:
        for half in self._waiting.values():
            half.sock.close()
        if self._proxy is not None:
            self._proxy.close()
        self._pairings.close()


class TcpTransport:
    """Links over TCP, through nng."""

    scheme = "tcp"
    memory: Memory | None = None

    def viability(self) -> Viability:
        return pairing.viability()

    def listen(self, url: str, secret: bytes) -> StreamListener:
        pairing.check(url, self.viability())
        nng.load()
        address = parse(url, self.scheme)
        sock = pairing.listening(url, address)
        return accepting(sock, secret, pairing.shown(self.scheme, address, sock), _loopback_connections)

    def dial(self, url: str, secret: bytes, timeout_s: float) -> TcpLink:
        pairing.check(url, self.viability())
        return dialing(url, secret, timeout_s)

    def inherit(self, fds: Sequence[int], url: str, timeout_s: float) -> TcpLink:
        ends = [socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd) for fd in fds]

        def connect(kind: int, greeting: bytes) -> socket.socket:
            sock = ends.pop(0)
            set_options(sock, small_frames=kind == _NNG)
            try:
                sock.sendall(greeting)
            except OSError as error:
                sock.close()
                raise severed(url, error) from error
            sock.setblocking(False)
            return sock

        try:
            return _complete(connect, url, time.monotonic() + timeout_s)
        finally:
            for end in ends:
                end.close()


def accepting(
    sock: Acceptor, secret: bytes, shown: str, connections: Callable[[], list[Connection]] = list
) -> StreamListener:
    """A listener over `sock`, which others reach at `shown`."""
    pairings = pairing.Pairings("tcp", shown)
    halves = _Halves(pairings)
    listener = StreamListener(
        sock,
        secret,
        shown,
        halves.adopt,
        greeting_bytes=GREETING.size,
        on_close=halves.close,
        connections=connections,
        heir_bytes=GREETING.size,
    )
    pairings.listener = listener
    return listener


def _loopback_connections() -> list[Connection]:
    """Two, of which nobody else can have an end. Raises: OSError."""
    found: list[Connection] = []
    try:
        with socket.create_server((_LOOPBACK, 0)) as server:
            server.settimeout(_LOOPBACK_S)
            for _ in (_PLAIN, _NNG):
                far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                try:
                    far.settimeout(_LOOPBACK_S)
                    far.connect(server.getsockname())
                    near, peer = server.accept()
                    while peer != far.getsockname():  # a stranger was quicker
                        near.close()
                        near, peer = server.accept()
                except BaseException:
                    far.close()
                    raise
                far.settimeout(None)
                found.append((near, far))
    except BaseException:
        for near, far in found:
            near.close()
            far.close()
        raise
    return found


def dialing(url: str, secret: bytes, timeout_s: float, opener: pairing.Opener = socket.create_connection) -> TcpLink:
    """As `Transport.dial`, over connections of `opener`."""
    deadline_s = time.monotonic() + timeout_s
    address = parse(url, "tcp")
    at = str(evolve(address, bind=None))

    def connect(kind: int, greeting: bytes) -> socket.socket:
        def prepare(sock: socket.socket) -> socket.socket:
            set_options(sock, small_frames=kind == _NNG)
            return sock

        return pairing.connected(address, at, secret, deadline_s, prepare=prepare, greeting=greeting, opener=opener)

    return _complete(connect, at, deadline_s)


def _complete(connect: Callable[[int, bytes], socket.socket], at: str, deadline_s: float) -> TcpLink:
    """The dialer's end of a link, over a connection of each kind that has sent this greeting."""
    link_id = secrets.token_bytes(16)
    plain = connect(_PLAIN, GREETING.pack(_PLAIN, link_id))
    pair: Pair | None = None
    try:
        pair = Pair.over(connect(_NNG, GREETING.pack(_NNG, link_id)))
        return pairing.completed(plain, pair, at, deadline_s)
    except BaseException:
        plain.close()
        if pair is not None:
            pair.close()
        raise


TRANSPORT: Final = TcpTransport()
