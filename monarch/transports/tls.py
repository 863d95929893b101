"""TLS between hosts: as `tcp`, for those whose network others can read.

A dialer opens one connection to the port of the listener. It is wrapped by Python's `ssl`, where each side shows a
certificate that the authority of both has signed; the job's secret is proved over it, and large parts travel over it
later. Small frames travel over nng's own TLS: nng cannot wrap a connection that is there, so the acceptor lets it
listen at a port for this one link, and tells the dialer the port and a key drawn for it, over the first connection.
Only who knows the key gets in there, so the certificates, and the secret, vouch for both; and once the pair is up the
port is closed to everybody (`Pair.shut_the_door`).

Names in certificates are not looked at: processes are reached at addresses that no certificate foresees. Who has a
certificate of the authority is trusted to be of the job, if it knows the secret too.
"""

from __future__ import annotations

import errno
import functools
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from attrs import evolve

from monarch.errors import AuthenticationError, NotViable, TransportError
from monarch.transports import certificates, nng, pairing
from monarch.transports.base import Inherit, Memory, Viability
from monarch.transports.certificates import SETTINGS, Certificates
from monarch.transports.listener import StreamListener, words_for
from monarch.transports.nng import DOOR_BYTES, Door, Pair, set_options
from monarch.transports.tcp_link import TcpLink
from monarch.transports.url import parse

_WRITE_BYTES: Final = 256 << 10


class TlsSocket(ssl.SSLSocket):
    """A connection with TLS that behaves like one without: what is not ready is a BlockingIOError, two threads may send
    and receive at once, and what is begun with one buffer may be given up for another."""

    _turn: threading.Lock
    _begun: tuple[object, memoryview] | None  # of which buffer a record is half out

    def __new__(cls, *args: Any, **kwargs: Any) -> TlsSocket:
        self = super().__new__(cls, *args, **kwargs)
        self._turn = threading.Lock()  # OpenSSL's objects are for one thread at a time
        self._begun = None
        return self

    def recv(self, size: int = 1024, flags: int = 0) -> bytes:
        try:
            with self._turn:
                return super().recv(size, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise _not_ready() from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        try:
            with self._turn:
                return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise _not_ready() from None

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            with self._turn:
                return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise _not_ready() from None
        except (ssl.SSLEOFError, ConnectionError):
            super().recv(1)  # raises what the other side has said before it ended, if it has said anything
            raise

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]
        """Send of the first buffer what there is room for."""
        first = next(iter(buffers))
        try:
            with self._turn:
                if self._begun is not None and self._begun[0] is not first:
                    super().send(self._begun[1])
                view = memoryview(first)[:_WRITE_BYTES]
                self._begun = (first, view)
                sent: int = super().send(view) if view else 0
                self._begun = None
                return sent
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise _not_ready() from None

    def shutdown(self, how: int) -> None:
        """Of the connection below; TLS goes on in the other direction. What is the last is said in frames."""
        socket.socket.shutdown(self, how)


def _not_ready() -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _context(*, accepts: bool) -> ssl.SSLContext:
    """Raises: NotViable, when the files are not there or do not fit each other."""
    files = certificates.used()
    try:
        paths = (files.certificate, files.key, files.authority)
        return _made(files, accepts, tuple(os.stat(path).st_mtime_ns for path in paths))
    except OSError as error:
        raise NotViable(f"TLS: {error.filename} ({files.setting(error.filename)}): {error.strerror}") from error


@contextmanager
def _refused(text: str, *what: str) -> Iterator[None]:
    """Raises: NotViable, for what OpenSSL makes nothing of; it names the settings of `what`."""
    try:
        yield
    except ssl.SSLError as error:
        settings = " and ".join(SETTINGS[each] for each in what)
        raise NotViable(f"TLS: {text}: {error.reason or error} (see {settings})") from error


