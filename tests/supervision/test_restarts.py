"""The state machine of a supervisor: what it does about each event, in tables and in any interleaving."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from monarch.supervision.policy import Action, Escalate, Exit, Forget, Restart, Rule, Start, Stop, Strategy, Window
from monarch.supervision.restarts import Phase, Restarts

NORMAL, FAILED = Exit.NORMAL, Exit.FAILED


def said(actions: list[Action]) -> str:
    """Actions as text: `+a` start, `-a` stop, `xa` forget, `!a` escalate."""
    signs = {Start: "+", Stop: "-", Forget: "x", Escalate: "!"}
    return " ".join(f"{signs[type(action)]}{action.name}" for action in actions)


def play(machine: Restarts, children: str, events: str, now_s: float = 0.0) -> list[str]:
    """Begin with `children` (`a/t` is transient, `a/T` temporary) and feed `events`; returns what follows from each.

    `a`: it is up; `a!`: it failed; `a.`: it ended on purpose; `+a`, `~a`: it is added, removed; `?`: shut down.
    """
    kinds = {"": Restart.PERMANENT, "t": Restart.TRANSIENT, "T": Restart.TEMPORARY}
    rules = [Rule(name, kinds[kind]) for name, _, kind in (each.partition("/") for each in children.split())]
    current: dict[str, int] = {}
    out = []

    def note(actions: list[Action]) -> None:
        current.update({action.name: action.incarnation for action in actions if isinstance(action, Start)})
        out.append(said(actions))
        machine.check_invariants()

    note(machine.begin(rules))
    for event in events.split():
        name = event.strip("!.~?+")
        if event == "?":
            note(machine.shut_down())
        elif event.startswith("~"):
            note(machine.remove(name, "asked"))
        elif event.startswith("+"):
            note(machine.add(Rule(name)))
        elif event.endswith(("!", ".")):
            note(machine.gone(name, current[name], FAILED if event.endswith("!") else NORMAL, now_s))
        else:
            note(machine.up(name, current[name]))
    return out


def machine_of(strategy: str = "one_for_one", limit: int = 10) -> Restarts:
    return Restarts(Strategy(strategy), Window(limit, 5.0))


UP = "a b c"  # the events by which all come up
BORN = ["+a", "+b", "+c", ""]  # and what that does


@pytest.mark.parametrize(
    ("strategy", "children", "events", "actions"),
    [
        # each strategy, and who goes along
        ("one_for_one", "a b c", "b! b", ["+b", ""]),
        ("one_for_one", "a b c", "b! a! a b", ["+b", "+a", "", ""]),
        ("rest_for_one", "a b c", "b! c. b c", ["-c", "+b", "+c", ""]),
        ("rest_for_one", "a b c", "c! c", ["+c", ""]),
        ("one_for_all", "a b c", "b! c. a. a b c", ["-c", "-a", "+a", "+b", "+c", ""]),
        ("one_for_all", "a b c", "a! c! b! a b c", ["-c", "-b", "+a", "+b", "+c", ""]),
        # a sibling that dies by itself while it waits to be stopped, or while it is
        ("one_for_all", "a b c", "a! b! c. a b c", ["-c", "", "+a", "+b", "+c", ""]),
        # a death in the middle of the starts
        ("rest_for_one", "a b c", "b! c. b b! c. b c", ["-c", "+b", "+c", "-c", "+b", "+c", ""]),
        # kinds
        ("one_for_one", "a b/t c", "b.", ["xb"]),
        ("one_for_one", "a b/t c", "b! b b.", ["+b", "", "xb"]),
        ("one_for_one", "a b/T c", "b!", ["xb"]),
        ("one_for_one", "a b c", "b. b", ["+b", ""]),
        ("one_for_all", "a b/T c", "a! c. b. a c", ["-c", "-b", "xb +a", "+c", ""]),
        ("one_for_all", "a b/t c", "b. a! c. a c", ["xb", "-c", "+a", "+c", ""]),
        # removal
        ("one_for_one", "a b c", "~b b. ~b", ["-b", "xb", ""]),
        ("one_for_all", "a b c", "a! ~c c. b. a b", ["-c", "", "xc -b", "+a", "+b", ""]),
        ("rest_for_one", "a b c", "a! ~b c. b. a c", ["-c", "", "-b", "xb +a", "+c", ""]),
        # addition
        ("one_for_all", "a b c", "+d d d! c. b. a.", ["+d", "", "-c", "-b", "-a", "+a"]),
        ("one_for_one", "a b c", "+d d!", ["+d", "xd"]),
        # the end
        ("one_for_one", "a b c", "? c. b! a.", ["-c", "xc -b", "xb -a", "xa"]),
        ("one_for_one", "a b c", "b! ? c. b. a.", ["+b", "-c", "xc -b", "xb -a", "xa"]),
        ("one_for_all", "a b c", "b! ? c. a.", ["-c", "xb", "xc -a", "xa"]),
        ("one_for_all", "a b c", "? b! c. a.", ["-c", "xb", "xc -a", "xa"]),
    ],
)
def test_what_follows_from_events(strategy, children, events, actions):
    assert play(machine_of(strategy), children, f"{UP} {events}") == BORN + actions


def test_a_death_of_an_older_one_while_younger_ones_start_begins_anew():
    out = play(machine_of("one_for_all"), "a b c", f"{UP} c! b. a. a a! b. a b c")

    assert out == [*BORN, "-b", "-a", "+a", "+b", "-b", "+a", "+b", "+c", ""]


def test_children_start_in_order_and_wait_for_each_other():
    assert play(machine_of(), "a b c", UP) == BORN


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
def test_the_first_start_that_fails_is_no_restart(strategy):
    out = play(machine_of(strategy), "a b c", "a b! ? a.")

    assert out == ["+a", "+b", "!b", "xb xc -a", "xa"]


def test_the_first_start_that_is_called_off_is_forgotten():
    assert play(machine_of(), "a b", "a. b") == ["+a", "xa +b", ""]


def test_a_restart_that_fails_counts_and_is_tried_again():
    out = play(machine_of(limit=2), "a", "a a! a! a! ?")

    assert out == ["+a", "", "+a", "+a", "!a", "xa"]


def test_the_intensity_is_of_all_children_together():
    machine = machine_of(limit=2)

    assert play(machine, "a b", "a b a! b! a a! ? b.") == ["+a", "+b", "", "+a", "+b", "", "!a", "xa -b", "xb"]
    assert machine.finished


def test_a_group_counts_once():
    out = play(machine_of("one_for_all", limit=1), "a b", "a b a! b. a b b!")

    assert out == ["+a", "+b", "", "-b", "+a", "+b", "", "!b"]


def test_a_sibling_that_dies_while_it_waits_to_be_stopped_does_not_count():
    out = play(machine_of("one_for_all", limit=1), "a b c", f"{UP} a! b! c. a b c")

    assert out == [*BORN, "-c", "", "+a", "+b", "+c", ""]


def test_after_giving_up_nothing_is_started():
    machine = machine_of(limit=0)
    out = play(machine, "a b", "a b a! b! ?")

    assert out == ["+a", "+b", "", "!a", "", "xa xb"]
    with pytest.raises(ValueError, match="ending"):
        machine.add(Rule("c"))


@pytest.mark.parametrize("event", ["up", "gone"])
def test_what_is_told_late_or_twice_changes_nothing(event):
    machine = machine_of()
    play(machine, "a", "a a! a")
    calls: dict[str, Any] = {"up": lambda n: machine.up("a", n), "gone": lambda n: machine.gone("a", n, FAILED, 0.0)}

    assert calls[event](1) == []
    assert machine.up("a", 2) == []
    assert machine.gone("z", 1, FAILED, 0.0) == []
    assert machine.status() == [("a", Phase.UP, 1)]


def test_a_name_that_comes_again_goes_on_counting():
    """An incarnation is told from all others of its name, whoever has the name."""
    machine = machine_of()
    play(machine, "a", "a ~a a.")

    assert machine.add(Rule("a")) == [Start("a", 2)]


def test_names_are_unique():
    with pytest.raises(ValueError, match="two children have the name 'a'"):
        machine_of().begin([Rule("a"), Rule("b"), Rule("a")])
    machine = machine_of()
    machine.begin([Rule("a")])
    with pytest.raises(ValueError, match="'a' already"):
        machine.add(Rule("a"))


class Interleavings(RuleBasedStateMachine):
    """A world that carries the actions out in any order, with any accident, and a model of what must come of it.

    The model is the world itself (what lives), which incarnations are doomed, and when restarts were granted. It knows
    nothing of phases and batches.
    """

    @initialize(
        strategy=st.sampled_from(Strategy),
        kinds=st.lists(st.sampled_from(Restart), max_size=4),
        limit=st.integers(0, 6),
    )
    def begin(self, strategy: Strategy, kinds: list[Restart], limit: int) -> None:
        self.now_s = 0.0
        self.strategy, self.limit = strategy, limit
        self.machine = Restarts(strategy, Window(limit, 5.0))
        self.kinds: dict[str, Restart] = {}
        self.order: list[str] = []  # oldest first, those that are not forgotten
        self.alive: dict[str, tuple[int, str]] = {}  # name -> incarnation, "starting" | "up" | "stopping"
        self.started: dict[str, int] = {}
        self.up_once: set[str] = set()
        self.forgotten: list[str] = []
        self.leaving: set[str] = set()
        self.escalated: list[str] = []
        self.ended: list[tuple[str, int]] = []
        self.shut_down = False
        self.granted_s: list[float] = []
        self.doomed: set[tuple[str, int]] = set()  # incarnations that are to be stopped, and have not ended yet
        self.added: set[str] = set()
        self.names = 0
        rules = [self.new_rule(kind) for kind in kinds]
        self.order = [each.name for each in rules]
        self.obey(self.machine.begin(rules))

    def new_rule(self, kind: Restart) -> Rule:
        self.names += 1
        name = f"c{self.names}"
        self.kinds[name] = kind
        return Rule(name, kind)

    # ---- the world obeys

    def obey(self, actions: list[Action]) -> None:
        self.machine.check_invariants()
        for action in actions:
            name = action.name
            if isinstance(action, Start):
                assert not self.shut_down and not self.escalated, "nothing is started in the end"
                assert name not in self.alive, "two incarnations at once"
                assert name not in self.forgotten and name not in self.leaving
                assert action.incarnation == self.started.get(name, 0) + 1, "each incarnation is started once"
                self.started[name] = action.incarnation
                self.alive[name] = action.incarnation, "starting"
            elif isinstance(action, Stop):
                incarnation, state = self.alive[name]
                assert incarnation == action.incarnation, "what is stopped is alive"
                assert state != "stopping", "it is told once"
                assert (name, incarnation) in self.doomed, "nobody is stopped without need"
                self.youngest_first(name)
                self.alive[name] = incarnation, "stopping"
            elif isinstance(action, Forget):
                assert name not in self.alive and name not in self.forgotten, "over once, and with nothing left"
                self.forgotten.append(name)
                self.order.remove(name)
            else:
                assert not self.escalated and not self.shut_down, "it gives up once"
                self.escalated.append(name)

    def youngest_first(self, name: str) -> None:
        """Whoever is younger has been stopped before, unless it was not to be stopped at all."""
        if self.shut_down:
            younger = self.order[self.order.index(name) + 1 :]
            assert not any(each in self.alive for each in younger)

    # ---- what may happen

    @precondition(lambda self: any(state == "starting" for _, state in self.alive.values()))
    @rule(data=st.data())
    def a_start_succeeds(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n, (_, s) in self.alive.items() if s == "starting"]))
        self.alive[name] = self.alive[name][0], "up"
        self.up_once.add(name)
        self.obey(self.machine.up(name, self.alive[name][0]))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), exit=st.sampled_from(Exit), later_s=st.sampled_from([0.0, 0.0, 1.0, 6.0]))
    def one_ends(self, data: st.DataObject, exit: Exit, later_s: float) -> None:
        """By itself, or because it was told to; a start that fails is the same to the machine."""
        self.now_s += later_s
        name = data.draw(st.sampled_from(sorted(self.alive)))
        incarnation, state = self.alive.pop(name)
        self.ended.append((name, incarnation))
        escalated, forgotten, started = len(self.escalated), len(self.forgotten), self.started[name]
        due = (name, incarnation) in self.doomed or self.shut_down or bool(self.escalated)
        self.doomed.discard((name, incarnation))
        expected = "nothing of its own" if due else self.judge(name, state, exit)
        self.obey(self.machine.gone(name, incarnation, exit, self.now_s))
        if due:
            assert len(self.escalated) == escalated
            assert (name in self.forgotten) == (self.shut_down or name in self.leaving)
            return
        assert (len(self.escalated) > escalated) == (expected == "escalate")
        assert (name in self.forgotten[forgotten:]) == (expected == "forget")
        again = self.started[name] > started or (name, Phase.DOWN) in [s[:2] for s in self.machine.status()]
        assert again == (expected in ("restart", "escalate"))

    def judge(self, name: str, state: str, exit: Exit) -> str:
        """What must come of an end that nobody asked for, by the rules as the documentation has them."""
        if state == "starting" and exit is NORMAL:
            return "forget"
        if state == "starting" and name not in self.up_once:
            return "forget" if name in self.added else "escalate"
        if self.kinds[name] is Restart.TEMPORARY or (self.kinds[name] is Restart.TRANSIENT and exit is NORMAL):
            return "forget"
        if sum(self.now_s - at_s < 5.0 for at_s in self.granted_s) >= self.limit:
            return "escalate"
        self.granted_s.append(self.now_s)
        at = self.order.index(name)
        along = {"one_for_one": [], "one_for_all": self.order, "rest_for_one": self.order[at:]}[self.strategy.value]
        for each in along:
            if each in self.alive:
                self.doomed.add((each, self.alive[each][0]))
            if each != name and self.kinds[each] is Restart.TEMPORARY:
                self.leaving.add(each)
        return "restart"

    @rule(data=st.data())
    def old_news(self, data: st.DataObject) -> None:
        """What has been told is told again, or too late: nothing happens."""
        assume(self.ended)
        name, incarnation = data.draw(st.sampled_from(self.ended))
        assert self.machine.gone(name, incarnation, FAILED, self.now_s) == []
        assert self.machine.up(name, incarnation) == []

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def one_is_removed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.order))
        if not self.shut_down and not self.escalated:
            self.leaving.add(name)
            if name in self.alive:
                self.doomed.add((name, self.alive[name][0]))
        self.obey(self.machine.remove(name, "asked"))

    @precondition(lambda self: self.names < 7)
    @rule(kind=st.sampled_from(Restart))
    def one_is_added(self, kind: Restart) -> None:
        each = self.new_rule(kind)
        if self.shut_down or self.escalated:
            with pytest.raises(ValueError, match="ending"):
                self.machine.add(each)
            return
        self.order.append(each.name)
        self.added.add(each.name)
        self.obey(self.machine.add(each))

    @precondition(lambda self: self.escalated or self.names > 5)
    @rule()
    def the_supervisor_ends(self) -> None:
        self.shut_down = True
        self.doomed.update((name, incarnation) for name, (incarnation, _) in self.alive.items())
        self.obey(self.machine.shut_down())

    # ---- what must hold

    @invariant()
    def it_knows_what_lives(self) -> None:
        if not hasattr(self, "machine"):
            return
        states = {Phase.STARTING: "starting", Phase.UP: "up", Phase.STOPPING: "stopping"}
        known = {name: states[phase] for name, phase, _ in self.machine.status() if phase in states}
        assert known == {name: state for name, (_, state) in self.alive.items()}
        assert [name for name, _, _ in self.machine.status()] == self.order
        assert self.machine.finished == (bool(self.escalated or self.shut_down) and not self.alive)

    def teardown(self) -> None:
        """Left alone, the world comes to rest: all are up, or forgotten, or it has ended and nothing lives."""
        if not hasattr(self, "machine"):
            return
        for _ in range(100):
            if self.escalated and not self.shut_down:
                self.the_supervisor_ends()
            starting = [n for n, (_, s) in self.alive.items() if s == "starting" and not self.shut_down]
            stopping = [n for n, (_, s) in self.alive.items() if s == "stopping"]
            if starting:
                self.alive[starting[0]] = self.alive[starting[0]][0], "up"
                self.obey(self.machine.up(starting[0], self.alive[starting[0]][0]))
            elif stopping:
                incarnation, _ = self.alive.pop(stopping[0])
                self.doomed.discard((stopping[0], incarnation))
                self.obey(self.machine.gone(stopping[0], incarnation, NORMAL, self.now_s))
            else:
                break
        if self.shut_down:
            assert not self.alive and not self.order
        else:
            assert sorted(self.alive) == sorted(self.order)
            assert all(state == "up" for _, state in self.alive.values())
            assert not self.leaving.intersection(self.order)
            assert not self.doomed, "whoever was to be stopped was"
        assert len(set(self.forgotten)) == len(self.forgotten)


TestInterleavings = Interleavings.TestCase
