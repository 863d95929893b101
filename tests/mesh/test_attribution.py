"""Marks on the lines of a process: what its reader makes of them."""

from __future__ import annotations

import io
import logging

import pytest

from monarch.actor import Actor, endpoint, this_host
from monarch.log import get_logger
from monarch.mesh import attribution
from monarch.mesh.attribution import _MarkedStream
from monarch.mesh.lines import LineReader, Origin
from monarch.testing import fresh_client


class Speaker:
    """Stands for the actor whose code runs."""

    def __init__(self, rank: int) -> None:
        self.origin = Origin("actor", rank)


@pytest.fixture
def stream(monkeypatch):
    """A marked stream, what it wrote, and a way to say who speaks."""
    raw = io.BytesIO()
    marked = _MarkedStream(raw, "utf-8", line_buffering=True)
    now: list[Speaker | None] = [None]
    monkeypatch.setattr(attribution, "running_actor", lambda: now[0])

    def say(who: Speaker | None, *pieces: str) -> None:
        now[0] = who
        for piece in pieces:
            assert marked.write(piece) == len(piece)

    yield marked, raw, say
    marked.close()


def read(raw: io.BytesIO) -> list[tuple[str, str]]:
    reader = LineReader(1, Origin("process", 0))
    lines = reader.feed(raw.getvalue()) + reader.rest()
    return [(f"{line.origin.name}[{line.origin.rank}]", line.text.decode()) for line in lines]


def test_lines_are_whose_code_ran(stream):
    _, raw, say = stream
    say(Speaker(1), "one", "\n", "two\nthree\n")
    say(None, "of nobody\n")
    say(Speaker(2), "", "\n", "é\n")

    assert read(raw) == [
        ("actor[1]", "one"),
        ("actor[1]", "two"),
        ("actor[1]", "three"),
        ("process[0]", "of nobody"),
        ("actor[2]", ""),
        ("actor[2]", "é"),
    ]


def test_a_claim_counts_for_later_lines_and_waits_for_the_end_of_one_that_is_being_written(stream):
    marked, raw, say = stream
    say(None, "before", "\n", "half")
    marked.claim(Origin("only", 3))
    say(None, " a line", "\n", "after\n")
    marked.claim(Origin("process", 0))
    say(None, "again\n")

    assert read(raw) == [
        ("process[0]", "before"),
        ("process[0]", "half a line"),
        ("only[3]", "after"),
        ("process[0]", "again"),
    ]


class Waiter(Actor):
    """Its thread does work for all of the process while it waits."""

    @endpoint
    def log(self) -> list[str]:
        kept: list[str] = []
        keep = logging.Handler()
        keep.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
        for name in ("monarch.peer", "another"):
            logging.getLogger(name).addHandler(keep)
        get_logger("monarch.peer").warning("peer.lost", peer="it")
        logging.getLogger("another").warning("mine")
        return kept


def test_a_record_of_the_library_is_no_actors_on_whatever_thread():
    with fresh_client("ipc"):
        procs = this_host().spawn_procs()
        records = procs.spawn("waiter", Waiter).log.call_one().get(30)
        procs.stop().get(30)

    assert records == ["peer.lost peer='it'", f"[actor=<root>.<{__name__}.Waiter waiter>] mine"]