@functools.lru_cache(4)
def _made(files: Certificates, accepts: bool, written: tuple[int, ...]) -> ssl.SSLContext:
    """One that is kept until a file is written anew."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    with _refused(f"{files.authority} is no certificate of an authority", "authority"):
        context.load_verify_locations(files.authority)
    with _refused(f"{files.certificate} with {files.key} is no certificate with its key", "certificate", "key"):
        context.load_cert_chain(files.certificate, files.key)
    context.sslsocket_class = TlsSocket
    if accepts:
        context.num_tickets = 0
    return context


_OF_OURS: Final = {
    "UNKNOWN_CA": "its authority has not signed it",
    "CERTIFICATE_EXPIRED": "it has expired",
    "CERTIFICATE_REQUIRED": "it wants one",
    "BAD_CERTIFICATE": "it is damaged",
    "UNSUPPORTED_CERTIFICATE": "it is not made for this use",
    "DECRYPT_ERROR": "its authority has another key",
}


def _in_words(error: ssl.SSLError) -> str:
    """What went wrong between two ends of TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the other side's certificate is not accepted here: {error.verify_message}"
    reason = error.reason or ""
    for name, words in _OF_OURS.items():
        if reason.endswith(f"ALERT_{name}"):
            return f"the other side does not accept our certificate: {words}"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"):
        return "the other side does not speak TLS"
    return f"TLS failed: {reason.replace('_', ' ').lower() or error}"


class TlsTransport:
    """Links over TLS, through nng."""

    scheme = "tls+tcp"
    memory: Memory | None = None
    inherit: Inherit | None = None

    def viability(self) -> Viability:
        missing = certificates.used().missing
        return Viability(False, f"TLS: {missing}") if missing else pairing.viability()

    def listen(self, url: str, secret: bytes) -> StreamListener:
        pairing.check(url, self.viability())
        _context(accepts=True)
        nng.load()
        address = parse(url, self.scheme)
        sock = pairing.listening(url, address)
        shown = pairing.shown(self.scheme, address, sock)
        pairings = pairing.Pairings(self.scheme, shown)

        def wrap(newcomer: socket.socket) -> socket.socket:
            try:
                context = _context(accepts=True)
            except NotViable as error:
                raise OSError(str(error)) from error
            return context.wrap_socket(newcomer, server_side=True, do_handshake_on_connect=False)

        def adopt(newcomer: socket.socket, _: bytes) -> None:
            set_options(newcomer, small_frames=False)
            pair, door = Pair.behind_a_door(newcomer.getsockname()[0])
            try:
                newcomer.send(door.encode())
            except OSError:
                pair.close()
                raise
            pairings.add(newcomer, pair)

        def words(error: Exception) -> str:
            if isinstance(error, ssl.SSLEOFError):
                return ""
            return _in_words(error) if isinstance(error, ssl.SSLError) else words_for(error)

        listener = StreamListener(sock, secret, shown, adopt, wrap=wrap, words_for=words, on_close=pairings.close)
        pairings.listener = listener
        return listener

    def dial(self, url: str, secret: bytes, timeout_s: float) -> TcpLink:
        pairing.check(url, self.viability())
        deadline_s = time.monotonic() + timeout_s
        address = parse(url, self.scheme)
        at = str(evolve(address, bind=None))
        context = _context(accepts=False)

        def prepare(sock: socket.socket) -> socket.socket:
            set_options(sock, small_frames=False)
            sock.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            wrapped = context.wrap_socket(sock)
            # The acceptor speaks next, or says why it does not: whatever we say first may hide that.
            poll = select.poll()
            poll.register(wrapped, select.POLLIN)
            poll.poll(max(deadline_s - time.monotonic(), 0) * 1e3)
            return wrapped

        try:
            plain = pairing.connected(address, at, secret, deadline_s, prepare=prepare)
        except TransportError as error:
            if isinstance(error.__cause__, ssl.SSLError):
                raise AuthenticationError(f"{at}: {_in_words(error.__cause__)}") from error
            raise
        pair: Pair | None = None
        try:
            door = Door.decode(pairing.received(plain, DOOR_BYTES, at, deadline_s))
            host = plain.getpeername()[0]
            pair = Pair.through(host, door)
            late = f"{at} let us in, and then port {door.port} of {host} did not answer, where small frames travel"
            return pairing.completed(plain, pair, at, deadline_s, f"{late}: is there a firewall?")
        except BaseException:
            plain.close()
            if pair is not None:
                pair.close()
            raise


TRANSPORT: Final = TlsTransport()
