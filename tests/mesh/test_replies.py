"""What `call`, `call_fail_fast`, `call_settled` and `stream` make of replies and failures, in any order."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from monarch.actor import ActorError, SupervisionError
from monarch.core import codec, exceptions
from monarch.core import future as future_module
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.future import Future
from monarch.core.ids import ProcId, Uid
from monarch.core.monitor import Down
from monarch.mesh.context import NOWHERE, Context
from monarch.mesh.members import Members
from monarch.mesh.replies import FailFastReply, MeshReply, OneReply, SettledReply, StreamReply
from monarch.mesh.shape import Extent

_DOWN = Down("killed", "the process this actor was running on failed: Killed(sig=9)", 4711, "here", signal=9)
_PROCS = [ProcId(Uid.instance(f"p{rank}"), "") for rank in range(3)]


class Runtime:
    """As much of a Proc as a sink needs: port numbers, and no driver, for nobody waits here."""

    driver = None

    def __init__(self) -> None:
        self.ports: dict[int, Any] = {}
        self.proc_runtime = self

    def new_port(self) -> int:
        return 77


def sink(kind: type, size: int = 3) -> tuple[Any, Runtime]:
    runtime: Any = Runtime()
    region = Extent(("gpus",), (size,)).region
    targets = [(proc.key, proc) for proc in _PROCS[:size]]
    members = Members(5, targets, lambda rank: f"module.Class mesh{{'gpus': {rank}/3}}", "mesh", "step", region)
    return kind(Context(runtime, NOWHERE), members), runtime


def happen(reply: Any, events: str) -> None:
    """`v0` a value of rank 0, `e1` an exception of rank 1, `b2` rank 2's call came back, `d1` rank 1's process died."""
    for what, rank in (tuple(event) for event in events.split()):
        at = int(rank)
        if what == "v":
            parts, flags = codec.encode(f"value {at}"), 0
            reply.deliver(Envelope(Kind.PORT, 0, 0, 77, 0, 0, parts, flags, at))
        elif what == "e":
            parts = exceptions.encode_exception(ValueError(f"error {at}"))
            reply.deliver(Envelope(Kind.PORT, 0, 0, 77, 0, 0, parts, Flag.ERROR, at))
        elif what == "b":
            reply.bounced(Envelope(Kind.BOUNCE, 0, 0, 77, 0, 0, [], 0, at), _DOWN)
        else:
            reply.proc_gone(_PROCS[at].key, _DOWN)


def outcome(future: Any) -> str:
    """In short: `-` pending, `v012` all values, `e1` the exception of rank 1, `s2` a SupervisionError about rank 2."""
    if not future.done():
        return "-"
    error = future.exception(0)
    if error is None:
        return "".join(short(value) for value in future.get(0).values())
    return short(error)


def short(value: Any) -> str:
    if isinstance(value, ActorError):
        return f"e{str(value.exception)[-1]}"
    if isinstance(value, SupervisionError):
        assert value.failure.down is _DOWN and "Killed(sig=9)" in str(value)
        return f"s{value.failure.crashed_ranks[0]}"
    return f"v{value[-1]}"


@pytest.mark.parametrize(
    ("events", "call", "fail_fast", "settled"),
    [
        ("", "-", "-", "-"),
        ("v0 v2", "-", "-", "-"),
        ("v2 v0 v1", "v0v1v2", "v0v1v2", "v0v1v2"),
        ("v0 v0 v0", "-", "-", "-"),  # a repeated reply counts once
        ("e1", "-", "e1", "-"),  # call waits for all
        ("e2 v0 e1", "e1", "e2", "v0e1e2"),  # and raises the lowest rank, not the first to come
        ("e2 e1 e0", "e0", "e2", "e0e1e2"),
        ("b1", "s1", "s1", "-"),  # a member that is gone fails it at once
        ("d1", "s1", "s1", "-"),
        ("e0 d1", "s1", "e0", "-"),  # a known failure of the view wins over exceptions that have come
        ("v1 d1", "s1", "s1", "-"),  # also of one that had answered
        ("v0 v1 v2 d1", "v0v1v2", "v0v1v2", "v0v1v2"),  # but not over a result that is complete
        ("d2 v2 v0 v1", "s2", "s2", "v0v1s2"),
        ("v1 d1 v0 b2", "s1", "s1", "v0v1s2"),  # an answer is kept
        ("d0 d1 d2", "s0", "s0", "s0s1s2"),
        ("b1 d1 v0 v2", "s1", "s1", "v0s1v2"),
    ],
)
def test_the_race_of_replies_and_failures(events: str, call: str, fail_fast: str, settled: str) -> None:
    for kind, expected in ((MeshReply, call), (FailFastReply, fail_fast), (SettledReply, settled)):
        reply, runtime = sink(kind)
        happen(reply, events)

        assert outcome(reply) == expected, kind.__name__
        assert (77 in runtime.ports) == (expected == "-")  # what comes later finds nobody


@pytest.mark.parametrize(
    ("events", "expected"),
    [("v2 e0", ["v2", "e0", "-"]), ("v1 d1 b0 v2", ["v1", "s0", "v2"]), ("d2 d1 d0", ["s2", "s1", "s0"])],
)
def test_a_stream_has_them_as_they_come(events: str, expected: list[str]) -> None:
    reply, _ = sink(StreamReply)
    happen(reply, events)

    futures = [(future.exception(0) or future.get(0)) if future.done() else None for future in reply.futures]
    assert ["-" if value is None else short(value) for value in futures] == expected


def test_an_exception_that_was_sent_as_it_is_is_the_value_of_its_member() -> None:
    reply, _ = sink(SettledReply)
    happen(reply, "v0 v2")
    parts = exceptions.encode_exception(KeyError("exactly this"))
    reply.deliver(Envelope(Kind.PORT, 0, 0, 77, 0, 0, parts, Flag.ERROR | Flag.RAW_ERROR, 1))

    assert isinstance(reply.get(0).item(gpus=1), KeyError)


def test_no_members_are_complete_at_once() -> None:
    runtime: Any = Runtime()
    members = Members(5, [], str, "mesh", "step", Extent(("gpus",), (0,)).region)
    for kind in (MeshReply, FailFastReply, SettledReply):
        reply: Any = kind(Context(runtime, NOWHERE), members)
        assert list(reply.get(0).values()) == [] and not runtime.ports


class _Message(Envelope):
    """One that weak references can be made to, with and without the compiled part."""


@pytest.mark.parametrize("kind", [OneReply, MeshReply, FailFastReply, SettledReply])
def test_a_future_that_was_read_holds_no_message(kind: type) -> None:
    reply, _ = sink(kind, 1)
    message = _Message(Kind.PORT, 0, 0, 77, 0, 0, codec.encode("value 0"), 0, 0)
    held = weakref.ref(message)
    reply.deliver(message)
    del message
    assert held() is not None
    value = reply.get(0)
    assert value == "value 0" or list(value.values()) == ["value 0"]

    assert held() is None


@pytest.mark.parametrize("kind", [MeshReply, FailFastReply])
def test_a_future_that_has_failed_holds_no_message(kind: type) -> None:
    reply, _ = sink(kind)
    message = _Message(Kind.PORT, 0, 0, 77, 0, 0, codec.encode("value 0"), 0, 0)
    held = weakref.ref(message)
    reply.deliver(message)
    del message
    happen(reply, "d1")

    assert outcome(reply) == "s1" and held() is None


@pytest.mark.parametrize("kind", [OneReply, MeshReply, FailFastReply])
def test_a_failure_that_nobody_looks_at_is_told_when_its_future_goes(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(future_module, "tell_unseen", told.append)
    reply, _ = sink(kind, 1)
    happen(reply, "e0")
    assert not told
    gc.disable()  # it is in no cycle
    try:
        del reply
        assert len(told) == 1 and "error 0" in told[0]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [OneReply, MeshReply, FailFastReply, SettledReply])
def test_a_future_is_the_sink_of_its_replies_as_long_as_it_is_pending(kind: type) -> None:
    reply, runtime = sink(kind, 1)
    assert runtime.ports == {77: reply} and isinstance(reply, Future) and not reply.done()
    happen(reply, "v0")
    assert reply.done() and not runtime.ports and not reply.cancel()


def test_a_future_of_a_call_has_no_attributes_that_its_value_or_futures_of_others_may_have() -> None:
    for kind in (OneReply, MeshReply):
        reply, _ = sink(kind, 1)
        for name in ("wait", "then", "value", "add_done_callback", "running", "ready", "values", "item"):
            with pytest.raises(AttributeError, match="a Future has no attribute"):
                getattr(reply, name)
