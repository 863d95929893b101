"""How another terminal finds the drivers of its user on this machine, and asks them.

A driver listens at a unix socket in the abstract namespace, which leaves nothing behind however the driver ends. The
socket's name begins with `_PREFIX` and the driver's pid, and the kernel lists all names in /proc/net/unix. The kernel
also tells each side the user of the other, and the transport refuses any other user's before a byte is read. So there
is nothing to prove on top, and the secret is no secret.

A question is a frame of JSON, and so is the answer: a driver and an asker of different versions do not unpickle each
other's objects. A driver that does not answer, or not in a way that can be read, is looked at from outside. A
debugger's terminal asks for a `Conversation`: such frames both ways, until one side ends it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from attrs import define

from monarch.core.gateway import Gateway
from monarch.errors import AuthenticationError, MonarchError
from monarch.log import get_logger
from monarch.mesh.inspector import LIMIT_S, from_outside
from monarch.mesh.snapshot import Snapshot
from monarch.transports import registry
from monarch.transports.base import Link, Listener
from monarch.wake import Wake

log = get_logger("monarch.console")

_PREFIX: Final = "monarch-driver-"
_SECRET: Final = b"same user"
_LINE: Final = re.compile(rf"@({_PREFIX}(\d+)-[0-9a-f]+)$", re.MULTILINE)
_DIAL_S: Final = 1.0
_GREETING_S: Final = 0.5


class Console:
    """The driver's side."""

    def __init__(
        self, gateway: Gateway, take: Callable[[bool], Snapshot], attend: Callable[[Conversation], None]
    ) -> None:
        self._gateway, self._take, self._attend = gateway, take, attend
        self._listener: Listener | None = None

    @property
    def url(self) -> str:
        """Where it listens; empty while it does not."""
        return self._listener.url if self._listener is not None else ""

    @property
    def is_open(self) -> bool:
        """Whether it can be found."""
        return self._listener is not None

    def open(self) -> None:
        """Be found from now on; where that is not possible, say so in the log."""
        url = f"ipc://@{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self._listener = registry.get("ipc").listen(url, _SECRET)
        except (OSError, MonarchError) as error:
            log.info("console.unavailable", reason=str(error))
            return
        self._gateway.add_pollable(self._listener.fileno(), self._accept)

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._gateway.remove_pollable(listener.fileno())
            listener.close()

    def _accept(self) -> None:
        listener = self._listener
        for link in listener.accept_nowait() if listener is not None else ():
            threading.Thread(target=self._serve, args=(link,), name="monarch-console", daemon=True).start()

    def _serve(self, link: Link) -> None:
        try:
            question = _receive(link, LIMIT_S)
            if question.get("debug"):
                self._attend(Conversation(link))
                return
            _send(link, self._take(bool(question["stacks"])).to_json())
            link.close(LIMIT_S)
        except Exception as error:
            log.info("console.failed", peer=link.peer, error=str(error))
            link.abort()


class Source(Protocol):
    """What a conversation also reads from."""

    def fileno(self) -> int:
        """A descriptor to poll, or -1 for now."""
        ...

    def read(self) -> None: ...


