"""What is asked about a call at the process of its callee or caller: where is it, take it back, is it waited for.

Answered by whoever drives the links, so that a busy actor, or one that is stuck, is no hindrance.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import define

from monarch.core import deadlock
from monarch.core.envelope import Envelope
from monarch.core.future import Future
from monarch.core.ids import ProcId
from monarch.core.instance import Instance
from monarch.core.serving import ActorState, Running

if TYPE_CHECKING:
    from monarch.core.proc import Proc

_STATE: Final = "call_state"
_CANCEL: Final = "call_cancel"


@define(frozen=True)
class CallState:
    """A call at its callee, at one moment.

    Attributes:
        actor: the callee; None when there is none (yet).
        ahead: how many calls are before this one in its queue; None when it is not queued.
        running: where this call itself is served.
    """

    actor: ActorState | None
    ahead: int | None = None
    running: Running | None = None


def install(proc: Proc) -> None:
    proc.handlers[_STATE] = partial(_on_state, proc)
    proc.handlers[_CANCEL] = partial(_on_cancel, proc)
    proc.handlers[deadlock.PROBE] = lambda envelope, port, probe: deadlock.on_probe(proc, port, probe)


def ask(proc: Proc, callee: ProcId, actor: int, reply_port: int) -> Future[tuple[CallState]]:
    """Where is the call to that actor whose answer `reply_port` waits for?"""
    return proc.request(callee, _STATE, actor, reply_port)


def withdrawal(actor: int, reply_port: int) -> tuple[Any, ...]:
    """What to tell the callee's process to take that call back."""
    return _CANCEL, actor, reply_port


def _on_state(proc: Proc, envelope: Envelope, number: int, reply_port: int) -> None:
    call = envelope.src_proc, reply_port
    actor = proc.actors.get(number)
    if not isinstance(actor, Instance):
        proc.answer(envelope, CallState(None))
        return
    running = next((each.running() for each in tuple(actor.serving) if each.call == call), None)
    proc.answer(envelope, CallState(actor.snapshot(), actor.mailbox.place(call), running))


def _on_cancel(proc: Proc, envelope: Envelope, number: int, reply_port: int) -> None:
    call = envelope.src_proc, reply_port
    actor = proc.actors.get(number)
    if isinstance(actor, Instance):
        actor.cancel(call)
    else:
        proc.withdraw_unborn(number, call)
