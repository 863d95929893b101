"""What a transport is: links that carry frames between two processes. It knows bytes and URLs, and no actors.

A transport offers `listen` and `dial`; both give `Link`s, and only after the peer proved that it knows the job's
secret (`transports.auth`). Nothing a link does blocks, but `close`; whoever holds a link drives it, one thread at a
time for receiving and one at a time for sending (the two may be different threads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from attrs import define

if TYPE_CHECKING:
    from monarch.compiled import Lane, Reader

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes. `memoryview`s are one-dimensional, of format B."""


BIG_BYTES: Final = 96 << 10
"""From here on a part gets memory of its own, which the receiver may write to. Below, a few more copies cost less than
one more part, with its owner: an echo of 90 KiB takes 97 us, and one of 100 KiB 165."""


class Missing(bytes):
    """Stands, empty, for a part of `size_bytes` that arrived where there was `lacking` for it, in words. The frame
    arrives all the same, so that those behind it do; who decodes the message says what it lacks."""

    size_bytes: int
    lacking: str

    @classmethod
    def of(cls, size_bytes: int, lacking: str = "no memory") -> Missing:
        self = cls()
        self.size_bytes, self.lacking = size_bytes, lacking
        return self


Frame = list[Buffer]
"""What a link delivers whole: the buffers (parts) it was gathered from, with their edges kept."""


@define(frozen=True)
class Viability:
    """Whether a transport can work on this machine, and why not."""

    ok: bool
    reason: str = ""


class Link(Protocol):
    """An ordered, lossless, two-way stream of frames between two processes."""

    @property
    def peer(self) -> str:
        """Where the other side is, for people: a URL or a description."""
        ...

    @property
    def ring(self) -> Reader | None:
        """Where small frames arrive without a signal at the descriptor, for a poller that looks there itself before it
        sleeps (see `transports.ring`), and sets `attended`. None: there is no such thing."""
        ...

    @property
    def blocked(self) -> bool:
        """True after `send_nowait` or `flush_nowait` left something for which there was no room. While it is true,
        whoever polls `fileno()` asks for writability too, and calls `flush_nowait` whenever the descriptor is signalled
        in any way: some links are signalled as writable, others as readable, when there is room again."""
        ...

    @property
    def lane(self) -> Lane | None:
        """A shorter way for small messages of the session that this link carries: see `monarch.compiled`. It ends with
        the link. None: there is none, or none yet."""
        ...

    def carry(self, session: object, most_bytes: int) -> None:
        """This link carries `session`, one of `core.protocol`, and nothing else, from now on. `recv_nowait` may give
        its messages in place of their frames; who has delivered one says so (`Session.took`).

        Args:
            most_bytes: who sends on the lane is told when more than so much is not acknowledged.
        """
        ...

    def deliver(self, take: Callable[[Any], None], proc: int, now_s: float) -> bool:
        """Give to `take` the messages of the carried session that have arrived and are for that process, oldest first,
        where this link makes messages, each with its `Session.took` behind it. Whether there is nothing else to do;
        else `recv_nowait` has the rest, and the session is to be looked at: it may owe an acknowledgement, or somebody
        waits for room.

        Raises:
            Exception: of `take`; its message counts as taken, and `recv_nowait` has the rest.
            BaseException: likewise, of a message that does not count.
        """
        ...

    def send_nowait(self, frames: Sequence[Sequence[Buffer]]) -> int:
        """Take as many whole frames, in order, as there is room for, and return how many were taken.

        A taken frame may be sent in pieces later, from `flush_nowait`; its buffers belong to the link until then and
        must not change. Frames taken in one call travel together where the transport gains by it.

        Raises:
            LinkSevered, LinkClosed: nobody will receive what has not been taken, and maybe not what has.
        """
        ...

    def flush_nowait(self) -> bool:
        """Go on with frames taken before. True when none is left in this link."""
        ...

    def recv_nowait(self) -> list[Frame]:
        """All frames that have arrived whole, oldest first; an empty list when there are none.

        The receiver owns the buffers. A part of `BIG_BYTES` or more is writable memory that nothing else refers to.

        Raises:
            LinkClosed: the peer closed, and all its frames have been returned by earlier calls.
            LinkSevered: the connection broke, likewise.
            RemoteProtocolError: the peer sent what no frame of ours looks like, likewise; abort the link.
        """
        ...

    def fileno(self) -> int:
        """A descriptor for epoll; it stays the same. Readable when `recv_nowait` or `flush_nowait` has work."""
        ...

    def close(self, timeout_s: float = 5.0) -> bool:
        """Deliver what was taken, say goodbye, and end. Blocks up to `timeout_s`; False when it had to give up."""
        ...

    def abort(self) -> None:
        """End at once; what is in flight is lost and the peer sees a severed link."""
        ...


