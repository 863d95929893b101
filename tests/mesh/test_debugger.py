"""The driver's side of the debugger: who waits, who is attached, and which ranks a command is for."""

from __future__ import annotations

import pytest

from monarch.core.ids import ProcId, Uid
from monarch.mesh.breakpoints import Place, Waiter
from monarch.mesh.debugger import HELP, PROMPT, Desk, matches

PROCS = [ProcId(Uid("proc", number + 1)) for number in range(8)]
PLACE = Place("step", "train.py", 12)


def waiter(rank: int, name: str = "trainer") -> Waiter:
    return Waiter(100 * len(name) + rank, PROCS[rank], name, rank, (("hosts", rank // 4), ("gpus", rank % 4)), "vm")


class Scene:
    """A desk, actors that have stopped, and somebody at a terminal."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []
        self.announced: list[str] = []
        self.text = ""
        self.desk = Desk(lambda proc, id, line: self.sent.append((id, line)), self.announced.append, "monarch debug")

    def stop(self, rank: int, name: str = "trainer") -> Waiter:
        stopped = waiter(rank, name)
        self.desk.stopped(stopped, PLACE, f"> rank {rank}\n(Pdb) ")
        return stopped

    def come(self) -> None:
        self.terminal = self.desk.open(self.write)
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def type(self, line: str | None) -> str:
        """What the terminal shows next."""
        self.text = ""
        self.goes_on = self.terminal.line(line)
        return self.text


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_first_to_wait_is_announced_and_nobody_while_others_wait(scene):
    first, second = scene.stop(3), scene.stop(4)
    (text,) = scene.announced
    assert "breakpoint hit in trainer[3], train.py:12 (step)" in text and "monarch debug" in text

    for each in (first, second):
        scene.desk.resumed(each.id, True)
    scene.stop(5)
    assert len(scene.announced) == 2


def test_who_sits_at_a_terminal_is_told_there(scene):
    scene.come()
    scene.stop(3)

    assert (scene.announced, scene.text) == ([], f"\rbreakpoint hit in trainer[3], train.py:12 (step)\n{PROMPT}")


def test_list_shows_who_waits_where(scene):
    scene.come()
    assert scene.type("list") == f"no actor waits at a breakpoint\n{PROMPT}"

    scene.stop(5)
    scene.stop(0, "critic")
    assert scene.type("l").splitlines() == [
        "ACTOR    RANK  COORDINATES     HOST  FUNCTION  LINE",
        "critic   0     hosts=0 gpus=0  vm    step      train.py:12",
        "trainer  5     hosts=1 gpus=1  vm    step      train.py:12",
        PROMPT,
    ]


def test_attached_lines_go_to_pdb_until_detach(scene):
    actor = scene.stop(3)
    scene.come()
    assert scene.type("attach trainer 3") == "> rank 3\n(Pdb) "

    assert (scene.type("p x"), scene.sent) == ("", [(actor.id, "p x\n")])
    scene.desk.said(actor.id, "7\n(Pdb) ")
    assert scene.text == "7\n(Pdb) "
    assert scene.type("detach") == f"\n{PROMPT}"
    assert scene.type("a trainer 3") == "(Pdb) "
    assert scene.type(None) == f"\n{PROMPT}"  # the end of input leaves it too
    assert scene.type("quit") == ""
    assert not scene.goes_on and scene.desk.waiting() == [(actor, PLACE)]


def test_a_line_for_an_actor_that_runs_is_not_kept_for_its_next_stop(scene):
    actor = scene.stop(3)
    scene.come()
    scene.type("attach trainer")
    scene.desk.resumed(actor.id, False)

    assert "runs" in scene.type("n")
    assert scene.sent == []
    scene.stop(3)
    assert scene.text.endswith("(Pdb) ")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda desk, actor: desk.resumed(actor.id, True), "goes on"),
        (lambda desk, actor: desk.proc_gone(actor.proc.key), "has ended"),
    ],
)
def test_the_end_of_a_session_brings_its_terminal_back(scene, end, said):
    actor = scene.stop(3)
    scene.come()
    scene.type("attach trainer 3")
    scene.text = ""
    end(scene.desk, actor)

    assert said in scene.text and scene.text.endswith(PROMPT)
    assert scene.type("list").startswith("no actor waits")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("attach trainer", "give one of the ranks of 'trainer' that wait: 3, 4"),
        ("attach trainer 9", "give one of the ranks of 'trainer' that wait: 3, 4"),
        ("attach nobody", "no 'nobody' waits; see list"),
        ("attach", "attach NAME RANK"),
        ("cast trainer p x", "cast NAME ranks(SPEC) CMD"),
        ("cast trainer ranks(a) p x", "'a' is no rank, list of ranks, or range start:stop:step"),
        ("cast trainer ranks(racks=1) p x", "its mesh has no dimension 'racks'; it has hosts, gpus"),
        ("frobnicate", "unknown command 'frobnicate'; see help"),
    ],
)
def test_what_is_wrong_with_a_command_is_said(scene, line, answer):
    scene.stop(3)
    scene.stop(4)
    scene.come()

    assert scene.type(line) == f"{answer}\n{PROMPT}"
    assert scene.sent == []


def test_only_one_is_attached_to_an_actor_and_leaving_makes_room(scene):
    scene.stop(3)
    scene.come()
    scene.type("attach trainer 3")
    first = scene.terminal
    scene.come()
    assert "somebody else" in scene.type("attach trainer 3")

    scene.desk.close(first)
    assert scene.type("attach trainer 3") == "(Pdb) "


def test_cast_sends_to_the_ranks_and_shows_each_answer(scene):
    actors = [scene.stop(rank) for rank in (0, 3, 5)]
    scene.come()
    assert scene.type("cast trainer ranks(0:4) p x + 1") == f"sent to 2 actor(s)\n{PROMPT}"
    assert scene.sent == [(actors[0].id, "p x + 1\n"), (actors[1].id, "p x + 1\n")]

    scene.text = ""
    scene.desk.said(actors[1].id, "7\n(Pdb) ")
    assert scene.text == f"\rtrainer[3] 7\n{PROMPT}"
    assert scene.type("attach trainer 3") == "(Pdb) "


def test_who_has_cast_may_cast_again_and_attach_before_the_answer(scene):
    actor = scene.stop(0)
    scene.come()
    for command in ("p x", "p y"):
        assert scene.type(f"cast trainer ranks(0) {command}") == f"sent to 1 actor(s)\n{PROMPT}"

    scene.text = ""
    for value in (1, 2):
        scene.desk.said(actor.id, f"{value}\n(Pdb) ")
    assert scene.text == f"\rtrainer[0] 1\n{PROMPT}\rtrainer[0] 2\n{PROMPT}"

    scene.type("cast trainer ranks(0) p z")
    assert scene.type("attach trainer 0") == "(Pdb) "
    scene.desk.said(actor.id, "3\n(Pdb) ")
    assert scene.text == "(Pdb) 3\n(Pdb) "


def test_cast_to_nobody_says_who_waits(scene):
    scene.stop(0)
    taken = scene.stop(1)
    scene.come()
    assert scene.type("cast trainer ranks(7) p x") == f"ranks(7) is none that waits of 'trainer': 0, 1\n{PROMPT}"
    assert scene.type("cast critic ranks() p x") == f"no 'critic' waits; see list\n{PROMPT}"

    scene.type("attach trainer 1")
    scene.come()
    assert scene.type("cast trainer ranks(1) p x") == f"somebody else is attached to {taken}\n{PROMPT}"
    assert scene.sent == []


def test_continue_lets_all_go_and_clears_their_breakpoints(scene):
    actors = [scene.stop(rank) for rank in (0, 3)]
    scene.come()

    assert scene.type("continue") == f"2 actor(s) go on\n{PROMPT}"
    assert scene.sent == [(each.id, "release\n") for each in actors]


def test_help_names_all_commands(scene):
    scene.come()

    assert scene.type("help") == HELP + PROMPT


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ("", range(8)),
        ("3", [3]),
        ("1,4,6", [1, 4, 6]),
        ("2:6:2", [2, 4]),
        (":3", [0, 1, 2]),
        ("6:", [6, 7]),
        ("::4", [0, 4]),
        ("hosts=1", [4, 5, 6, 7]),
        ("gpus=(0,3)", [0, 3, 4, 7]),
        ("hosts=0:1,gpus=(1,2)", [1, 2]),
        ("gpus=1:4:2, hosts=(1)", [5, 7]),
    ],
)
def test_ranks_by_number_range_and_dimension(spec, ranks):
    assert [rank for rank in range(8) if matches(spec, rank, dict(waiter(rank).point))] == list(ranks)


@pytest.mark.parametrize("spec", ["x", "1-3", "1:2:3:4", "0:4:0", "racks=1", "hosts=", "hosts=(1"])
def test_a_spec_that_cannot_be_read_is_refused(spec):
    with pytest.raises(ValueError):
        matches(spec, 0, dict(waiter(0).point))
