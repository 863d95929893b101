"""Backpressure: who sends to an actor faster than it serves has to wait, until there is room in its mailbox.

Theory of operation. A mailbox takes whatever comes; the limit is kept by those who send. With the first call that makes
it larger than `mailbox_bytes`, the sender's process is told that it is FULL, and once it is down to half of that, that
there is ROOM. In between, whoever has sent there waits, in the adverb, behind its message:

```
    process of the sender                       process of the actor
        broadcast ────────── call ─────────────►  mailbox: over the limit
        waits      ◄───────── FULL ─────────────
           :                                      serves
        goes on    ◄───────── ROOM ─────────────  half of the limit is left
```

Who has less there than its share, the limit divided by the processes that have sent what is queued, is not told, and
sends on up to that: what others have piled up is none of its business.

Both news go the way that the call came: who casts by the agents of hosts is not dialed by each member. So a mailbox
grows beyond the limit by what its senders send until they hear of it. Only calls count, and only who makes them waits:
answers, values for ports, supervision and all that agents say passes by.

A wait would not end if the receiver itself waited for the one who waits: because that one serves a call of the
receiver's, say, or has it in its own full mailbox, or they flood each other. So the waiting sends a PROBE to the
receiver, again and again, which is passed on to whomever that one waits for, in a call or for room. When it comes back,
the one who waits is *excused*: it goes on, over the limit, until there is room. What is not seen so (waits for a port,
for a thread) ends after `_LIMIT_S`, for one message; then the log says who is too slow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from monarch.core.driver import Signal
from monarch.core.envelope import Envelope
from monarch.core.instance import Instance, Sender
from monarch.core.mailbox import size_of
from monarch.core.probes import Probes
from monarch.log import get_logger

if TYPE_CHECKING:
    from monarch.core.proc import Proc

log = get_logger("monarch.backpressure")

Target = tuple[int, int]
"""An actor: its process, and its number there."""

_FULL: Final = "mailbox_full"
_ROOM: Final = "mailbox_room"
_PROBE: Final = "mailbox_probe"
_LIMIT_S: Final = 30.0
_PROBE_FIRST_S: Final = 0.05
_PROBE_LAST_S: Final = 2.0


class Backpressure:
    """Of one process: of its own actors' mailboxes, and as far as it sends there, of others'. Thread-safe."""

    def __init__(self, proc: Proc, mailbox_bytes: int) -> None:
        self._proc, self.limit_bytes = proc, mailbox_bytes
        self._lock = threading.Lock()
        self.full: dict[Target, list[Signal]] = {}  # and who waits for room there
        self._waiting: dict[int, tuple[Target, Signal]] = {}  # which actors of this process wait, for which
        self._excused: set[tuple[int, Target]] = set()
        self._late: set[Target] = set()  # those of which the log has heard
        self._probes = Probes()
        proc.handlers[_FULL] = lambda envelope, target: self._on_full(target)
        proc.handlers[_ROOM] = lambda envelope, target: self._on_room(target)
        proc.handlers[_PROBE] = lambda envelope, *probe: self._on_probe(*probe)

    # ---- as the receiver

    def arrived(self, instance: Instance, envelope: Envelope) -> int:
        """A call was put into a mailbox into which enough has come to weigh it. Returns how much more it takes, until
        that is worth it again."""
        mailbox = instance.mailbox
        sender = envelope.src_proc
        if sender in mailbox.told_full:
            return 0  # it goes on until it hears of it
        spared_bytes = mailbox.spared.get(sender, 0) - size_of(envelope)
        if spared_bytes > 0:
            mailbox.spared[sender] = spared_bytes
            return 0
        found_bytes = mailbox.weigh()
        size_bytes = found_bytes.total()
        if size_bytes <= self.limit_bytes:
            mailbox.spared.clear()
            return max(self.limit_bytes, size_bytes + self.limit_bytes // 4)
        share_bytes = self.limit_bytes // len(found_bytes)
        if found_bytes[sender] <= share_bytes:
            mailbox.spared[sender] = share_bytes - found_bytes[sender]
            return 0
        self._proc.tell_known(sender, _FULL, (self._proc.key, instance.actor_id.number), via=envelope.via)
        mailbox.told_full[sender] = envelope.via  # not before: nobody shall tell of room in between
        if mailbox.weigh().total() <= self.limit_bytes // 2:
            self.ended(instance)
        return self.limit_bytes

    def taken(self, instance: Instance, envelope: Envelope) -> None:
        """A call was taken out of a mailbox, and somebody is to hear of room there."""
        if instance.mailbox.lighten(size_of(envelope)) <= self.limit_bytes // 2:
            self.ended(instance)

    def ended(self, instance: Instance) -> None:
        """Nobody has to wait for room there any more."""
        told = instance.mailbox.told_full
        while told:
            try:
                sender, via = told.popitem()
            except KeyError:
                return  # another thread tells
            self._proc.tell_known(sender, _ROOM, (self._proc.key, instance.actor_id.number), via=via)

    # ---- as the sender

    def wait(self, key: int, number: int, sender: Sender, name: str) -> None:
        """Block while the mailbox of that actor is full. `sender` has just sent to it; `name` is for people."""
        target = key, number
        if not self.full or target not in self.full:
            return
        own = self._number_of(sender)
        if target == (self._proc.key, sender.actor_id.number) or (own, target) in self._excused:
            return
        signal = Signal()
        with self._lock:
            if target not in self.full:
                return
            self.full[target].append(signal)
        if own:
            self._waiting[own] = target, signal
        try:
            if not self._has_waited(target, own, signal) and target not in self._late:
                self._late.add(target)
                log.warning(
                    "mailbox.full",
                    actor=name,
                    limit_bytes=self.limit_bytes,
                    waited_s=_LIMIT_S,
                    hint="it is slower than those who send to it, who now wait that long after each message",
                )
        finally:
            self._waiting.pop(own, None)
            with self._lock:
                waiting = self.full.get(target, [])
                if signal in waiting:
                    waiting.remove(signal)

    @staticmethod
    def _number_of(sender: Sender) -> int:
        """Of the actor that can serve nothing meanwhile; 0 for the client, and for threads that actors have started."""
        is_actor = isinstance(sender, Instance) and sender.thread_id == threading.get_ident()
        return sender.actor_id.number if is_actor else 0

    def _has_waited(self, target: Target, own: int, signal: Signal) -> bool:
        """Whether there is room, or the wait is excused; False when it took too long."""
        deadline_s = time.monotonic() + _LIMIT_S
        pause_s = _PROBE_FIRST_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            if own:
                self._probe((self._proc.key, own), self._probes.next_number(), target)
            if self._proc.driver.wait(signal, min(pause_s, left_s)):
                return True
            pause_s = min(2 * pause_s, _PROBE_LAST_S)
        return False

    def forget(self, key: int) -> None:
        """A process is gone: nobody waits for its actors any more."""
        for target in [each for each in list(self.full) if each[0] == key]:
            self._on_room(target)

    def close(self) -> None:
        """This process has closed its links: nobody will hear of room."""
        for target in list(self.full):
            self._on_room(target)

    # ---- what processes tell each other, on the driving thread or the one of a local sender

    def _on_full(self, target: Target) -> None:
        with self._lock:
            self.full.setdefault(target, [])

    def _on_room(self, target: Target) -> None:
        with self._lock:
            waiting = self.full.pop(target, [])
            self._excused = {each for each in self._excused if each[1] != target}
        self._late.discard(target)
        for signal in waiting:
            signal.notify()

    def _probe(self, origin: Target, serial: int, at: Target) -> None:
        self._proc.tell_known(at[0], _PROBE, origin, serial, at[1])

    def _on_probe(self, origin: Target, serial: int, number: int) -> None:
        """Somebody waits for the actor of that number: does it wait, too?"""
        if origin == (self._proc.key, number):
            self._excuse(number)
        elif not self._probes.has_passed((origin, number), serial):
            for target in list(self._waits_of(number)):
                self._probe(origin, serial, target)

    def _excuse(self, number: int) -> None:
        found = self._waiting.get(number)
        if found is not None:
            target, signal = found
            with self._lock:
                if target in self.full:
                    self._excused.add((number, target))
            signal.notify()

    def _waits_of(self, number: int) -> Iterator[Target]:
        """Those without whom an actor of this process serves no further call."""
        found = self._waiting.get(number)
        actor = self._proc.actors.get(number)
        if found is not None:
            yield found[0]
        elif isinstance(actor, Instance):
            for call in self._proc.pending_calls():
                if call.caller_wait.holds_up(actor):
                    yield from call.unanswered()
