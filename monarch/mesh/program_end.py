"""What is still going on when the program ends: it gets a moment, and is told of where it is cut off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from monarch.core import inquiries
from monarch.core.driver import Signal
from monarch.core.instance import Phase
from monarch.core.peer import State
from monarch.log import get_logger
from monarch.mesh.ownership import OwnedActors
from monarch.mesh.replies import CallSink

if TYPE_CHECKING:
    from monarch.core.proc import Proc
    from monarch.mesh.context import Spawner

log = get_logger("monarch.client")

_ASK_LIMIT_S: Final = 0.1
_SHOWN: Final = 4


def attend_no_more(runtime: Proc) -> None:
    """Daemon threads that wait for an answer end with the program, silently. Errors of calls are told."""
    for number, sink in list(runtime.ports.items()):
        instead = sink.unattended() if isinstance(sink, CallSink) else None
        if instead is None:
            runtime.ports.pop(number, None)
        else:
            runtime.ports[number] = instead


def await_starts(runtime: Proc, limit_s: float) -> None:
    """Give the processes that are starting time to take what they were sent."""
    deadline_s = time.monotonic() + limit_s
    peers = [peer for peer in runtime.gateway.peers if peer.state is State.NEW and peer.session.unacked]
    changed = Signal()
    for peer in peers:
        runtime.gateway.peers.when_settled(peer, changed.notify)
    while any(peer.state is State.NEW for peer in peers) and time.monotonic() < deadline_s:
        changed.clear()
        runtime.driver.wait(changed, deadline_s - time.monotonic())


def tell_cut_off(owner: Spawner) -> None:
    """The time for what `owner` owns is over, and it is killed now. One that works without end is no news; one that has
    not come to its work is, and one in the middle of its `__cleanup__`."""
    runtime = owner.proc_runtime
    unserved, asked = [], []
    for mesh in [mesh for mesh in owner.owned.values() if isinstance(mesh, OwnedActors)]:
        for member, proc in mesh.left():
            peer = runtime.gateway.peers.get(proc.key)
            if peer is not None and peer.state is State.NEW:
                unserved.append(str(member))
            else:
                asked.append((str(member), inquiries.ask(runtime, proc, mesh.number, 0)))
    _tell("exit.unserved", unserved, "their processes were not up before the program had ended")
    deadline_s = time.monotonic() + _ASK_LIMIT_S
    ending = []
    for text, answer in asked:
        if answer._wait(max(0.0, deadline_s - time.monotonic())) and answer.exception(0) is None:
            actor = answer.get(0)[0].actor
            if actor is not None and actor.phase == Phase.ENDING.value:
                ending.append(text)
    _tell("exit.cut_off", ending, "__cleanup__, or the end of what they own, took too long after the program's end")


def _tell(event: str, actors: Sequence[str], reason: str) -> None:
    if actors:
        more = f", and {len(actors) - _SHOWN} more" if len(actors) > _SHOWN else ""
        hint = "wait for it: get() the futures of calls, and of stop()"
        log.warning(event, actors=", ".join(actors[:_SHOWN]) + more, reason=reason, hint=hint)
