"""What a cast costs whom, counted over links that are real: bounded for every node but for the plan."""

from __future__ import annotations

from benchmarks.casting import PAYLOAD_BYTES, SIZES, Figures, simulate, table

_FAN_OUT = 4
_PER_HOST = 4


def test_no_node_carries_more_when_there_are_more_members() -> None:
    few, many = (simulate(members, _PER_HOST, _FAN_OUT) for members in (64, 256))
    for figures in (few, many):
        # The cast, and an acknowledgement for each host.
        assert figures.root.writes <= _FAN_OUT + figures.hosts
        assert figures.answers.writes <= figures.hosts + _FAN_OUT
        # The answer, which is made here while the message is being delivered, and an acknowledgement after that.
        assert figures.member.writes <= 2
        assert figures.agent.writes <= _PER_HOST * 2 + _FAN_OUT * 2 + 3
    assert (few.depth, many.depth) == (2, 3)
    assert few.steps < many.steps <= few.steps + 2
    # Neither the payload nor the answers cross a node more than once for each of its neighbours.
    plan_bytes = 40 * 256 + 200 * many.hosts
    assert many.root.size_bytes < _FAN_OUT * (PAYLOAD_BYTES + 200) + plan_bytes


def test_the_table_has_a_line_for_each_size() -> None:
    figures: list[Figures] = [simulate(members, 2, 2) for members in (4, 10)]
    assert [line.split("|")[1].strip() for line in table(figures).splitlines()[2:]] == ["4", "10"]
    assert max(SIZES) == 10_000
