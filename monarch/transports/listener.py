"""The listener over a stream socket, which lets in only who proves the job's secret.

Decides how long one may stay while the proof is not there, and what to do without descriptors; leaves the proof to
`auth`, who must go when there are too many to `newcomers`, and what becomes of a connection to whoever makes links.
"""

from __future__ import annotations

import errno
import itertools
import math
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from attrs import define, field

from monarch.errors import AuthenticationError, ProtocolError, TransportError
from monarch.log import Sparing, get_logger
from monarch.transports.auth import Handshake
from monarch.transports.base import Link
from monarch.transports.newcomers import Crowd, Newcomer, network_of
from monarch.transports.stream import NO_DESCRIPTOR

log = get_logger("monarch.listener")


_AT_ONCE: Final = 4
"""So many times as many as may be unfinished are taken in at a time: who is pushed out by then need not be watched."""


_UNREAD_BYTES: Final = 64 << 10
"""Of what a refused one has sent beyond what he was asked for: a friend, in another job, has sent less."""


class Acceptor(Protocol):
    """What a listener needs of a listening socket."""

    def fileno(self) -> int: ...

    def setblocking(self, flag: bool, /) -> None: ...

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises: BlockingIOError, when nobody is there."""
        ...

    def close(self) -> None: ...


@define(eq=False)
class Spare:
    """A descriptor to live on when all are used: a connection that is not accepted keeps its listener readable, and
    who polls it spinning."""

    _sock: socket.socket | None = field(factory=socket.socket)

    def turn_away(self, acceptor: Acceptor) -> bool:
        """Refuse who is next. False: another thread has taken the descriptor since."""
        self.close()
        with suppress(OSError):
            acceptor.accept()[0].close()
        with suppress(OSError):
            self._sock = socket.socket()
        return self._sock is not None

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


_MOST: Final = 128
_SHARE: Final = 8
"""One in so many descriptors may be a newcomer's: friends need some, for their links and for what they start here."""


