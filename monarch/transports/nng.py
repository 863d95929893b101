"""nng: a `Pair0` over a connected socket, or over TLS of its own.

The one module that knows nng; how two processes come to have a connection is decided in `tcp` and `tls`.

`Pair0` because the polyamorous `Pair1` drops messages for a slow peer. nng must not redial behind our back: a pipe that
is gone is the death of the link.

nng starts its threads with the first pair. A process that has used it and forks leaves a child in which any call of nng
aborts or hangs: there, `_disown` makes what is left of it inert. pynng ends nng in an exit handler of its own, which
would run before the handlers of those who still have links to close, and what nng is asked for after its end hangs; so
nng is ended by `_end`, last of all.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Final

from attrs import define, field

from monarch.errors import LinkSevered, NotViable
from monarch.transports.ending import at_the_end
from monarch.transports.stream import NO_DESCRIPTOR
from monarch.wake import Wake

_KEY_BYTES: Final = 32
_DOOR: Final = struct.Struct(f"!H{_KEY_BYTES}s")
DOOR_BYTES: Final = _DOOR.size
_IDENTITY: Final = b"monarch"
_END_S: Final = 0.05
_GONE_LIMIT_S: Final = 1.0
_LOOK_MS: Final = 1000
_SO_ATTACH_FILTER: Final = 26
_USER_TIMEOUT_MS: Final = 20_000

_start_lock: Final = threading.Lock()
_pynng: Any = None


def load() -> Any:
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
                at_the_end(_end)
                os.register_at_fork(after_in_child=_disown)
                _pynng = pynng
    return _pynng


_used_by: int | None = None  # the process that has started nng
_pairs: Final[weakref.WeakSet[Pair]] = weakref.WeakSet()


def _end() -> None:
    """End nng's threads, so that none of them calls into an interpreter that is being taken down."""
    if _used_by == os.getpid():
        pairs = list(_pairs)
        for pair in pairs:
            pair.close()
        for pair in pairs:
            pair.wait_closed()
        _pynng.lib.nng_fini()


def _disown() -> None:
    """In a forked child: the sockets of the parent must not be closed by this process, not even when collected."""
    for pair in list(_pairs):
        pair._socket.close = _nothing
    _pairs.clear()


def _nothing() -> None:
    pass


@define(frozen=True)
class Door:
    """Where one pair is listened for with TLS, and the key that lets in whom it is told: for one who dials, once."""

    port: int
    key: bytes = field(repr=False)

    def encode(self) -> bytes:
        return _DOOR.pack(self.port, self.key)

    @classmethod
    def decode(cls, data: bytes) -> Door:
        return cls(*_DOOR.unpack(data))


