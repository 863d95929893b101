"""Supervisors: who is restarted after which death, in which order, and what callers of a child see of it."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from typing import Any

import pytest

import monarch.supervision
from monarch.actor import Actor, ActorError, Channel, SupervisionError, context, endpoint, this_host, this_proc
from monarch.errors import MeshError
from monarch.supervision import Child, Restart, Strategy, Supervisor
from monarch.testing import TestClient, wait_until_gone
from tests.mesh.actors import FailingCleaner, Worker
from tests.mesh.children import Caller, Shop, Slow, Storyteller, Stubborn, Teller

LIMIT_S = 20.0


def supervise(*children: Child[Any], cls: type[Supervisor] = Supervisor, **options: Any) -> Any:
    return this_proc().spawn("shop", cls, children, **options)


def heard(receiver: Any, count: int) -> list[Any]:
    return [receiver.recv().get(LIMIT_S) for _ in range(count)]


def kill(child: Any) -> int:
    """Kill a child's process in the middle of a call, and see the call fail."""
    pid: int = child.pid.call_one().get(LIMIT_S)
    with pytest.raises(SupervisionError, match=r"Killed\(sig=9\)"):
        child.kill_process.call_one().get(LIMIT_S)
    return pid


# ---- restarts, as callers see them


def test_a_killed_process_is_replaced_and_the_handle_goes_on(real_client: TestClient, channel: Any) -> None:
    port, receiver = channel
    spec = Child("worker", Worker, 40)
    worker = supervise(spec).child(spec)
    pid = worker.pid.call_one().get(LIMIT_S)
    assert worker.add.call_one(2).get(LIMIT_S) == 42
    held = worker.hold.call_one(port)
    receiver.recv().get(LIMIT_S)
    queued = worker.add.call_one(1)

    os.kill(pid, signal.SIGKILL)

    for future in (held, queued):
        with pytest.raises(SupervisionError, match=r"Killed\(sig=9\)") as caught:
            future.get(LIMIT_S)
        assert caught.value.failure.down.pid == pid
    assert worker.add.call_one(2).get(LIMIT_S) == 42  # constructed anew: nothing was repeated
    assert worker.pid.call_one().get(LIMIT_S) != pid
    wait_until_gone(pid)


@pytest.mark.slow
def test_replacements_are_replaced(real_client: TestClient) -> None:
    worker = supervise(Child("worker", Worker), max_restarts=10).child("worker")
    pids = [worker.pid.call_one().get(LIMIT_S)]
    for _ in range(5):
        with pytest.raises(SupervisionError):
            worker.kill_process.call_one().get(LIMIT_S)
        pids.append(worker.pid.call_one().get(LIMIT_S))

    assert len(set(pids)) == 6


def test_other_processes_hear_of_the_new_incarnation_too(client: TestClient, channel: Any) -> None:
    """The handle travels; its holders know nothing of the restart until they call."""
    port, receiver = channel
    child = supervise(Child("child", Storyteller, port, "a"), max_restarts=20).child("child")
    callers = this_host().spawn_procs({"gpus": 2}).spawn("callers", Caller, child)
    for round in range(4):
        assert list(callers.echo.call(round).get(LIMIT_S).values()) == [round, round]
        with pytest.raises(SupervisionError, match="SystemExit"):
            child.leave.call_one().get(LIMIT_S)
        assert child.echo.call_one(round).get(LIMIT_S) == round  # at once, by whoever saw the failure

    assert [story for story in heard(receiver, 9) if story == "+a"] == ["+a"] * 5


