"""Children for the tests of supervisors."""

from __future__ import annotations

import os
import threading
from typing import Any

from monarch.actor import Actor, Channel, Port, context, endpoint
from monarch.supervision import Supervisor


class Storyteller(Actor):
    """Tells a port of its birth and of its end."""

    def __init__(self, port: Port[Any], name: str) -> None:
        self.port, self.name = port, name
        self.seen: list[Any] = []
        port.send(f"+{name}")

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def note(self, value: Any) -> None:
        self.seen.append(value)

    @endpoint
    def notes(self) -> list[Any]:
        return self.seen

    @endpoint
    def hold(self, ready: Port[Any]) -> Any:
        port, receiver = Channel[Any].open()
        ready.send(port)
        return receiver.recv().get(30)

    @endpoint
    def leave(self) -> None:
        raise SystemExit(3)

    @endpoint
    def end(self) -> None:
        context().actor_instance.stop("done")

    def __cleanup__(self, exc: Exception | None) -> None:
        self.port.send(f"-{self.name}" if exc is None else f"!{self.name}")


class Slow(Storyteller):
    """Is constructed when a port says so: sends one for that."""

    def __init__(self, port: Port[Any], gate: Port[Any]) -> None:
        mine, receiver = Channel[Any].open()
        gate.send(mine)
        if receiver.recv().get(30) == "fail":
            raise ValueError("not this time")
        super().__init__(port, "slow")


class Teller(Actor):
    """Tells a port what it is told, before anything else happens."""

    def __init__(self, port: Port[Any]) -> None:
        self.port = port

    @endpoint
    def tell(self, value: Any, dies: bool) -> Any:
        self.port.send(value)
        if dies:
            raise SystemExit(3)
        return value


class Stubborn(Storyteller):
    """Does not end."""

    def __cleanup__(self, exc: Exception | None) -> None:
        threading.Event().wait()


class Caller(Actor):
    """Calls what it was given, from its own process."""

    def __init__(self, child: Any) -> None:
        self.child = child

    @endpoint
    def echo(self, value: Any) -> Any:
        return self.child.echo.call_one(value).get(20)

    @endpoint
    def note_all(self, values: list[Any]) -> None:
        for value in values:
            self.child.note.broadcast(value)


class Shop(Supervisor):
    """A supervisor with an endpoint of its own."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def ask(self, name: str, value: Any) -> Any:
        child = self.child(name)
        return await child.echo.call_one(value)
