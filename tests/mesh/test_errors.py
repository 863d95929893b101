"""What a caller sees of an endpoint that goes wrong, and whether its actor lives on: the table, row by row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch.actor import Actor, ActorError, Channel, SupervisionError, endpoint
from tests.mesh.actors import AsyncWorker, Unloadable, Worker
from tests.mesh.conftest import Shared

Spawn = Callable[..., Any]


class Odd(Exception):
    """Needs more than pickle gives it, and does not like to be printed."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")
        self.one, self.lock = one, __import__("threading").Lock()

    def __str__(self) -> str:
        raise RuntimeError("not printable")


class Denying(Exception):
    """Says nothing of itself but by raising."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"not even {name}")


class Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__qualname__", "__reduce_ex__"):
            raise RuntimeError("not printable")
        return super().__getattribute__(name)


class Thrower(Actor):
    @endpoint
    def deny(self) -> None:
        raise Denying

    @endpoint
    async def deny_async(self) -> None:
        raise Denying

    @endpoint
    def nameless(self) -> Any:
        return Nameless("Nobody", (), {})()

    @endpoint
    def odd(self) -> None:
        raise Odd(1, 2)

    @endpoint
    def chained(self) -> None:
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError("the effect") from error

    @endpoint
    def in_context(self) -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904

    @endpoint
    def relay(self, other: Any) -> None:
        other.chained.call_one().get(10)

    @endpoint
    def group(self) -> None:
        raise ExceptionGroup("several", [ValueError("a"), KeyError("b")])


@pytest.fixture
def alone(shared: Shared) -> Any:
    return shared.procs.slice(hosts=0, gpus=1)


@pytest.fixture
def silent(shared: Shared) -> Iterator[Callable[[str], Any]]:
    """What must have been the only failure that reached the client; without the fixture's use, none may."""
    yield lambda match: shared.client.expect_fault(match)


def test_an_exception_reaches_the_caller_and_the_actor_lives_on(spawn: Spawn, alone: Any) -> None:
    worker = spawn(Worker, on=alone, name="w")

    with pytest.raises(ActorError, match=r"^Actor call w\.fail failed\. It ran in .*\.Worker w") as caught:
        worker.fail.call_one("too bad").get(10)

    assert isinstance(caught.value.exception, ValueError)
    assert caught.value.exception.args == ("too bad",)
    assert "Traceback of where the remote call failed" in str(caught.value)
    assert str(caught.value).count("ValueError: too bad") == 1
    assert worker.echo.call_one(1).get(10) == 1


def test_the_lowest_rank_that_failed_is_raised_once_all_have_replied(spawn: Spawn) -> None:
    workers = spawn(Worker)

    with pytest.raises(ActorError, match="rank 2 says no"):
        workers.fail_at.call(2).get(10)
    assert list(workers.echo.call(1).get(10).values()) == [1] * 4


def test_results_are_kept_beside_the_failures_of_others(spawn: Spawn) -> None:
    workers = spawn(Worker)

    outcomes = workers.fail_at.call_settled(2).get(10)

    assert outcomes.sizes == {"hosts": 2, "gpus": 2}
    assert list(outcomes.slice(hosts=0).values()) == [0, 1]
    for gpu in range(2):
        error = outcomes.item(hosts=1, gpus=gpu)
        assert isinstance(error, ActorError) and f"rank {2 + gpu} says no" in str(error) and ".fail_at" in str(error)


def test_the_first_failure_is_not_kept_waiting(spawn: Spawn) -> None:
    workers = spawn(Worker)
    port, receiver = Channel[Any].open()
    workers.slice(hosts=0, gpus=0).hold.broadcast(port)
    release = receiver.recv().get(10)  # rank 0 cannot answer

    with pytest.raises(ActorError, match=r"rank [123] says no"):
        workers.fail_at.call_fail_fast(1).get(10)
    release.send(None)
    assert list(workers.echo.call_fail_fast("x").get(10).values()) == ["x"] * 4


def test_an_exception_of_a_broadcast_ends_the_actor(spawn: Spawn, alone: Any, silent: Callable[[str], Any]) -> None:
    worker = spawn(Worker, on=alone, name="silently")

    worker.fail.broadcast("nobody hears")

    failure = silent("nobody hears")
    assert (failure.mesh_name, failure.crashed_ranks) == ("silently", [0])
    with pytest.raises(SupervisionError, match=r"all its descendants have failed.*nobody hears"):
        worker.echo.call_one(1).get(10)


@pytest.mark.parametrize("method", ["fail_explicit", "fail_explicit_aside"])
def test_an_exception_of_an_explicit_port_method_ends_the_actor(
    spawn: Spawn, alone: Any, silent: Callable[[str], Any], method: str
) -> None:
    worker = spawn(AsyncWorker, on=alone, name="explicit")

    with pytest.raises(SupervisionError, match="ValueError: explicit"):
        getattr(worker, method).call_one().get(10)

    silent("ValueError: explicit")


