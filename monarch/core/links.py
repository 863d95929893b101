"""The links of a process: those that have not said hello, those that carry a session, and the end of each, once.

A new link, dialed or accepted, is watched until its first frames are here; whoever expects it takes these (`Hear`), and
the link with `carry`, or drops it. What breaks before that, stays silent, or makes no sense, is dropped here.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from monarch.core.poller import Poller
from monarch.core.protocol import refusal
from monarch.errors import ProtocolError, TransportError
from monarch.log import Sparing, get_logger
from monarch.transports.base import Frame, Link, Listener

log = get_logger("monarch.links")

Hear = Callable[[Link, list[Frame]], None]
"""Takes the first frames of a link, which it does not let go of if it raises TransportError, ProtocolError or
ValueError."""

_LAST_WORDS_LIMIT_S: Final = 1.0


class Refused(Protocol):
    def __call__(self, *, silent: bool, reason: str = "") -> None:
        """A link that was dialed came to nothing; `silent`: no hello came in time; `reason`: what the other said."""
        ...


class Links:
    """See the module. Events come on the thread that polls; everything may be called from any thread."""

    def __init__(self, poller: Poller, hello_limit_s: float) -> None:
        self._poller, self._hello_limit_s = poller, hello_limit_s
        self._fds: dict[Link, int] = {}  # of every link that is watched: it may be closed, and another's, before
        self._sparing = Sparing(log)
        self._new: dict[Link, Refused | None] = {}  # those whose hello is awaited, and who hears of a refusal

    def __len__(self) -> int:
        return len(self._fds)

    @property
    def new(self) -> int:
        """How many have not said hello."""
        return len(self._new)

    def accept(self, listener: Listener, hear: Hear) -> None:
        """Those who have dialed `listener`."""
        for link in listener.accept_nowait():
            self.expect(link, hear)
            self._on_event(link, hear)

    def adopt(self, link: Link, hear: Hear, frames: list[Frame]) -> None:
        """One that others have accepted, who have read the first frames."""
        self.expect(link, hear)
        self._hear(link, hear, frames)

    def expect(self, link: Link, hear: Hear, refused: Refused | None = None) -> None:
        """A new link; `refused`: we dialed, and who hears of it if it comes to nothing.

        Raises:
            OSError, ValueError: it cannot be polled.
        """
        self._new[link] = refused
        self._fds[link] = fd = link.fileno()
        self._poller.register(fd, lambda _: self._on_event(link, hear), link.ring)
        if link.blocked:
            self._poller.watch(fd, True)
        known = weakref.ref(link)  # one that has ended before goes at once, and its memory with it
        self._poller.call_later(self._hello_limit_s, lambda: self._drop_if_silent(known()))

    def _on_event(self, link: Link, hear: Hear) -> None:
        try:
            if link.blocked:
                link.flush_nowait()
            frames = link.recv_nowait()
        except (TransportError, ProtocolError) as error:
            log.debug("link.refused", peer=link.peer, error=str(error))
            self.drop(link)
            return
        if frames:
            self._hear(link, hear, frames)

    def _hear(self, link: Link, hear: Hear, frames: list[Frame]) -> None:
        try:
            hear(link, frames)
        except TransportError as error:
            log.debug("link.refused", peer=link.peer, error=str(error))
            self.drop(link)
        except (ProtocolError, ValueError) as error:
            place = re.sub(r":?\d+(?= at )", "", link.peer)  # the same for the next connection from there
            self._sparing.warning("link.refused", (place, str(error)), peer=link.peer, error=str(error))
            self.refuse(link, str(error))

    def carry(self, link: Link, on_event: Callable[[int], None]) -> None:
        """It has said hello: `on_event` hears from now on what the poller has of it."""
        self._new.pop(link, None)
        self._poller.replace(link.fileno(), on_event)

    def _drop_if_silent(self, link: Link | None) -> None:
        if link is not None and link in self._new:
            log.info("link.silent", peer=link.peer, limit_s=self._hello_limit_s)
            self.drop(link, silent=True)

    def drop(self, link: Link, *, silent: bool = False, reason: str = "") -> None:
        """End a link, once: its descriptor may soon be another's."""
        refused = self.release(link)
        link.abort()
        if refused is not None:
            refused(silent=silent, reason=reason)

    def release(self, link: Link) -> Refused | None:
        """Watch it no more; who is to hear that it came to nothing, if it had not come to anything yet."""
        fd = self._fds.pop(link, None)
        if fd is not None:
            self._poller.unregister(fd)
        return self._new.pop(link, None)

    def refuse(self, link: Link, reason: str) -> None:
        """End one that is not wanted, and say why to who dialed it."""
        if self._new.get(link) is not None:
            self.drop(link, reason=reason)
            return
        self.release(link)

        def end() -> None:
            try:
                link.send_nowait([refusal(reason)])
            except TransportError:
                link.abort()
            else:
                link.close(_LAST_WORDS_LIMIT_S)

        # On a thread, because an abort could overtake the words.
        threading.Thread(target=end, name="monarch-refuse", daemon=True).start()

    def abort(self) -> None:
        """End all of them; nothing is polled any more."""
        for link in list(self._fds):
            link.abort()
        self._fds.clear()
        self._new.clear()
