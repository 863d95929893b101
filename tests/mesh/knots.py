"""Actors that call each other on a given way, for the tests of deadlocks and of giving up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from monarch.actor import Actor, Channel, Future, Port, concurrent_endpoint, context, endpoint

LIMIT_S = 30.0


class Knot(Actor):
    """Sync. `way` are the meshes to call one after the other, each by the one before it."""

    def __init__(self) -> None:
        self.sent: list[Future[Any]] = []

    @endpoint
    def go(self, way: list[Any]) -> str:
        return way[0].go.call_one(way[1:]).get(LIMIT_S) if way else "end"

    @endpoint
    def go_to_all(self, mesh: Any) -> list[str]:
        return list(mesh.go.call([]).get(LIMIT_S).values())

    @endpoint
    def go_without_limit(self, way: list[Any]) -> str:
        result: str = way[0].go.call_one(way[1:]).get()
        return result

    @endpoint
    def wait_later(self, way: list[Any], ready: Port[Any]) -> str:
        """Send, and wait only when released."""
        future = way[0].go.call_one(way[1:])
        port, receiver = Channel[Any].open()
        ready.send(port)
        receiver.recv().get(LIMIT_S)
        result: str = future.get(LIMIT_S)
        return result

    @endpoint
    def send_only(self, way: list[Any]) -> str:
        self.sent.append(way[0].go.call_one(way[1:]))
        return "sent"

    @endpoint
    def stream_first(self, mesh: Any, me: Any) -> str:
        """Wait for one reply of two, of which the other is this very actor's."""
        stream = mesh.go.stream([])
        first: str = next(stream).get(LIMIT_S)
        self.sent.extend(stream)
        return first

    @endpoint
    def answered(self) -> int:
        return sum(future.done() for future in self.sent)

    @endpoint
    def sent_answers(self, ready: Port[str] | None = None) -> list[str]:
        if ready is not None:
            ready.send("began")
        return [future.get(LIMIT_S) for future in self.sent]


class Newborn(Actor):
    """Calls itself in its constructor."""

    def __init__(self, ready: Port[Any]) -> None:
        port, receiver = Channel[Any].open()
        ready.send(port)
        me = receiver.recv().get(LIMIT_S)
        try:
            me.initialized.get(LIMIT_S)
        except Exception as error:
            self.initialized = f"{type(error).__name__}: {error}"
        try:
            self.error = me.told.call_one().get(LIMIT_S)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    @endpoint
    def told(self) -> tuple[str, str]:
        return self.error, self.initialized


class AsyncKnot(Actor):
    """As Knot, with the ways to wait that a coroutine has."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []

    @endpoint
    async def go(self, way: list[Any], how: str = "await") -> str:
        if not way:
            return "end"
        future = way[0].go.call_one(way[1:])
        if how == "await":
            return str(await future)
        if how == "as_asyncio":
            return str(await future.as_asyncio())
        if how == "gather":
            return str((await asyncio.gather(asyncio.sleep(0), future))[1])
        if how == "task":
            task = asyncio.create_task(self._wait(future))
            await asyncio.sleep(0)  # the task waits before anybody waits for the task
            await asyncio.sleep(0)
            return await task
        assert how == "get"
        return str(future.get(LIMIT_S))

    async def _wait(self, future: Future[Any]) -> str:
        return str(await future)

    @endpoint
    async def go_in_background(self, way: list[Any]) -> str:
        """A task waits for the call, and nobody for the task; until the call that comes back is queued here."""
        self.tasks.append(asyncio.create_task(self._wait(way[0].go.call_one(way[1:]))))
        while not len(context().actor_instance.mailbox):
            await asyncio.sleep(0)
        return "sent"

    @endpoint
    async def background(self) -> list[str]:
        return list(await asyncio.gather(*self.tasks))

    @concurrent_endpoint
    async def go_aside(self, way: list[Any]) -> str:
        return str(await way[0].go.call_one(way[1:]))


class Patient(Actor):
    """Async. Tells what becomes of its calls."""

    @endpoint
    async def wait(self, port: Port[str]) -> None:
        await self._wait(port)

    @concurrent_endpoint
    async def wait_aside(self, port: Port[str]) -> None:
        await self._wait(port)

    @endpoint(explicit_response_port=True)
    async def wait_explicitly(self, reply: Port[None], port: Port[str]) -> None:
        await self._wait(port)

    async def _wait(self, port: Port[str]) -> None:
        port.send("began")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            port.send(f"interrupted, cancelled={context().cancelled}")
            raise

    @endpoint(explicit_response_port=True)
    async def fail_when_cancelled(self, reply: Port[None], port: Port[str]) -> None:
        try:
            await self._wait(port)
        except asyncio.CancelledError:
            raise ValueError("in the middle of something") from None

    @endpoint
    async def stubborn(self, port: Port[str]) -> str:
        try:
            await self._wait(port)
        except asyncio.CancelledError:
            pass
        return "an answer that nobody gets"

    @endpoint
    async def cancelled(self) -> bool:
        return context().cancelled


class Busy(Actor):
    """Sync. Looks at the flag."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def spin(self, port: Port[Any]) -> None:
        port.send("began")
        pause = threading.Event()
        for _ in range(30_000):
            if context().cancelled:
                break
            pause.wait(0.001)
        port.send(context().cancelled)

    @endpoint
    def note(self, value: Any) -> None:
        self.seen.append(value)

    @endpoint
    def notes(self) -> tuple[list[Any], bool]:
        return self.seen, context().cancelled