def test_a_base_exception_ends_the_actor(spawn: Spawn, alone: Any, silent: Callable[[str], Any]) -> None:
    sync, asynchronous = spawn(Worker, on=alone, name="sync"), spawn(AsyncWorker, on=alone, name="async")

    with pytest.raises(SupervisionError, match="SystemExit"):
        sync.leave.call_one().get(10)
    with pytest.raises(SupervisionError, match="KeyboardInterrupt"):
        asynchronous.fail.call_one("base").get(10)

    silent("SystemExit")
    silent("KeyboardInterrupt")


class Canceller(Actor):
    @endpoint
    async def wait_for_what_is_cancelled(self) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future


def test_a_cancellation_that_an_endpoint_lets_out_is_told_with_what_it_does(
    spawn: Spawn, alone: Any, silent: Callable[[str], Any]
) -> None:
    actor = spawn(Canceller, on=alone, name="canceller")

    with pytest.raises(SupervisionError) as caught:
        actor.wait_for_what_is_cancelled.call_one().get(10)

    told = "endpoint wait_for_what_is_cancelled raised asyncio.exceptions.CancelledError, a cancellation that no caller"
    assert told in str(caught.value)
    assert "To let one out ends an actor: catch it" in str(caught.value)
    failure = silent(told)
    assert (failure.exception_type, failure.exception_text) == ("asyncio.exceptions.CancelledError", "")


@pytest.mark.parametrize("kind", ["base", "cancelled"])
def test_a_base_exception_of_a_concurrent_endpoint_is_an_actor_error(spawn: Spawn, alone: Any, kind: str) -> None:
    worker = spawn(AsyncWorker, on=alone)

    with pytest.raises(ActorError, match="failed with a BaseException"):
        worker.fail_aside.call_one(kind).get(10)
    with pytest.raises(ActorError, match="aside"):
        worker.fail_aside.call_one("error").get(10)
    assert worker.echo.call_one(1).get(10) == 1


def test_an_exception_sent_by_port_arrives_as_it_is(spawn: Spawn, alone: Any) -> None:
    worker = spawn(AsyncWorker, on=alone)

    with pytest.raises(KeyError, match="exactly this"):
        worker.answer_with_error.call_one().get(10)
    assert worker.echo.call_one(1).get(10) == 1


def test_a_result_that_cannot_be_pickled_is_an_actor_error(spawn: Spawn, alone: Any) -> None:
    worker = spawn(Worker, on=alone)

    with pytest.raises(ActorError, match="cannot be sent"):
        worker.unpicklable.call_one().get(10)
    assert worker.echo.call_one(1).get(10) == 1


def test_an_argument_that_cannot_be_unpickled_is_an_actor_error(spawn: Spawn, alone: Any) -> None:
    worker = spawn(Worker, on=alone)

    with pytest.raises(ActorError, match="cannot be unpickled") as caught:
        worker.echo.call_one(Unloadable()).get(10)
    assert "Worker worker.echo could not be rebuilt there" in str(caught.value)
    assert worker.echo.call_one(1).get(10) == 1


def test_a_result_that_cannot_be_unpickled_is_an_error_at_the_reader(spawn: Spawn, alone: Any) -> None:
    port, receiver = Channel[Any].open()
    worker = spawn(Worker, on=alone)

    worker.send_to.broadcast(port, 1)
    assert receiver.recv().get(10) == 1
    port.send(Unloadable())
    with pytest.raises(LookupError, match="cannot be unpickled") as caught:
        receiver.recv().get(10)
    assert caught.value.__notes__ == ["a value on a port could not be rebuilt here"]
    for result in (worker.unloadable.call_one(), worker.unloadable.call(), next(worker.unloadable.stream())):
        with pytest.raises(LookupError, match="cannot be unpickled") as caught:
            list(result.get(10))
        (note,) = caught.value.__notes__
        assert note == "the result of tests.mesh.actors.Worker worker.unloadable could not be rebuilt here"


def test_stop_iteration_arrives_wrapped(spawn: Spawn, alone: Any) -> None:
    with pytest.raises(ActorError) as caught:
        spawn(AsyncWorker, on=alone).fail.call_one("stop").get(10)

    assert isinstance(caught.value.exception, RuntimeError)


def test_an_exception_that_cannot_travel_arrives_by_name_and_text(spawn: Spawn, alone: Any) -> None:
    thrower = spawn(Thrower, on=alone)

    with pytest.raises(ActorError) as caught:
        thrower.odd.call_one().get(10)

    assert "Odd" in str(caught.value)
    assert caught.value.exception.one == 1


@pytest.mark.parametrize("name", ["deny", "deny_async", "nameless"])
def test_what_answers_no_question_about_itself_harms_nobody_else(spawn: Spawn, alone: Any, name: str) -> None:
    thrower = spawn(Thrower, on=alone)

    with pytest.raises(ActorError, match=f"{name} failed"):
        getattr(thrower, name).call_one().get(10)
    with pytest.raises(ActorError, match="several"):
        thrower.group.call_one().get(10)


