"""RDMA devices, through libibverbs.

Decides how two processes get a link; leaves the stream to `verbs_stream`, the end of it to `stream`, and the device to
`monarch.verbs`.

An address is that of a TCP listener. A dialer proves the secret there, and then both sides tell each other their queue
pairs, post their receives, and say that they are ready. The connection stays: its end is the death notice that an idle
queue pair never gives. A queue pair in error is of no more use: the link is severed, and the next one has a new queue
pair and a new connection.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
from typing import Final

from monarch.errors import LinkSevered, NotViable, TransferError, TransportError
from monarch.transports.base import Inherit, Link, Memory, Viability
from monarch.transports.listener import StreamListener
from monarch.transports.stream import StreamLink, authenticate, recv_some, send_all, severed
from monarch.transports.url import Url, parse
from monarch.transports.verbs_stream import DEPTH, READY, SLOT_BYTES, VerbsStream
from monarch.verbs.adapter import Peer
from monarch.verbs.node import Wire, node

_PEER: Final = struct.Struct("!IIHB16sHI")  # number, psn, lid, mtu, gid, and the ring: slots, bytes of each
_KEEPALIVE_S: Final = 5


class IbverbsTransport:
    """Links over reliable connected queue pairs."""

    scheme = "ibverbs"
    memory: Memory | None = None
    inherit: Inherit | None = None

    def viability(self) -> Viability:
        try:
            node()
        except NotViable as error:
            return Viability(False, str(error))
        return Viability(True)

    def listen(self, url: str, secret: bytes) -> StreamListener:
        self._check(url)
        address = parse(url, "ibverbs")
        local = address.local
        family = socket.AF_INET6 if ":" in local.host else socket.AF_INET
        try:
            sock = socket.create_server((local.host, local.port), family=family, backlog=1024)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen at {local}: {error.strerror or error}") from error
        shown = str(Url("ibverbs", address.host, address.port or sock.getsockname()[1]))

        def adopt(newcomer: socket.socket, greeting: bytes) -> Link:
            wire = node().wire(DEPTH)
            try:
                wire.connect(_decode(greeting))
                stream = VerbsStream(newcomer, wire)
                newcomer.send(_encode(wire) + READY)  # some bytes always fit into an empty socket
            except TransferError as error:
                wire.close()
                raise TransportError(str(error)) from error
            except BaseException:
                wire.close()
                raise
            return _link(stream, newcomer, f"a process at {shown}")

        return StreamListener(sock, secret, shown, adopt, greeting_bytes=_PEER.size)

    def _check(self, url: str) -> None:
        viability = self.viability()
        if not viability.ok:
            raise NotViable(f"{url}: {viability.reason}")

    def dial(self, url: str, secret: bytes, timeout_s: float) -> StreamLink:
        self._check(url)
        deadline_s = time.monotonic() + timeout_s
        address = parse(url, "ibverbs")
        sock = _connect(address, url, deadline_s)
        wire: Wire | None = None
        try:
            authenticate(sock, secret, url, deadline_s)
            wire = node().wire(DEPTH)
            try:
                send_all(sock, _encode(wire), deadline_s)
                wire.connect(_decode(_receive(sock, _PEER.size, url, deadline_s)))
                stream = VerbsStream(sock, wire)
                sock.send(READY)
            except TimeoutError as error:
                raise TimeoutError(f"{url} did not accept the link in time") from error
            except OSError as error:
                raise severed(url, error) from error
            return _link(stream, sock, url)
        except BaseException:
            if wire is not None:
                wire.close()
            sock.close()
            raise


def _link(stream: VerbsStream, control: socket.socket, peer: str) -> StreamLink:
    control.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    return StreamLink(
        stream,  # type: ignore[arg-type]
        peer,
        room_event=select.POLLIN,
        send_lock=stream.lock,
    )


def _connect(address: Url, shown: str, deadline_s: float) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), max(deadline_s - time.monotonic(), 1e-3))
    except ConnectionRefusedError as error:
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {shown}") from error
    except TimeoutError as error:
        raise TimeoutError(f"{shown} did not answer in time") from error
    except OSError as error:
        raise severed(shown, error) from error


def _receive(sock: socket.socket, size_bytes: int, url: str, deadline_s: float) -> bytes:
    data = b""
    while len(data) < size_bytes:
        more = recv_some(sock, size_bytes - len(data), deadline_s)
        if not more:
            raise LinkSevered(f"{url} closed the connection before the link was ready")
        data += more
    return data


def _encode(wire: Wire) -> bytes:
    mine = wire.mine
    gid = bytes.fromhex(mine.gid.replace(":", "")) if mine.gid else bytes(16)
    return _PEER.pack(mine.number, mine.psn, mine.lid, mine.mtu, gid, DEPTH, SLOT_BYTES)


def _decode(data: bytes) -> Peer:
    """Raises: TransportError, when the other side has rings of another size."""
    number, psn, lid, mtu, gid, depth, slot_bytes = _PEER.unpack(data)
    if (depth, slot_bytes) != (DEPTH, SLOT_BYTES):
        raise TransportError(f"the peer has rings of {depth} x {slot_bytes} bytes: it is of another version")
    text = gid.hex(":", 2) if any(gid) else ""
    return Peer(number, psn, text, lid, mtu)


TRANSPORT: Final = IbverbsTransport()
