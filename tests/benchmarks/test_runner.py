"""The rounds: who is measured when, and what becomes of what they print."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from benchmarks import runner
from benchmarks.figures import Figure


def test_each_round_measures_all_and_begins_with_another():
    asked: list[tuple[str, list[str]]] = []

    def measure(subject: str, arguments: Sequence[str]) -> Iterator[str]:
        asked.append((subject, list(arguments)))
        yield json.dumps({"name": "call", "value": float(len(asked))})

    heard: list[str] = []
    results = runner.run(
        ["shm", "tcp"], 3, ["--quick"], measure=measure, on_part=lambda part: heard.append(part.subject)
    )

    assert [subject for subject, _ in asked] == heard
    assert [sorted(heard[at : at + 3]) for at in (0, 3, 6)] == [["floor", "shm", "tcp"]] * 3
    assert {heard[at] for at in (0, 3, 6)} == {"floor", "shm", "tcp"}
    assert all(arguments == ["--quick"] for _, arguments in asked)
    assert results.transports == ["shm", "tcp"]
    assert len(results.values("tcp", "call")) == 3


def test_a_group_that_fails_costs_no_other_its_figures():
    def measure(subject: str, arguments: Sequence[str]) -> Iterator[str]:
        yield json.dumps({"name": "call", "value": 1.5})
        yield json.dumps({"name": "casts", "error": "ValueError: no"})

    results = runner.run(["shm"], 1, [], measure=measure)

    assert results.parts[0].figures == (Figure("call", 1.5),)
    assert results.failures == {"shm, casts": "ValueError: no", "floor, casts": "ValueError: no"}


def test_a_subject_that_cannot_be_measured_is_a_failure():
    lines = list(runner.measure_in_process("floor", ["--no-such-option"]))

    assert json.loads(lines[-1])["error"] == "ended with status 2"
