"""Meshes for the tests: shared ones for each transport and link driver, and fresh clients where things are killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import define

from monarch.actor import ActorMesh, Channel, Port, PortReceiver, ProcMesh, this_host
from monarch.testing import TestClient, fresh_client
from monarch.testing.plugin import monarch_client, monarch_settings
from tests.mesh.netns import machines, network_client

__all__ = ["machines", "monarch_client", "monarch_settings", "network_client"]

COMBINATIONS = [
    pytest.param((transport, driver), id=f"{transport}-{driver}", marks=() if unit == driver else pytest.mark.slow)
    for transport, unit in (("inproc", "caller"), ("shm", "caller"), ("tcp", "thread"))
    for driver in ("caller", "thread")
]


@define
class Shared:
    """A client with a mesh of 2 x 2 processes, that no test kills."""

    client: TestClient
    procs: ProcMesh
    transport: str


@pytest.fixture(scope="package", params=COMBINATIONS)
def shared_session(request: pytest.FixtureRequest) -> Iterator[Shared]:
    transport, driver = request.param
    with fresh_client(transport, driver, cleanup_timeout="1s") as client:
        procs = this_host().spawn_procs({"hosts": 2, "gpus": 2}, name="shared")
        yield Shared(client, procs, transport)


@pytest.fixture
def shared(shared_session: Shared) -> Iterator[Shared]:
    yield shared_session
    shared_session.client.check_faults()


@pytest.fixture
def spawn(shared: Shared) -> Iterator[Callable[..., Any]]:
    """`spawn(Class, *args, on=procs)`: actors that are stopped at the end of the test."""
    spawned: list[Any] = []

    def spawn(cls: type, *args: Any, on: Any = None, name: str | None = None, **kwargs: Any) -> Any:
        mesh = (shared.procs if on is None else on).spawn(name or cls.__name__.lower(), cls, *args, **kwargs)
        spawned.append(mesh)
        return mesh

    yield spawn
    stops = [ActorMesh.stop(mesh) for mesh in reversed(spawned)]
    for stop in stops:
        stop.get(10)


@pytest.fixture(params=["inproc", *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("shm", "tcp"))])
def client(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    """A fresh client over each transport, for tests that end things."""
    with fresh_client(request.param, cleanup_timeout="1s", process_exit_timeout="3s") as client:
        yield client


@pytest.fixture(params=["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def real_client(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    """A fresh client whose processes are real."""
    with fresh_client(request.param, cleanup_timeout="1s", process_exit_timeout="3s") as client:
        yield client


@pytest.fixture
def channel(request: pytest.FixtureRequest) -> tuple[Port[Any], PortReceiver[Any]]:
    """A channel of the client. Request it after the client."""
    for name in ("shared", "client", "real_client", "monarch_client"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    return Channel[Any].open()
