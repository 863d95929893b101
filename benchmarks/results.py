"""What a run has found: the values of every figure, for each subject, and under which conditions."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import Factory, asdict, define

from benchmarks.clock import median
from benchmarks.figures import ROWS, Figure, Row
from benchmarks.load import Load
from benchmarks.measure import FLOOR


@define(frozen=True)
class Part:
    """One subject in one round: its figures, and what failed, by group."""

    round: int
    subject: str
    load: Load
    figures: tuple[Figure, ...]
    failures: dict[str, str]


@define
class Results:
    """All parts, and where transports that were left out say why."""

    left_out: dict[str, str] = Factory(dict)
    parts: list[Part] = Factory(list)

    @property
    def transports(self) -> list[str]:
        return [subject for subject in dict.fromkeys(part.subject for part in self.parts) if subject != FLOOR]

    def values(self, subject: str, name: str) -> list[float]:
        """One for each round in which it was measured."""
        return [f.value for part in self.parts if part.subject == subject for f in part.figures if f.name == name]

    def median(self, subject: str, name: str) -> float | None:
        values = self.values(subject, name)
        return median(values) if values else None

    def ratio(self, transport: str, row: Row) -> float | None:
        """How many times its floor a figure is."""
        ours, floor = self.median(transport, row.name), self.median(FLOOR, row.floor)
        return ours / floor if ours is not None and floor else None

    def rows(self) -> Iterator[Row]:
        """Those that some transport has a value for."""
        for row in ROWS:
            if any(self.values(transport, row.name) for transport in self.transports):
                yield row

    @property
    def failures(self) -> dict[str, str]:
        """Which group failed over which transport, and how."""
        return {f"{part.subject}, {group}": text for part in self.parts for group, text in part.failures.items()}

    @property
    def conditions(self) -> str:
        """For people: machine, rounds, and what else it did meanwhile."""
        rounds = len({part.round for part in self.parts})
        others = [part.load.others for part in self.parts] or [0.0]
        averages = [part.load.average for part in self.parts] or [0.0]
        return (
            f"{os.cpu_count()} CPUs, Python {platform.python_version()}, Linux {platform.release().split('-')[0]}; "
            f"medians of {rounds} round{'s' if rounds != 1 else ''}; meanwhile others used "
            f"{min(others):.0%} to {max(others):.0%} of the CPUs, load {min(averages):.1f} to {max(averages):.1f}"
        )

    def save(self, path: Path) -> None:
        subjects = [FLOOR, *self.transports]
        names = {s: dict.fromkeys(f.name for p in self.parts if p.subject == s for f in p.figures) for s in subjects}
        document: dict[str, Any] = {
            "conditions": self.conditions,
            "left_out": self.left_out,
            "failures": self.failures,
            "rounds": [{"round": p.round, "subject": p.subject, **asdict(p.load)} for p in self.parts],
            "figures": {s: {name: self.values(s, name) for name in names[s]} for s in subjects},
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
