"""A mesh of 2 x 2 for the tests of tensors; its processes are threads, unless a test needs real ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from monarch.actor import ProcMesh, this_host
from monarch.testing import TestClient, fresh_client


class _NeedsTorch(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip("torch is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    missing = importlib.util.find_spec("torch") is None
    return _NeedsTorch.from_parent(parent, path=module_path) if missing else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/mesh/tensor" in str(item.path):
            item.add_marker(pytest.mark.torch)


@pytest.fixture(scope="module")
def tensor_client() -> Iterator[TestClient]:
    with fresh_client("inproc", cleanup_timeout="1s") as client:
        yield client


@pytest.fixture(scope="module")
def shared_procs(tensor_client: TestClient) -> ProcMesh:
    return this_host().spawn_procs({"hosts": 2, "gpus": 2}, name="tensors")


@pytest.fixture
def procs(shared_procs: ProcMesh, tensor_client: TestClient) -> Iterator[ProcMesh]:
    """Shared by the tests of a module; no test ends it."""
    yield shared_procs
    tensor_client.check_faults()
