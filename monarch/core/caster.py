"""Casts of this process: what it has sent to the agents of hosts, until all who are meant have it.

Theory of operation. Whoever casts sends a CAST to the agent of each branch of the tree (`cast`), which passes it on
(`relay`).

- *TAKEN.* An agent tells who passed a cast on to it once all below have it. Who cast keeps the message until then, and
  so knows how much is under way (`wait_for_taken`).
- *Death.* An agent that cannot pass a cast on says so with TAKEN, and who cast sends it to all hosts of that branch
  itself, as it does with what was below an agent that is gone before it said TAKEN. With an agent the processes of its
  host are gone, and no others.

Threads. `cast`, `wait_for_taken` and `when_taken` run on any; all else runs on the driving thread, with two exceptions.
Who casts may find an agent gone while it sends: then `_lost`, and what that calls, runs there. `close` runs on the
thread that closes, when nobody drives any more. What `when_taken` is given runs on any of these. `_lock` guards what
they share: `_sent`, the `branches` and flags of each, `_load`, `_waiting` and `_when_taken`. A single key is looked up
without it, and what is found may be over a moment later.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import define, field

from monarch.core.cast import Branch, body_of, cast_of, title_of
from monarch.core.driver import Signal
from monarch.core.envelope import Envelope, Flag
from monarch.core.ids import ProcId
from monarch.core.monitor import Down
from monarch.core.peer import Peer

if TYPE_CHECKING:
    from monarch.core.proc import Proc


@define(eq=False)
class _Sent:
    """A cast of this process, until all have it."""

    number: int
    message: Envelope
    seqs: Mapping[int, int]
    size_bytes: int
    is_deep: bool
    branches: dict[int, Branch] = field(factory=dict)  # by the key of the agent that has not said TAKEN


class Caster:
    """See the module; the part of `proc` that has to do with its own casts."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._sent: dict[int, _Sent] = {}
        self._load: dict[int, int] = {}  # bytes on their way, by the key of the agent that they go by first
        self._waiting: list[Signal] = []
        self._when_taken: list[tuple[set[int], Callable[[], None]]] = []
        self._title: tuple[ProcId, str] | None = None

    def cast(self, message: Envelope, branches: Sequence[Branch], seqs: Mapping[int, int]) -> None:
        """Send `message`, which names no process, to all members of `branches`. What cannot be delivered comes back as
        bounces, one for each member.

        Args:
            seqs: rank -> this sender's number of the message for that member; empty for one that is not numbered.
        """
        sent = _Sent(
            next(self._numbers), message, seqs, sum(map(len, message.parts)), any(each.below for each in branches)
        )
        with self._lock:
            self._sent[sent.number] = sent
            self._expect(sent, branches)
        for branch in branches:
            self._send(sent, branch)

    def _expect(self, sent: _Sent, branches: Iterable[Branch]) -> None:
        """TAKEN is to come from these. The lock is held."""
        for branch in branches:
            key = branch.host.key
            sent.branches[key] = branch
            self._load[key] = self._load.get(key, 0) + sent.size_bytes

    def _send(self, sent: _Sent, branch: Branch) -> None:
        message, key = sent.message, branch.host.key
        parts = [self._titled(message.kind), body_of(branch, self._proc.key, sent.seqs), *message.parts]
        down = self._proc.gateway.send(cast_of(message, key, parts, sent.number), branch.host)
        if down is not None:
            self._lost(sent, key, down, unsure=False)

    def _titled(self, kind: int) -> bytes:
        proc = self._proc.proc_id
        if self._title is None or self._title[0] is not proc:
            self._title = proc, str(proc)
        return title_of(kind, self._title[1])

    def _over(
        self, sent: _Sent, key: int, lost: Callable[[Branch], Iterable[Branch]], *, unsure: bool
    ) -> tuple[Branch, list[Branch]] | None:
        """Nothing more is to be heard of a branch; None when that was known. In its place come the hosts of what was
        `lost` of it, which are to be sent the message: at the same moment, or else the cast could seem to be over."""
        with self._lock:
            branch = sent.branches.pop(key, None)
            if branch is None:
                return None
            if unsure:
                sent.message.flags |= Flag.UNSURE  # also of the copies that follow, whatever becomes of them
            self._load[key] -= sent.size_bytes
            if not self._load[key]:
                del self._load[key]
            again = [host for each in lost(branch) for host in each.hosts()]
            self._expect(sent, again)
            waiting, self._waiting = self._waiting, []
        for signal in waiting:
            signal.notify()
        return branch, again

    def _settle(self, sent: _Sent) -> None:
        with self._lock:
            if sent.branches:
                return
            self._sent.pop(sent.number, None)
            for numbers, _ in self._when_taken:
                numbers.discard(sent.number)
            due = [then for numbers, then in self._when_taken if not numbers]
            self._when_taken = [each for each in self._when_taken if each[0]]
        for then in due:
            then()

    def _lost(self, sent: _Sent, key: int, down: Down, *, unsure: bool) -> None:
        """An agent is gone, and its processes with it; those below are reached without it. `unsure`: it may have passed
        the message on before."""
        found = self._over(sent, key, lambda branch: branch.below, unsure=unsure)
        if found is None:
            return
        branch, again = found
        for member, rank in zip(branch.keys, branch.ranks, strict=True):
            self._proc.bounce(sent.message.for_member(member, rank, 0, []), down)
        for each in again:
            self._send(sent, each)
        self._settle(sent)

    def wait_for_taken(self, branches: Sequence[Branch]) -> None:
        """Block while the link to one of these agents is full, or more is on its way by it, and not TAKEN yet, than the
        buffer of a link should hold."""
        gateway = self._proc.gateway
        limit_bytes = gateway.limits.send_buffer_bytes
        signal = Signal()
        for branch in branches:
            key = branch.host.key
            gateway.wait_for_room((key,))
            while self._load.get(key, 0) > limit_bytes:
                signal.clear()
                with self._lock:
                    if gateway.is_closed:
                        return
                    if self._load.get(key, 0) <= limit_bytes:
                        break
                    if signal not in self._waiting:
                        self._waiting.append(signal)
                self._proc.driver.wait(signal, 1.0)

    def when_taken(self, then: Callable[[], None]) -> None:
        """Call `then` once the hosts of all casts so far have them, where several lie between; at once if they do, or
        nobody will hear of it, because this process has closed. What is sent to an agent then is behind them."""
        with self._lock:
            numbers = {sent.number for sent in self._sent.values() if sent.is_deep}
            if numbers and not self._proc.gateway.is_closed:
                self._when_taken.append((numbers, then))
                return
        then()

    def close(self) -> None:
        """This process has closed its links: nobody will hear of TAKEN."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            due, self._when_taken = self._when_taken, []
        for signal in waiting:
            signal.notify()
        for _, then in due:
            then()

    def on_taken(self, number: int, agent: int, lost: list[int]) -> None:
        """All below that agent have the cast of that number, but for the hosts in `lost`."""
        sent = self._sent.get(number)
        if sent is None:
            return
        # Some of the lost may have reached their hosts all the same.
        found = self._over(sent, agent, lambda branch: _found(branch, lost), unsure=bool(lost))
        if found is None:
            return
        for each in found[1]:
            self._send(sent, each)
        self._settle(sent)

    def proc_gone(self, gone: Peer, down: Down) -> None:
        """A process has ended, and all that it sent was delivered."""
        with self._lock:
            under_way = list(self._sent.values())
        for sent in under_way:
            self._lost(sent, gone.key, down, unsure=bool(gone.pid))


def _found(branch: Branch, keys: list[int]) -> list[Branch]:
    """The branches of those agents, of a branch that was sent to the first; none that is below another."""
    if branch.host.key in keys:
        return [branch]
    return [each for below in branch.below for each in _found(below, keys)]