def most_newcomers() -> int:
    """How many may be unfinished at a time in this process."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if descriptors == resource.RLIM_INFINITY else max(1, min(descriptors // _SHARE, _MOST))


def words_for(error: Exception) -> str:
    """Why somebody was turned away, for the log; "" for connections that just broke."""
    return str(error) if isinstance(error, AuthenticationError | ProtocolError) else ""


@define(eq=False, repr=False)
class StreamListener:
    """Accepts connections on a listening socket, which it owns, and hands out those that proved the secret.

    Nothing here blocks and no thread is needed: `fileno` is a selector over the socket and all newcomers, and
    `accept_nowait` moves every one of them on as far as its bytes allow. Nobody is answered before he says something.
    Another thread may `close` it meanwhile, which waits: who was accepted by then is closed, too.

    At most `max_newcomers` are unfinished at a time; one more pushes one out, see `Crowd`. They are taken in about as
    fast as one stranger can come, 20 us each where he says nothing: while the queue of the kernel is full it drops
    friends and strangers alike, and who was dropped tries again after a second, then after two more.
    """

    _sock: Acceptor
    _secret: bytes
    url: str
    _adopt: Callable[[socket.socket, bytes], Link | None]
    """Makes a link of an authenticated, non-blocking socket, which it owns, and a greeting. None: not now, or never."""
    _greeting_bytes: int = 0
    """The dialer sends this much after the handshake, for `adopt`."""
    _is_welcome: Callable[[socket.socket], bool] = lambda sock: True
    _wrap: Callable[[socket.socket], socket.socket] = lambda sock: sock
    """Puts on a new, non-blocking connection what the proof is to travel in. Raises: OSError."""
    _words_for: Callable[[Exception], str] = words_for
    _on_close: Callable[[], None] = lambda: None
    _connections: Callable[[], list[tuple[socket.socket, socket.socket]]] = list
    """Makes connections of this process with itself, as many as a link has. Raises: OSError."""
    _heir_bytes: int = 0
    """An heir sends this much as its greeting."""
    _clock: Callable[[], float] = time.monotonic
    _handshake_s: float = 10.0
    _max_newcomers: int = field(factory=most_newcomers)
    selector: selectors.BaseSelector = field(factory=selectors.DefaultSelector, init=False)
    """Whatever else `adopt` has to wait for may be registered here, with a callable that raises nothing as data."""
    starved: OSError | None = field(default=None, init=False)
    _newcomers: Crowd = field(factory=Crowd, init=False)
    _heirs: set[Newcomer] = field(factory=set, init=False)  # of whom nothing was heard yet
    _spare: Spare = field(factory=Spare, init=False)
    _is_closed: bool = field(default=False, init=False)
    _lock: threading.RLock = field(factory=threading.RLock, init=False)
    _sparing: Sparing = field(factory=partial(Sparing, log), init=False)
    _fd: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._sock.setblocking(False)
        self.selector.register(self._sock, selectors.EVENT_READ)
        self._fd = self.selector.fileno()  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<StreamListener at {self.url}>"

    def fileno(self) -> int:
        return self._fd

    @property
    def newcomer_count(self) -> int:
        return len(self._newcomers)

    def hand_down(self) -> list[int]:
        """As `Listener.hand_down`. Our end waits for the first bytes of the heir, as long as it takes to come up."""
        with self._lock:
            pairs = [] if self._is_closed else self._connections()
            heirs: list[Newcomer] = []
            try:
                for near, _ in pairs:
                    near.setblocking(False)
                    heir = Newcomer(near, math.inf, self._heir_bytes, is_heir=True)
                    self._watch(heir)
                    heirs.append(heir)
            except BaseException:
                for heir in heirs:
                    self.selector.unregister(heir.fd)
                for end in itertools.chain(*pairs):
                    end.close()
                raise
            self._heirs.update(heirs)
        return [far.detach() for _, far in pairs]

    def accept_nowait(self) -> list[Link]:
        with self._lock:
            return [] if self._is_closed else self._let_in()

    def _let_in(self) -> list[Link]:
        links: list[Link] = []
        for key, _ in self.selector.select(0):
            if key.fileobj is self._sock:
                self._accept(links)
            elif isinstance(key.data, Newcomer):
                if key.data.is_here:
                    self._advance(key.data, links)
            else:
                link = key.data()
                if link is not None:
                    links.append(link)
        now_s = self._clock()
        while self._newcomers and (oldest := next(iter(self._newcomers))).deadline_s <= now_s:
            self._forget(oldest)
        if links:
            self.starved = None
        return links

    def starves(self, error: Exception) -> None:
        """Note `error`, which ended somebody who came, if it is that no descriptor was left."""
        if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
            self.starved = error

    def _accept(self, links: list[Link]) -> None:
        fresh: list[Newcomer] = []
        for _ in range(_AT_ONCE * self._max_newcomers):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno in NO_DESCRIPTOR:
                    self.starves(error)
                    if not self._make_room(links):
                        break
                    continue
                if error.errno in (errno.EBADF, errno.EINVAL):
                    break
                continue  # the connection died in the queue, see accept(2)
            if not self._is_welcome(sock):
                self._tell(address, AuthenticationError("the peer is another user's"))
                sock.close()
                continue
            sock.setblocking(False)
            if len(self._newcomers) >= self._max_newcomers:
                self._push_one_out(links)
            deadline_s = self._clock() + self._handshake_s
            newcomer = Newcomer(sock, deadline_s, self._greeting_bytes, address)
            self._newcomers.add(newcomer)
            fresh.append(newcomer)
        for newcomer in fresh:  # in a flood most of them are gone again
            if newcomer.is_here and not newcomer.is_watched:
                self._watch(newcomer)

    def _watch(self, newcomer: Newcomer) -> None:
        self.selector.register(newcomer.fd, selectors.EVENT_READ, newcomer)
        newcomer.is_watched = True

    def _make_room(self, links: list[Link]) -> bool:
        """No descriptor is free: give up a newcomer, else refuse the next one."""
        if self._newcomers:
            self._push_one_out(links)
            return True
        return self._spare.turn_away(self._sock)

    def _advance(self, newcomer: Newcomer, links: list[Link]) -> None:
        try:
            if not (newcomer.is_heir or newcomer.handshake) and not self._answer(newcomer):
                return self._forget(newcomer)
            newcomer.greet()
            if newcomer.unsent:
                return
            handshake, sock = newcomer.handshake, newcomer.sock
            while handshake is not None and not handshake.done:
                data = sock.recv(handshake.missing_bytes)
                if not data:
                    handshake.ended()
                    return self._forget(newcomer)
                answer = handshake.feed(data)
                if answer and sock.send(answer) < len(answer):
                    return self._forget(newcomer)
            while len(newcomer.greeting) < newcomer.greeting_bytes:
                data = sock.recv(newcomer.greeting_bytes - len(newcomer.greeting))
                if not data:
                    return self._forget(newcomer)
                newcomer.greeting += data
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, AuthenticationError, ProtocolError) as error:
            self._tell(newcomer.address, error)
            with suppress(OSError):  # to close with something unread breaks the connection, and what we said
                socket.socket.recv(newcomer.sock, _UNREAD_BYTES, socket.MSG_DONTWAIT)
            return self._forget(newcomer)
        self._forget(newcomer, close=False)
        try:
            link = self._adopt(sock, newcomer.greeting)
        except (OSError, TransportError) as error:  # it is gone already, or cannot be kept
            self.starves(error)
            return sock.close()
        if link is not None:
            links.append(link)

    def _answer(self, newcomer: Newcomer) -> bool:
        """Begin the handshake, now that there is something from the newcomer. False: that is its end.

        Raises: BlockingIOError, when there is nothing; OSError.
        """
        if not newcomer.sock.recv(1, socket.MSG_PEEK):
            return False
        newcomer.sock = self._wrap(newcomer.sock)
        newcomer.handshake = Handshake("acceptor", self._secret)
        newcomer.unsent = newcomer.handshake.greeting
        self._newcomers.has_spoken(newcomer)
        if not newcomer.is_watched:
            self._watch(newcomer)
        return True

    def _tell(self, address: Any, error: Exception) -> None:
        """Whoever keeps this process shall know why somebody cannot come in, who may know no more than that."""
        if words := self._words_for(error):
            network = network_of(address)
            peer = address[0] if network else "this host"
            self._sparing.warning("newcomer.refused", (network, words), address=self.url, peer=peer, reason=words)

    def _push_one_out(self, links: list[Link]) -> None:
        count = len(self._newcomers)
        while len(self._newcomers) == count:
            newcomer = self._newcomers.last_choice()
            if newcomer.handshake is None:
                self._advance(newcomer, links)  # it may have said something since it came
                if newcomer.handshake is not None:
                    continue
            if newcomer.is_here:
                self._forget(newcomer)

    def _forget(self, newcomer: Newcomer, close: bool = True) -> None:
        newcomer.is_here = False
        if newcomer.is_watched:
            self.selector.unregister(newcomer.fd)
        if newcomer.is_heir:
            self._heirs.discard(newcomer)
        else:
            self._newcomers.remove(newcomer)
        if close:
            newcomer.sock.close()

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._on_close()
            for newcomer in [*self._newcomers, *self._heirs]:
                self._forget(newcomer)
            self._sock.close()
            self.selector.close()
            self._spare.close()
