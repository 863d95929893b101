"""Fixtures for tests of shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch.transports import registry
from monarch.transports.base import Link
from monarch.transports.pool import Pool
from tests.transports.drive import connected

TRANSPORT = registry.get("shm")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """That of the transport, for one test."""
    pool = Pool(64 << 20)
    monkeypatch.setattr(TRANSPORT, "memory", pool)
    return pool


@pytest.fixture
def links(pool: Pool) -> Iterator[tuple[Link, Link]]:
    """Both ends of one."""
    with connected(TRANSPORT) as pair:
        yield pair
