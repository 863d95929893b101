"""What the adverbs do, what an endpoint sees, and in which order messages are served."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import attrs
import pytest

from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Endpoint,
    Port,
    SupervisionError,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_actor_name,
    endpoint,
    send,
    this_host,
    this_proc,
)
from tests.mesh.actors import AsyncWorker, Blocker, Names, Sender, Ticker, Worker
from tests.mesh.conftest import Shared

Spawn = Callable[..., Any]
T = TypeVar("T")


def one(shared: Shared) -> Any:
    return shared.procs.slice(hosts=1, gpus=0)


# Adverbs


def test_call_gives_the_values_of_all_members_in_the_shape_of_the_view(spawn: Spawn) -> None:
    workers = spawn(Worker, 10)

    values = workers.add.call(1, times=2).get(10)

    assert values.sizes == {"hosts": 2, "gpus": 2}
    assert list(values.values()) == [12] * 4
    assert workers.slice(hosts=0).add.call(1).get(10).sizes == {"gpus": 2}


def test_call_one_needs_a_view_of_one_member(spawn: Spawn) -> None:
    workers = spawn(Worker)

    assert workers.slice(hosts=0, gpus=1).echo.call_one("x").get(10) == "x"
    with pytest.raises(ValueError, match="requires exactly 1 actor, but mesh has 4"):
        workers.echo.call_one("x")


def test_choose_calls_a_single_member(spawn: Spawn) -> None:
    workers = spawn(Worker)

    for _ in range(8):
        workers.add.choose(1).get(10)

    assert sum(workers.add.call(0).get(10).values()) == 8


def test_stream_gives_replies_as_they_arrive(spawn: Spawn, channel: Any) -> None:
    """A member that is held up is the last, whatever its rank."""
    workers = spawn(Worker)
    ready, receiver = channel
    workers.slice(hosts=0, gpus=0).hold.broadcast(ready)
    release = receiver.recv().get(10)

    futures = workers.rank.stream()
    first = [next(futures).get(10)[0] for _ in range(3)]
    release.send("go")

    assert sorted(first) == [1, 2, 3]
    assert next(futures).get(10)[0] == 0
    assert list(futures) == []


def test_broadcast_returns_nothing_and_reaches_all(spawn: Spawn) -> None:
    workers = spawn(Worker)

    assert workers.add.broadcast(5) is None
    assert list(workers.add.call(0).get(10).values()) == [5] * 4


def test_send_replies_to_a_port_of_the_callers_own(spawn: Spawn) -> None:
    workers = spawn(Worker)
    port, receiver = Channel[Any].open_ranked()

    send(workers.echo, ("x",), {}, port)
    assert sorted(receiver.recv().get(10) for _ in range(4)) == [(rank, "x") for rank in range(4)]

    send(workers.echo, ("y",), {}, port, "choose")
    assert receiver.recv().get(10)[1] == "y"
    with pytest.raises(ValueError, match="Invalid selection"):
        send(workers.echo, ("y",), {}, port, "some")


def test_an_accumulator_folds_the_replies_and_an_error_among_them_is_raised(spawn: Spawn) -> None:
    workers = spawn(Worker, 3)

    assert Accumulator(workers.add, 100, lambda total, x: total + x).accumulate(1).get(10) == 116
    with pytest.raises(Exception, match="rank 3 says no"):
        Accumulator(workers.fail_at, 0, lambda total, x: total + x).accumulate(3).get(10)


def test_an_empty_view_can_be_called(spawn: Spawn) -> None:
    empty = spawn(Worker).slice(gpus=slice(0, 0))

    assert list(empty.echo.call(1).get(10).values()) == []
    assert list(empty.echo.stream(1)) == []
    assert empty.echo.broadcast(1) is None
    assert Accumulator(empty.echo, "identity", lambda a, b: b).accumulate(1).get(10) == "identity"
    with pytest.raises(ValueError, match="empty"):
        empty.echo.choose(1)


def test_arguments_that_do_not_fit_are_a_type_error_at_the_call(spawn: Spawn) -> None:
    workers = spawn(Worker)

    for adverb in ("call", "choose", "stream", "broadcast"):
        with pytest.raises(TypeError, match=r"Worker\.add"):
            getattr(workers.add, adverb)(1, 2, 3)
    with pytest.raises(TypeError, match="times_"):
        workers.add.call(1, times_=2)


def test_arguments_that_cannot_be_pickled_are_an_error_at_the_call_that_names_them(spawn: Spawn) -> None:
    workers = spawn(Worker)

    with pytest.raises(TypeError) as caught:
        workers.echo.call({"a": [1, threading.Lock()]})

    assert "argument 1" in "\n".join(caught.value.__notes__)
    assert "['a'][1]" in "\n".join(caught.value.__notes__)
    assert list(workers.add.call(1).get(10).values()) == [1] * 4  # nothing of the refused call was sent


def test_calling_an_endpoint_without_an_adverb_says_what_to_do(spawn: Spawn) -> None:
    with pytest.raises(TypeError, match="adverb"):
        spawn(Worker).echo(1)


# Which attributes a mesh has


def test_as_endpoint_calls_an_undecorated_method(spawn: Spawn) -> None:
    workers = spawn(Worker)

    assert list(as_endpoint(workers.plain).call(4).get(10).values()) == [8] * 4
    explicit = as_endpoint(workers.plain_with_port, explicit_response_port=True)
    assert list(explicit.call(4).get(10).values()) == [12] * 4


def test_an_undecorated_method_is_called_only_through_as_endpoint(spawn: Spawn) -> None:
    workers = spawn(Worker)

    with pytest.raises(RuntimeError, match="as_endpoint"):
        workers.plain(4)
    with pytest.raises(ValueError, match="expected an method of a spawned actor"):
        as_endpoint(len)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="nothing_like_that"):
        _ = workers.nothing_like_that
    with pytest.raises(AttributeError, match="value"):
        _ = workers.value


def test_endpoints_win_over_mesh_methods_of_their_name(spawn: Spawn) -> None:
    names = spawn(Names)

    for name in ("stop", "slice", "size", "extent", "initialized"):
        assert list(getattr(names, name).call().get(10).values()) == [name] * 4
    part = ActorMesh.slice(names, hosts=0)
    assert list(part.size.call().get(10).values()) == ["size"] * 2
    assert ActorMesh.size(names) == 4


def test_options_are_kept_on_the_class() -> None:
    def shape(*args: Any) -> None: ...

    class Options(Worker):
        @endpoint(propagate=shape, instrument=False)
        def plain_one(self) -> None: ...

        @endpoint(explicit_response_port=True)
        def explicit(self, port: Port[int]) -> None: ...

        @concurrent_endpoint
        async def aside(self) -> None: ...

    found: Any = Options
    assert (found.plain_one._propagator, found.plain_one._instrument) == (shape, False)
    assert found.explicit._explicit_response_port
    assert found.aside._explicit_response_port


def test_concurrent_endpoints_are_async_and_stand_alone() -> None:
    with pytest.raises(ValueError, match="can only wrap async endpoints"):

        @concurrent_endpoint
        def sync(self: Any) -> None: ...

    with pytest.raises(ValueError, match="does not wrap @endpoint"):

        @concurrent_endpoint
        @endpoint
        async def both(self: Any) -> None: ...


# What an endpoint sees


def test_rank_and_size_are_those_of_the_view_that_was_called(spawn: Spawn) -> None:
    workers = spawn(Worker)

    for name, view in {
        "whole": workers,
        "slice": workers.slice(gpus=1),
        "flat": workers.flatten("all"),
        "renamed": workers.rename(gpus="cards"),
    }.items():
        for rank, (point, seen) in enumerate(view.rank.call().get(10).items()):
            assert seen == (rank, dict(point), view.sizes), name
    assert workers.slice(hosts=1, gpus=1).rank.call_one().get(10) == (0, {}, {})


def test_choose_shows_the_rank_in_the_view(spawn: Spawn) -> None:
    view = spawn(Worker).slice(gpus=1)

    rank, point, size = view.rank.choose().get(10)

    assert size == {"hosts": 2}
    assert point == {"hosts": rank}


def test_the_constructor_sees_the_rank_in_the_mesh_that_was_spawned(spawn: Spawn, shared: Shared) -> None:
    births = spawn(Worker, on=shared.procs.slice(hosts=1)).birth.call().get(10)

    assert [birth for _, birth in births.items()] == [{"gpus": 0}, {"gpus": 1}]


class Looks(Actor):
    def __init__(self) -> None:
        self.spawned: list[Any] = []

    @endpoint
    def creator(self) -> str:
        return context().actor_instance.creator.name

    @endpoint
    def mesh(self) -> int:
        return id(context().actor_instance.proc_mesh)

    @endpoint
    def creators_of_two(self, procs: Any) -> list[str]:
        """Spawned on the same mesh by this actor, one after the other."""
        self.spawned += [procs.spawn(name, Looks) for name in ("first", "second")]
        return [each.creator.call_one().get(10) for each in self.spawned]


def test_names_say_who_created_whom(spawn: Spawn, shared: Shared) -> None:
    workers = spawn(Worker, name="w")

    path, address, name, class_name, creator = workers.slice(hosts=1, gpus=0).who.call_one().get(10)

    assert path == "<root>.<tests.mesh.actors.Worker w{'hosts': 1/2, 'gpus': 0/2}>"
    assert (name, class_name, creator) == ("w", "tests.mesh.actors.Worker", "root")
    assert "w" in address
    assert str(context().actor_instance) == "<root>"
    assert this_proc().spawn("looks", Looks).creator.call_one().get(10) == "root"
    assert current_actor_name()
    assert context().message_rank.rank == 0


def test_actors_have_their_creators_where_several_spawn_on_one_mesh(spawn: Spawn, shared: Shared) -> None:
    procs = shared.procs.slice(hosts=1, gpus=0)
    one, other = spawn(Looks, name="one", on=procs), spawn(Looks, name="other", on=procs)

    assert one.creators_of_two.call_one(procs).get(10) == ["one", "one"]
    assert other.creators_of_two.call_one(procs).get(10) == ["other", "other"]
    assert spawn(Looks, on=procs).creator.call_one().get(10) == "root"


def test_actors_of_one_process_share_no_mesh_on_which_they_make_things(spawn: Spawn, shared: Shared) -> None:
    procs = shared.procs.slice(hosts=1, gpus=0)
    meshes = [spawn(Looks, on=procs).mesh.call_one().get(10) for _ in range(3)]

    assert len(set(meshes)) == 3


def test_everything_of_an_actor_runs_on_one_thread(spawn: Spawn) -> None:
    assert all(spawn(Worker).same_thread.call().get(10).values())


def test_the_loop_is_hidden_in_sync_endpoints_of_sync_and_mixed_classes(spawn: Spawn) -> None:
    assert all(spawn(Worker).loop_hidden.call().get(10).values())
    assert all(spawn(AsyncWorker).sync_one.call().get(10).values())


def test_a_sync_endpoint_of_an_async_class_may_block_on_a_call(spawn: Spawn, shared: Shared) -> None:
    mixed, other = spawn(AsyncWorker, on=one(shared)), spawn(Worker, on=one(shared))

    assert mixed.sync_blocking_call.call_one(other, 7).get(10) == 7
    assert mixed.await_other.call_one(other, 8).get(10) == 8


def test_tasks_and_threads_of_an_endpoint_see_the_actors_context(spawn: Spawn) -> None:
    workers = spawn(AsyncWorker, name="w")

    for point, seen in workers.rank_in_task.call().get(10).items():
        assert seen == ("w", dict(point))
    for point, seen in workers.rank_in_thread.call().get(10).items():
        assert seen == ("w", dict(point))


def test_a_thread_of_an_actor_may_call_others(spawn: Spawn, shared: Shared, channel: Any) -> None:
    sender, other = spawn(Sender, channel[0], on=one(shared)), spawn(Worker, on=shared.procs.slice(hosts=0, gpus=0))

    assert sender.from_a_thread.call_one(other, 5).get(10) == [5]


def test_the_constructor_of_a_sync_class_sees_the_loop_and_may_block(
    spawn: Spawn, shared: Shared, channel: Any
) -> None:
    spawn(Blocker, channel[0], on=one(shared))

    assert [channel[1].recv().get(10) for _ in range(2)] == [[], "the task runs"]


def test_a_task_made_in_the_constructor_goes_on_between_messages(spawn: Spawn, shared: Shared) -> None:
    ticker = spawn(Ticker, on=one(shared))

    first = ticker.next_tick.call_one().get(10)
    second = ticker.next_tick.call_one().get(10)

    assert second > first >= 1


def test_many_calls_are_gathered_in_an_endpoint(spawn: Spawn, shared: Shared) -> None:
    caller, other = spawn(AsyncWorker, on=one(shared)), spawn(AsyncWorker, on=shared.procs.slice(hosts=0, gpus=0))

    assert caller.gather_others.call_one(other, 50).get(10) == list(range(50))


# Concurrency


def test_an_async_endpoint_is_awaited_before_the_next_message_is_taken(spawn: Spawn, shared: Shared) -> None:
    worker = spawn(AsyncWorker, on=one(shared))

    for value in range(5):
        worker.note_slowly.broadcast(value)

    assert worker.notes.call_one().get(10) == [(what, value) for value in range(5) for what in ("begin", "end")]


def test_concurrent_endpoints_start_in_order_and_hold_up_nobody(spawn: Spawn, shared: Shared, channel: Any) -> None:
    worker = spawn(AsyncWorker, on=one(shared))
    ready, receiver = channel

    held = [worker.hold_aside.call_one(ready) for _ in range(3)]
    worker.aside.broadcast("aside")
    worker.note.broadcast("ordinary")

    assert worker.notes.call_one().get(10) == ["start"] * 3 + ["aside", "ordinary"]
    releases = [receiver.recv().get(10) for _ in range(3)]
    for number in (2, 0, 1):
        releases[number].send(number)
        assert held[number].get(10) == number


def test_an_ordinary_endpoint_holds_up_concurrent_ones_behind_it(spawn: Spawn, shared: Shared, channel: Any) -> None:
    worker = spawn(AsyncWorker, on=one(shared))
    ready, receiver = channel

    held = worker.hold.call_one(ready)
    aside = worker.aside.call_one("aside")
    release = receiver.recv().get(10)
    with pytest.raises(TimeoutError):
        aside.get(0.02)
    release.send("go")

    assert (held.get(10), aside.get(10)) == ("go", "aside")


def test_concurrent_endpoints_answer_by_value_or_by_their_port(spawn: Spawn) -> None:
    workers = spawn(AsyncWorker)

    assert list(workers.aside.call("x").get(10).values()) == ["x"] * 4
    assert list(workers.answer_aside.call(1).get(10).values()) == [2] * 4


def test_explicit_ports_answer_at_once_or_later_or_with_exactly_an_exception(spawn: Spawn) -> None:
    workers = spawn(AsyncWorker)

    assert list(workers.answer.call(1).get(10).values()) == [2] * 4
    assert list(workers.answer_later.call(1).get(10).values()) == [2] * 4
    assert workers.answer_later.choose(2).get(10) == 3
    assert [future.get(10) for future in workers.answer_later.stream(3)] == [4] * 4
    with pytest.raises(KeyError, match="exactly this"):
        workers.slice(hosts=0, gpus=0).answer_with_error.call_one().get(10)
    workers.answer.broadcast(1)  # nobody waits: what it sends is dropped
    assert list(workers.answer.call(1).get(10).values()) == [2] * 4


def test_a_kept_port_that_is_never_used_fails_when_its_actor_ends(spawn: Spawn, shared: Shared, channel: Any) -> None:
    worker = spawn(AsyncWorker, on=one(shared))
    ready, receiver = channel

    pending = worker.keep_port.call_one(ready)
    assert receiver.recv().get(10) == "kept"
    worker.stop().get(10)

    with pytest.raises(SupervisionError, match="stopped"):
        pending.get(10)


# Order


def test_one_sender_is_served_in_order_over_adverbs_and_views(spawn: Spawn) -> None:
    workers = spawn(Worker)
    sent: dict[int, list[str]] = {rank: [] for rank in range(4)}

    for turn in range(60):
        text = f"turn {turn}"
        kind = turn % 5
        if kind == 0:
            workers.note.broadcast(text)
            ranks = range(4)
        elif kind == 1:
            workers.slice(gpus=1).note.call(text)
            ranks = (1, 3)
        elif kind == 2:
            workers.flatten("all").slice(all=slice(1, 3)).note.stream(text)
            ranks = (1, 2)
        elif kind == 3:
            workers.slice(hosts=1, gpus=0).note.call_one(text)
            ranks = (2,)
        else:
            send(workers.note, (text,), {})
            ranks = range(4)
        for rank in ranks:
            sent[rank].append(text)

    for rank, (_, seen) in enumerate(workers.notes.call().get(10).items()):
        assert seen == sent[rank]


def test_threads_of_one_sender_each_keep_their_order(spawn: Spawn) -> None:
    workers = spawn(Worker)

    def run(thread: int) -> None:
        for number in range(100):
            workers.note.broadcast((thread, number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))

    for seen in workers.notes.call().get(10).values():
        for thread in range(4):
            assert [number for t, number in seen if t == thread] == list(range(100))


def test_actors_that_send_to_the_same_one_each_keep_their_order(spawn: Spawn, shared: Shared) -> None:
    senders, target = spawn(Worker, name="senders"), spawn(Worker, on=one(shared), name="target")

    for rank in range(4):
        senders.flatten("all").slice(all=rank).broadcast_to.broadcast(target, [(rank, i) for i in range(50)])
    senders.call_other.call(target, 0).get(10)  # each is served behind what the same sender sent before

    seen = target.notes.call_one().get(10)
    for rank in range(4):
        assert [i for r, i in seen if r == rank] == list(range(50))


def test_two_references_to_an_actor_share_their_order(spawn: Spawn) -> None:
    workers = spawn(Worker)
    again = workers.slice(gpus=slice(None))

    for number in range(50):
        (workers, again)[number % 2].note.broadcast(number)

    for seen in workers.notes.call().get(10).values():
        assert seen == list(range(50))


def test_large_and_small_messages_keep_their_order(spawn: Spawn, shared: Shared) -> None:
    worker = spawn(Worker, on=one(shared))

    for number in range(12):
        worker.note.broadcast((number, bytes(3 << 20) if number % 3 == 0 else b""))

    assert [number for number, _ in worker.notes.call_one().get(20)] == list(range(12))


def test_calls_can_be_made_from_several_loops_at_once(spawn: Spawn) -> None:
    workers = spawn(Worker)

    async def work(thread: int) -> list[int]:
        answers = await asyncio.gather(*(workers.echo.call((thread, i)) for i in range(20)))
        return [value[1] for mesh in answers for value in mesh.values()]

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda thread: asyncio.run(work(thread)), range(3)))

    assert results == [[i for i in range(20) for _ in range(4)]] * 3


def test_a_large_result_and_argument_pass_whole(spawn: Spawn, shared: Shared) -> None:
    data = bytes(range(256)) * (16 << 12)

    assert spawn(Worker, on=one(shared)).echo.call_one(data).get(20) == data


# How they look to editors and `help`


_noted: contextvars.ContextVar[str] = contextvars.ContextVar("noted", default="nothing")


class NeverWaits(Actor):
    """Its endpoints are `async def`, and have nothing to wait for: they need no task."""

    def __init__(self) -> None:
        self.later: list[str] = []

    @endpoint
    async def note(self, what: str) -> str:
        before = _noted.get()
        _noted.set(what)
        return before

    @endpoint
    async def begin(self, what: str) -> None:
        async def append() -> None:
            await asyncio.sleep(0)
            self.later.append(what)

        self.task = asyncio.create_task(append())

    @endpoint
    async def finish(self) -> list[str]:
        await self.task
        return self.later

    @endpoint
    async def fail(self) -> None:
        raise StopIteration("of the endpoint")

    @endpoint
    async def leave(self) -> None:
        raise SystemExit(3)


def test_an_async_endpoint_that_never_waits_has_a_context_of_its_own_and_sees_its_loop(
    spawn: Spawn, shared: Shared
) -> None:
    actor = spawn(NeverWaits, on=shared.procs.slice(hosts=0, gpus=0))
    assert [actor.note.call_one(what).get() for what in ("a", "b")] == ["nothing", "nothing"]
    for what in "ab":
        actor.begin.call_one(what).get()
    assert actor.finish.call_one().get() == ["a", "b"]


def test_an_async_endpoint_that_never_waits_fails_as_others_do(spawn: Spawn, shared: Shared) -> None:
    actor = spawn(NeverWaits, on=shared.procs.slice(hosts=0, gpus=0))
    with pytest.raises(ActorError, match="StopIteration") as raised:
        actor.fail.call_one().get()
    assert isinstance(raised.value.exception, RuntimeError)
    with pytest.raises(SupervisionError, match="status 3"):
        actor.leave.call_one().get()
    shared.client.expect_fault()


class Documented(Actor):
    @endpoint
    def add(self, a: int, b: int = 0) -> int:
        """The sum."""
        return a + b

    @endpoint(explicit_response_port=True)
    def explicit(self, port: Port[int], *, n: int) -> None:
        port.send(n)


def test_an_endpoint_of_a_mesh_looks_like_its_method(monarch_client: Any) -> None:
    mesh = this_host().spawn_procs({"gpus": 2}).spawn("documented", Documented)

    assert mesh.add.__name__ == "add"
    assert inspect.getdoc(mesh.add) == "The sum."
    assert list(inspect.signature(mesh.add).parameters) == ["a", "b"]
    assert str(inspect.signature(mesh.explicit)) == "(*, n: 'int') -> 'None'"
    assert {"add", "explicit", "slice"} <= set(dir(mesh.slice(gpus=0)))
    assert inspect.getdoc(Endpoint).startswith("An endpoint of a mesh.")


# Classes of all kinds


class Doubler(Actor):
    @endpoint
    def double(self) -> Any:
        return 2


@attrs.define
class Slotted(Doubler):
    """attrs makes this class anew: `super()` must find the new one."""

    value: int = 3

    @endpoint
    def double(self) -> Any:
        return self.value * super().double()


@dataclass
class Data(Actor):
    value: int

    @endpoint
    def double(self) -> Any:
        return self.value * 2


class Boxed(Actor, Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    @endpoint
    def double(self) -> tuple[T, T]:
        return self.value, self.value


def test_attrs_dataclasses_and_generics_can_be_actors(monarch_client: Any) -> None:
    here = this_proc()

    assert here.spawn("slotted", Slotted, value=4).double.call_one().get(10) == 8
    assert here.spawn("data", Data, 5).double.call_one().get(10) == 10
    assert here.spawn("boxed", Boxed[str], "x").double.call_one().get(10) == ("x", "x")


class Counts(Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def note(self, number: int) -> int:
        self.seen.append(number)
        return number

    @endpoint
    def noted(self) -> list[int]:
        return self.seen


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one may come while a future is dropped
def test_interrupted_calls_to_an_actor_of_the_same_process_hold_up_no_other(monarch_client: Any) -> None:
    """A handler that raises, as often as it can: what was sent is served in order, and nothing waits for ever."""
    counts = this_proc().spawn("counts", Counts)
    interrupted = 0

    def handler(number: int, frame: object) -> None:
        raise InterruptedError

    old = signal.signal(signal.SIGALRM, handler)
    try:
        for number in range(20_000):
            try:
                signal.setitimer(signal.ITIMER_REAL, (20 + number % 80) * 1e-6)
                assert counts.note.call_one(number).get(10) == number
                signal.setitimer(signal.ITIMER_REAL, 0)
            except InterruptedError:
                interrupted += 1
            if interrupted == 200:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)

    seen = counts.noted.call_one().get(10)
    assert interrupted == 200 and seen == sorted(set(seen))
