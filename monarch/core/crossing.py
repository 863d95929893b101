"""Calls that cross: actors that wait for each other, and no call came from another. Found within seconds, and refused.

Theory of operation. A cycle that one call has made is refused as it closes (`deadlock`). Two calls of different origins
make one, too, when each waits in an actor that the other needs; nothing in them says so. So, where an endpoint has
waited for a call for a second, a probe asks the actor that was called: do you wait, too? It is passed on along what
each on the way waits for, with the list of these waits, until somebody does not wait, or it is back:

```
    A.a waits for B.c, behind B.b ────►  B.b waits for A.d, behind A.a
          ▲──────────────────────────────────────┘  back: [A.a for B.c, B.b for A.d]
```

What the list says was true of each wait at another moment. But waits are numbered: where two probes bring the same
list, every wait in it has lasted from the one to the other, so that all were there at the same time, and none of them
can end. Then one of the calls, the same for all who find out, fails with a `DeadlockError`, and the others go on. (Edge
chasing, where each needs all that it waits for: Chandy, Misra and Haas, Distributed deadlock detection, 1983.)

A `get` with a time-out ends by itself, and is left alone; the limits of asyncio are not seen. What `deadlock` does not
see is not seen here either.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from attrs import define

from monarch.core.envelope import CallKey
from monarch.core.instance import Instance
from monarch.core.probes import PendingCall, Probes
from monarch.errors import DeadlockError

if TYPE_CHECKING:
    from monarch.core.proc import Proc

_PROBE: Final = "crossing_probe"
_SCAN_S: Final = 1.0
_LONGEST: Final = 64  # waits in a cycle that is looked for
_MOST_ASKED: Final = 64  # actors that one probe is passed on to


@define(frozen=True)
class Hop:
    """An endpoint waits for a call that it has made.

    Attributes:
        key, port: of the call.
        begun: how many waits for it there have been.
        number: of the actor that waits.
        waits, wanted: the endpoint that waits, and the one that it waits for, for people.
    """

    key: int
    port: int
    begun: int
    number: int
    waits: str
    wanted: str


class Crossings:
    """Of one process. All but `scan_later` runs on the driving thread."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._scan_is_due = False
        self._seen: set[int] = set()  # ports that were waited for at the last scan
        self._probes = Probes()
        self._lock = threading.Lock()  # guards `_scan_is_due`
        # What has come back since the last scan, and before it.
        self._cycles: set[tuple[Hop, ...]] = set()
        self._cycles_before: set[tuple[Hop, ...]] = set()
        proc.handlers[_PROBE] = lambda envelope, serial, hops, number: self._on_probe(serial, hops, number)

    def scan_later(self) -> None:
        """An endpoint has begun to wait. From any thread."""
        if self._scan_is_due:
            return
        with self._lock:
            if self._scan_is_due:
                return
            self._scan_is_due = True
        self._proc.gateway.call_later(_SCAN_S, self._scan)

    def _scan(self) -> None:
        self._scan_is_due = False
        self._cycles, self._cycles_before = set(), self._cycles
        by_actor: dict[int, list[PendingCall]] = {}
        for call in self._proc.pending_calls():
            if call.caller_wait.lasts:
                by_actor.setdefault(call.caller_wait.actor.actor_id.number, []).append(call)
        seen, self._seen = self._seen, {call.number for calls in by_actor.values() for call in calls}
        for calls in by_actor.values():
            self._ask(self._probes.next_number(), (), [call for call in calls if call.number in seen])
        if by_actor:
            self.scan_later()

    def _waits_of(self, number: int, caller: CallKey) -> Iterator[PendingCall]:
        """Without which of its own calls that actor does not answer `caller`."""
        actor = self._proc.actors.get(number)
        if isinstance(actor, Instance):
            served = next((each for each in tuple(actor.serving) if each.call == caller), None)
            if served is not None or actor.mailbox.place(caller) is not None:
                for call in self._proc.pending_calls():
                    wait = call.caller_wait
                    stops = wait.holds_up(actor) if served is None else wait.holds(served)
                    if stops and wait.lasts and wait.actor is actor:
                        yield call

    def _ask(self, serial: int, before: tuple[Hop, ...], calls: Iterable[PendingCall]) -> None:
        """Go on from the actor that made the calls: to each that it waits for, with the oldest of its calls there. One
        is enough, and it is always the same while none is answered."""
        oldest: dict[tuple[int, int], PendingCall] = {}
        for call in sorted(calls, key=lambda call: call.number):
            for target in call.unanswered():
                oldest.setdefault(target, call)
        for (key, number), call in [*oldest.items()][:_MOST_ASKED]:
            wait = call.caller_wait
            hop = Hop(self._proc.key, call.number, wait.begun, wait.actor.actor_id.number, wait.endpoint, call.wanted())
            self._proc.tell_known(key, _PROBE, serial, (*before, hop), number)

    def _on_probe(self, serial: int, hops: tuple[Hop, ...], number: int) -> None:
        """Whoever made the last call on the list asks an actor of this process whether it waits, too."""
        first, last = hops[0], hops[-1]
        waits = self._waits_of(number, (last.key, last.port))
        if (self._proc.key, number) == (first.key, first.number):
            found = next(
                (call for call in waits if call.number == first.port and call.caller_wait.begun == first.begun), None
            )
            if found is not None:
                self._on_cycle(hops, found)
        elif len(hops) < _LONGEST and not self._probes.has_passed((first.key, first.number, number), serial):
            self._ask(serial, hops, waits)

    def _on_cycle(self, hops: tuple[Hop, ...], call: PendingCall) -> None:
        if hops not in self._cycles_before:
            self._cycles.add(hops)
        elif hops[0] == max(hops, key=lambda hop: (hop.key, hop.port)):
            call.refuse(DeadlockError(describe(hops), tuple(hop.waits for hop in hops)))


def describe(hops: tuple[Hop, ...]) -> str:
    waits = "; ".join(f"{hop.waits} waits for {hop.wanted}" for hop in hops)
    return (
        f"deadlock, calls that wait for each other: {waits}. None can be served before another is through, and this "
        "one was chosen to fail. Do not wait in one of them (broadcast, a port), or make it a @concurrent_endpoint"
    )