def test_causes_and_contexts_are_in_the_text_once(spawn: Spawn, alone: Any) -> None:
    thrower = spawn(Thrower, on=alone)

    with pytest.raises(ActorError) as caught:
        thrower.chained.call_one().get(10)
    assert "direct cause of the following exception" in str(caught.value)
    assert str(caught.value).count("KeyError: 'the cause'") == 1
    assert isinstance(caught.value.exception.__cause__, KeyError)

    with pytest.raises(ActorError, match="During handling of the above exception"):
        thrower.in_context.call_one().get(10)
    with pytest.raises(ActorError) as caught:
        thrower.group.call_one().get(10)
    assert isinstance(caught.value.exception, ExceptionGroup)


def test_an_error_that_passes_through_an_actor_keeps_both_tracebacks(spawn: Spawn, alone: Any) -> None:
    first, second = spawn(Thrower, on=alone), spawn(Thrower, on=alone)

    with pytest.raises(ActorError) as caught:
        first.relay.call_one(second).get(10)

    assert isinstance(caught.value.exception, ActorError)
    assert "the effect" in str(caught.value)
    assert ".relay failed" in str(caught.value)


def test_every_reader_gets_the_same_exception(spawn: Spawn, alone: Any) -> None:
    future = spawn(Worker, on=alone).fail.call_one("once")

    assert future.exception(10) is future.exception(10)
    with pytest.raises(ActorError) as caught:
        future.get(10)
    assert caught.value is future.exception()


def test_errors_in_a_stream_belong_to_their_reply(spawn: Spawn) -> None:
    workers = spawn(Worker)

    results = [future.exception(10) for future in workers.fail_at.stream(2)]

    assert sum(result is None for result in results) == 2
    assert sum(isinstance(result, ActorError) for result in results) == 2


def test_a_failed_actor_does_not_touch_the_others_of_its_process(
    spawn: Spawn, alone: Any, silent: Callable[[str], Any]
) -> None:
    first, second = spawn(Worker, on=alone, name="first"), spawn(Worker, on=alone)

    first.fail.broadcast("alone")
    silent("alone")

    assert second.echo.call_one(1).get(10) == 1
    assert spawn(Worker, on=alone).echo.call_one(2).get(10) == 2


def test_views_without_the_failed_rank_go_on_and_new_views_with_it_fail(
    spawn: Spawn, silent: Callable[[str], Any]
) -> None:
    workers = spawn(Worker, name="some")

    workers.slice(hosts=1, gpus=0).fail.broadcast("rank two")
    assert silent("rank two").crashed_ranks == [2]

    assert list(workers.slice(hosts=0).echo.call(1).get(10).values()) == [1, 1]
    for view in (workers, workers.slice(hosts=1), workers.slice(gpus=0), workers.flatten("all")):
        with pytest.raises(SupervisionError, match="rank two"):
            view.echo.call(1).get(10)
    assert [f.exception(10) is None for f in workers.slice(hosts=1).echo.stream(1)].count(True) == 1
    settled = list(workers.echo.call_settled(1).get(10).values())
    assert isinstance(settled.pop(2), SupervisionError) and settled == [1, 1, 1]


def test_pending_and_queued_calls_fail_when_their_actor_does(
    spawn: Spawn, alone: Any, channel: Any, silent: Callable[[str], Any]
) -> None:
    worker = spawn(AsyncWorker, on=alone, name="pending")
    ready, receiver = channel

    aside = worker.hold_aside.call_one(ready)
    receiver.recv().get(10)
    waiting = worker.hold.call_one(ready)
    release = receiver.recv().get(10)
    worker.fail_explicit.broadcast()
    queued = worker.echo.call_one(1)
    release.send("go")

    assert waiting.get(10) == "go"
    for future in (aside, queued):
        with pytest.raises(SupervisionError, match="ValueError: explicit"):
            future.get(10)
    silent("ValueError: explicit")


def test_a_constructor_that_raises_fails_pending_and_later_calls(
    spawn: Spawn, alone: Any, silent: Callable[[str], Any]
) -> None:
    from tests.mesh.actors import FailingInit

    actors = spawn(FailingInit, "no such thing", on=alone, name="unborn")
    pending = actors.ping.call_one()

    with pytest.raises(SupervisionError, match=r"unborn.*no such thing"):
        pending.get(10)
    with pytest.raises(SupervisionError, match=r"unborn.*no such thing"):
        actors.ping.call_one().get(10)
    with pytest.raises(SupervisionError, match=r"error spawning actor mesh.*no such thing"):
        actors.initialized.get(10)
    silent("no such thing")


def test_a_message_that_comes_back_is_told_to_its_sender(
    spawn: Spawn, alone: Any, channel: Any, silent: Callable[[str], Any]
) -> None:
    from tests.mesh.actors import Sender

    port, receiver = channel
    sender, worker = spawn(Sender, port, on=alone), spawn(Worker, on=alone, name="gone")
    worker.fail.broadcast("on purpose")
    with pytest.raises(SupervisionError):
        worker.echo.call_one(1).get(10)

    sender.note_to.broadcast(worker, 1)

    assert "on purpose" in receiver.recv().get(10)
    silent("on purpose")
