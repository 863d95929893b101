"""A whole mesh over the transport ibverbs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from monarch.actor import SupervisionError, this_host
from monarch.testing import TestClient, fresh_client
from tests.mesh.actors import Worker

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(200)]

WAIT_S = 100


@pytest.fixture
def client() -> Iterator[TestClient]:
    with fresh_client("ibverbs", cleanup_timeout="1s", process_exit_timeout="3s") as client:
        yield client


def test_calls_small_and_large_messages_and_a_death(client):
    workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)
    first, second = workers.slice(gpus=0), workers.slice(gpus=1)
    large = os.urandom(5 << 20)

    assert [value for _, value in workers.add.call(3).get(WAIT_S).items()] == [3, 3]
    assert first.echo.call_one(large).get(WAIT_S) == large
    assert first.call_other.call_one(second, 4).get(WAIT_S) == 4  # a link between the two

    os.kill(second.pid.call_one().get(WAIT_S), signal.SIGKILL)
    with pytest.raises(SupervisionError, match="Killed"):
        second.echo.call_one(1).get(WAIT_S)
    client.expect_fault("Killed")
    assert first.add.call_one(1).get(WAIT_S) >= 4
