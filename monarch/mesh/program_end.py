"""What is still going on when the program ends: it gets a moment, and is told of where it is cut off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from monarch.core.driver import Signal
from monarch.core.future import Future
from monarch.core.peer import State
from monarch.log import get_logger
from monarch.mesh.ownership import OwnedActors
from monarch.mesh.replies import CallSink

if TYPE_CHECKING:
    from monarch.core.proc import Proc
    from monarch.mesh.context import Spawner
    from monarch.mesh.host import HostAgent
    from monarch.mesh.mesh_proc import MeshProc

log = get_logger("monarch.client")

_SHOWN: Final = 4
_HINT: Final = "wait for it: get() the futures of calls, and of stop()"


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


def all_over(stops: Sequence[Future[Any]], limit_s: float) -> bool:
    """Wait for them. One that fails is over, too: what became of it is told elsewhere."""
    deadline_s = time.monotonic() + limit_s
    return all(stop._wait(max(0.0, deadline_s - time.monotonic())) for stop in stops)


def cut_short(runtime: MeshProc, agent: HostAgent, reason: str, left_s: float) -> None:
    """In all processes of the program, also those that its actors own, cleanups are due; all are killed in `left_s`."""
    runtime.agent.cut_short(reason, left_s)
    agent.cut_short(reason, left_s)
    for host in runtime.gateway.peers.attached():
        runtime.tell(host, "cut_procs_short", reason, left_s)


def tell_unserved(owner: Spawner) -> None:
    """The time for what `owner` owns is over, and it is killed now. One that works without end is no news; one that has
    not come to its work is."""
    peers = owner.proc_runtime.gateway.peers
    unserved = []
    for mesh in [mesh for mesh in owner.owned.values() if isinstance(mesh, OwnedActors)]:
        for member, proc in mesh.left():
            peer = peers.get(proc.key)
            if peer is not None and peer.state is State.NEW:
                unserved.append(str(member))
    _tell("exit.unserved", unserved, "their processes were not up before the program had ended")


def tell_cut_off(actors: Sequence[str], hint: str = _HINT) -> None:
    """The time for the cleanups of these is over."""
    _tell("cleanup.cut_off", actors, "they were still at this when the time to stop was over", hint)


def _tell(event: str, actors: Sequence[str], reason: str, hint: str = _HINT) -> None:
    if actors:
        more = f", and {len(actors) - _SHOWN} more" if len(actors) > _SHOWN else ""
        log.warning(event, actors=", ".join(actors[:_SHOWN]) + more, reason=reason, hint=hint)
