"""Fixtures for pytest.

Put `pytest_plugins = ["monarch.testing.plugin"]` into the top conftest.py, or import the fixtures into any conftest.py.
Installing monarch alone brings nothing into anybody's pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from monarch.testing.client import TestClient, fresh_client


@pytest.fixture
def monarch_settings() -> dict[str, Any]:
    """What `monarch_client` is made with: arguments of `fresh_client`. Override or parametrize it."""
    return {}


@pytest.fixture
def monarch_client(monarch_settings: dict[str, Any]) -> Iterator[TestClient]:
    """A fresh client for the test, over `inproc` unless `monarch_settings` says otherwise. Fails a test in which a
    failure reached the client unexpectedly."""
    with fresh_client(**monarch_settings) as client:
        yield client
