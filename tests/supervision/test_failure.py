"""A failure is a value: its fields, its text, its way through a pickle."""

from __future__ import annotations

import pickle

import pytest
from attrs import evolve

from monarch.core.monitor import Down
from monarch.supervision.failure import Fate, Member, MeshFailure, call_failed

MEMBER = Member("shop.Worker", "workers", {"hosts": 0, "gpus": 1}, "{'hosts': 0/1, 'gpus': 1/2}")
KILLED = Down("killed", "the process this actor was running on failed: Killed(sig=9)", pid=42, host="node7", signal=9)
RAISED = Down(
    "failed",
    "endpoint step raised ValueError: no: never",
    pid=43,
    host="node7",
    error="shop.BadInput: no: never",
    traceback="Traceback of it\n",
)


@pytest.mark.parametrize(
    ("down", "fields"),
    [
        (KILLED, ("killed", 42, "node7", None, 9, "", "", [])),
        (Down("exited", "it exited", pid=4, code=3), ("exited", 4, "", 3, None, "", "", [])),
        (RAISED, ("failed", 43, "node7", None, None, "shop.BadInput", "no: never", [])),
        (RAISED.because(KILLED.because(RAISED)), ("failed", 43, "node7", None, None, "shop.BadInput", "no: never", 2)),
        (Down("unreachable", "it is silent"), ("unreachable", 0, "", None, None, "", "", [])),
    ],
    ids=["killed", "exited", "raised", "caused", "unreachable"],
)
def test_the_fields_say_what_happened(down: Down, fields: tuple[object, ...]) -> None:
    failure = MeshFailure("workers", [1], MEMBER, down)
    *plain, causes = fields

    assert [
        failure.kind,
        failure.pid,
        failure.host,
        failure.exit_code,
        failure.signal,
        failure.exception_type,
        failure.exception_text,
    ] == plain
    assert len(failure.causes) == (causes or 0)
    assert (failure.actor_class, failure.actor_name) == ("shop.Worker", "workers")
    assert failure.coordinates == [{"hosts": 0, "gpus": 1}]


def test_it_pickles_with_all_of_it() -> None:
    failure = MeshFailure("workers", [1], MEMBER, evolve(RAISED, time_s=1e9).because(KILLED))

    again = pickle.loads(pickle.dumps(failure))
    assert again == failure
    assert (again.report(), again.coordinates, again.causes) == (failure.report(), failure.coordinates, [KILLED])


def test_its_report_is_a_paragraph_and_what_caused_it() -> None:
    report = MeshFailure("workers", [1], MEMBER, evolve(RAISED, time_s=1e9).because(KILLED)).report()

    first, trace, cause = report.splitlines()
    assert first.startswith("shop.Worker workers{'hosts': 0/1, 'gpus': 1/2} at rank 1 failed at 2001-09-")
    assert first.endswith("endpoint step raised ValueError: no: never (process 43 on node7)")
    assert trace == "Traceback of it"
    assert cause == "caused by: the process this actor was running on failed: Killed(sig=9) (process 42)"
    assert "Down" not in report and "Member" not in report


def test_its_text_names_mesh_and_ranks() -> None:
    text = str(MeshFailure("workers", [1], MEMBER, KILLED))

    assert text.startswith("MeshFailure(mesh_name='workers', crashed_ranks=[1], event=")
    assert "shop.Worker workers{'hosts': 0/1, 'gpus': 1/2}" in text
    assert "Down" not in text and "Member" not in text


@pytest.mark.parametrize("fate", list(Fate))
def test_a_call_that_failed_carries_it(fate: Fate) -> None:
    error = pickle.loads(pickle.dumps(call_failed(MEMBER, 1, "workers", KILLED, "workers.step", fate)))

    assert str(error).startswith("Endpoint call workers.step() failed, The actor shop.Worker workers{")
    assert "and all its descendants have failed" in str(error)
    assert fate in str(error)
    assert (error.failure.crashed_ranks, error.failure.signal) == ([1], 9)


def test_a_call_to_what_was_stopped_carries_none() -> None:
    error = call_failed(MEMBER, 1, "workers", Down("stopped", "by its owner"), "workers.step", Fate.UNSERVED)

    assert "has status: stopped (by its owner)" in str(error)
    assert error.failure is None