class Conversation:
    """Frames of JSON both ways. `say` and `end` from any thread; `run` on one, which alone uses the link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._unsaid: deque[dict[str, Any]] = deque()
        self._ending = False
        self._bell = Wake()  # rings when there is something to say

    def say(self, facts: dict[str, Any]) -> None:
        """Never blocks."""
        self._unsaid.append(facts)
        self._bell.set()

    def end(self) -> None:
        """Say what is unsaid, and no more."""
        self._ending = True
        self._bell.set()

    def run(self, hear: Callable[[dict[str, Any]], None], source: Source | None = None) -> None:
        """Returns when either side has ended it. Reads from `source` meanwhile."""
        link = self._link
        try:
            while not (self._ending and not self._unsaid):
                poll = select.poll()
                poll.register(self._bell, select.POLLIN)
                poll.register(link.fileno(), select.POLLIN | (select.POLLOUT if link.blocked else 0))
                if source is not None and source.fileno() >= 0:
                    poll.register(source.fileno(), select.POLLIN)
                ready = [fd for fd, _ in poll.poll()]
                if source is not None and source.fileno() in ready:
                    source.read()
                self._bell.clear()
                for frame in link.recv_nowait():
                    hear(json.loads(b"".join(frame)))
                if link.flush_nowait():
                    frames = [[json.dumps(facts).encode()] for facts in list(self._unsaid)]
                    for _ in range(link.send_nowait(frames) if frames else 0):
                        self._unsaid.popleft()
            link.close(_DIAL_S)
        except MonarchError:  # the other side is gone
            link.abort()
        finally:
            self._bell.close()


@define(frozen=True)
class Found:
    """A driver of this machine, of whatever user."""

    pid: int
    url: str


def found(listing: str | None = None) -> list[Found]:
    """The drivers that `listing`, the text of /proc/net/unix, has, by pid."""
    if listing is None:
        try:
            listing = Path("/proc/net/unix").read_text()
        except OSError:
            return []
    names = {match[1]: int(match[2]) for match in _LINE.finditer(listing)}  # connections have their listener's name
    return sorted((Found(pid, f"ipc://@{name}") for name, pid in names.items()), key=lambda each: each.pid)


def ask(driver: Found, with_stacks: bool) -> Snapshot | None:
    """What a driver says of its program; None when it has ended, or is another user's."""
    transport = registry.get("ipc")
    try:
        link = transport.dial(driver.url, _SECRET, _DIAL_S)
    except (ConnectionRefusedError, AuthenticationError):
        return None
    except (TimeoutError, MonarchError, OSError):
        return _from_outside(driver, with_stacks)
    try:
        _send(link, {"stacks": with_stacks})
        return Snapshot.from_json(_receive(link, LIMIT_S))
    except (TimeoutError, MonarchError, OSError, TypeError, LookupError, ValueError):
        return _from_outside(driver, with_stacks)
    finally:
        link.abort()


def converse(driver: Found) -> Conversation | None:
    """Talk to the debugger of a driver; None when it has ended, or is another user's."""
    try:
        link = registry.get("ipc").dial(driver.url, _SECRET, _DIAL_S)
    except (TimeoutError, MonarchError, OSError):
        return None
    _send(link, {"debug": True})
    return Conversation(link)


def _from_outside(driver: Found, with_stacks: bool) -> Snapshot | None:
    if not os.path.exists(f"/proc/{driver.pid}"):
        return None
    return from_outside(driver.pid, with_stacks, lambda: not _greets(driver))


def _greets(driver: Found) -> bool:
    """Whether it answers by now."""
    try:
        registry.get("ipc").dial(driver.url, _SECRET, _GREETING_S).abort()
    except TimeoutError:
        return False
    except (MonarchError, OSError):
        pass
    return True


def ask_all(with_stacks: bool, pid: int | None = None) -> list[Snapshot]:
    """All drivers of this user, or the one with that pid. They are asked at once."""
    drivers = [driver for driver in found() if pid in (None, driver.pid)]
    answers: list[Snapshot | None] = [None] * len(drivers)

    def put(at: int) -> None:
        answers[at] = ask(drivers[at], with_stacks)

    threads = [threading.Thread(target=put, args=(at,)) for at in range(len(drivers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answer for answer in answers if answer is not None]


def _send(link: Link, facts: dict[str, Any]) -> None:
    """One frame on a fresh link, which takes it whole; `close` waits until all of it has left."""
    link.send_nowait([[json.dumps(facts).encode()]])


def _receive(link: Link, limit_s: float) -> dict[str, Any]:
    """Raises: TimeoutError, TransportError, ProtocolError."""
    deadline_s = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    while not (frames := link.recv_nowait()):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1e3):
            raise TimeoutError(f"{link.peer} did not answer within {limit_s:g} s")
    facts: dict[str, Any] = json.loads(b"".join(frames[0]))
    return facts
