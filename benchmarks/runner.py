"""Runs the rounds. In each, the floor and every transport are measured in turn, by a process of its own, so that what
the machine does meanwhile meets all of them, and nothing that one leaves behind meets the next."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure
from benchmarks.load import Watch
from benchmarks.measure import FLOOR
from benchmarks.results import Part, Results

_LIMIT_S: Final = 1800.0
ROOT: Final = Path(__file__).parent.parent

Measure = Callable[[str, Sequence[str]], Iterator[str]]
"""Gives the lines of one subject, as `measure` prints them."""


def run(
    transports: Sequence[str],
    rounds: int,
    arguments: Sequence[str],
    *,
    measure: Measure | None = None,
    on_part: Callable[[Part], None] = lambda part: None,
) -> Results:
    """Measure the floor and `transports`, `rounds` times.

    Args:
        arguments: for `benchmarks.measure`.
        on_part: hears of each subject of each round.
    """
    measure = measure_in_process if measure is None else measure
    results = Results()
    for round_ in range(1, rounds + 1):
        subjects = [FLOOR, *transports]
        turn = round_ % len(subjects)  # nobody is always the first, or behind the same one
        for subject in subjects[turn:] + subjects[:turn]:
            watch = Watch()
            figures, failures = _parse(measure(subject, arguments))
            part = Part(round_, subject, watch.stop(), tuple(figures), failures)
            results.parts.append(part)
            on_part(part)
    return results


def _parse(lines: Iterator[str]) -> tuple[list[Figure], dict[str, str]]:
    figures, failures = [], {}
    for line in lines:
        said = json.loads(line)
        if "error" in said:
            failures[said["name"]] = said["error"]
        else:
            figures.append(Figure(said["name"], said["value"]))
    return figures, failures


def measure_in_process(subject: str, arguments: Sequence[str]) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.measure", subject, *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=_LIMIT_S)
        said, fault = done.stdout, f"ended with status {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired as late:
        said, fault = late.stdout or b"", f"took more than {_LIMIT_S} s, and was killed"
    *lines, _ = said.decode().split("\n")  # the last one ends in the middle, or is empty
    yield from lines
    if fault is not None:
        yield json.dumps({"name": "process", "error": fault})
