"""Futures: any number of observers in threads and loops, one result, time-outs that do not consume."""

from __future__ import annotations

import asyncio
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from monarch.core.future import Future, Outcome
from monarch.core.held import Held
from monarch.errors import ActorError


def _pending(explain: Callable[[], str] | None = None) -> Future[Any]:
    return Future._pending(None, explain)


def _in_threads(count: int, work: Callable[[int], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    return threads


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_future_cannot_be_constructed() -> None:
    with pytest.raises(TypeError, match="cannot be constructed"):
        Future()


def test_a_future_that_is_sent_says_that_its_value_was_meant() -> None:
    with pytest.raises(TypeError, match="only its value: `await` it"):
        pickle.dumps(_pending())


def test_an_attribute_of_the_value_is_not_one_of_the_future() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'items'; its value may have.*get\(\)"):
        _pending().items()  # type: ignore[attr-defined]


def test_a_result_is_kept_for_any_number_of_looks() -> None:
    future = _pending()
    assert not future.done() and "pending" in repr(future)
    assert future._complete(lambda: 7)
    assert not future._complete(lambda: 8)

    assert future.get() == future.result(0) == future.get(timeout=1) == 7
    assert future.done() and future.exception() is None and "done" in repr(future)
    assert Future._completed(5).get(0) == 5


def test_every_observer_gets_the_same_exception_object() -> None:
    future, error = _pending(), KeyError("x")
    future._fail(error)
    with pytest.raises(KeyError) as caught:
        future.get()

    assert caught.value is error and future.exception() is error and "failed" in repr(future)


def test_looking_again_at_a_failure_does_not_lengthen_its_traceback() -> None:
    future = _pending()
    future._fail(ValueError("x"))
    lengths = set()
    for _ in range(20):
        error = future.exception()
        assert error is not None
        lengths.add(len(traceback.extract_tb(error.__traceback__)))

    assert len(lengths) == 1


@pytest.mark.parametrize(("error", "shown"), [(ActorError(KeyError("x")), False), (ValueError("x"), True)])
def test_the_traceback_of_an_error_leaves_out_how_a_reply_was_read(error: Exception, shown: bool) -> None:
    """Not that of other errors, which are of what was read: they come from the code that rebuilds a value."""
    future = _pending()

    def rebuild() -> None:
        raise error

    future._complete(rebuild)
    with pytest.raises(type(error)) as caught:
        future.get()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert ("rebuild" in names) == shown and names[1:3] == ["get", "_resolve"]


def test_the_traceback_of_an_interrupt_that_waited_shows_its_handler_and_where_it_waited() -> None:
    def handler(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError) as caught, Held():
            signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["__exit__", "handler"]


@pytest.mark.parametrize("error", [None, KeyError("x")])
def test_what_an_alarm_raises_while_a_result_is_read_goes_to_who_looks_and_is_not_the_result(
    error: Exception | None,
) -> None:
    def handler(*_: object) -> None:
        raise TimeoutError

    future, looks = _pending(), []

    def rebuild() -> int:
        looks.append(1)
        if len(looks) == 1:
            signal.raise_signal(signal.SIGALRM)
        if error is not None:
            raise Outcome(error)
        return 5

    before = signal.signal(signal.SIGALRM, handler)
    try:
        future._complete(rebuild)
        with pytest.raises(TimeoutError):
            future.get()
        assert future.exception() is error and (error is not None or future.get() == 5)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan"), -0.001])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    future = _pending()
    with pytest.raises(ValueError, match="timeout is"):
        future.get(timeout)
    with pytest.raises(ValueError, match="timeout is"):
        future.exception(timeout)


def test_a_timeout_says_what_was_waited_for_and_consumes_nothing() -> None:
    future = _pending(lambda: "an answer")
    with pytest.raises(TimeoutError, match=r"no result within 0\.01 s for an answer"):
        future.get(0.01)
    assert isinstance(future.exception(0), TimeoutError)
    assert not future._callbacks  # nobody listens any more
    future._complete(lambda: 1)
    assert future.get(0) == 1


def test_many_threads_wait_for_one_result() -> None:
    future, got = _pending(), []
    threads = _in_threads(16, lambda _: got.append(future.get(10)))
    future._complete(lambda: 3)
    _join(threads)

    assert got == [3] * 16


def test_the_thunk_runs_once_whoever_looks_first() -> None:
    for _ in range(100):
        future, runs, got = _pending(), [], []
        barrier = threading.Barrier(4)

        def look(_: int) -> None:
            barrier.wait(10)
            got.append(future.get(10))

        threads = _in_threads(4, look)
        future._complete(lambda: runs.append(1) or object())
        _join(threads)
        assert runs == [1] and len(set(map(id, got))) == 1


def test_only_the_first_of_many_completions_counts() -> None:
    for _ in range(100):
        future, won = _pending(), []
        barrier = threading.Barrier(4)

        def complete(n: int) -> None:
            barrier.wait(10)
            if future._complete(lambda: n):
                won.append(n)

        _join(_in_threads(4, complete))
        assert won == [future.get(0)]


def test_a_callback_is_called_once_whenever_it_was_added() -> None:
    future, called = _pending(), []
    future._on_done(lambda: called.append("before"))
    discarded = lambda: called.append("discarded")  # noqa: E731
    future._on_done(discarded)
    future._discard_callback(discarded)
    future._complete(lambda: 1)
    future._on_done(lambda: called.append("after"))
    future._discard_callback(discarded)

    assert called == ["before", "after"]


def test_the_thunk_does_not_run_before_somebody_looks() -> None:
    future, runs = _pending(), []
    future._complete(lambda: runs.append(1))
    assert future.done() and runs == []
    future.get()
    assert runs == [1]


def test_get_in_a_loop_warns_and_a_finished_future_does_not() -> None:
    future = _pending()

    async def block() -> None:
        with pytest.warns(UserWarning, match="use `await future`"), pytest.raises(TimeoutError):
            future.get(0.001)
        future._complete(lambda: 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert future.get() == 1

    asyncio.run(block())


def test_a_future_is_awaited_from_several_loops_and_again() -> None:
    future, got = _pending(), []
    started = threading.Barrier(4)

    async def observe() -> None:
        started.wait(10)
        got.append(await future)
        got.append(await future)

    threads = _in_threads(3, lambda _: asyncio.run(observe()))
    started.wait(10)
    future._complete(lambda: 9)
    _join(threads)

    assert got == [9] * 6


def test_await_outside_a_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="only inside a running event loop"):
        next(_pending().__await__())


def test_as_asyncio_outside_a_loop_is_refused_and_consumes_nothing() -> None:
    future = _pending()
    with pytest.raises(RuntimeError):
        future.as_asyncio()
    future._complete(lambda: 1)
    assert future.get(0) == 1


def test_cancelling_a_waiter_leaves_the_future_alone() -> None:
    async def wait_and_give_up() -> None:
        future = _pending()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(future.as_asyncio()), 0.001)
        task = future.as_asyncio()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not future.done()
        again = future.as_asyncio()
        await asyncio.sleep(0)
        future._complete(lambda: 4)
        assert await again == await future == 4
        assert await asyncio.gather(future, future.as_asyncio()) == [4, 4]

    asyncio.run(wait_and_give_up())


def test_completing_after_the_loop_of_a_waiter_has_closed_harms_nobody() -> None:
    future = _pending()

    async def give_up() -> None:
        future.as_asyncio()
        await asyncio.sleep(0)

    asyncio.run(give_up())
    assert future._complete(lambda: 1) and future.get(0) == 1


def test_a_coroutine_runs_on_a_thread_of_its_own() -> None:
    async def work(fail: bool) -> int:
        await asyncio.sleep(0)
        if fail:
            raise KeyError("x")
        return threading.get_ident()

    assert Future._from_coro(work(False)).get(10) != threading.get_ident()
    assert isinstance(Future._from_coro(work(True)).exception(10), KeyError)
