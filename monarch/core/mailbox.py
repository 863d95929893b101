"""An actor's queue: messages of each sender in the order in which they were sent, and control messages first.

Senders number their messages for other processes, per destination, before they fan out (`Flag.SEQUENCED`), so that the
order holds over any route; a message that overtook another waits here for it. Those of this process have one way only,
and no numbers. The compiled part puts both in itself, in one step with the waking (`compiled.post`, `delivery`), where
they are next, and as long as the mailbox is open and need not be weighed.

Calls are served as they come. Where more than `FEW` of several senders are queued, these take turns, until none is
left: who sends one call does not wait behind all that others have piled up.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

from monarch import compiled
from monarch.core.driver import Signal
from monarch.core.envelope import CallKey, Envelope, Flag
from monarch.core.held import undisturbed
from monarch.core.monitor import Down

_SEQUENCED: Final = Flag.SEQUENCED
_SKIP: Final = Flag.SKIP
FEW: Final = 16
"""To let senders take turns takes 1 us for each call; a small one takes 7 in all."""
_NEVER: Final = 1 << 62  # bytes come into no mailbox


class _Inbox:
    """What the compiled part knows of a mailbox; so it is there, too.

    Attributes:
        calls: those that can be taken now.
        message: their type.
        come_bytes: what has come since the last `weigh`, and what it found; an upper limit of what is queued. It grows
            at any time.
        weigh_at_bytes: with more, who puts a call in has to weigh.
        closed: why nothing is accepted any more, or None.
        is_mixed: a call came while there was one of another sender; who takes the last one out may forget that.
    """

    __slots__ = (
        "_behind",
        "_expected",
        "_last_actor",
        "_last_proc",
        "_waiting",
        "calls",
        "closed",
        "come_bytes",
        "is_mixed",
        "message",
        "signal",
        "weigh_at_bytes",
    )

    calls: deque[Envelope]
    message: type[Envelope]
    signal: Signal
    come_bytes: int
    weigh_at_bytes: int
    closed: Down | None
    is_mixed: bool
    _last_proc: int  # and actor: the sender of what came last
    _last_actor: int
    _expected: dict[tuple[int, int], int]  # (process, actor) -> the number of its next message
    _waiting: dict[tuple[int, int], dict[int, Envelope]]  # those that came before others of their senders
    _behind: list[tuple[tuple[int, int], int, Callable[[], None]]]  # what is to be done once messages are here


if not TYPE_CHECKING and compiled.part is not None:
    _Inbox = compiled.part.Inbox


class Mailbox(_Inbox):
    """`put` may be called from any thread; the actor's takes from `calls`, where another may have withdrawn what was
    there a moment ago, or, where `in_turns`, by `take_in_turn`. After `close`, nothing more goes in."""

    __slots__ = ("_lock", "_sealed", "controls", "in_turns", "spared", "told_full")

    def __init__(self, signal: Signal, weigh_at_bytes: int = _NEVER) -> None:
        self.signal, self.message = signal, Envelope
        self.calls = deque()
        self.in_turns: OrderedDict[tuple[int, int], deque[Envelope]] = OrderedDict()
        """What came before all `calls`, by sender; whose turn is next first."""
        self.come_bytes, self.weigh_at_bytes = 0, min(weigh_at_bytes, _NEVER)
        self._lock = threading.Lock()
        self.is_mixed, self._last_proc, self._last_actor = False, 0, 0
        self.controls: deque[Callable[[], None]] = deque()
        """What the runtime is to do on the actor's thread."""
        self.closed = None
        self._sealed = False
        self._expected, self._waiting, self._behind = {}, {}, []
        self.told_full: dict[int, int] = {}
        """The processes that are to hear of room here (`backpressure`), and by which (`Envelope.via`). While there are
        some, takers `lighten`."""
        self.spared: dict[int, int] = {}
        """The processes that may send on while it is full: how many bytes yet."""

    def put(self, envelope: Envelope) -> Down | None:
        """Queue a call; returns why it is refused, if it is."""
        size_bytes = size_of(envelope)
        with self._lock:
            if self.closed is not None:
                return self.closed
            flags = envelope.flags
            if flags & _SEQUENCED:
                sender, seq = (envelope.src_proc, envelope.src_actor), envelope.seq
                expected = self._expected.get(sender, 0)
                if seq != expected:
                    if seq > expected:  # else it is here already
                        self._waiting.setdefault(sender, {})[seq] = envelope
                        self.come_bytes += size_bytes  # without a call in the line: others add to it, too
                    return None
                if not flags & _SKIP:
                    self._append(envelope)
                    self.come_bytes += size_bytes
                expected += 1
                if self._waiting and (waiting := self._waiting.get(sender)):
                    while (late := waiting.pop(expected, None)) is not None:
                        if not late.flags & _SKIP:
                            self._append(late)
                        expected += 1
                    if not waiting:
                        del self._waiting[sender]
                self._expected[sender] = expected
            else:
                self._append(envelope)
                self.come_bytes += size_bytes
        self.signal.notify()
        if self._behind:
            self._run_due()
        return None

    def _append(self, call: Envelope) -> None:
        proc, actor = call.src_proc, call.src_actor
        if actor != self._last_actor or proc != self._last_proc:
            self._last_proc, self._last_actor = proc, actor
            if self.calls:
                self.is_mixed = True
        self.calls.append(call)

    def when_at(self, sender: tuple[int, int], seq: int, action: Callable[[], None]) -> None:
        """Run `action` once the messages of a sender (process, actor) before that number are here."""
        with self._lock:
            self._behind.append((sender, seq, action))
        self._run_due()

    def _run_due(self) -> None:
        with self._lock:
            due = [each for each in self._behind if self.closed or self._expected.get(each[0], 0) >= each[1]]
            self._behind = [each for each in self._behind if each not in due]
        for _, _, action in due:
            action()

    def control(self, action: Callable[[], None]) -> bool:
        """Queue something that the runtime does on the actor's thread, before calls. False once that is over."""
        with self._lock:
            if self._sealed:
                return False
            self.controls.append(action)
        self.signal.notify()
        return True

    def take_control(self, *, last: bool = False) -> Callable[[], None] | None:
        """The oldest, or None; with `last`, None also means that no more are accepted."""
        if self.controls or not last:
            return self.controls.popleft() if self.controls else None
        with self._lock:
            self._sealed = not self.controls
        return self.take_control()

    def take_in_turn(self) -> Envelope | None:
        """The next call of the sender whose turn it is; None where all have been withdrawn.

        For the actor's thread, once there are more than `FEW` of several, and as long as there are some `in_turns`.
        """
        lines, calls = self.in_turns, self.calls
        with undisturbed(), self._lock:  # the handler of a signal may send to this actor, cancel, and raise
            for _ in range(len(calls)):
                each = calls.popleft()
                sender = each.src_proc, each.src_actor
                line = lines.get(sender)
                if line is None:
                    line = lines[sender] = deque()
                line.append(each)
            if not lines:
                return None
            sender, line = next(iter(lines.items()))
            message = line.popleft()
            if not line:
                del lines[sender]
                self.is_mixed = bool(lines or calls)
            elif len(lines) > 1:
                lines.move_to_end(sender)
            return message

    def _queued(self) -> Iterator[Envelope]:
        """Those that can be taken now, with the lock; of each sender in their order."""
        return chain(*self.in_turns.values(), list(self.calls))

    def place(self, call: CallKey) -> int | None:
        """How many are ahead of a call in the queue; None when it is not there."""
        with self._lock:
            calls = list(self.calls)
            by_sender = {sender: list(line) for sender, line in self.in_turns.items()}
            if not by_sender and not (self.is_mixed and len(calls) > FEW):
                return next((at for at, each in enumerate(calls) if each.call == call), None)
        for each in calls:
            by_sender.setdefault((each.src_proc, each.src_actor), []).append(each)
        lines = list(by_sender.values())
        for turn, line in enumerate(lines):
            for at, each in enumerate(line):
                if each.call == call:
                    before = sum(min(len(other), at + 1) for other in lines[:turn])
                    return before + at + sum(min(len(other), at) for other in lines[turn + 1 :])
        return None

    def withdraw(self, call: CallKey) -> Envelope | None:
        """Take a call out of the queue; None when it is not there (any more). From any thread."""
        proc, port = call
        with self._lock:
            for each in self._queued():
                if each.reply_port == port and each.src_proc == proc:
                    return each if self._remove(each) else None
            for waiting in self._waiting.values():
                for late in waiting.values():
                    if late.call == call and not late.flags & Flag.SKIP:
                        late.flags |= Flag.SKIP  # its number still counts
                        return late
        return None

    def _remove(self, call: Envelope) -> bool:
        sender = call.src_proc, call.src_actor
        line = self.in_turns.get(sender)
        if line is not None and call in line:
            line.remove(call)
            if not line:
                del self.in_turns[sender]
            return True
        try:
            self.calls.remove(call)
        except ValueError:  # the actor was quicker
            return False
        return True

    def close(self, down: Down) -> None:
        """Refuse what comes from now on, with `down`; what is queued stays, to be drained."""
        with self._lock:
            if self.closed is None:
                self.closed = down
        self.signal.notify()

    def drain(self) -> list[Envelope]:
        """Everything that is left, also what waits for an earlier message."""
        with self._lock:
            left = list(self._queued())
            self.calls.clear()
            self.in_turns.clear()
            for waiting in self._waiting.values():
                left.extend(late for late in waiting.values() if not late.flags & Flag.SKIP)
            self._waiting.clear()
        return left

    def forget_sender(self, proc_key: int) -> None:
        """A process is gone: nothing more comes from its actors."""
        with self._lock:
            for known in (self._expected, self._waiting):
                for sender in [s for s in list(known) if s[0] == proc_key]:  # the compiled part adds some meanwhile
                    del known[sender]
            self.told_full.pop(proc_key, None)
            self.spared.pop(proc_key, None)
            self._behind = [
                (sender, 0 if sender[0] == proc_key else seq, action) for sender, seq, action in self._behind
            ]
        self._run_due()

    def weigh(self) -> Counter[int]:
        """What is queued, in bytes, roughly, by the sender's process: looks at every message."""
        found_bytes: Counter[int] = Counter()
        with self._lock:
            before_bytes = self.come_bytes
            late = [each for waiting in self._waiting.values() for each in waiting.values()]
            for each in chain(self._queued(), late):
                found_bytes[each.src_proc] += size_of(each)
            self.come_bytes += found_bytes.total() - before_bytes  # what has come meanwhile stays
        return found_bytes

    def lighten(self, size_bytes: int) -> int:
        """So much was taken out; returns what is left, at the most."""
        with self._lock:
            self.come_bytes = self.come_bytes - size_bytes if self.calls or self.in_turns else 0
            return self.come_bytes

    def __len__(self) -> int:
        """How many calls can be taken now."""
        with self._lock:
            return len(self.calls) + sum(map(len, self.in_turns.values()))


_MESSAGE_BYTES: Final = 1024
"""Beside its parts."""


def size_of(envelope: Envelope) -> int:
    """What a queued call takes, in bytes, about."""
    return _MESSAGE_BYTES + sum(map(len, envelope.parts))
