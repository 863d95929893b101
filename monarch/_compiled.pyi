from collections import deque
from collections.abc import Callable, Mapping, Sequence, Sized
from threading import Lock
from typing import Protocol

from monarch.compiled import Targets
from monarch.core.driver import Signal
from monarch.core.envelope import Envelope
from monarch.core.held import Held, NothingHeld
from monarch.core.spin import Spin
from monarch.transports.base import Buffer, Frame
from monarch.wake import Wake

VERSION: int

class Writer:
    def __init__(self, memory: object, keep: object, bell: int, /) -> None:
        """`bell`: that of the reader's process, which `keep` is to keep open."""
    @property
    def position(self) -> int: ...
    after: int
    def push(self, frames: Frames, /) -> int: ...
    def rouse(self) -> bool:
        """Wake the reader, if it sleeps. True: it sleeps, and polls the stream alone."""

class Reader:
    attended: bool
    find: Callable[[bytes], Buffer]
    """The part that a description stands for. Called once for each."""
    def __init__(self, memory: object, keep: object, /) -> None: ...
    @property
    def position(self) -> int: ...
    def pop(self, after: int, /) -> list[Frame]: ...
    def carry(self, session: object, /) -> None: ...
    def deliver(self, take: Callable[[Envelope], object], proc: int, now_s: float, /) -> bool:
        """Give to `take` the messages of the session that are there now, as long as each is the next and for that
        process: as `pop`, with `Session.took` behind each. Whether there is nothing else to do: otherwise, look with
        `pop`, and at what the session owes.

        Raises:
            Exception: of `take`. The message counts as taken, those behind it are still there.
            BaseException: likewise, of a message that does not count.
        """

class Session:
    """As `core.protocol` has it in Python."""

    sent: int
    received: int
    unacked_bytes: int
    delivered: int
    ack_is_timed: bool
    room_is_awaited: bool
    @property
    def unacked(self) -> list[tuple[int, list[Buffer], int]]: ...
    @property
    def owes_ack(self) -> bool: ...
    def __init__(self, ack_every_n: int = 1000, ack_interval_s: float = 0.5, ack_at_bytes: int = 4 << 20) -> None: ...
    def keep(self, parts: list[Buffer], size_bytes: int, /) -> int: ...
    def told(self) -> int: ...
    def accept(self, frame: Frame, /) -> Frame | None: ...
    def took(self, size_bytes: int, now_s: float, /) -> None: ...
    def acknowledge(self, number: int, /) -> None: ...
    def abandon(self) -> None: ...
    def ack_due(self, now_s: float, /) -> bool | None: ...

class Lane:
    """From a session into the ring of its link. While it is `open`, all that was numbered before is on its way."""

    open: bool
    def __init__(self, writer: Writer, session: object, fd: int, most_bytes: int, /) -> None: ...
    def close(self) -> None: ...

class Delivery:
    """Calls `take`, or, for a ring that delivers, what that would call in the end: see `compiled.delivery`."""

    def __init__(
        self, take: Callable[[Envelope], None], actors: Mapping[int, object], ports: Mapping[int, object], /
    ) -> None: ...
    def __call__(self, message: Envelope, /) -> None: ...

# Bases of `Signal`, `Wake` and `Spin`, of the same names, are here, too: see `_Signal`, `_Wake` and `_Spin` there.

class Lead:
    """How a thread waits and delivers meanwhile; see `Poller.lead_by`.

    Attributes:
        readers: the rings that it looks at.
        take: takes the messages for the process `proc`; None: nobody leads.
        first: as long as there is something in it, nobody leads.
    """

    readers: tuple[Reader, ...]
    take: Callable[[Envelope], object] | None
    proc: int
    first: Sized
    def __init__(
        self,
        epoll: int,
        bell: int,
        waker: Wake,
        byte: bytearray,
        spin: Spin,
        timers: list[tuple[float, int, Callable[[], None]]],
        first: Sized,
        on_failure: Callable[[BaseException], object],
        /,
    ) -> None:
        """
        Args:
            bell: an eventfd that `epoll` has, edge-triggered.
            waker: what others wake the leader by; it sets `byte` while that looks.
            timers: a heap; when the first is due, in seconds of the monotonic clock, somebody else does it.
            on_failure: hears what a delivery raised, once the lock is released.
        """
    def until(
        self, lock: Lock, signal: Signal, held: Held | NothingHeld, calls_only: bool, timeout_s: float, /
    ) -> bool | None: ...

class Inbox:
    """As `core.mailbox` has it in Python."""

    calls: deque[Envelope]
    signal: Signal
    message: type[Envelope]
    come_bytes: int
    weigh_at_bytes: int
    closed: object | None
    is_mixed: bool

def post(
    targets: Targets,
    parts: list[Buffer],
    chain: bytes,
    kind: int,
    flags: int,
    ttl: int,
    dst_actor: int,
    dst_port: int,
    src_proc: int,
    src_actor: int,
    reply_port: int,
    /,
) -> int:
    """Number a message, and put it into the rings of all `targets`, or into the mailbox of the only one, and wake who
    waits for it, in one step: no handler of a signal runs between, and no other thread before all is in its place.

    Returns:
        `compiled.SENT`, or `FULL`; or 0, and nothing is sent or numbered: to one of them it has to go another way.
    """

class Frames(Protocol):
    """A list or a tuple of lists or tuples. A part that is `(description,)` lies elsewhere."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: int, /) -> Sequence[Buffer | tuple[bytes]]: ...

def look(readers: tuple[Reader, ...], epoll: int, time_s: float, bell: bytearray, /) -> tuple[list[int] | None, float]:
    """Look at the rings, at the bell, and now and then at what `epoll` has, until there is something or the time is
    over. The places of the readers that have something, or None where there is nothing at all; and the seconds that the
    longest round of looking took. The readers are awake from now on.

    Args:
        epoll: its descriptor, or -1.
        bell: one byte. Another thread of this process that wants the one which looks sets it to other than 0.
    """

def sleep(
    readers: tuple[Reader, ...], events: tuple[tuple[int, int], ...], epoll: int, bell: int, timeout_s: float | None, /
) -> tuple[list[tuple[int, int]], float | None]:
    """Those of the `events` whose readers have something, or else, with all of them asleep meanwhile, what `epoll` has
    within the time, as (descriptor, mask). The second is how long it slept, in seconds; None: it did not. The readers
    are awake from then on: whoever pushes while these events are dealt with need not wake them. May return early.

    Args:
        bell: an eventfd that `epoll` has, edge-triggered; whoever rings it has pushed to one of the readers.

    Raises:
        ValueError: the epoll is closed.
        BaseException: what the handler of a signal raised.
    """

def ring_bell(fd: int, /) -> bool:
    """Put a bell into the stream of that socket: a frame of no parts. False, and nothing is sent: there is no room."""

def swap(memory: object, at: int, old: int, new: int, /) -> bool:
    """Whether `memory[at]` was `old`, and is `new` now. Of all processes that do so at a time, one does.

    Raises: IndexError.
    """
