"""A program at one moment: what matches a pattern, what JSON keeps, and how it looks."""

from __future__ import annotations

import io
import json

import pytest

from monarch.core.serving import Running
from monarch.core.stacks import Frame, Owner, Stack
from monarch.mesh.rendering import duration, show
from monarch.mesh.snapshot import Actor, Host, Process, ProcessState, Snapshot

STEP = Stack("MainThread", (Frame("train.py", 7, "step", Owner.USER),))
WAITING = Stack("Task-1", (Frame("train.py", 9, "fetch", Owner.USER),), waits=True)
LOADER = Stack("loader", (Frame("data.py", 3, "load", Owner.USER),))
IDLE = Stack("monarch-io", ())

TRAINER = Actor("trainer{'gpus': 0/2}", "train.Trainer", "serving", (Running("step", 1.0, 72.5),), 3, 1, (STEP,))
FETCHING = (Running("fetch", 1.0, 0.25),)
FETCHER = Actor("fetcher", "data.Fetcher", "serving", FETCHING, 0, 0, (IDLE, WAITING), "data.py:9 (fetch)")
LOGGER = Actor("logger", "train.Logger", "serving", stacks=(IDLE,))

SNAPSHOT = Snapshot(
    "python train.py",
    100,
    (
        Host(
            "box",
            (
                Process("client", 100, ProcessState.UP, "", 30 << 20, (), (IDLE,)),
                Process("work{'gpus': 0/2}", 101, ProcessState.UP, "", 40 << 20, (LOGGER, TRAINER, FETCHER), (LOADER,)),
                Process("work{'gpus': 1/2}", 102, ProcessState.HELD, "it does not answer", 50 << 20, (), (STEP,)),
                Process("late", None, ProcessState.STARTING),
            ),
        ),
    ),
)


def with_stacks() -> Snapshot:
    return Snapshot(SNAPSHOT.program, SNAPSHOT.pid, SNAPSHOT.hosts, shows_stacks=True)


@pytest.mark.parametrize(
    ("pattern", "processes", "actors"),
    [
        ("work", ["work{'gpus': 0/2}", "work{'gpus': 1/2}"], ["logger", "trainer{'gpus': 0/2}", "fetcher"]),
        ("WORK{'gpus': 0", ["work{'gpus': 0/2}"], ["logger", "trainer{'gpus': 0/2}", "fetcher"]),
        ("102", ["work{'gpus': 1/2}"], []),
        ("trainer", ["work{'gpus': 0/2}"], ["trainer{'gpus': 0/2}"]),
        ("data.fetch", ["work{'gpus': 0/2}"], ["fetcher"]),
        ("step", ["work{'gpus': 0/2}"], ["trainer{'gpus': 0/2}"]),
        ("loader", ["work{'gpus': 0/2}"], []),
        ("nobody", [], []),
    ],
)
def test_a_pattern_takes_processes_actors_and_threads_by_name(pattern, processes, actors):
    found = SNAPSHOT.matching(pattern)

    assert [process.name for process in found.processes] == processes
    assert [actor.name for process in found.processes for actor in process.actors] == actors


def test_json_and_back():
    assert Snapshot.from_json(json.loads(json.dumps(with_stacks().to_json()))) == with_stacks()


TREE = """\
python train.py  pid 100  4 processes, 3 actors
└── host box
    ├── process client  pid 100  up  30 MiB
    ├── process work{'gpus': 0/2}  pid 101  up  40 MiB
    │   ├── train.Logger logger  idle
    │   ├── train.Trainer trainer{'gpus': 0/2}  step for 1 min 12 s  3 queued  1 restart
    │   └── data.Fetcher fetcher  fetch for 0.2 s  at a breakpoint, data.py:9 (fetch)
    ├── process work{'gpus': 1/2}  pid 102  held  50 MiB  (it does not answer)
    └── process late  no pid yet  starting"""

STACKS = """\
python train.py  pid 100  4 processes, 3 actors

process client  pid 100  up  30 MiB
  1 more thread without code of the program

process work{'gpus': 0/2}  pid 101  up  40 MiB
  train.Trainer trainer{'gpus': 0/2}  step for 1 min 12 s  3 queued  1 restart
      File "train.py", line 7, in step
  data.Fetcher fetcher  fetch for 0.2 s  at a breakpoint, data.py:9 (fetch)
    Task-1, at an await
      File "train.py", line 9, in fetch
  train.Logger logger  idle
  thread loader
      File "data.py", line 3, in load

process work{'gpus': 1/2}  pid 102  held  50 MiB  (it does not answer)
  thread MainThread
      File "train.py", line 7, in step

process late  no pid yet  starting"""


def test_the_tree_as_text():
    assert str(SNAPSHOT) == TREE


def test_stacks_as_text_begin_with_what_runs():
    assert str(with_stacks()) == STACKS


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_pipe_gets_whole_lines_in_its_encoding_and_no_colours(encoding):
    from rich.console import Console

    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    show(SNAPSHOT, Console(file=stream, highlight=False))
    lines = raw.getvalue().decode(encoding).splitlines()

    assert len(lines) == len(TREE.splitlines())
    assert lines[5].endswith("train.Trainer trainer{'gpus': 0/2}  step for 1 min 12 s  3 queued  1 restart")
    assert (lines[1] == "└── host box") == (encoding == "utf-8")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-0.5, "0.0 s"), (0.25, "0.2 s"), (9.94, "9.9 s"), (59.9, "59 s"), (60, "1 min 0 s"), (7325, "2 h 2 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
