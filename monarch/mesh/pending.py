"""What a call waits for, in words: the members that have not answered, and what each of them is doing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from monarch.core import inquiries
from monarch.core.ids import ProcId
from monarch.core.inquiries import CallState
from monarch.core.peer import State

if TYPE_CHECKING:
    from monarch.core.proc import Proc
    from monarch.mesh.members import Members

_SHOWN: Final = 4
"""Members that are asked; of the others only the number is told."""


def explain(runtime: Proc, members: Members, reply_port: int, left: Sequence[int], limit_s: float) -> str:
    """The members with the ranks `left` are waited for. Asks them, for `limit_s` at most; with 0 nobody is asked."""
    size = len(members.keys)
    what = f"the answer of {members.mesh_name}.{members.method}()"
    if size > 1:
        what += f" from {len(left)} of {size} actors"
    if not limit_s or not left:
        return what
    deadline_s = time.monotonic() + limit_s
    shown = left[:_SHOWN]
    procs = [members.procs[rank] for rank in shown]
    asked = [None if p is None else inquiries.ask(runtime, p, members.number, reply_port) for p in procs]
    said = []
    for rank, proc, future in zip(shown, procs, asked, strict=True):
        call = f"{members.describe(rank)}.{members.method}"
        if proc is None or future is None:
            said.append(f"{call} has not been sent: the actor is not up")
        elif future._wait(max(0.0, deadline_s - time.monotonic())) and future.exception(0) is None:
            said.append(describe(call, future.get(0)[0]))
        else:
            said.append(f"{call}: {_silence(runtime, proc, limit_s)}")
    if len(left) > len(shown):
        said.append(f"{len(left) - len(shown)} more")
    return f"{what}: {'; '.join(said)}"


def _silence(runtime: Proc, proc: ProcId, limit_s: float) -> str:
    peer = runtime.gateway.peers.get(proc.key)
    if peer is None or peer.state is not State.UP:
        return "its process is not connected: it is starting, or cut off"
    return f"its process {peer.pid} did not answer within {limit_s:g} s: native code may hold its interpreter"


def describe(call: str, state: CallState) -> str:
    """A sentence about a call that is not answered yet."""
    actor = state.actor
    if state.running is not None:
        return f"{call} has been running for {state.running.for_s:.1f} s"
    if actor is None:
        return f"{call} waits for its actor to be spawned"
    doing = " and ".join(f"running {each.endpoint} for {each.for_s:.1f} s" for each in actor.running)
    if not doing:
        doing = {"born": "starting", "serving": "idle"}.get(actor.phase, actor.phase)
    if state.ahead is not None:
        before = f"queued behind {state.ahead} call(s)" if state.ahead else "next in the queue"
        return f"{call} is {before}, and its actor has been {doing}"
    return (
        f"{call} is neither queued nor running there (its answer is on its way, or is left to a reply port that was "
        f"handed on), and its actor has been {doing}"
    )
