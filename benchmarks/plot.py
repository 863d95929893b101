"""Results as a picture: how far each figure is from its floor, and how fast large payloads are. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import SIZES, in_words
from benchmarks.measure import FLOOR
from benchmarks.results import Results

MISSING: Final = "no plot: matplotlib is not installed (pip install 'monarch-actors[bench]')"
_MARKS: Final = "osD^vPX"


def is_possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def save(results: Results, path: Path) -> None:
    """Raises: ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    ratios, payloads = figure.subplots(1, 2, width_ratios=(3, 2))
    _ratios(results, ratios)
    _payloads(results, payloads)
    figure.suptitle(results.conditions, fontsize=8)
    figure.savefig(path, dpi=120)


def _ratios(results: Results, axes: Any) -> None:
    rows = [row for row in results.rows() if any(results.ratio(t, row) for t in results.transports)]
    for transport, mark in zip(results.transports, _MARKS, strict=False):
        points = [(results.ratio(transport, row), at) for at, row in enumerate(rows)]
        there = [(ratio, at) for ratio, at in points if ratio is not None]
        axes.plot(*zip(*there, strict=True), mark, label=transport, alpha=0.8) if there else None
    axes.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.grid(axis="x", which="both", alpha=0.3)
    axes.set_title("times the machine's floor")
    axes.legend()


def _payloads(results: Results, axes: Any) -> None:
    """GB/s, where both ways count."""
    for subject, mark in zip([FLOOR, *results.transports], "-" + _MARKS, strict=False):
        name = "exchange_{}" if subject == FLOOR else "echo_numpy_{}"
        medians = [(size, results.median(subject, name.format(size))) for size in SIZES]
        speeds = [(size, 2e-9 * size / seconds) for size, seconds in medians if seconds]
        style = "k-" if subject == FLOOR else f"{mark}-"
        label = "a round trip, two copies" if subject == FLOOR else subject
        axes.plot(*zip(*speeds, strict=True), style, label=label) if speeds else None
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SIZES, [in_words(size) for size in SIZES], fontsize=8)
    axes.grid(alpha=0.3)
    axes.set_title("echo of numpy arrays, GB/s")
    axes.legend()
