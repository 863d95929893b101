"""Actors for the tests of meshes. Light to import: every process of every test does it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import warnings
from typing import Any

from monarch.actor import (
    Actor,
    Channel,
    Port,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)

TRACE = threading.local()


class Worker(Actor):
    """A bit of everything, sync."""

    def __init__(self, start: int = 0) -> None:
        self.total = start
        self.seen: list[Any] = []
        self.thread = threading.get_ident()
        self.born_at = dict(current_rank())

    @endpoint
    def add(self, x: int, *, times: int = 1) -> int:
        self.total += x * times
        return self.total

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
    def rank(self) -> tuple[int, dict[str, int], dict[str, int]]:
        return current_rank().rank, dict(current_rank()), current_size()

    @endpoint
    def birth(self) -> dict[str, int]:
        return self.born_at

    @endpoint
    def who(self) -> tuple[str, str, str, str, str]:
        me = context().actor_instance
        assert me.creator is not None
        return str(me), current_actor_name(), me.name, me.class_name, me.creator.name

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def proc_key(self) -> int:
        return context().actor_instance.proc_id.key

    @endpoint
    def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def same_thread(self) -> bool:
        return self.thread == threading.get_ident()

    @endpoint
    def loop_hidden(self) -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return True
        return False

    @endpoint
    def hold(self, ready: Port[Any]) -> Any:
        """Say that it runs, by a port to release it with, and block until released."""
        port, receiver = Channel[Any].open()
        ready.send(port)
        return receiver.recv().get(30)

    @endpoint
    def hold_and_fail(self, ready: Port[Any]) -> None:
        port, receiver = Channel[Any].open()
        ready.send(port)
        raise ValueError(receiver.recv().get(30))

    @endpoint
    def send_to(self, port: Port[Any], *values: Any) -> None:
        for value in values:
            port.send(value)

    @endpoint
    def call_when_told(self, ready: Port[Any], other: Any) -> None:
        """Say that it runs, by a port to release it with, then call `other`."""
        port, receiver = Channel[Any].open()
        ready.send(port)
        receiver.recv().get(30)
        other.echo.call_one(1).get(30)

    @endpoint
    def fail_to(self, port: Port[Any], text: str) -> None:
        port.exception(KeyError(text))

    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def fail_at(self, rank: int) -> int:
        if current_rank().rank >= rank:
            raise ValueError(f"rank {current_rank().rank} says no")
        return current_rank().rank

    @endpoint
    def leave(self) -> None:
        raise SystemExit(3)

    @endpoint
    def exit_process(self, code: int) -> None:
        os._exit(code)

    @endpoint
    def unloadable(self) -> Any:
        return Unloadable()

    @endpoint
    def exec_process(self) -> None:
        os.execvp("sleep", ["sleep", "100"])

    @endpoint
    def exit_main_thread(self) -> None:
        assert threading.current_thread() is threading.main_thread()
        ctypes.CDLL(None).pthread_exit(None)

    @endpoint
    def kill_process(self, signum: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), signum)

    @endpoint
    def unpicklable(self) -> Any:
        return threading.Lock()

    @endpoint
    def call_other(self, other: Any, x: int) -> int:
        result: int = other.echo.call_one(x).get(10)
        return result

    @endpoint
    def broadcast_to(self, other: Any, values: list[Any]) -> None:
        for value in values:
            other.note.broadcast(value)

    @endpoint
    def use_endpoint(self, remote: Any, x: int) -> Any:
        return list(remote.call(x).get(10).values())

    @endpoint
    def size_of(self, mesh: Any) -> dict[str, int]:
        return dict(mesh.extent)

    @endpoint
    def stop_it(self, mesh: Any) -> str:
        try:
            mesh.stop().get(10)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "stopped"

    def plain(self, x: int) -> int:
        return x * 2

    def plain_with_port(self, port: Port[int], x: int) -> None:
        port.send(x * 3)

    value = 7


class AsyncWorker(Actor):
    """As much, async."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.task: asyncio.Task[Any] | None = None

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def echo_later(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    @endpoint
    async def note(self, value: Any) -> None:
        self.seen.append(value)

    @endpoint
    async def note_slowly(self, value: Any) -> None:
        self.seen.append(("begin", value))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.seen.append(("end", value))

    @endpoint
    async def notes(self) -> list[Any]:
        return self.seen

    @endpoint
    async def hold(self, ready: Port[Any]) -> Any:
        port, receiver = Channel[Any].open()
        ready.send(port)
        return await receiver.recv()

    @concurrent_endpoint
    async def hold_aside(self, ready: Port[Any]) -> Any:
        self.seen.append("start")
        port, receiver = Channel[Any].open()
        ready.send(port)
        return await receiver.recv()

    @concurrent_endpoint
    async def aside(self, value: Any) -> Any:
        self.seen.append(value)
        await asyncio.sleep(0)
        return value

    @concurrent_endpoint
    async def fail_aside(self, kind: str) -> None:
        await asyncio.sleep(0)
        raise {"error": ValueError, "base": KeyboardInterrupt, "cancelled": asyncio.CancelledError}[kind]("aside")

    @concurrent_endpoint(explicit_response_port=True)
    async def answer_aside(self, port: Port[int], x: int) -> None:
        await asyncio.sleep(0)
        port.send(x + 1)

    @concurrent_endpoint(explicit_response_port=True)
    async def fail_explicit_aside(self, port: Port[int]) -> None:
        raise ValueError("explicit aside")

    @endpoint(explicit_response_port=True)
    async def answer(self, port: Port[int], x: int) -> None:
        port.send(x + 1)

    @endpoint(explicit_response_port=True)
    async def answer_later(self, port: Port[int], x: int) -> str:
        async def later() -> None:
            await asyncio.sleep(0)
            port.send(x + 1)

        self.task = asyncio.create_task(later())
        return "ignored"

    @endpoint(explicit_response_port=True)
    async def answer_with_error(self, port: Port[int]) -> None:
        port.exception(KeyError("exactly this"))

    @endpoint(explicit_response_port=True)
    async def keep_port(self, port: Port[int], ready: Port[Any]) -> None:
        self.kept = port
        ready.send("kept")

    @endpoint(explicit_response_port=True)
    async def fail_explicit(self, port: Port[int]) -> None:
        raise ValueError("explicit")

    @endpoint
    def sync_one(self) -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return True
        return False

    @endpoint
    def sync_blocking_call(self, other: Any, x: int) -> Any:
        return other.echo.call_one(x).get(10)

    @endpoint
    async def rank_in_task(self) -> tuple[str, dict[str, int]]:
        async def look() -> tuple[str, dict[str, int]]:
            await asyncio.sleep(0)
            return context().actor_instance.name, dict(current_rank())

        return await asyncio.create_task(look())

    @endpoint
    async def rank_in_thread(self) -> tuple[str, dict[str, int]]:
        return await asyncio.to_thread(lambda: (context().actor_instance.name, dict(current_rank())))

    @endpoint
    async def await_other(self, other: Any, x: int) -> Any:
        return await other.echo.call_one(x)

    @endpoint
    async def gather_others(self, other: Any, n: int) -> list[Any]:
        return list(await asyncio.gather(*(other.echo.call_one(i) for i in range(n))))

    @endpoint
    async def fail(self, kind: str) -> None:
        await asyncio.sleep(0)
        raise {"error": ValueError, "base": KeyboardInterrupt, "stop": StopIteration}[kind](kind)


class Blocker(Actor):
    """Has sync endpoints only. Its constructor makes a task, and blocks; both tell `port`."""

    def __init__(self, port: Port[Any]) -> None:
        self.task = asyncio.create_task(self._run(port))
        own, receiver = Channel[str].open()
        own.send("")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            receiver.recv().get(10)
        port.send([str(each.message) for each in caught])

    async def _run(self, port: Port[Any]) -> None:
        await asyncio.sleep(0)
        port.send("the task runs")

    @endpoint
    def nothing(self) -> None:
        pass


class Ticker(Actor):
    """Has a task from its constructor on, which counts whatever else happens."""

    def __init__(self) -> None:
        self.ticks = 0
        self.ticked = asyncio.Event()
        self.task = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.ticks += 1
            self.ticked.set()

    @endpoint
    async def next_tick(self) -> int:
        self.ticked.clear()
        await self.ticked.wait()
        return self.ticks


class Cleaner(Actor):
    """Tells a port what its cleanup saw."""

    def __init__(self, port: Port[Any], name: str = "", child: bool = False) -> None:
        self.port, self.name = port, name
        self.served: list[int] = []
        self.child = this_proc().spawn("child", Cleaner, port, f"child of {name}") if child else None

    @endpoint
    def serve(self, x: int) -> None:
        self.served.append(x)

    @endpoint
    def hold(self, ready: Port[Any]) -> None:
        port, receiver = Channel[Any].open()
        ready.send(port)
        receiver.recv().get(30)

    @endpoint
    def fail(self) -> None:
        raise ValueError("no")

    @endpoint
    def abort(self, reason: str | None) -> None:
        context().actor_instance.abort(reason)

    @endpoint
    def end_yourself(self) -> None:
        context().actor_instance.stop()

    def __cleanup__(self, exc: Exception | None) -> None:
        self.port.send((self.name, None if exc is None else str(exc), self.served))


class AsyncCleaner(Actor):
    def __init__(self, port: Port[Any]) -> None:
        self.port = port
        self.log: list[str] = []

    @endpoint
    async def work_for_ever(self, ready: Port[Any]) -> None:
        await self.wait_for_ever(ready)

    @concurrent_endpoint
    async def wait_for_ever(self, ready: Port[Any]) -> None:
        ready.send("waiting")
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append("cancelled")

    async def __cleanup__(self, exc: Exception | None) -> None:
        await asyncio.sleep(0)
        self.log.append("cleanup")
        self.port.send(self.log)


class HangingCleaner(Actor):
    def __init__(self, blocks: bool) -> None:
        self.blocks = blocks

    @endpoint
    async def ping(self) -> None:
        pass

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self.blocks:
            threading.Event().wait()
        await asyncio.Event().wait()


class FailingCleaner(Actor):
    @endpoint
    def ping(self) -> None:
        pass

    def __cleanup__(self, exc: Exception | None) -> None:
        raise ValueError("cleanup says no")


class CrashingCleaner(Actor):
    def __cleanup__(self, exc: Exception | None) -> None:
        os._exit(5)


class FailingInit(Actor):
    def __init__(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def ping(self) -> None:
        pass

    def __cleanup__(self, exc: Exception | None) -> None:
        raise AssertionError("no cleanup without a constructor that succeeded")


class EndlessInit(Actor):
    """Tells a port that its constructor runs, which then waits for a release."""

    def __init__(self, ready: Port[Any]) -> None:
        port, receiver = Channel[Any].open()
        ready.send(port)
        receiver.recv().get(30)

    @endpoint
    def ping(self) -> str:
        return "pong"


class Parent(Actor):
    """Owns children, and treats their failures as it was told."""

    def __init__(self, port: Port[Any], verdict: str) -> None:
        self.port, self.verdict = port, verdict
        self.children: dict[str, Any] = {}
        self.thread = threading.get_ident()

    @endpoint
    def spawn(self, name: str) -> Any:
        self.children[name] = this_proc().spawn(name, Worker)
        return self.children[name]

    @endpoint
    def spawn_on(self, procs: Any, name: str) -> Any:
        self.children[name] = procs.spawn(name, Worker)
        return self.children[name]

    @endpoint
    def spawn_procs(self, n: int, name: str) -> Any:
        self.procs = this_host().spawn_procs({"gpus": n})
        self.children[name] = self.procs.spawn(name, Worker)
        return self.children[name]

    @endpoint
    def call_fail(self, name: str) -> str:
        try:
            self.children[name].leave.call_one().get(10)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def kill_process(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def __supervise__(self, failure: Any) -> bool:
        on_thread = threading.get_ident() == self.thread
        self.port.send((failure.mesh_name, failure.crashed_ranks, failure.report(), on_thread))
        if self.verdict == "raise":
            raise ValueError("supervise says no")
        return self.verdict == "handle"


class SlowParent(Parent):
    """Takes its time over a failure."""

    async def __supervise__(self, failure: Any) -> bool:
        await asyncio.sleep(0.01)
        return super().__supervise__(failure)


class LateParent(Actor):
    """Owns something new in its last moment."""

    def __init__(self, port: Port[Any]) -> None:
        self.port = port

    def __cleanup__(self, exc: Exception | None) -> None:
        this_proc().spawn("late", Cleaner, self.port, "late").fail.broadcast()


class AsyncParent(Actor):
    def __init__(self, port: Port[Any]) -> None:
        self.port = port
        self.failed = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    @endpoint
    async def wait_for_failure(self) -> str:
        """An endpoint that awaits sees what `__supervise__` does meanwhile."""
        child = this_proc().spawn("child", Worker)
        child.leave.broadcast()
        await self.failed.wait()
        return "saw it"

    async def __supervise__(self, failure: Any) -> bool:
        await asyncio.sleep(0)
        self.port.send(asyncio.get_running_loop() is self.loop)
        self.failed.set()
        return True


class Unsupervised(Actor):
    def __init__(self) -> None:
        self.children: list[Any] = []

    @endpoint
    def spawn(self, name: str) -> Any:
        self.children.append(this_proc().spawn(name, Worker))
        return self.children[-1]


class Names(Actor):
    """Its endpoints have the names of mesh methods."""

    @endpoint
    def stop(self) -> str:
        return "stop"

    @endpoint
    def slice(self) -> str:
        return "slice"

    @endpoint
    def size(self) -> str:
        return "size"

    @endpoint
    def extent(self) -> str:
        return "extent"

    @endpoint
    def initialized(self) -> str:
        return "initialized"


class Counter(Actor):
    """A controller."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    def count(self) -> int:
        self.value += 1
        return self.value

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def leave(self) -> None:
        raise SystemExit(3)

    @endpoint
    def spawn_here(self) -> int:
        pid: int = this_proc().spawn("here", Worker).pid.call_one().get(10)
        return pid


class Asker(Actor):
    @endpoint
    def ask(self, name: str) -> int:
        counter = get_or_spawn_controller(name, Counter, 100).get(10)
        value: int = counter.count.call_one().get(10)
        return value


class Unloadable:
    """Pickles, and does not unpickle."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("cannot be unpickled")


class Sender(Actor):
    """Sends to others, and hears of what came back."""

    def __init__(self, port: Port[Any]) -> None:
        self.port = port

    @endpoint
    def note_to(self, other: Any, value: Any) -> None:
        other.note.broadcast(value)

    @endpoint
    def from_a_thread(self, other: Any, value: Any) -> Any:
        """A thread that the user started has no actor: it speaks for the process."""
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(other.echo.call_one(value).get(10)))
        thread.start()
        thread.join(10)
        return got

    def _handle_undeliverable_message(self, message: Any) -> bool:
        self.port.send(message.error_msg())
        return True
