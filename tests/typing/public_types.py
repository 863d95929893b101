"""What a type checker tells a user of `monarch.actor`. Checked by `mypy --strict`, never run: see tests/test_typing.py.

Where a line is an error on purpose, its `type: ignore` names the code; were it accepted, mypy would report the comment
as unused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import assert_type, reveal_type

from monarch.actor import (
    Accumulator,
    Actor,
    Channel,
    Endpoint,
    Future,
    Point,
    Port,
    PortReceiver,
    ProcMesh,
    ValueMesh,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_rank,
    endpoint,
    get_or_spawn_controller,
    send,
    shutdown_context,
    this_host,
    this_proc,
)
from monarch.supervision import Child, Supervisor


class Worker(Actor):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @endpoint
    def add(self, a: int, b: int = 0) -> int:
        return a + b

    @endpoint
    async def name(self) -> str:
        return "worker"

    @endpoint(instrument=False)
    def with_options(self, text: str) -> bytes:
        return text.encode()

    @concurrent_endpoint
    async def slow(self, seconds: float) -> list[int]:
        return []

    @endpoint(explicit_response_port=True)
    def explicit(self, reply: Port[bytes], times: int) -> None:
        reply.send(b"" * times)

    @concurrent_endpoint(explicit_response_port=True)
    async def later(self, reply: Port[str], text: str) -> None:
        reply.send(text)

    def plain(self, x: float) -> bool:
        return x > 0

    @endpoint
    def take(self, other: Worker, port: Port[str]) -> None:
        port.send("taken")


def meshes() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    assert_type(procs, ProcMesh)
    assert_type(procs.slice(gpus=0), ProcMesh)
    assert_type(this_proc(), ProcMesh)
    worker = procs.spawn("worker", Worker, 2.0)
    assert_type(worker, Worker)
    assert_type(worker.slice(gpus=0), Worker)
    assert_type(worker.flatten("all"), Worker)
    assert_type(procs.stop(), Future[None])
    assert_type(shutdown_context(), Future[None])
    assert_type(get_or_spawn_controller("only", Worker, 1.0), Future[Worker])
    assert_type(current_rank(), Point)
    assert_type(current_rank()["gpus"], int)

    procs.spawn("worker", int)  # type: ignore[type-var]


def adverbs(worker: Worker) -> None:
    assert_type(worker.add.call(1), Future[ValueMesh[int]])
    assert_type(worker.add.call(1).get(), ValueMesh[int])
    assert_type(worker.add.call_fail_fast(1), Future[ValueMesh[int]])
    assert_type(worker.add.call_settled(1), Future[ValueMesh[int | BaseException]])
    for outcome in worker.add.call_settled(1).get().values():
        if not isinstance(outcome, BaseException):
            assert_type(outcome, int)
    assert_type(worker.add.call_one(1, b=2), Future[int])
    assert_type(worker.add.call_one(1).cancel(), bool)
    assert_type(context().cancelled, bool)
    assert_type(worker.add.choose(1), Future[int])
    assert_type([reply.get() for reply in worker.add.stream(1)], list[int])
    worker.add.broadcast(1)

    assert_type(worker.name.call_one(), Future[str])  # of the awaited value, not of the coroutine
    assert_type(worker.with_options.call_one("a").get(), bytes)
    assert_type(worker.slow.call(0.5), Future[ValueMesh[list[int]]])
    assert_type(worker.explicit.call_one(3), Future[bytes])  # the type of the port, which the caller does not pass
    assert_type(Accumulator(worker.add, 0.5, lambda total, n: total + n).accumulate(1), Future[float])

    worker.add.call_one("one")  # type: ignore[arg-type]
    worker.add.call_one()  # type: ignore[call-arg]
    worker.add.call(1, c=2)  # type: ignore[call-arg]
    worker.add.call_settled("one")  # type: ignore[arg-type]
    worker.add.broadcast(None)  # type: ignore[arg-type]
    worker.explicit.call_one("three")  # type: ignore[arg-type]


async def awaiting(worker: Worker) -> None:
    reveal_type(await worker.add.call_one(1))
    assert_type(await worker.add.call_one(1), int)
    assert_type(await worker.name.call(), ValueMesh[str])
    for reply in worker.name.stream():
        assert_type(await reply, str)


def values(mesh: ValueMesh[int]) -> None:
    assert_type(mesh.item(gpus=0), int)
    assert_type(mesh.get(0), int)
    assert_type(list(mesh.values()), list[int])
    assert_type([(point, value) for point, value in mesh.items()], list[tuple[Point, int]])
    assert_type(mesh.slice(gpus=0), ValueMesh[int])


def channels(worker: Worker) -> None:
    port, receiver = Channel[str].open()
    assert_type(port, Port[str])
    assert_type(receiver, PortReceiver[str])
    assert_type(receiver.recv(), Future[str])
    port.send("text")
    port.send(1)  # type: ignore[arg-type]
    worker.take.broadcast(worker.slice(gpus=0), port)


async def more_channels(worker: Worker) -> None:
    port, receiver = Channel[tuple[int, str]].open(once=True)
    assert_type(await receiver.recv(), tuple[int, str])
    port.exception(ValueError("no"))
    port.return_undeliverable = False
    ranked, ranks = Channel[bytes].open_ranked()
    assert_type(ranked, Port[bytes])
    assert_type(ranks.recv().get(timeout=1.0), tuple[int, bytes])
    assert_type(receiver.ranked(), PortReceiver[tuple[int, tuple[int, str]]])
    Channel[int].open(once="name")  # type: ignore[arg-type]
    sums, _ = Channel[int].open()
    send(worker.add, (1,), {}, port=sums)
    worker.explicit.call_one(port, 3)  # type: ignore[call-arg, arg-type]
    worker.explicit.broadcast(3)


async def more_adverbs(worker: Worker) -> None:
    stream = worker.slow.stream(0.5)
    assert_type(stream, Iterator[Future[list[int]]])
    assert_type(await next(stream), list[int])
    assert_type(await worker.slow.choose(0.5), list[int])
    assert_type(await worker.explicit.call(2), ValueMesh[bytes])
    assert_type(await worker.later.call_one("text"), str)
    assert_type(worker.add.call_one(1).exception(), BaseException | None)
    assert_type(worker.add.call_one(1).result(timeout=2.0), int)
    assert_type(await asyncio.gather(worker.add.call_one(1), worker.name.call_one()), tuple[int, str])
    assert_type(await asyncio.wait_for(worker.add.call_one(1).as_asyncio(), 1.0), int)
    assert_type(await Accumulator(worker.add, "", lambda text, n: text + str(n)).accumulate(1), str)
    plain = as_endpoint(worker.plain)
    assert_type(plain.call_one(1.0), Future[bool])
    plain.call_one("one")  # type: ignore[arg-type]
    only = await get_or_spawn_controller("only", Worker)
    assert_type(only.add.call_one(1), Future[int])


def endpoints_are_values(worker: Worker) -> Endpoint[[int, int], int]:
    return worker.add


def supervised() -> None:
    spec = Child("worker", Worker, 2.0)
    supervisor = this_proc().spawn("supervisor", Supervisor, [spec], max_restarts=1)
    assert_type(supervisor, Supervisor)
    assert_type(supervisor.child(spec), Worker)
    assert_type(supervisor.child(spec).add.call_one(1, b=2), Future[int])
    Child("worker", Worker, "two")  # type: ignore[arg-type]
    assert_type(spec.options(restart="transient"), Child[Worker])
