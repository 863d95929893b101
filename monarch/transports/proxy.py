"""Streams that pass through a process, for a friend that nobody can dial.

Decides what such a friend may ask for, and carries bytes; what they mean it does not know, and they prove the secret
end to end once more. The friend's side is `tunnel`.

A friend opens a connection, proves the secret, and says in its greeting what it is for, with 16 bytes that go along:

```
CONNECT  the length of a text (u16), and the text, HOST:PORT     0 and from there on that stream, or 1 and why not
LISTEN   in the 16 bytes: the port it had before, or 0           the port (u16) that others dial; then, for each who
                                                                 does, 16 bytes that stand for him
TAKE     those 16 bytes                                          that stream
```

A port is open for as long as the connection that asked for it. One thread carries the bytes of all, so what goes wrong
with one friend ends what that friend has, and nothing else.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import Final

from attrs import define, field

from monarch.transports.listener import Spare
from monarch.transports.stream import NO_DESCRIPTOR, RECV_BYTES, recv_some, send_all
from monarch.wake import Wake

CONNECT, LISTEN, TAKE = 3, 4, 5
ID_BYTES: Final = 16
PORT: Final = Struct("!H")
OK, REFUSED, FAILED = b"\0", b"\1", b"\2"

_ASK_S: Final = 10.0
_MOST_WAITING: Final = 128


@define(eq=False)
class _Flow:
    """One direction of two connections that are one."""

    source: socket.socket
    sink: socket.socket
    chunk: memoryview = field(factory=lambda: memoryview(b""))
    has_ended: bool = False

    @property
    def is_over(self) -> bool:
        return self.has_ended and not self.chunk

    def move(self) -> None:
        """As far as there are bytes and room. Raises: OSError."""
        with suppress(BlockingIOError):
            while True:
                while self.chunk:
                    self.chunk = self.chunk[self.sink.send(self.chunk) :]
                if self.has_ended:
                    return
                data = self.source.recv(RECV_BYTES)
                if not data:  # all that came before is out
                    self.has_ended = True
                    self.sink.shutdown(socket.SHUT_WR)
                    return
                self.chunk = memoryview(data)


@define(eq=False)
class _Port:
    """A port that is open for a friend."""

    asker: socket.socket
    server: socket.socket


@define(eq=False)
class _Todo:
    """What the thread is to do, and the connections that it takes over with that."""

    action: Callable[[], None]
    socks: tuple[socket.socket, ...]

    def run(self) -> None:
        try:
            self.action()
        except OSError:
            self.drop()

    def drop(self) -> None:
        for sock in self.socks:
            sock.close()


class Proxy:
    """See the module. `serve` may be called from any thread; the thread starts with the first friend."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waiting: OrderedDict[bytes, socket.socket] = OrderedDict()
        self._carried: set[socket.socket] = set()
        self._todo: list[_Todo] = []
        self._lock = threading.Lock()  # of `_todo` and `_is_closed`
        self._wake = Wake()
        self._spare = Spare()
        self._is_closed = False
        self._selector.register(self._wake.fileno(), selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="monarch-proxy", daemon=True)
        self._thread.start()

    def serve(self, kind: int, key: bytes, sock: socket.socket) -> None:
        """A friend's connection, which is the proxy's from now on."""
        if kind == CONNECT:
            threading.Thread(target=self._connect, args=(sock,), name="monarch-proxy-connect", daemon=True).start()
        elif kind == LISTEN:
            self._soon(lambda: self._listen(sock, PORT.unpack_from(key)[0]), sock)
        elif kind == TAKE:
            self._soon(lambda: self._take(sock, key), sock)
        else:
            sock.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._wake.set()

    # ---- what friends ask for

    def _connect(self, sock: socket.socket) -> None:
        deadline_s = time.monotonic() + _ASK_S
        try:
            (size,) = PORT.unpack(_received(sock, PORT.size, deadline_s))
            host, _, port = _received(sock, size, deadline_s).decode().rpartition(":")
            try:
                other = socket.create_connection((host, int(port)), _ASK_S)
            except OSError as error:
                text = (error.strerror or str(error)).encode()
                answer = REFUSED if isinstance(error, ConnectionRefusedError) else FAILED
                send_all(sock, answer + PORT.pack(len(text)) + text, deadline_s)
                sock.close()
                return
        except (OSError, ValueError):
            sock.close()
            return
        try:
            send_all(sock, OK, deadline_s)
        except OSError:
            sock.close()
            other.close()
            return
        self._soon(lambda: self._join(sock, other), sock, other)

    def _listen(self, sock: socket.socket, port: int) -> None:
        host = sock.getsockname()[0]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            server = socket.create_server((host, port), family=family, backlog=1024)
        except OSError:
            server = socket.create_server((host, 0), family=family, backlog=1024)
        server.setblocking(False)
        entry = _Port(sock, server)
        sock.setblocking(False)
        try:
            sock.send(PORT.pack(server.getsockname()[1]))
            self._watch(server, selectors.EVENT_READ, lambda: self._accept(entry))
            self._watch(sock, selectors.EVENT_READ, lambda: self._asker_says(entry))
        except OSError:
            self._end(entry)

    def _asker_says(self, entry: _Port) -> None:
        try:
            if entry.asker.recv(RECV_BYTES):
                return
        except BlockingIOError:
            return
        except OSError:  # also of a machine that vanished: TimeoutError, "no route to host"
            pass
        self._end(entry)

    def _end(self, entry: _Port) -> None:
        for sock in (entry.asker, entry.server):
            self._forget(sock)

    def _accept(self, entry: _Port) -> None:
        try:
            sock, _ = entry.server.accept()
        except OSError as error:  # nobody is there any more, or
            if error.errno in NO_DESCRIPTOR:
                self._spare.turn_away(entry.server)
            return
        key = secrets.token_bytes(ID_BYTES)
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popitem(last=False)[1].close()
        self._waiting[key] = sock
        try:
            entry.asker.send(key)
        except BlockingIOError:  # the asker has not heard of so many others yet
            self._waiting.pop(key).close()
        except OSError:
            self._waiting.pop(key).close()
            self._end(entry)

    def _take(self, sock: socket.socket, key: bytes) -> None:
        other = self._waiting.pop(key, None)
        if other is None:
            sock.close()
        else:
            self._soon(lambda: self._join(sock, other), sock, other)

    # ---- the thread

    def _soon(self, action: Callable[[], None], *socks: socket.socket) -> None:
        """On the proxy's thread, which owns `socks` from now on. They are closed when it raises OSError, and at once
        when the proxy is closed."""
        todo = _Todo(action, socks)
        with self._lock:
            if not self._is_closed:
                self._todo.append(todo)
                self._wake.set()
                return
        todo.drop()

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._wake.clear()
                    continue
                now = self._selector.get_map().get(key.fd)
                if now is not None and now.fileobj is key.fileobj:  # no other event of this turn has ended it
                    key.data()
            while self._todo:
                self._todo.pop(0).run()
        for todo in self._todo:
            todo.drop()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        for sock in (*self._waiting.values(), *self._carried):
            sock.close()
        self._selector.close()
        self._spare.close()
        self._wake.close()

    def _join(self, one: socket.socket, other: socket.socket) -> None:
        flows = _Flow(one, other), _Flow(other, one)
        for flow in flows:
            flow.source.setblocking(False)
            flow.source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._carried |= {one, other}
        self._move(flows)

    def _move(self, flows: tuple[_Flow, _Flow]) -> None:
        there, back = flows
        try:
            there.move()
            back.move()
            for flow, against in ((there, back), (back, there)):
                wanted = 0 if flow.chunk or flow.has_ended else selectors.EVENT_READ
                wanted |= selectors.EVENT_WRITE if against.chunk else 0
                self._watch(flow.source, wanted, lambda: self._move(flows))
            is_over = there.is_over and back.is_over
        except OSError:
            is_over = True
        if is_over:
            for flow in flows:
                self._carried.discard(flow.source)
                self._forget(flow.source)

    def _forget(self, sock: socket.socket) -> None:
        if sock in self._selector.get_map():
            self._selector.unregister(sock)
        sock.close()

    def _watch(self, sock: socket.socket, events: int, action: Callable[[], None]) -> None:
        known = self._selector.get_map().get(sock)
        if known is None:
            if events:
                self._selector.register(sock, events, action)
        elif not events:
            self._selector.unregister(sock)
        elif events != known.events:
            self._selector.modify(sock, events, action)


def _received(sock: socket.socket, size_bytes: int, deadline_s: float) -> bytes:
    """Raises: OSError, also when it ends before."""
    data = b""
    while len(data) < size_bytes:
        more = recv_some(sock, size_bytes - len(data), deadline_s)
        if not more:
            raise ConnectionError("it ended in the middle")
        data += more
    return data
