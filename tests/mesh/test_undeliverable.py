"""What is said of a message that came back and that nobody waits for: what did not arrive where, and what to do."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from monarch.actor import Actor, Channel, Port, SupervisionError, context, endpoint, this_host, this_proc
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.monitor import Down
from monarch.mesh.undeliverable import Undeliverable
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


def test_many_that_come_back_at_once_are_told_of_in_one_line(
    monarch_client: TestClient, warnings: Recorder[str]
) -> None:
    worker: Any = this_host().spawn_procs({"gpus": 2}).spawn("worker", Worker)
    client = context().actor_instance
    runtime, key = client.proc_runtime, worker._procs[1].key
    gone = Down("killed", "the process was killed", signal=9)

    def come_back() -> None:
        for _ in range(1000):
            lost = Envelope(Kind.CALL, key, worker._number, 0, runtime.key, client.actor_id.number, [b""], Flag.UNSURE)
            runtime.bounce(lost, gone)
        runtime.bounce(Envelope(Kind.CALL, key, worker._number, 0, runtime.key, client.actor_id.number, [b""]), gone)

    runtime.gateway.call_later(0.0, come_back)  # on the thread that tells of them, which comes to it after all of them

    many, one = warnings.wait(2)
    assert many.startswith("message.maybe_delivered messages=1000 ")
    assert one.startswith("message.undeliverable sender=")
    assert "to=\"actor tests.mesh.actors.Worker worker{'gpus': 1/2}\"" in many


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


@pytest.mark.parametrize("unsure", [False, True])
def test_what_may_have_been_served_is_not_called_undeliverable(
    monarch_client: TestClient, warnings: Recorder[str], unsure: bool
) -> None:
    client = context().actor_instance
    runtime, number = client.proc_runtime, client.actor_id.number
    flags = Flag.UNSURE if unsure else 0
    lost = Envelope(Kind.CALL, 1, number, 0, runtime.key, number, [b""], flags)
    runtime.bounce(lost, Down("unreachable", "its host is gone"))
    (text,) = warnings.wait(1)
    assert text.startswith("message.maybe_delivered" if unsure else "message.undeliverable")
    told = Undeliverable.of(client, lost, Down("unreachable", "its host is gone"))
    assert told.maybe_delivered is unsure
    assert told.error_msg().startswith("message to actor" if unsure else "undeliverable message to actor")


class Sender(Actor):
    """It sends to an actor that is gone, and is asked about that."""

    def __init__(self, told: Port[tuple[str, str]], handles: bool) -> None:
        self.told, self.handles = told, handles

    @endpoint
    async def send(self, other: Any) -> None:
        other.echo.broadcast(1)

    @endpoint
    async def ping(self) -> None:
        pass

    def _told(self, message: Any) -> bool:
        self.told.send((context().actor_instance.name, message.error_msg()))
        return self.handles

    def _handle_undeliverable_message(self, message: Any) -> bool:
        asked = this_proc().spawn("asked", Worker).echo.call_one(1)  # a plain one may block
        return asked.get(10) == 1 and self._told(message)


class AsyncSender(Sender):
    async def _handle_undeliverable_message(self, message: Any) -> bool:  # type: ignore[override]
        await asyncio.sleep(0)
        return self._told(message)


@pytest.mark.parametrize("cls", [Sender, AsyncSender])
@pytest.mark.parametrize("handles", [True, False])
def test_the_sender_is_asked_as_itself_in_a_plain_or_an_async_method(
    monarch_client: TestClient, cls: type[Sender], handles: bool
) -> None:
    port, told = Channel[tuple[str, str]].open()
    worker = this_host().spawn_procs().spawn("worker", Worker)
    with pytest.raises(SupervisionError):
        worker.leave.call_one().get(10)
    monarch_client.expect_fault("worker")
    sender = this_host().spawn_procs().spawn("sender", cls, port, handles)
    sender.send.call_one(worker).get(10)

    name, error = told.recv().get(10)
    assert name == "sender" and error.startswith("undeliverable message to actor ")
    if handles:
        sender.ping.call_one().get(10)
    else:
        assert "undeliverable message to" in str(monarch_client.expect_fault("sender"))
