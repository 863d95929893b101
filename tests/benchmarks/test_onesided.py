"""Each comparison is carried out, with little: that it is shown, not how fast it is."""

from __future__ import annotations

import pytest

from benchmarks import onesided
from benchmarks.beside import Row, line
from benchmarks.figures import MIB
from monarch.testing import fresh_client


def test_a_line_compares_rates_where_something_is_moved_and_times_where_not() -> None:
    assert line(Row("read", 0.5, "memcpy", 0.25, 1_000_000_000)) == "| read | 2.00 GB/s | memcpy | 4.00 GB/s | 0.50 |"
    assert line(Row("trip", 3e-4, "other", 1e-4)).endswith("| other | 100 us | 3.00 |")


def test_copies_and_chunks() -> None:
    with fresh_client("ipc"):
        rows = [*onesided.copies((MIB,), 1), *onesided.chunks(MIB, 1)]
    assert [row.title for row in rows] == [
        "read of 1 MiB of monarch.rdma.empty",
        "read of 1 MiB of monarch.rdma.empty, the owner computes",
        "read of 1 MiB of any kind",
        "read of 1 MiB of any kind, the owner computes",
        "read of 1 MiB over the link",
    ]
    assert all(row.ratio > 0 for row in rows)


@pytest.mark.rdma
@pytest.mark.timeout(200)
def test_a_device_and_its_frames() -> None:
    with fresh_client("ipc"):
        rows = list(onesided.device(MIB, 1))
    if not onesided.why_not("frames"):
        rows += onesided.frames(10, 1)
    assert len(rows) >= 2
    assert all(row.ratio > 0 for row in rows)
