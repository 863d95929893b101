"""`python -m benchmarks`: measure, show a table, write a plot and all values."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from benchmarks import plot, report, runner
from benchmarks.results import Part, Results
from benchmarks.workloads import GROUPS
from monarch.transports import registry


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(width=None if os.isatty(1) else 160)
    transports, left_out = _usable(options.transports)
    for transport, reason in left_out.items():
        console.print(f"{transport} is left out: {reason}", style="dim")

    def progress(part: Part) -> None:
        console.print(
            f"round {part.round} of {options.rounds}: {part.subject}, {len(part.figures)} figures; "
            f"others used {part.load.others:.0%} of the CPUs, load {part.load.average:.1f}",
            style="dim",
        )

    quick = ["--quick"] if options.quick else []
    only = ["--only", *options.only] if options.only else []
    results = runner.run(transports, options.rounds, [*quick, *only], on_part=progress)
    results.left_out = left_out
    console.print(report.table(results))
    if options.quick:
        console.print("This shows that it works, not how fast it is: everything was measured a few times only.")
    for where, error in results.failures.items():
        console.print(f"failed: {where}: {error}", style="red", markup=False)
    if not plot.is_possible():
        console.print(plot.MISSING, markup=False)
    _save(results, options.out)
    console.print(f"written to {options.out}/")
    return 1 if results.failures else 0


def _save(results: Results, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    results.save(folder / "results.json")
    (folder / "results.md").write_text(report.markdown(results))
    if plot.is_possible():
        plot.save(results, folder / "results.png")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="little of everything, once: does it work?")
    parser.add_argument("--rounds", type=int, help="how often each is measured (5; 1 with --quick)")
    parser.add_argument("--transports", nargs="+", metavar="NAME", default=[], help="those to measure (all)")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where files go (bench-results)")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = 1 if options.quick else 5
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    unknown = set(options.transports).difference(registry.CHOICES[1:])
    if unknown:
        parser.error(f"unknown transport {', '.join(sorted(unknown))}: there are {', '.join(registry.CHOICES[1:])}")
    return options


def _usable(wanted: list[str]) -> tuple[list[str], dict[str, str]]:
    """The transports to measure, and why others are not."""
    usable, left_out = [], {}
    for scheme in wanted or registry.CHOICES[1:]:
        viability = registry.get(scheme).viability()
        if viability.ok:
            usable.append(scheme)
        else:
            left_out[scheme] = viability.reason
    return usable, left_out


if __name__ == "__main__":
    raise SystemExit(main())
