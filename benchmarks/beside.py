"""Figures beside what they are made of, or compared with, both measured in turns, so that both meet the same load."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping

from attrs import define

from benchmarks.load import Watch
from benchmarks.report import in_units


@define(frozen=True)
class Row:
    """Seconds that something takes, and what stands beside it; the size of what is moved, where anything is."""

    title: str
    took_s: float
    beside: str
    beside_s: float
    size_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Of the rates, where something is moved; else of the times."""
        return self.beside_s / self.took_s if self.size_bytes else self.took_s / self.beside_s


def line(row: Row) -> str:
    def shown(seconds: float) -> str:
        return f"{row.size_bytes / seconds / 1e9:.2f} GB/s" if row.size_bytes else in_units(seconds, "s")

    return f"| {row.title} | {shown(row.took_s)} | {row.beside} | {shown(row.beside_s)} | {row.ratio:.2f} |"


def main(
    name: str,
    about: str | None,
    groups: Mapping[str, Callable[[], Iterator[Row]]],
    why_not: Callable[[str], str] = lambda group: "",
) -> None:
    """The command line of `python -m benchmarks.NAME [GROUP ...]`.

    Args:
        why_not: why a group cannot be measured here; "" where it can.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(about or "").split("\n")[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(groups)} (all that work here)")
    wanted = parser.parse_args().groups
    if unknown := set(wanted).difference(groups):
        parser.error(f"unknown group {', '.join(sorted(unknown))}: there are {', '.join(groups)}")
    watch = Watch()
    print("| what | takes | beside | takes | ratio |\n|---|---:|---|---:|---:|", flush=True)
    left_out = []
    for group in wanted or groups:
        if reason := why_not(group):
            left_out.append(f"{group} is left out: {reason}")
            continue
        for row in groups[group]():
            print(line(row), flush=True)
    load = watch.stop()
    print(
        f"\nMedians, in turns; {os.cpu_count()} CPUs; others used {load.others:.0%} of them, load {load.average:.1f}."
    )
    print("\n".join(left_out))
