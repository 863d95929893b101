"""Results for people: a table on the terminal, the same in Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from benchmarks.figures import Row, in_words
from benchmarks.measure import FLOOR
from benchmarks.results import Results


def in_units(value: float, unit: str) -> str:
    """`38.1 us`, `1.2 MiB`."""
    if unit == "B":
        return in_words(value)
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{value / factor:.3g} {name}"
    return f"{value * 1e6:.3g} us"


def _cell(results: Results, transport: str, row: Row) -> tuple[str, str]:
    value, ratio = results.median(transport, row.name), results.ratio(transport, row)
    if value is None:
        return "", ""
    rate = f" ({1e-3 / value:.0f} k/s)" if row.rate else ""
    return in_units(value, row.unit) + rate, f"{ratio:.2g}x" if ratio is not None and ratio < 99.5 else _many(ratio)


def _many(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0f}x"


def _lines(results: Results) -> Iterator[tuple[Row, str, list[tuple[str, str]]]]:
    for row in results.rows():
        floor = results.median(FLOOR, row.floor)
        cells = [_cell(results, transport, row) for transport in results.transports]
        yield row, "" if floor is None else in_units(floor, row.unit), cells


def table(results: Results) -> Table:
    made = Table(title="monarch, and the machine's floor", caption=results.conditions, caption_justify="left")
    made.add_column("")
    made.add_column("floor", justify="right")
    for transport in results.transports:
        made.add_column(transport, justify="right")
        made.add_column("", style="bold", justify="right")
    for row, floor, cells in _lines(results):
        made.add_row(row.title, floor, *(text for cell in cells for text in cell))
    return made


def markdown(results: Results) -> str:
    transports = results.transports
    lines = [f"| | floor | {' | '.join(transports)} |", "|---|" + "---:|" * (1 + len(transports))]
    for row, floor, cells in _lines(results):
        shown = [f"{value}, {ratio}" if ratio else value for value, ratio in cells]
        lines.append(f"| {row.title} | {floor} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", f"{results.conditions}.", ""])
