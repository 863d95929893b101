"""Ports and channels over processes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from monarch.actor import Actor, Channel, Port, endpoint
from tests.mesh.actors import AsyncWorker, Worker
from tests.mesh.conftest import Shared

Spawn = Callable[..., Any]


class Mail(Actor):
    """Keeps channels of its own, and hands their ports out."""

    def __init__(self) -> None:
        self.port, self.receiver = Channel[Any].open()

    @endpoint
    async def address(self) -> Port[Any]:
        return self.port

    @endpoint
    async def take(self, count: int) -> list[Any]:
        return [await self.receiver.recv() for _ in range(count)]

    @endpoint
    async def give_receiver(self) -> Any:
        return self.receiver


def test_values_of_many_senders_come_in_each_in_order(spawn: Spawn, channel: Any) -> None:
    workers = spawn(Worker)
    port, receiver = channel

    workers.send_to.broadcast(port, *range(20))
    got = [receiver.recv().get(10) for _ in range(80)]

    assert sorted(got) == sorted(list(range(20)) * 4)


def test_one_sender_is_heard_in_order(spawn: Spawn, shared: Shared, channel: Any) -> None:
    port, receiver = channel
    spawn(Worker, on=shared.procs.slice(hosts=0, gpus=0)).send_to.broadcast(port, *range(200))

    assert [receiver.recv().get(10) for _ in range(200)] == list(range(200))


def test_recv_may_be_called_ahead(shared: Shared, channel: Any) -> None:
    port, receiver = channel
    first, second = receiver.recv(), receiver.recv()

    with pytest.raises(TimeoutError, match="port"):
        first.get(0.01)
    port.send(1)
    port.send(2)

    assert (second.get(10), first.get(10)) == (2, 1)


def test_threads_that_receive_each_get_values_of_their_own(shared: Shared, channel: Any) -> None:
    port, receiver = channel

    with ThreadPoolExecutor(4) as pool:
        taken = [pool.submit(lambda: receiver.recv().get(10)) for _ in range(40)]
        for number in range(40):
            port.send(number)
        assert sorted(each.result(10) for each in taken) == list(range(40))


def test_an_exception_travels_as_it_is(spawn: Spawn, shared: Shared, channel: Any) -> None:
    port, receiver = channel
    spawn(Worker, on=shared.procs.slice(hosts=0, gpus=0)).fail_to.broadcast(port, "by port")

    with pytest.raises(KeyError, match="by port"):
        receiver.recv().get(10)


def test_a_once_port_takes_one_value(spawn: Spawn, shared: Shared) -> None:
    worker = spawn(Worker, on=shared.procs.slice(hosts=0, gpus=0))
    port, receiver = Channel[Any].open(once=True)
    port.return_undeliverable = False

    worker.send_to.call_one(port, "first", "second").get(10)

    assert receiver.recv().get(10) == "first"
    with pytest.raises(TimeoutError):
        receiver.recv().get(0.02)


def test_ranked_receivers_say_who_replied(shared: Shared) -> None:
    port, receiver = Channel[Any].open_ranked()
    port.send("x")
    assert receiver.recv().get(10) == (0, "x")

    plain, unranked = Channel[Any].open()
    plain.send("y")
    assert unranked.ranked().recv().get(10) == (0, "y")


def test_the_receiving_half_cannot_be_sent(spawn: Spawn, shared: Shared, channel: Any) -> None:
    worker = spawn(Worker, on=shared.procs.slice(hosts=0, gpus=0))
    _, receiver = channel

    with pytest.raises(TypeError, match="stays where it was opened"):
        worker.echo.call_one(receiver)
    mail = spawn(Mail, on=shared.procs.slice(hosts=0, gpus=0))
    with pytest.raises(Exception, match="cannot be sent"):
        mail.give_receiver.call_one().get(10)


def test_a_port_of_an_actor_is_sent_to_by_others(spawn: Spawn, shared: Shared) -> None:
    mail = spawn(Mail, on=shared.procs.slice(hosts=0, gpus=0))
    port = mail.address.call_one().get(10)

    taking = mail.take.call_one(6)
    port.send("client")
    spawn(Worker).send_to.broadcast(port, "worker")
    spawn(AsyncWorker)
    pickle.loads(pickle.dumps(port)).send("pickled")

    assert sorted(taking.get(10)) == ["client", "pickled", *["worker"] * 4]


def test_a_port_that_was_passed_on_still_leads_home(spawn: Spawn, shared: Shared, channel: Any) -> None:
    """Client to actor to client to actor to client."""
    port, receiver = channel
    workers = spawn(Worker)

    back = workers.slice(hosts=0, gpus=0).echo.call_one([port]).get(10)[0]
    assert back == port
    workers.slice(hosts=1, gpus=1).send_to.call_one(back, "home").get(10)

    assert receiver.recv().get(10) == "home"
    assert hash(copy.copy(port)) == hash(port)


def test_a_value_that_cannot_be_pickled_is_an_error_at_the_sender(shared: Shared, channel: Any) -> None:
    port, receiver = channel

    with pytest.raises(TypeError, match="pickle"):
        port.send(__import__("threading").Lock())
    port.send("next")

    assert receiver.recv().get(10) == "next"


def test_what_is_sent_is_a_snapshot(shared: Shared, channel: Any) -> None:
    port, receiver = channel
    small, large = [1], bytearray(1 << 20)

    port.send((small, large))
    small.append(2)
    large[0] = 1

    got = receiver.recv().get(10)
    assert (got[0], got[1][0]) == ([1], 0)


def test_a_wait_that_was_given_up_leaves_the_value_to_the_next(
    shared: Shared,
) -> None:
    port, receiver = Channel[int].open()
    with pytest.raises(TimeoutError):
        receiver.recv().get(timeout=0.01)
    port.send(1)
    assert receiver.recv().get(10) == 1
