"""The state machine of a supervisor: events in, `Start | Stop | Forget | Escalate` out. Sans-IO.

Theory of operation. Every child is in one phase:

```
          ┌────────────── gone, to be restarted ───────────────┐
          ▼                                                    │
        DOWN ──Start──► STARTING ──up──► UP ──Stop──► STOPPING ─┤
          │                │ gone         │ gone               │ gone, leaving
          │                └──────┬───────┘                    ▼
          └── leaving ──────► `decide` ──────────────────► OVER (Forget)
```

Whoever carries the actions out answers each `Start` with `up` or `gone`, and each `Stop` with `gone`. An event names an
incarnation of its child; one that is not current (late, or told twice) changes nothing. So no event is lost and none
counts twice, in whatever order they come.

Children that a decision restarts together are a batch: first all of them that run are stopped, one after the other,
the youngest first; then they are started, each when the one before it is up. A newer decision takes children out of an
older batch. Different batches do not wait for each other, so that under one_for_one a slow start delays nobody.

The first start of a child is no restart: when it fails, the supervisor gives up (for a child that was added later: the
child is forgotten), as in OTP. An end on purpose before the child was up is never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from attrs import define, field

from monarch.supervision.policy import (
    Action,
    Escalate,
    Exit,
    Forget,
    Restart,
    Rule,
    Start,
    Stop,
    Strategy,
    Window,
    decide,
)


def refuse_twins(names: Sequence[str]) -> None:
    """Raises: ValueError, when two are the same."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two children have the name {', '.join(map(repr, twice))}")


class Phase(Enum):
    DOWN = "waits to be started"
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"
    OVER = "over"


@define(eq=False)
class _Child:
    rule: Rule
    batch: int
    added: bool = False  # after the supervisor had started
    phase: Phase = Phase.DOWN
    incarnation: int = 0
    was_up: bool = False
    must_stop: bool = False  # it is to be stopped, as soon as its batch lets it
    leaving: str = ""  # why it is not started again
    restarts: int = 0

    @property
    def runs(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.UP, Phase.STOPPING)