@pytest.mark.slow
def test_the_adverbs_and_views_work_over_a_restart(real_client: TestClient) -> None:
    workers = supervise(Child("workers", Worker).options(per_host={"hosts": 2, "gpus": 2})).child("workers")
    assert (len(workers), dict(workers.extent)) == (4, {"hosts": 2, "gpus": 2})
    row = workers.slice(hosts=1)
    pids = workers.pid.call().get(LIMIT_S)
    with pytest.raises(SupervisionError, match=r"'gpus': 1/2"):
        row.slice(gpus=1).kill_process.call_one().get(LIMIT_S)

    # Waiting calls of every kind, on views of every kind.
    row.note.broadcast(7)
    chosen, one = row.pid.choose(), row.pid.call()
    stream = workers.echo.stream(5)
    assert row.notes.call().get(LIMIT_S).item(gpus=1) == [7]
    assert workers.slice(hosts=0, gpus=0).notes.call_one().get(LIMIT_S) == []
    assert [future.get(LIMIT_S) for future in stream] == [5] * 4
    assert chosen.get(LIMIT_S) in one.get(LIMIT_S).values()
    assert workers.slice(hosts=1, gpus=0).rank.call_one().get(LIMIT_S)[0] == 0
    assert not set(pids.values()) & set(workers.pid.call().get(LIMIT_S).values())  # the whole mesh is new
    assert workers.initialized.get(LIMIT_S) is None


def test_calls_that_wait_keep_their_order(client: TestClient, channel: Any) -> None:
    port, _ = channel
    gates, gate_receiver = Channel[Any].open()
    slow = supervise(Child("slow", Slow, port, gates)).child("slow")
    gate_receiver.recv().get(LIMIT_S).send("go")
    for value in range(50):
        slow.note.broadcast(value)
    assert slow.notes.call_one().get(LIMIT_S) == list(range(50))
    with pytest.raises(SupervisionError):
        slow.leave.call_one().get(LIMIT_S)

    for value in range(50):
        slow.note.broadcast(value)
    gate_receiver.recv().get(LIMIT_S).send("go")
    for value in range(50, 100):
        slow.note.broadcast(value)

    assert slow.notes.call_one().get(LIMIT_S) == list(range(100))


def test_a_wait_has_its_limit(client: TestClient, channel: Any) -> None:
    port, _ = channel
    gates, gate_receiver = Channel[Any].open()
    supervisor = supervise(Child("slow", Slow, port, gates))
    slow, patient = supervisor.child("slow", wait_s=0.05), supervisor.child("slow")
    for call in (slow.echo.call_one(1), slow.echo.call(1), slow.initialized):
        with pytest.raises(SupervisionError, match=r"child 'slow' of supervisor 'shop' was not up within 0.05 s"):
            call.get(LIMIT_S)
    with pytest.raises(SupervisionError, match="was not up"):
        next(slow.echo.stream(1)).get(LIMIT_S)
    waiting = patient.echo.call_one(2)

    gate_receiver.recv().get(LIMIT_S).send("go")

    assert waiting.get(LIMIT_S) == 2


def test_a_restart_that_fails_is_tried_again_and_callers_wait(client: TestClient, channel: Any) -> None:
    port, _ = channel
    gates, gate_receiver = Channel[Any].open()
    supervisor = supervise(Child("slow", Slow, port, gates), max_restarts=3)
    slow = supervisor.child("slow")
    gate_receiver.recv().get(LIMIT_S).send("go")
    with pytest.raises(SupervisionError):
        slow.leave.call_one().get(LIMIT_S)
    waiting = slow.echo.call_one("made it")
    for word in ("fail", "fail", "go"):
        gate_receiver.recv().get(LIMIT_S).send(word)

    assert waiting.get(LIMIT_S) == "made it"
    (status,) = supervisor.children.call_one().get(LIMIT_S)
    assert (status.name, status.state, status.restarts) == ("slow", "up", 3)
    assert "not this time" in status.last_failure