class Pair:
    """A `Pair0`, with one connection. Calls never block, and errors are return values: raising TryAgain for every
    wake-up would cost more than the call. What makes one raises NotViable, or OSError when no descriptor is left."""

    def __init__(self) -> None:
        global _used_by
        pynng = load()
        if _used_by not in (None, os.getpid()):
            raise NotViable("nng cannot be used here: this process was forked from one that uses it")
        _used_by = os.getpid()
        self._lib, self._ffi = pynng.lib, pynng.ffi
        self._closed = False
        self._door: _End | None = None  # with TLS: where nng's own connection is to be found
        self._connection: socket.socket | None = None  # with TLS: nng's own, by a descriptor of ours
        self._removed = threading.Event()  # nng knows that the connection has ended
        self._closer: threading.Thread | None = None
        self._is_ending = False
        self.wake = Wake()
        self.is_up = False
        """Both ends have agreed to talk."""
        self.is_gone = False
        """The connection has ended; what arrived before can still be received."""
        try:
            with _start_lock:  # two threads that make the first socket at once start nng twice, which then hangs
                self._socket = pynng.Pair0(recv_max_size=0)
            _pairs.add(self)
            self._socket.add_post_pipe_connect_cb(self._on_up)
            self._socket.add_post_pipe_remove_cb(self._on_gone)
            self._id = self._socket.socket
            self.recv_fd: int = self._socket.recv_fd
            self.send_fd: int = self._socket.send_fd
        except pynng.NNGException as error:
            if self in _pairs:
                self.close()
            raise self._failed(error.errno, "make a socket") from None
        self._data, self._size = self._ffi.new("char **"), self._ffi.new("size_t *")
        self._recv_flags = self._lib.NNG_FLAG_ALLOC | self._lib.NNG_FLAG_NONBLOCK
        self._send_flags = self._lib.NNG_FLAG_NONBLOCK
        self._again = self._lib.NNG_EAGAIN

    @classmethod
    def over(cls, sock: socket.socket) -> Pair:
        """A pair over a connected socket, which is nng's from now on."""
        fd = sock.detach()
        try:
            self = cls()
            what = "adopt a connected socket"
            listener = self._listen("socket://", what)
            self._must(self._lib.nng_listener_set_int(listener, b"socket:fd", fd), what)
        except BaseException:
            os.close(fd)
            raise
        return self

    @classmethod
    def behind_a_door(cls, host: str) -> tuple[Pair, Door]:
        """A pair at an address of ours that whoever knows the door's key can dial, with TLS."""
        self = cls()
        what = f"listen at {host} with TLS"
        key = secrets.token_bytes(_KEY_BYTES)
        listener = self._listen(f"tls+tcp://{_in_url(host)}:0", what, self._tls(self._lib.NNG_TLS_MODE_SERVER, key))
        port = self._ffi.new("int *")
        self._must(self._lib.nng_listener_get_int(listener, b"tcp-bound-port", port), what)
        self._door = _End(port[0], is_ours=True)
        return self, Door(port[0], key)

    @classmethod
    def through(cls, host: str, door: Door) -> Pair:
        """The other end, on its way up."""
        self = cls()
        what = f"dial {host} with TLS"
        dialer = self._ffi.new("nng_dialer *")
        url = f"tls+tcp://{_in_url(host)}:{door.port}"
        self._must(self._lib.nng_dialer_create(dialer, self._id, url.encode()), what)
        config = self._tls(self._lib.NNG_TLS_MODE_CLIENT, door.key)
        self._must(self._lib.nng_dialer_set_ptr(dialer[0], b"tls-config", config), what)
        self._must(self._lib.nng_dialer_start(dialer[0], self._lib.NNG_FLAG_NONBLOCK), what)
        self._door = _End(door.port, is_ours=False)
        return self

    def _listen(self, url: str, what: str, tls: Any = None) -> Any:
        listener = self._ffi.new("nng_listener *")
        self._must(self._lib.nng_listener_create(listener, self._id, url.encode()), what)
        if tls is not None:
            self._must(self._lib.nng_listener_set_ptr(listener[0], b"tls-config", tls), what)
        self._must(self._lib.nng_listener_start(listener[0], 0), what)
        return listener[0]

    def _tls(self, mode: int, key: bytes) -> Any:
        """A configuration of TLS between two who know `key`."""
        found = self._ffi.new("nng_tls_config **")
        self._must(self._lib.nng_tls_config_alloc(found, mode), "do TLS")
        config = self._ffi.gc(found[0], self._lib.nng_tls_config_free)  # nng counts who uses it
        self._must(self._lib.nng_tls_config_psk(config, _IDENTITY, key, len(key)), "do TLS with a key")
        return config

    def _must(self, code: int, what: str) -> None:
        if code != 0:
            self.close()
            raise self._failed(code, what)

    def _failed(self, code: int, what: str) -> NotViable | OSError:
        if code == self._lib.NNG_ENOFILES:
            return OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return NotViable(f"nng cannot {what}: {self.describe(code)}")

    def shut_the_door(self) -> None:
        """The pair is up: nobody else is to reach the port, which nng keeps for as long as it has the pair. And what
        `tcp` sets on its own connections holds for this one, too. nng shows its sockets to nobody; the kernel does.

        Raises: OSError, when the port may be open still: close the pair.
        """
        if self._door is None:
            return
        is_shut = not self._door.is_ours
        for sock in self._door.sockets():
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _deafen(sock)
                is_shut = True
            elif self._connection is None:
                set_options(sock, small_frames=True)
                self._connection = socket.socket(fileno=os.dup(sock.fileno()))  # `sock.dup()` would make it block
        if not is_shut:
            raise OSError(errno.ENOENT, f"port {self._door.port}, where nng listens for one link, was not found")

    def _on_up(self, _: object) -> None:
        """On a thread of nng."""
        self.is_up = True
        self.wake.set()

    def _on_gone(self, _: object) -> None:
        """On a thread of nng."""
        self._removed.set()
        self._tell_gone()

    def _tell_gone(self) -> None:
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
        message: bytes = self._ffi.unpack(data, size) if size else b""
        self._lib.nng_free(data, size)
        return message

    def check_end(self) -> None:
        """The other connection to the peer has ended: this one has, or will soon. nng's TLS forgets an end that it
        meets while messages wait for us; the kernel does not. If nng knows of it, it says so in the moment that it is
        given."""
        if self._connection is not None and not self.is_gone and not self._is_ending:
            self._is_ending = True
            poll = select.poll()
            poll.register(self._connection, select.POLLRDHUP)
            threading.Thread(target=self._tell_end, args=(poll,), name="monarch-nng-end", daemon=True).start()

    def _tell_end(self, poll: select.poll) -> None:
        while not poll.poll(_LOOK_MS) and not self._closed:
            pass
        time.sleep(_END_S)
        self._tell_gone()

    def describe(self, code: int) -> str:
        text: bytes = self._ffi.string(self._lib.nng_strerror(code))
        return text.decode()

    def close(self) -> None:
        """At once; with TLS, its connection ends at once, and the rest soon: nng 1.11 now and then uses what it has
        freed where a pair that has its connection is closed (3 times in 3000 on a busy machine), and aborts."""
        if self._closed:
            return
        self._closed = True
        if self._connection is None:
            self._finish()
            return
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._closer = threading.Thread(target=self._finish_when_gone, name="monarch-nng-close", daemon=True)
        self._closer.start()

    def _finish_when_gone(self) -> None:
        self._removed.wait(_GONE_LIMIT_S)
        time.sleep(_END_S)  # nothing tells when nng has let go of it
        self._finish()

    def _finish(self) -> None:
        self._socket.close()
        self._socket.close = _nothing  # it would close again when it is collected, maybe in a fork
        _pairs.discard(self)
        self.wake.close()
        if self._connection is not None:
            self._connection.close()

    def wait_closed(self) -> None:
        """Until nng has closed it, after `close`; for a second or so."""
        if self._closer is not None:
            self._closer.join(2 * _GONE_LIMIT_S)


def set_options(sock: socket.socket, *, small_frames: bool) -> None:
    """No delay, and a machine that vanished is noticed in seconds, idle or not. A peer that is busy, and takes in no
    large part for long, is no reason to cut it off: only a connection of small frames has a limit for what the other
    kernel does not take."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if small_frames:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


@define(frozen=True)
class _End:
    """One end of connections to a port: of those who dialed it, or of the one who listens there."""

    port: int
    is_ours: bool

    def sockets(self) -> Iterator[socket.socket]:
        """Those of this process, each by a descriptor of its own while it is looked at. Raises: OSError, when there is
        none left for that."""
        for name in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if sock.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    if (sock.getsockname() if self.is_ours else sock.getpeername())[1] == self.port:
                        yield sock
            except OSError as error:
                if error.errno in NO_DESCRIPTOR:
                    raise
                # it has been closed, or is connected to nobody


def _deafen(sock: socket.socket) -> None:
    """Let a listening socket see no packet any more; connections that it has accepted are others."""
    drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # a filter's "return 0"
    program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