def carry_anything(link: Link, session: object, most_bytes: int) -> None:
    """`Link.carry` of links that do not look at what they carry."""


def deliver_nothing(link: Link, take: Callable[[Any], None], proc: int, now_s: float) -> bool:
    """`Link.deliver` of such."""
    return False


class Listener(Protocol):
    """Accepts links at an address. Newcomers are authenticated inside; a stranger never becomes a link."""

    @property
    def url(self) -> str:
        """The address to dial, complete: a port 0 or an empty name that was asked for is filled in."""
        ...

    def fileno(self) -> int:
        """A descriptor for epoll, readable when `accept_nowait` has work (progress of a handshake counts)."""
        ...

    @property
    def starved(self) -> OSError | None:
        """Why the last that could have become a link did not: this process had no descriptor left for it."""
        ...

    def accept_nowait(self) -> list[Link]:
        """Go on with all handshakes, and return the links that became ready."""
        ...

    def hand_down(self) -> list[int]:
        """Make a link without being dialed, for a process that inherits its other end. Thread-safe.

        Returns:
            Descriptors for `Inherit`, which the caller owns; nothing is proved over them, for nobody else has them.
            Empty: there is no such way.

        Raises: OSError.
        """
        ...

    def close(self) -> None:
        """Accept no more, drop unfinished handshakes, and remove what the listener left in the file system."""
        ...


class Inherit(Protocol):
    def __call__(self, fds: Sequence[int], url: str, timeout_s: float) -> Link:
        """The other end of a link that a listener has handed down, which owns `fds`. Blocks.

        Args:
            url: who is there, for errors.

        Raises: TransportError, TimeoutError, OSError, as `Transport.dial`.
        """
        ...


class Memory(Protocol):
    """Memory from which a transport passes parts on without another copy."""

    limit: Callable[[], int]
    """How much of it there may be, in bytes: asked whenever more is needed."""

    def allocate(self, size_bytes: int, receivers: int = 1) -> memoryview | None:
        """Writable memory, not zeroed, for a part that will be sent to so many receivers. None: put it anywhere.

        What is sent to one receiver belongs to it as soon as it has arrived: write nothing to it after sending.
        """
        ...


class Transport(Protocol):
    """A way to connect two processes."""

    @property
    def scheme(self) -> str: ...

    @property
    def memory(self) -> Memory | None:
        """Where large parts are best put, or None: anywhere."""
        ...

    @property
    def inherit(self) -> Inherit | None:
        """None: its listeners hand nothing down."""
        ...

    def viability(self) -> Viability:
        """Can it work on this machine?"""
        ...

    def listen(self, url: str, secret: bytes) -> Listener:
        """Raises: NotViable; OSError with the address in it."""
        ...

    def dial(self, url: str, secret: bytes, timeout_s: float) -> Link:
        """Connect and authenticate, blocking. Thread-safe.

        Raises:
            ConnectionRefusedError: nobody listens there. On one host that is proof that the listener is gone.
            AuthenticationError: somebody else listens there.
            TransportError, TimeoutError: it did not work; the text has the address.
        """
        ...
