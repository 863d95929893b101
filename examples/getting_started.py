"""Every feature of the actor API once, in the order in which one meets them.

    python examples/getting_started.py

Each function below is a lesson that stands for itself. All but two share one mesh of four processes.
"""

from __future__ import annotations

import asyncio
import os

from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    Future,
    Port,
    ProcMesh,
    SupervisionError,
    ValueMesh,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    get_or_spawn_controller,
    send,
    this_host,
    this_proc,
)

# ------------------------------------------------------------------------------------------------------------- actors


class Counter(Actor):
    """An actor is an object in some process. Others reach its endpoints, and nothing else of it."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    @endpoint
    async def get(self) -> int:  # endpoints may be async, in one class with others that are not
        return self.value

    @endpoint
    def where(self) -> tuple[int, int, dict[str, int]]:
        """In which process, at which rank of the mesh that was called, and how large that was."""
        return os.getpid(), current_rank().rank, current_size()

    @endpoint
    def fail(self) -> None:
        raise ValueError(f"rank {current_rank().rank} does not like this")

    def double(self) -> int:  # not an endpoint
        return 2 * self.value


def actors_and_adverbs(procs: ProcMesh) -> None:
    """An endpoint is called through an adverb, which says who gets the message and how the replies come back."""
    counters = procs.spawn("counters", Counter, start=10)  # one Counter in each process; arguments go to __init__

    # call: all members; the reply is a ValueMesh in the shape of the mesh.
    values: ValueMesh[int] = counters.add.call(5).get()
    assert [value for _, value in values.items()] == [15, 15, 15, 15]

    # call_one: the mesh must have exactly one member, so take a slice that has.
    assert counters.slice(row=0, col=1).add.call_one(1).get() == 16

    # choose: any one member.
    assert counters.get.choose().get() in (15, 16)

    # stream: all members; the replies as they come in.
    assert sorted(reply.get() for reply in counters.get.stream()) == [15, 15, 15, 16]

    # broadcast: all members, and no replies. Messages of one sender to one actor keep their order.
    counters.add.broadcast(100)
    assert counters.get.call().get().item(row=0, col=1) == 116

    # A method without @endpoint becomes one for a single call.
    assert as_endpoint(counters.slice(row=0, col=0).double).call_one().get() == 230
    print("actors and adverbs: values are", list(counters.get.call().get().values()))


def meshes_and_slices(procs: ProcMesh) -> None:
    """A mesh is an array with named dimensions; a view of it is cheap, and takes messages like the whole."""
    counters = procs.spawn("sliced", Counter)
    assert counters.sizes == {"row": 2, "col": 2} and len(counters) == 4 and counters.size("row") == 2

    right = counters.slice(col=1)  # an int drops the dimension
    assert right.sizes == {"row": 2}
    assert counters.slice(row=slice(0, 1)).sizes == {"row": 1, "col": 2}  # a slice keeps it
    assert counters.flatten("member").sizes == {"member": 4}
    assert counters.rename(row="host", col="gpu").sizes == {"host": 2, "gpu": 2}
    assert counters.flatten("m").split(m=("a", "b"), a=2).sizes == {"a": 2, "b": 2}

    # The rank is that in the view which was called: an actor has different ranks in different views.
    ranks = [rank for _, (_, rank, _) in right.where.call().get().items()]
    assert ranks == [0, 1]

    # A ValueMesh can be cut the same way, and asked by coordinates or by rank.
    values = counters.add.call(1).get()
    assert values.slice(row=1).item(col=0) == values.get(2) == 1
    for point, (pid, rank, sizes) in counters.where.call().get().items():
        print(f"meshes and slices: {point} is rank {rank} of {sizes}, pid {pid}")


# ------------------------------------------------------------------------------------------------------------ futures


def futures(procs: ProcMesh) -> None:
    """The message has left when the adverb returns. The future can be waited for with and without asyncio."""
    counters = procs.spawn("futures", Counter)
    one = counters.slice(row=0, col=0)

    future: Future[int] = one.add.call_one(1)
    assert future.get(timeout=10) == future.get() == 1  # a result is kept: it may be asked for again

    async def concurrently() -> list[int]:
        first = await one.add.call_one(1)
        others = await asyncio.gather(one.add.call_one(1), one.add.call_one(1))
        return [first, *others]

    assert asyncio.run(concurrently()) == [2, 3, 4]
    assert isinstance(one.fail.call_one().exception(), ActorError)  # returned, not raised
    print("futures: blocking and awaited")


class Sleeper(Actor):
    """Ordinary endpoints run one after the other; concurrent ones share the actor's event loop."""

    def __init__(self) -> None:
        self.bell = asyncio.Event()

    @concurrent_endpoint
    async def wait_for_bell(self) -> str:
        await self.bell.wait()
        return "awake"

    @endpoint
    async def ring(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self.bell.set()


def concurrent_endpoints(procs: ProcMesh) -> None:
    """While a concurrent endpoint awaits, its actor takes further messages."""
    sleeper = procs.slice(row=0, col=0).spawn("sleeper", Sleeper)
    asleep = [sleeper.wait_for_bell.call_one() for _ in range(3)]
    sleeper.ring.call_one(0.01).get()
    assert [future.get() for future in asleep] == ["awake"] * 3
    print("concurrent endpoints: three waited at once")


# ----------------------------------------------------------------------------------------------------- ports, channels


class Reporter(Actor):
    """Answers through ports: as often as it likes, and when it likes."""

    @endpoint
    def count_down(self, start: int, port: Port[int]) -> None:
        for number in range(start, 0, -1):
            port.send(number)

    @endpoint(explicit_response_port=True)
    def later(self, reply: Port[str], text: str) -> None:
        """With an explicit port the value that the method returns does not matter: what is sent does."""
        reply.send(text.upper())

    @endpoint(explicit_response_port=True)
    def refuse(self, reply: Port[str]) -> None:
        reply.exception(KeyError("no"))  # reaches the caller as it is


def ports_and_channels(procs: ProcMesh) -> None:
    """A channel has a port, which may be sent anywhere and used by many, and a receiver, which stays here."""
    reporters = procs.spawn("reporters", Reporter)
    port, receiver = Channel[int].open()
    reporters.count_down.broadcast(3, port)
    assert sorted(receiver.recv().get() for _ in range(12)) == [1] * 4 + [2] * 4 + [3] * 4

    one = reporters.slice(row=1, col=1)
    assert one.later.call_one("hello").get() == "HELLO"
    assert isinstance(one.refuse.call_one().exception(), KeyError)

    # `send` sends to an endpoint with a port of ours for the replies.
    replies, inbox = Channel[str].open()
    send(reporters.later, ("to all",), {}, port=replies)
    assert [inbox.recv().get() for _ in range(4)] == ["TO ALL"] * 4
    print("ports and channels: 12 numbers from 4 actors")


def accumulators(procs: ProcMesh) -> None:
    """An accumulator folds the replies of a mesh into one value, in the order in which they come."""
    counters = procs.spawn("accumulated", Counter)
    total = Accumulator(counters.add, 0, lambda sum, reply: sum + reply).accumulate(25).get()
    assert total == 100
    print("accumulators: the sum of all replies is", total)


# --------------------------------------------------------------------------------------------------------- references


class Manager(Actor):
    """Is given meshes of other actors, and makes actors of its own."""

    def __init__(self, counters: Counter) -> None:
        self.counters = counters  # a reference; the actors stay where they are
        self.own = this_proc().spawn("own", Counter, 1000)  # lives in this process, and belongs to this actor

    @endpoint
    async def add_to_all(self, amount: int) -> int:
        values = await self.counters.add.call(amount)
        return sum(values.values()) + await self.own.add.call_one(amount)

    @endpoint
    def first(self) -> Counter:
        """A reference may be a result, too."""
        return self.counters.slice(row=0, col=0)


def references(procs: ProcMesh) -> None:
    """Meshes, slices and ports can stand anywhere in arguments and results, even while they are still starting."""
    counters = procs.spawn("referenced", Counter)
    manager = procs.slice(row=1, col=0).spawn("manager", Manager, counters)
    assert manager.add_to_all.call_one(2).get() == 4 * 2 + 1002
    assert manager.first.call_one().get().add.call_one(1).get() == 3
    print("references: an actor called a mesh that it was given")


class Registry(Actor):
    """Something of which the program needs exactly one."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @endpoint
    def register(self, name: str) -> int:
        self.names.append(name)
        return len(self.names)


class Member(Actor):
    """Finds the registry by its name, from wherever it lives."""

    @endpoint
    async def join(self) -> int:
        registry = await get_or_spawn_controller("registry", Registry)
        return await registry.register.call_one(current_actor_name())


def controllers(procs: ProcMesh) -> None:
    """A controller is spawned by whoever asks first, once for the whole program, in the driver's process."""
    places = procs.spawn("member", Member).join.call().get()
    assert sorted(places.values()) == [1, 2, 3, 4]
    print("controllers: four members found one registry")


# ------------------------------------------------------------------------------------------------------------- errors


def errors(procs: ProcMesh) -> None:
    """An exception in an endpoint reaches the caller with its remote traceback, and the actor lives on."""
    counters = procs.spawn("failing", Counter)
    one = counters.slice(row=0, col=0)
    try:
        one.fail.call_one().get()
        raise AssertionError("unreachable")
    except ActorError as error:
        assert isinstance(error.exception, ValueError) and "does not like this" in str(error)
    assert one.get.call_one().get() == 0

    # Arguments that do not fit are a mistake of the caller: it hears of it at once, and nothing is sent.
    try:
        one.add.call_one(amout=1)  # type: ignore[call-arg]
        raise AssertionError("unreachable")
    except TypeError as error:
        print("errors:", error)


class Host(Actor):
    """Has a clean-up, which runs when the actor ends, however it ends."""

    @endpoint
    def describe(self) -> str:
        me = context().actor_instance
        return f"{me.class_name} named {me.name}, made by {me.creator}"

    def __cleanup__(self, exc: Exception | None) -> None:
        pass  # close files, end subprocesses; `exc` is None after a plain stop


def stopping() -> None:
    """Actors can be stopped, and processes; `async with` does it at the end of a block."""
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    hosts = procs.spawn("host", Host)
    print("stopping:", hosts.slice(gpus=0).describe.call_one().get())

    hosts.stop().get()  # these actors; their processes live on
    try:
        hosts.describe.call().get()
        raise AssertionError("unreachable")
    except SupervisionError as error:
        assert "stopped" in str(error)
    assert procs.spawn("next", Counter).add.call(1).get().get(0) == 1
    procs.stop().get()  # the processes, and what lives in them

    async def block() -> int:
        async with this_host().spawn_procs(per_host={"gpus": 1}) as short_lived:
            return await short_lived.spawn("counter", Counter, 41).add.call_one()

    assert asyncio.run(block()) == 42


def set_up(name: str = "GREETING") -> None:
    """Runs in each new process before any actor is made there."""
    os.environ[name] = "hello"


class Reader(Actor):
    """Tells what it finds in its process."""

    @endpoint
    def read(self, name: str) -> str | None:
        return os.environ.get(name)


def bootstrapping() -> None:
    """A function prepares each process of a mesh: environment, devices, libraries."""
    procs = this_host().spawn_procs(per_host={"gpus": 2}, bootstrap=set_up)
    assert procs.initialized.get()
    assert list(procs.spawn("reader", Reader).read.call("GREETING").get().values()) == ["hello", "hello"]
    procs.stop().get()

    # The driver's own process is a mesh as well, of one.
    assert this_proc().spawn("here", Counter).where.call_one().get()[0] == os.getpid()
    print("bootstrapping: each process was prepared")


def main() -> None:
    procs = this_host().spawn_procs(per_host={"row": 2, "col": 2})
    actors_and_adverbs(procs)
    meshes_and_slices(procs)
    futures(procs)
    concurrent_endpoints(procs)
    ports_and_channels(procs)
    accumulators(procs)
    references(procs)
    controllers(procs)
    errors(procs)
    procs.stop().get()
    stopping()
    bootstrapping()


if __name__ == "__main__":
    main()