@define(eq=False)
class Restarts:
    """See the module. Not thread-safe. Every method returns the actions that follow, in their order."""

    strategy: Strategy
    window: Window
    _children: list[_Child] = field(factory=list, init=False)  # oldest first; those that are over are taken out
    _batches: int = field(default=0, init=False)
    _incarnations: dict[str, int] = field(factory=dict, init=False)  # the newest by name, also of those that are over
    _given_up: bool = field(default=False, init=False)
    _shutting_down: bool = field(default=False, init=False)

    # ---- events

    def begin(self, rules: Sequence[Rule]) -> list[Action]:
        """Start these children, the oldest first. Called once, before any other event.

        Raises:
            ValueError: two have one name.
        """
        refuse_twins([rule.name for rule in rules])
        batch = self._new_batch()
        self._children = [_Child(rule, batch) for rule in rules]
        return list(self._advance())

    def add(self, rule: Rule) -> list[Action]:
        """One more child, the youngest.

        Raises:
            ValueError: the name is taken, or the supervisor is ending.
        """
        if self._ending:
            raise ValueError("the supervisor is ending")
        if self._find(rule.name) is not None:
            raise ValueError(f"there is a child {rule.name!r} already")
        self._children.append(_Child(rule, self._new_batch(), added=True))
        return list(self._advance())

    def remove(self, name: str, reason: str) -> list[Action]:
        """Stop a child and forget it. Nothing happens where it is unknown, or leaving already."""
        child = self._find(name)
        if child is None or child.leaving or self._ending:
            return []
        child.leaving = reason
        child.must_stop = child.phase in (Phase.STARTING, Phase.UP)
        return list(self._advance())

    def up(self, name: str, incarnation: int) -> list[Action]:
        """The start of that incarnation has succeeded."""
        child = self._find(name)
        if child is None or child.incarnation != incarnation or child.phase is not Phase.STARTING:
            return []
        child.phase = Phase.UP
        child.was_up = True
        return list(self._advance())

    def gone(self, name: str, incarnation: int, exit: Exit, now_s: float) -> list[Action]:
        """That incarnation has ended, or could not be started; nothing of it is left."""
        child = self._find(name)
        if child is None or child.incarnation != incarnation or not child.runs:
            return []
        before, child.phase = child.phase, Phase.DOWN
        # The end of one that was to be stopped anyway is no event of its own.
        due = child.must_stop or before is Phase.STOPPING or self._ending
        child.must_stop = False
        judged = [] if due else self._judge(child, before, exit, now_s)
        return judged + list(self._advance())

    def shut_down(self) -> list[Action]:
        """The supervisor is ending: stop all children, the youngest first. Nothing is started any more."""
        if self._shutting_down:
            return []
        self._shutting_down = True
        batch = self._new_batch()
        for child in self._children:
            child.batch = batch
            child.leaving = child.leaving or "its supervisor has ended"
            child.must_stop = child.phase in (Phase.STARTING, Phase.UP)
        return list(self._advance())

    # ---- decisions

    def _judge(self, child: _Child, before: Phase, exit: Exit, now_s: float) -> list[Action]:
        """A child has ended that should not have been stopped."""
        if before is Phase.STARTING and exit is Exit.NORMAL:
            child.leaving = "it was stopped before it was up"
            return []
        if before is Phase.STARTING and not child.was_up:
            if child.added:
                child.leaving = "it could not be started"
                return []
            return self._give_up(child, "it could not be started")
        rules = [each.rule for each in self._children if not each.leaving]
        verdict = decide(self.strategy, rules, child.rule, exit, self.window, now_s)
        if verdict.escalate:
            return self._give_up(child, verdict.escalate)
        if verdict.forget:
            how = "it was stopped" if exit is Exit.NORMAL else "it failed"
            child.leaving = f"{how}, and it is {child.rule.restart.value}"
            return []
        batch = self._new_batch()
        names = {rule.name for rule in verdict.group}
        for each in self._children:
            if each.rule.name not in names:
                continue
            each.batch = batch
            each.must_stop = each.phase in (Phase.STARTING, Phase.UP)
            each.restarts += each is child or each.must_stop
            if each is not child and each.rule.restart is Restart.TEMPORARY:
                each.leaving = f"it was stopped along with {child.rule.name!r}, and it is temporary"
        return []

    def _give_up(self, child: _Child, reason: str) -> list[Action]:
        self._given_up = True
        return [Escalate(child.rule.name, reason)]

    def _advance(self) -> Iterator[Action]:
        """What can be done now: each batch by itself."""
        for child in list(self._children):
            if child.leaving and child.phase is Phase.DOWN:
                child.phase = Phase.OVER
                self._children.remove(child)
                yield Forget(child.rule.name, child.leaving)
        if self._given_up and not self._shutting_down:
            return
        for batch in sorted({child.batch for child in self._children}):
            members = [child for child in self._children if child.batch == batch]
            stopping = [child for child in members if child.must_stop or child.phase is Phase.STOPPING]
            if stopping:
                youngest = stopping[-1]
                if youngest.phase is not Phase.STOPPING:
                    youngest.must_stop = False
                    youngest.phase = Phase.STOPPING
                    yield Stop(youngest.rule.name, youngest.incarnation)
                continue
            for child in members:
                if child.phase is Phase.DOWN and not self._ending:
                    child.phase = Phase.STARTING
                    child.incarnation = self._incarnations.get(child.rule.name, 0) + 1
                    self._incarnations[child.rule.name] = child.incarnation
                    yield Start(child.rule.name, child.incarnation)
                if child.phase is not Phase.UP:
                    break

    # ---- for others

    @property
    def _ending(self) -> bool:
        return self._given_up or self._shutting_down

    @property
    def finished(self) -> bool:
        """The supervisor is ending, and no child runs."""
        return self._ending and not any(child.runs for child in self._children)

    def status(self) -> list[tuple[str, Phase, int]]:
        """(name, phase, restarts) of every child that is not over, oldest first."""
        return [(child.rule.name, child.phase, child.restarts) for child in self._children]

    def check_invariants(self) -> None:
        """For tests."""
        for child in self._children:
            assert child.phase is not Phase.OVER
            assert not (child.must_stop and child.phase not in (Phase.STARTING, Phase.UP)), child
            assert not (child.leaving and child.phase is Phase.DOWN and not self._given_up), child

    def _find(self, name: str) -> _Child | None:
        return next((child for child in self._children if child.rule.name == name), None)

    def _new_batch(self) -> int:
        self._batches += 1
        return self._batches
