"""Calls to a supervised child, without processes: what the directory answers, and what a line does with it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from monarch.core.future import Future
from monarch.core.ids import ActorId, ProcId, Uid
from monarch.core.monitor import Down, Monitors, PeerGone
from monarch.mesh.child_directory import Directory
from monarch.mesh.child_line import Current, Line, Path, Refused

DOWN = Down("failed", "it broke")


# ---- the directory


class Answers(list[tuple[Any, ...]]):
    """What a directory answers."""

    def __call__(self, *message: Any) -> None:
        self.append(message)


@pytest.fixture
def directory() -> Directory:
    made = Directory()
    made.declare("a", "a prototype")  # type: ignore[arg-type]
    made.open()
    return made


def test_a_question_is_answered_once_a_newer_incarnation_is_up(directory: Directory) -> None:
    any_answers, newer_answers = Answers(), Answers()
    directory.ask("a", 0, any_answers)
    directory.ask("a", 1, newer_answers)
    assert (any_answers, newer_answers) == ([], [])

    directory.up("a", 1, "one")  # type: ignore[arg-type]
    assert (any_answers, newer_answers) == ([("up", 1, "one")], [])
    directory.down("a", DOWN)
    directory.up("a", 2, "two")  # type: ignore[arg-type]

    assert (any_answers, newer_answers) == ([("up", 1, "one")], [("up", 2, "two")])


def test_who_watches_an_incarnation_hears_of_its_end_once_and_why(directory: Directory) -> None:
    answers, late = Answers(), Answers()
    directory.up("a", 1, "one")  # type: ignore[arg-type]
    directory.watch("a", 1, answers)
    assert answers == []

    directory.down("a", DOWN)
    directory.watch("a", 1, late)
    directory.up("a", 2, "two")  # type: ignore[arg-type]

    assert (answers, late) == ([("lost", DOWN)], [("lost", DOWN)])


def test_before_the_supervisor_is_constructed_no_name_is_unknown() -> None:
    directory, asked, shape, unknown = Directory(), Answers(), Answers(), Answers()
    directory.ask("a", 0, asked)
    directory.shape("a", shape)
    directory.shape("b", unknown)
    assert (asked, shape, unknown) == ([], [], [])

    directory.declare("a", "a prototype")  # type: ignore[arg-type]
    directory.open()

    assert (asked, shape, unknown) == ([], [("shape", "a prototype")], [("unknown", ["a"])])


def test_the_end_answers_everything_that_is_open(directory: Directory) -> None:
    asked, watched, other, late = Answers(), Answers(), Answers(), Answers()
    directory.declare("b", "b prototype")  # type: ignore[arg-type]
    directory.up("b", 1, "b one")  # type: ignore[arg-type]
    directory.ask("a", 0, asked)
    directory.watch("b", 1, watched)
    directory.over("a", DOWN)
    directory.ask("b", 1, other)

    directory.end("the supervisor", DOWN)
    directory.end("again", Down("stopped", "later"))
    directory.ask("b", 0, late)

    assert asked == [("over", DOWN)]
    assert watched == [("lost", None)]
    assert other == late == [("ended", "the supervisor", DOWN)]


# ---- the line


class FakeRuntime:
    """Keeps what a line asks, and its timers."""

    def __init__(self) -> None:
        self.gateway = self
        self.monitors = Monitors()
        self.timers: list[Any] = []
        self.asked: list[tuple[str, tuple[Any, ...], Future[Any]]] = []

    def call_later(self, delay_s: float, action: Any) -> None:
        self.timers.append(action)

    def request(self, proc: ProcId, kind: str, what: str, number: int, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future._pending(None)
        self.asked.append((what, arguments, future))
        return future


class FakeMesh:
    def __init__(self, key: int) -> None:
        self._procs = [ProcId(Uid("p", key))]
        self._number = key


class Interleavings(RuleBasedStateMachine):
    """Calls, answers, ends and time-outs in any order: each call is sent or refused, once, and those sent in order."""

    @initialize()
    def begin(self) -> None:
        self.runtime: Any = FakeRuntime()
        self.line = Line(self.runtime, Path(ActorId(ProcId(Uid("s", 1)), 5, "shop"), ("a",)), None)
        self.calls = 0
        self.sent: list[int] = []
        self.refused: list[int] = []
        self.newest = 0
        self.alive: int | None = None  # the incarnation that the line may use
        self.gone = 0
        self.gone_serials: list[int] = []
        self.reenter = False

    def open_questions(self, what: str) -> list[tuple[tuple[Any, ...], Future[Any]]]:
        return [
            (arguments, future) for kind, arguments, future in self.runtime.asked if kind == what and not future.done()
        ]

    def submit(self) -> None:
        self.calls += 1
        self.line.submit(Call(self, self.calls), 1.0)

    @rule()
    def a_call_comes(self) -> None:
        self.submit()

    @precondition(lambda self: self.open_questions("ask"))
    @rule(others=st.booleans())
    def the_child_is_up(self, others: bool) -> None:
        """`others`: another call comes while those that waited are sent."""
        ((_, after), future) = self.open_questions("ask")[0]
        assert after == self.gone, "it asks for one that is newer than those which are gone"
        self.reenter = others
        self.newest = max(self.newest, after) + 1
        self.alive = self.newest
        mesh = FakeMesh(self.newest)
        future._complete(lambda: ("up", mesh._number, mesh))
        self.reenter = False

    @precondition(lambda self: self.open_questions("ask"))
    @rule(kind=st.sampled_from(["over", "ended", "unknown", "gone", "unreadable"]))
    def the_child_will_not_be_up(self, kind: str) -> None:
        future = self.open_questions("ask")[0][1]
        answers: dict[str, tuple[Any, ...]] = {
            "over": ("over", DOWN), "ended": ("ended", "shop", DOWN), "unknown": ("unknown", [])
        }  # fmt: skip
        errors = {"gone": PeerGone(DOWN), "unreadable": ValueError("what?")}
        waiting = self.calls - len(self.sent) - len(self.refused)
        before = len(self.refused)
        if kind in errors:
            future._fail(errors[kind])
        else:
            future._complete(lambda: answers[kind])
        assert len(self.refused) == before + waiting, "all that waited have heard"

    @precondition(lambda self: self.alive is not None)
    @rule(how=st.sampled_from(["told", "process", "bounce"]), again=st.booleans())
    def the_incarnation_ends(self, how: str, again: bool) -> None:
        """And the line hears of it, in one way, then perhaps in another."""
        gone, self.alive = self.alive, None
        self.gone = gone or 0
        self.gone_serials.append(self.line._serials)
        for each in [how, "process"] if again else [how]:
            if each == "told":
                for (_, number), future in self.open_questions("watch"):
                    if number == gone:
                        future._complete(lambda: ("lost", DOWN))
            elif each == "process":
                self.runtime.monitors.fire((FakeMesh(gone or 0)._procs[0].key, 0), DOWN)
            else:
                self.line.lost(self.line._serials, DOWN)

    @precondition(lambda self: self.gone_serials)
    @rule(data=st.data())
    def an_old_end_is_told_again(self, data: st.DataObject) -> None:
        self.line.lost(data.draw(st.sampled_from(self.gone_serials)), DOWN)
        submitted = self.calls
        self.submit()
        assert self.alive is None or self.sent[-1] == submitted + 1

    @precondition(lambda self: self.runtime.timers)
    @rule(data=st.data())
    def a_limit_is_over(self, data: st.DataObject) -> None:
        self.runtime.timers.pop(data.draw(st.integers(0, len(self.runtime.timers) - 1)))()

    @invariant()
    def each_call_once_and_in_order(self) -> None:
        if not hasattr(self, "line"):
            return
        assert self.sent == sorted(set(self.sent))
        assert len(set(self.refused)) == len(self.refused)
        assert not set(self.sent) & set(self.refused)
        waiting = self.calls - len(self.sent) - len(self.refused)
        asked = len(self.open_questions("ask"))
        assert asked == 1 or (asked == 0 and not waiting)
        assert not (waiting and self.alive is not None), "nobody waits for what is there"

    def teardown(self) -> None:
        if hasattr(self, "line"):
            while self.runtime.timers:
                self.runtime.timers.pop()()
            assert sorted(self.sent + self.refused) == list(range(1, self.calls + 1))


class Call:
    def __init__(self, world: Interleavings, number: int) -> None:
        self.world, self.number = world, number

    def send(self, current: Current, may_wait: bool) -> None:
        assert current.number == self.world.alive, "it goes to the incarnation that is up"
        self.world.sent.append(self.number)
        if self.world.reenter:
            self.world.reenter = False
            self.world.submit()

    def refuse(self, refused: Refused) -> None:
        assert refused.reason
        self.world.refused.append(self.number)


TestInterleavings = Interleavings.TestCase


def test_a_call_that_raises_keeps_no_other_from_its_turn() -> None:
    runtime: Any = FakeRuntime()
    line = Line(runtime, Path(ActorId(ProcId(Uid("s", 1)), 5, "shop"), ("a",)), None)
    sent: list[str] = []

    class Raises:
        def send(self, current: Current, may_wait: bool) -> None:
            raise ValueError("no")

        refuse = send

    class Notes:
        def send(self, current: Current, may_wait: bool) -> None:
            sent.append("sent")

        refuse = send

    line.submit(Raises(), None)  # type: ignore[arg-type]
    line.submit(Notes(), None)  # type: ignore[arg-type]
    mesh = FakeMesh(1)
    runtime.asked[0][2]._complete(lambda: ("up", 1, mesh))

    assert sent == ["sent"]
