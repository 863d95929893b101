"""Lines of processes: how they are cut, whose they are, which are merged, and what is withheld."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.mesh.lines import MAX_LINE_BYTES, Admission, Aggregator, Gate, Line, LineReader, Origin, ranges, shown

PROCESS = Origin("anon", 0)
ACTOR = Origin("trainer", 3)
MARK = ACTOR.mark().encode()


def read(*pieces: bytes, rest: bool = True) -> list[tuple[str, bytes]]:
    reader = LineReader(1, PROCESS)
    lines = [line for piece in pieces for line in reader.feed(piece)]
    return [(f"{line.origin.name}[{line.origin.rank}]", line.text) for line in lines + (reader.rest() if rest else [])]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], [("anon[0]", b"one"), ("anon[0]", b"two")]),
        ([b"on", b"e", b"\n"], [("anon[0]", b"one")]),
        ([b"\n\n"], [("anon[0]", b""), ("anon[0]", b"")]),
        ([b"no end"], [("anon[0]", b"no end")]),
        ([MARK + b"said\nnative\n"], [("trainer[3]", b"said"), ("anon[0]", b"native")]),
        ([MARK[:3], MARK[3:] + b"sa", b"id\n"], [("trainer[3]", b"said")]),
        ([ACTOR.claim().encode() + b"native\n"], [("trainer[3]", b"native")]),
        ([b"\x1enot a mark\n"], [("anon[0]", b"\x1enot a mark")]),
        ([b"\x1e\x1ea\x1fb\x1f\n"], [("anon[0]", b"\x1e\x1ea\x1fb\x1f")]),
        ([b"\xff\n"], [("anon[0]", b"\xff")]),
    ],
)
def test_a_stream_is_cut_into_lines_with_their_origins(pieces, expected):
    assert read(*pieces) == expected


@given(st.binary(max_size=200).filter(lambda data: b"\x1e" not in data), st.lists(st.integers(0, 200), max_size=5))
def test_however_the_bytes_arrive_nothing_is_lost_or_added(data, cuts):
    at = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(at)]

    assert b"\n".join(text for _, text in read(*pieces)) == data.removesuffix(b"\n")


def test_a_line_without_end_is_shown_in_pieces_of_bounded_size():
    reader = LineReader(1, PROCESS)
    lines = [line for _ in range(10) for line in reader.feed(b"x" * (MAX_LINE_BYTES // 2 + 1))]

    assert {len(line.text) for line in lines} == {MAX_LINE_BYTES}
    assert len(reader.rest()[0].text) <= MAX_LINE_BYTES


def test_a_long_line_that_arrives_at_once_is_cut_too():
    (first, second) = read(b"x" * (MAX_LINE_BYTES + 1) + b"\n")

    assert (len(first[1]), len(second[1])) == (MAX_LINE_BYTES, 1)


def line(text: str, rank: int = 0, name: str = "a", stream: int = 1) -> Line:
    return Line(stream, Origin(name, rank), text.encode())


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([line("same", 0), line("same", 1), line("same", 2)], ["a[0-2] [3 similar log lines] same"]),
        ([line("step 1"), line("step 2"), line("step 1")], ["a[0] [2 similar log lines] step 1", "a[0] step 2"]),
        ([line("same", name="a"), line("same", name="b")], ["a[0] same", "b[0] same"]),
        ([line("same"), line("same", stream=2)], ["a[0] same", "a[0] same"]),
        ([line("1"), line("2"), line("3")], ["a[0] 1", "a[0] 2", "a[0] 3"]),
        (
            [line("2024-05-01 09:00:01,250 INFO up", 0), line("2024-05-01 09:00:01,377 INFO up", 1)],
            ["a[0-1] [2 similar log lines] 2024-05-01 09:00:01,250 INFO up"],
        ),
        ([line("[09:00:01] up", 0), line("[09:00:02] up", 1)], ["a[0-1] [2 similar log lines] [09:00:01] up"]),
        ([line("at 09:00:01"), line("at 09:00:02")], ["a[0] at 09:00:01", "a[0] at 09:00:02"]),
    ],
)
def test_only_equal_lines_of_one_mesh_are_merged_and_counted(lines, expected):
    aggregator = Aggregator(3.0)
    for each in lines:
        aggregator.add(each, 10.0)

    assert not aggregator.over(12.9)
    assert aggregator.next_deadline_s() == 13.0
    assert aggregator.over(13.0)
    assert [shown(*group).decode().rstrip("\n") for group in aggregator.take()] == expected
    assert aggregator.next_deadline_s() is None


def test_a_window_with_too_many_different_lines_ends_early():
    aggregator = Aggregator(3.0, max_bytes=1000)
    for number in range(20):
        aggregator.add(line(str(number)), 0.0)

    assert aggregator.over(0.0)


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([2, 0, 1], "0-2"), ([0, 2, 3, 4, 9], "0,2-4,9"), (range(512), "0-511")]
)
def test_ranks_are_told_in_ranges(ranks, text):
    assert ranges(ranks) == text


def test_without_prefix_a_line_is_what_was_printed():
    assert shown(line("text"), prefix=False) == b"text\n"


@pytest.mark.parametrize(
    ("refused", "then", "count", "kept"),
    [
        ([b"a\nb\n"], b"c\n", 2, b"c\n"),
        ([b"a\nb"], b"b\nc\n", 2, b"c\n"),
        ([b"a", b"a\n"], b"c\n", 1, b"c\n"),
        ([], b"c\n", 0, b"c\n"),
    ],
)
def test_whole_lines_are_withheld_and_counted(refused, then, count, kept):
    gate = Gate()
    for data in refused:
        gate.refuse(data)

    assert gate.admit(then) == (count, kept)
    assert gate.take_count() == 0


def test_processes_wait_while_the_output_moves_and_lose_lines_when_it_is_stuck():
    admission = Admission(limit_bytes=100, patience_s=5.0)
    admission.queued(99, 0.0)
    assert (admission.may_read(1.0), admission.withholds(1.0)) == (True, False)

    admission.queued(1, 1.0)
    assert not admission.may_read(4.9)  # full, but something may still move

    admission.shown(1, 4.9)
    admission.queued(1, 4.9)
    assert not admission.may_read(9.0)  # it has moved

    assert (admission.may_read(9.9), admission.withholds(9.9)) == (True, True)
    admission.shown(49, 10.0)
    assert admission.withholds(10.0)  # not before half of the room is free

    admission.shown(1, 10.0)
    assert (admission.may_read(10.0), admission.withholds(10.0)) == (True, False)
