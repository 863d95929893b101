"""Each comparison is carried out, with little: that it is shown, not how fast it is."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("torch")

from benchmarks import tensors
from monarch.testing import fresh_client

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]


def test_every_group_beside_what_it_is_compared_with() -> None:
    with fresh_client("ipc"):
        rows = [*tensors.issue(1), *tensors.reduce(2, 4096, 1), *tensors.move(4096, 1), *tensors.fetch(1)]
    assert len(rows) == 8
    assert all(row.ratio > 0 for row in rows)


def test_another_package_is_named_by_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONARCH_BENCH_TORCHMONARCH", raising=False)
    assert "names no Python" in tensors.why_not("torchmonarch")
    monkeypatch.setenv("MONARCH_BENCH_TORCHMONARCH", sys.executable)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert not tensors.why_not("torchmonarch")
    rows = list(tensors.torchmonarch(1))  # beside itself
    assert [row.title for row in rows][::2] == ["chain of sums", "chain of views", "views of one", "fetch"]
    assert all(row.ratio > 0 for row in rows)
