"""What a run has found, as a table, as Markdown, as JSON, as a picture."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks import plot, report
from benchmarks.figures import ROWS, Figure
from benchmarks.load import Load
from benchmarks.results import Part, Results


def results(*parts: tuple[int, str, dict[str, float], dict[str, str]]) -> Results:
    made = Results()
    for round_, subject, values, failures in parts:
        figures = tuple(Figure(name, value) for name, value in values.items())
        made.parts.append(Part(round_, subject, Load(0.25 * round_, 2.0 * round_), figures, failures))
    return made


FOUND = results(
    (1, "floor", {"round_trip": 10e-6, "message": 2e-6, "interpreter_memory": 4 << 20, "exchange_1024": 1e-6}, {}),
    (1, "shm", {"call": 50e-6, "cast_1": 20e-6, "idle_memory": 8 << 20, "echo_numpy_1024": 2e-6}, {}),
    (1, "tcp", {"call": 1.5e-3}, {"casts": "ValueError: no"}),
    (2, "floor", {"round_trip": 30e-6}, {}),
    (2, "shm", {"call": 40e-6}, {}),
    (3, "floor", {"round_trip": 20e-6}, {}),
    (3, "shm", {"call": 60e-6}, {}),
)


def test_a_figure_is_the_median_of_its_rounds_and_its_ratio_that_of_the_medians():
    row = next(row for row in ROWS if row.name == "call")

    assert FOUND.values("shm", "call") == [50e-6, 40e-6, 60e-6]
    assert FOUND.median("shm", "call") == 50e-6
    assert FOUND.ratio("shm", row) == pytest.approx(2.5)
    assert FOUND.ratio("inproc", row) is None


def test_the_table_has_what_was_measured_and_its_conditions():
    console = Console(file=io.StringIO(), width=200)
    console.print(report.table(FOUND))
    text = console.file.getvalue()
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}

    assert list(lines) == [
        "call, sync endpoint",
        "casts to 1 process",
        "echo of 1 KiB, numpy",
        "private memory of an idle process",
    ]
    cells = [cell.strip() for cell in lines["call, sync endpoint"].split("│")[2:7]]
    assert cells == ["20 us", "50 us", "2.5x", "1.5 ms", "75x"]
    assert "20 us (50 k/s) │  10x" in lines["casts to 1 process"]
    assert "8 MiB │   2x" in lines["private memory of an idle process"]
    assert FOUND.conditions.endswith(
        "medians of 3 rounds; meanwhile others used 25% to 75% of the CPUs, load 2.0 to 6.0"
    )


def test_markdown_says_the_same():
    lines = report.markdown(FOUND).splitlines()

    assert lines[:3] == [
        "| | floor | shm | tcp |",
        "|---|---:|---:|---:|",
        "| call, sync endpoint | 20 us | 50 us, 2.5x | 1.5 ms, 75x |",
    ]
    assert "load 2.0 to 6.0." in lines[-1]


def test_json_has_every_value_and_what_failed(tmp_path):
    FOUND.save(tmp_path / "found.json")
    saved = json.loads((tmp_path / "found.json").read_text())

    assert saved["figures"]["shm"]["call"] == [50e-6, 40e-6, 60e-6]
    assert saved["failures"] == {"tcp, casts": "ValueError: no"}
    assert saved["rounds"][0] == {"round": 1, "subject": "floor", "others": 0.25, "average": 2.0}


@pytest.mark.slow
@pytest.mark.skipif(not plot.is_possible(), reason="matplotlib is not installed")
def test_the_plot_is_a_picture(tmp_path):
    plot.save(FOUND, tmp_path / "found.png")

    assert (tmp_path / "found.png").read_bytes()[:4] == b"\x89PNG"
