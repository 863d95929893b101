"""What is said of a message that came back and that nobody waits for: what did not arrive where, and what to do."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from monarch.actor import Channel, SupervisionError, this_host
from monarch.testing import Recorder, TestClient
from tests.mesh.actors import Worker


@pytest.fixture
def warnings() -> Iterator[Recorder[str]]:
    """The texts of the warnings of this library."""
    texts: Recorder[str] = Recorder()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("monarch").addHandler(handler)
    yield texts
    logging.getLogger("monarch").removeHandler(handler)


def test_a_broadcast_to_a_dead_actor_names_the_actor(monarch_client: TestClient, warnings: Recorder[str]) -> None:
    monarch_client.allow_faults()
    worker: Any = this_host().spawn_procs({"gpus": 2}).spawn("worker", Worker).slice(gpus=1)
    with pytest.raises(SupervisionError):
        worker.leave.call_one().get(10)
    worker.echo.broadcast(1)

    (text,) = warnings.wait(1)
    assert "to=\"actor tests.mesh.actors.Worker worker{'gpus': 1/2}\"" in text
    assert "call() in place of broadcast()" in text


def test_a_value_for_a_port_that_is_gone_names_the_port(monarch_client: TestClient, warnings: Recorder[str]) -> None:
    port, receiver = Channel[int].open()
    quiet, other = Channel[int].open()
    quiet.return_undeliverable = False
    name = str(port._port).partition(".")[0]
    del receiver, other
    gc.collect()
    quiet.send(1)
    port.send(1)

    (text,) = warnings.wait(1)
    assert f"to='port {name}." in text
    assert "return_undeliverable = False" in text