def test_many_callers_over_many_deaths_lose_nothing_and_repeat_nothing(client: TestClient, channel: Any) -> None:
    """Every call ends; what succeeded ran once, what failed at most once; each thread's calls ran in their order."""
    port, receiver = channel
    supervisor = supervise(Child("teller", Teller, port), max_restarts=1000)
    teller = supervisor.child("teller")
    outcomes: dict[int, list[tuple[int, bool]]] = {}

    def call(thread: int) -> None:
        mine = outcomes[thread] = []
        for number in range(100):
            future = teller.tell.call_one((thread, number), dies=number % 20 == thread)
            mine.append((number, future.exception(LIMIT_S) is None))

    threads = [threading.Thread(target=call, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert {thread: len(mine) for thread, mine in outcomes.items()} == dict.fromkeys(range(4), 100)
    assert teller.tell.call_one("end", dies=False).get(LIMIT_S) == "end"
    told: list[Any] = []
    while not told or told[-1] != "end":
        told.append(receiver.recv().get(LIMIT_S))
    told.pop()
    assert len(set(told)) == len(told), "nothing ran twice"
    for thread, mine in outcomes.items():
        ran = [number for each, number in told if each == thread]
        assert ran == sorted(ran)
        assert {number for number, ok in mine if ok} <= set(ran)
        assert sum(not ok for _, ok in mine) >= 5  # its own deadly ones


# ---- who is restarted


@pytest.mark.parametrize(
    ("strategy", "story"),
    [
        ("one_for_one", ["!b", "+b"]),
        ("rest_for_one", ["!b", "-c", "+b", "+c"]),
        ("one_for_all", ["!b", "-c", "-a", "+a", "+b", "+c"]),
    ],
)
def test_a_strategy_restarts_whom_it_should_in_order(
    client: TestClient, channel: Any, strategy: str, story: list[str]
) -> None:
    port, receiver = channel
    supervisor = supervise(*(Child(name, Storyteller, port, name) for name in "abc"), strategy=strategy)
    assert heard(receiver, 3) == ["+a", "+b", "+c"]
    supervisor.child("c").initialized.get(LIMIT_S)

    supervisor.child("b").leave.broadcast()

    assert heard(receiver, len(story)) == story
    for name in "abc":
        assert supervisor.child(name).echo.call_one(name).get(LIMIT_S) == name
    supervisor.stop().get(LIMIT_S)
    assert heard(receiver, 3) == ["-c", "-b", "-a"]


@pytest.mark.parametrize(
    ("restart", "how", "comes_back"),
    [
        ("permanent", "end", True),
        ("permanent", "leave", True),
        ("transient", "end", False),
        ("transient", "leave", True),
        ("temporary", "end", False),
        ("temporary", "leave", False),
    ],
)
def test_the_kind_of_child_decides_whether_it_comes_back(
    client: TestClient, channel: Any, restart: str, how: str, comes_back: bool
) -> None:
    port, receiver = channel
    supervisor = supervise(Child("child", Storyteller, port, "a").options(restart=restart), Child("other", Worker))
    child = supervisor.child("child")
    assert heard(receiver, 1) == ["+a"]
    child.initialized.get(LIMIT_S)
    getattr(child, how).broadcast()
    assert heard(receiver, 1) == ["-a" if how == "end" else "!a"]

    if comes_back:
        assert heard(receiver, 1) == ["+a"]
        assert child.echo.call_one(1).get(LIMIT_S) == 1
        return
    with pytest.raises(SupervisionError):  # it finds the actor at its end, or nobody
        child.echo.call_one(1).get(LIMIT_S)
    with pytest.raises(SupervisionError, match=f"has ended for good.*it is {restart}"):
        child.echo.call_one(1).get(LIMIT_S)
    assert supervisor.child("other").echo.call_one(2).get(LIMIT_S) == 2


def test_a_child_on_given_processes_is_restarted_there(client: TestClient, channel: Any) -> None:
    port, _ = channel
    procs = this_host().spawn_procs({"gpus": 2})
    other = procs.spawn("other", Worker)
    child = supervise(Child("child", Storyteller, port, "a").options(on=procs.slice(gpus=1))).child("child")
    pid = child.pid.call_one().get(LIMIT_S)

    with pytest.raises(SupervisionError):
        child.leave.call_one().get(LIMIT_S)

    assert child.pid.call_one().get(LIMIT_S) == pid
    assert list(other.echo.call(1).get(LIMIT_S).values()) == [1, 1]


def test_given_processes_that_are_stopped_take_their_child_along_in_peace(client: TestClient, channel: Any) -> None:
    port, _ = channel
    procs = this_host().spawn_procs()
    child = supervise(Child("child", Storyteller, port, "a").options(on=procs)).child("child")
    child.initialized.get(LIMIT_S)

    procs.stop().get(LIMIT_S)

    with pytest.raises(SupervisionError):
        child.echo.call_one(1).get(LIMIT_S)
    assert client.faults.values == []


# ---- giving up


def test_too_many_restarts_make_it_give_up_with_the_cause(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    supervisor = supervise(Child("a", Storyteller, port, "a"), Child("b", Storyteller, port, "b"), max_restarts=1)
    first, second = supervisor.child("a"), supervisor.child("b")
    for child in (first, second):
        child.initialized.get(LIMIT_S)
    with pytest.raises(SupervisionError, match="SystemExit"):
        first.leave.call_one().get(LIMIT_S)
    assert first.echo.call_one(1).get(LIMIT_S) == 1
    with pytest.raises(SupervisionError, match="SystemExit"):
        first.leave.call_one().get(LIMIT_S)

    failure = client.expect_fault("gave up on its child 'a': restart intensity reached, 1 restart within 5 s")
    assert failure.mesh_name == "shop"
    assert "caused by: tests.mesh.children.Storyteller a" in failure.report()
    assert "SystemExit: 3" in failure.report()
    for child in (first, second):
        with pytest.raises(SupervisionError, match="gave up on its child 'a'") as caught:
            child.echo.call_one(1).get(LIMIT_S)
        assert "SystemExit" in str(caught.value.failure.report())
    assert heard(receiver, 6) == ["+a", "+b", "!a", "+a", "!a", "-b"]


@pytest.mark.slow
def test_waits_end_when_it_gives_up(real_client: TestClient, channel: Any) -> None:
    port, _ = channel
    gates, gate_receiver = Channel[Any].open()
    children = Child("slow", Slow, port, gates).options(shutdown_s=0.1), Child("worker", Worker)
    supervisor = supervise(*children, max_restarts=1)
    slow, worker = supervisor.child("slow"), supervisor.child("worker")
    gate_receiver.recv().get(LIMIT_S).send("go")
    worker.initialized.get(LIMIT_S)
    with pytest.raises(SupervisionError):
        slow.leave.call_one().get(LIMIT_S)
    waiting = slow.echo.call_one(1)
    gate_receiver.recv().get(LIMIT_S)

    kill(worker)

    with pytest.raises(SupervisionError, match=r"gave up on its child 'worker'.*The call was not sent"):
        waiting.get(LIMIT_S)
    real_client.expect_fault("gave up on its child 'worker'")


def test_a_child_that_cannot_be_started_at_first_makes_it_fail(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    gates, gate_receiver = Channel[Any].open()
    supervisor = supervise(Child("a", Storyteller, port, "a"), Child("slow", Slow, port, gates))
    waiting = supervisor.child("slow").echo.call_one(1)
    gate_receiver.recv().get(LIMIT_S).send("fail")

    failure = client.expect_fault("gave up on its child 'slow': it could not be started")
    assert "ValueError: not this time" in failure.report()
    with pytest.raises(SupervisionError, match="could not be started"):
        waiting.get(LIMIT_S)
    assert heard(receiver, 2) == ["+a", "-a"]


# ---- trees


def test_a_supervisor_is_restarted_by_its_own(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    leaf = Child("leaf", Storyteller, port, "leaf")
    outer = supervise(Child("inner", Supervisor, [leaf], max_restarts=0))
    by_name, by_spec = outer.child("inner").child("leaf"), outer.child("inner").child(leaf)
    for round in range(3):
        assert by_name.echo.call_one(round).get(LIMIT_S) == round
        assert by_spec.echo.call_one(round).get(LIMIT_S) == round
        with pytest.raises(SupervisionError):
            by_spec.leave.call_one().get(LIMIT_S)

    assert by_name.echo.call_one("again").get(LIMIT_S) == "again"
    assert heard(receiver, 7) == ["+leaf", "!leaf"] * 3 + ["+leaf"]
    (status,) = outer.children.call_one().get(LIMIT_S)
    assert (status.name, status.state, status.restarts) == ("inner", "up", 3)
    assert "gave up on its child 'leaf'" in status.last_failure


@pytest.mark.slow
def test_a_killed_supervisor_takes_its_children_along_and_comes_back(real_client: TestClient, channel: Any) -> None:
    outer = supervise(Child("inner", Shop, [Child("leaf", Worker)]))
    inner, leaf = outer.child("inner"), outer.child("inner").child("leaf")
    pids = inner.pid.call_one().get(LIMIT_S), leaf.pid.call_one().get(LIMIT_S)
    held = leaf.hold.call_one(channel[0])
    channel[1].recv().get(LIMIT_S)

    os.kill(pids[0], signal.SIGKILL)

    with pytest.raises(SupervisionError):
        held.get(LIMIT_S)
    for pid in pids:
        wait_until_gone(pid)
    assert leaf.pid.call_one().get(LIMIT_S) not in pids


def test_giving_up_climbs_to_the_top(client: TestClient, channel: Any) -> None:
    port, _ = channel
    leaf = Child("leaf", Storyteller, port, "leaf")
    outer = supervise(Child("inner", Supervisor, [leaf], max_restarts=0), max_restarts=0)
    child = outer.child("inner").child(leaf)
    child.initialized.get(LIMIT_S)
    child.leave.broadcast()

    report = client.expect_fault("gave up on its child 'inner'").report()
    assert report.index("gave up on its child 'inner'") < report.index("gave up on its child 'leaf'")
    assert "SystemExit: 3" in report
    with pytest.raises(SupervisionError):
        child.echo.call_one(1).get(LIMIT_S)


# ---- the end


@pytest.mark.slow
def test_a_stop_stops_the_youngest_first_and_leaves_nothing(real_client: TestClient, channel: Any) -> None:
    port, receiver = channel
    supervisor = supervise(*(Child(name, Storyteller, port, name) for name in "abc"))
    children = [supervisor.child(name) for name in "abc"]
    pids = [child.pid.call_one().get(LIMIT_S) for child in children]
    assert heard(receiver, 3) == ["+a", "+b", "+c"]

    supervisor.stop().get(LIMIT_S)

    assert heard(receiver, 3) == ["-c", "-b", "-a"]
    for pid in pids:
        wait_until_gone(pid)
    for child in children:
        with pytest.raises(SupervisionError, match="the supervisor was stopped"):
            child.echo.call_one(1).get(LIMIT_S)
    assert real_client.faults.values == []


def test_a_child_that_does_not_end_in_its_time_is_killed(real_client: TestClient, channel: Any) -> None:
    port, _ = channel
    child = Child("stubborn", Stubborn, port, "s").options(shutdown_s=0.1)
    supervisor = supervise(child)
    pid = supervisor.child(child).pid.call_one().get(LIMIT_S)

    supervisor.stop().get(LIMIT_S)

    wait_until_gone(pid)


def test_a_child_that_fails_while_it_is_stopped_is_told_of(client: TestClient, caplog: Any) -> None:
    supervisor = supervise(Child("child", FailingCleaner))
    supervisor.child("child").initialized.get(LIMIT_S)
    with caplog.at_level(logging.WARNING, "monarch"):
        supervisor.stop().get(LIMIT_S)
    assert "child.failed_while_stopped" in caplog.text and "cleanup says no" in caplog.text


def test_what_queues_is_served_before_a_stop(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    supervisor = supervise(Child("a", Storyteller, port, "a"))
    child = supervisor.child("a")
    holding = child.hold.call_one(port)
    assert heard(receiver, 1) == ["+a"]
    (release,) = heard(receiver, 1)
    queued = child.echo.call_one("served")
    stopping = supervisor.stop_child.call_one("a")

    release.send("released")

    assert (holding.get(LIMIT_S), queued.get(LIMIT_S)) == ("released", "served")
    stopping.get(LIMIT_S)
    assert heard(receiver, 1) == ["-a"]


# ---- children that come and go


def test_children_can_be_added_and_stopped(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    supervisor = supervise()
    assert supervisor.children.call_one().get(LIMIT_S) == []

    child = supervisor.start_child.call_one(Child("a", Storyteller, port, "a")).get(LIMIT_S)

    assert child.echo.call_one(1).get(LIMIT_S) == 1
    with pytest.raises(ActorError, match="there is a child 'a' already"):
        supervisor.start_child.call_one(Child("a", Worker)).get(LIMIT_S)
    supervisor.stop_child.call_one("a").get(LIMIT_S)
    with pytest.raises(SupervisionError, match="has ended for good: it was stopped by stop_child"):
        child.echo.call_one(1).get(LIMIT_S)
    with pytest.raises(ActorError, match="no child 'a' to stop"):
        supervisor.stop_child.call_one("a").get(LIMIT_S)
    supervisor.start_child.call_one(Child("a", Storyteller, port, "a")).get(LIMIT_S)
    assert child.echo.call_one(2).get(LIMIT_S) == 2  # the name is what counts
    assert heard(receiver, 3) == ["+a", "-a", "+a"]


def test_a_child_that_is_added_and_cannot_be_started_is_forgotten(client: TestClient, channel: Any) -> None:
    port, _ = channel
    gates, gate_receiver = Channel[Any].open()
    supervisor = supervise()
    starting = supervisor.start_child.call_one(Child("slow", Slow, port, gates))
    gate_receiver.recv().get(LIMIT_S).send("fail")

    with pytest.raises(ActorError, match=r"child 'slow' was not started: (?s:.)*not this time"):
        starting.get(LIMIT_S)
    assert supervisor.children.call_one().get(LIMIT_S) == []


def test_a_subclass_calls_its_own_children(client: TestClient, channel: Any) -> None:
    port, _ = channel
    supervisor = supervise(Child("a", Storyteller, port, "a"), cls=Shop)

    assert supervisor.ask.call_one("a", 1).get(LIMIT_S) == 1
    with pytest.raises(SupervisionError):
        supervisor.child("a").leave.call_one().get(LIMIT_S)
    assert supervisor.ask.call_one("a", 2).get(LIMIT_S) == 2  # it waits for itself to restart the child


# ---- handles


def test_a_handle_can_be_had_in_several_ways(client: TestClient, channel: Any) -> None:
    port, _ = channel
    spec = Child("a", Storyteller, port, "a")
    supervisor = supervise(spec)
    handles = [supervisor.child("a"), supervisor.child(spec), supervisor.get_child.call_one("a").get(LIMIT_S)]

    assert handles == [handles[0]] * 3 and len(set(handles)) == 1
    assert handles[0] == pickle.loads(pickle.dumps(handles[0]))
    assert repr(handles[0]) == "<SupervisedMesh child 'a' of supervisor 'shop', of tests.mesh.children.Storyteller {}>"
    assert [handle.echo.call_one(1).get(LIMIT_S) for handle in handles] == [1, 1, 1]
    with pytest.raises(NotImplementedError, match="stop_child"):
        handles[0].stop()
    with pytest.raises(TypeError):
        handles[0].echo.call_one()
    with pytest.raises(AttributeError, match="no endpoint 'nothing'"):
        handles[0].nothing  # noqa: B018


def test_an_unknown_child_is_a_mistake(client: TestClient, channel: Any) -> None:
    port, _ = channel
    supervisor = supervise(Child("a", Storyteller, port, "a"))

    with pytest.raises(MeshError, match=r"child 'b' of supervisor 'shop' does not exist; there is 'a'"):
        supervisor.child("b")
    with pytest.raises(MeshError, match="does not exist"):
        supervisor.child(Child("b", Worker)).echo.call_one(1).get(LIMIT_S)


def test_several_supervisors_are_asked_one_by_one(client: TestClient) -> None:
    supervisors = this_host().spawn_procs({"gpus": 2}).spawn("shops", Supervisor, [Child("worker", Worker)])
    with pytest.raises(ValueError, match="2 supervisors"):
        supervisors.child("worker")

    keys = {supervisors.slice(gpus=i).child("worker").proc_key.call_one().get(LIMIT_S) for i in range(2)}

    assert len(keys) == 2


class Hidden(Actor):
    @endpoint
    def _path(self) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Child("a", int), ValueError, "subclass of Actor"),
        (lambda: Child(7, Worker), TypeError, "the name of a mesh is a str"),
        (lambda: Child("a", Hidden), ValueError, "_path"),
        (lambda: Child("a", Worker, 1, 2, 3), TypeError, "too many"),
        (lambda: Child("a", Worker).options(restart="often"), ValueError, "'permanent', 'transient', 'temporary'"),
        (lambda: Child("a", Worker).options(shutdown_s=-1), ValueError, "not negative"),
        (lambda: Child("a", Worker).options(per_host={"gpus": 0}), ValueError, "at least 1"),
        (lambda: Child("a", Supervisor, [Worker]), TypeError, r"takes Child\(name, Class, ...\), not <class"),
        (lambda: Child("a", Supervisor, [Child("b", Worker)] * 2), ValueError, "two children have the name 'b'"),
        (lambda: Child("a", Supervisor, strategy="all"), ValueError, "'one_for_one', 'one_for_all', 'rest_for_one'"),
        (lambda: Child("a", Supervisor, max_restarts=-1), ValueError, "must not be negative"),
        (
            lambda: Child("a", Supervisor, within_s=0),
            ValueError,
            "within_s is 0; it must be a number of seconds, above 0",
        ),
        (lambda: Child("a", Supervisor, within_s="5s"), TypeError, "within_s is '5s'; it must be a number of seconds"),
    ],
)
def test_a_specification_that_cannot_work_is_refused(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_options_leave_the_original_alone() -> None:
    child = Child("a", Worker)
    other = child.options(restart=Restart.TEMPORARY, shutdown_s=1, per_host={"gpus": 2})

    assert (child.restart, child.shutdown_s, child.per_host) == (Restart.PERMANENT, 5.0, {})
    assert (other.restart, other.shutdown_s, other.per_host) == (Restart.TEMPORARY, 1, {"gpus": 2})
    assert repr(other) == "<Child 'a' of tests.mesh.actors.Worker, temporary>"


class Twins(Supervisor):
    def __init__(self, name: str) -> None:
        super().__init__([Child(name, Worker), Child(name, Worker)])


def test_a_supervisor_that_cannot_work_is_not_spawned_or_fails(client: TestClient) -> None:
    with pytest.raises(ValueError, match="max_restarts is -1"):
        this_proc().spawn("one", Supervisor, [], Strategy.ONE_FOR_ALL, max_restarts=-1)
    this_proc().spawn("two", Twins, "a")  # is not looked through
    client.expect_fault("two children have the name 'a'")
    with pytest.raises(RuntimeError, match="is an actor"):
        Supervisor([])
    assert context().actor_instance.name == "client"


def test_the_public_names_are_there_and_no_others() -> None:
    assert all(hasattr(monarch.supervision, name) for name in monarch.supervision.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        monarch.supervision.Nothing  # noqa: B018
