"""An actor's loop: messages cost no turn, first steps happen at once, and all of asyncio still works in it."""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import signal as signals
import socket
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from monarch.core.driver import Signal, _sleep_until_set
from monarch.core.future import Future
from monarch.core.loop import ActorLoop, hidden_loop


class _NoLinks:
    """A driver without links: a wait is a wait for the signal."""

    def wait(self, signal: Signal, timeout_s: float | None = None) -> bool:
        return _sleep_until_set(signal, timeout_s)

    def idle(self, signal: Signal, timeout_s: float | None, on_main: bool) -> None:
        self.wait(signal, timeout_s)


class _Answers(_NoLinks):
    """Does something before the first wait."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.then: Callable[[], object] | None = then

    def wait(self, signal: Signal, timeout_s: float | None = None) -> bool:
        then, self.then = self.then, None
        if then is not None:
            then()
        return super().wait(signal, timeout_s)


@pytest.fixture
def signal() -> Signal:
    return Signal()


@pytest.fixture
def loop(signal: Signal) -> Iterator[ActorLoop]:
    loop = ActorLoop(signal, _NoLinks())  # type: ignore[arg-type]
    loop.get_debug()  # so asyncio's part of it is there
    yield loop
    loop.close()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _run(loop: ActorLoop, coro: Coroutine[Any, Any, Any]) -> Any:
    return loop.run_until_complete(asyncio.wait_for(coro, 10))


def _start_in_turn(loop: ActorLoop, make: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[list[Any], bool]:
    """Start a coroutine from the loop's turn; returns (its task, whether it was done at once)."""
    found: list[Any] = []

    def turn() -> None:
        if not found:
            task = loop.start_now(make(), contextvars.copy_context())
            found.extend([task, task.done()])
            task.add_done_callback(lambda _: loop.stop())

    loop.turn = turn
    loop.run_forever()
    loop.turn = lambda: None
    return found[0], found[1]


def test_messages_dispatched_inside_select_cost_no_turn_of_the_loop(loop: ActorLoop, signal: Signal) -> None:
    served, turns = [], 0
    run_once = loop._run_once  # type: ignore[attr-defined]

    def count() -> None:
        nonlocal turns
        turns += 1
        run_once()

    loop._run_once = count  # type: ignore[attr-defined]
    waiting = threading.Semaphore(0)

    def turn() -> None:
        if inbox:
            served.append(inbox.pop())
            done.release()
        waiting.release()
        if len(served) == 50:
            loop.stop()

    inbox: list[int] = []
    done = threading.Semaphore(0)
    loop.turn = turn

    def send() -> None:
        for n in range(50):
            inbox.append(n)
            signal.notify()
            assert done.acquire(timeout=10)

    sender = threading.Thread(target=send)
    sender.start()
    loop.run_forever()
    sender.join(10)

    assert served == list(range(50)) and turns <= 2


def test_a_coroutine_that_never_waits_is_finished_when_start_now_returns(loop: ActorLoop) -> None:
    async def answer() -> int:
        return 42

    task, at_once = _start_in_turn(loop, answer)
    assert at_once and task.result() == 42


def test_the_first_step_is_made_in_a_real_task_and_in_the_given_context(loop: ActorLoop) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outside")
    seen: list[Any] = []

    async def look() -> None:
        seen.extend([variable.get(), asyncio.current_task(), asyncio.get_running_loop()])
        variable.set("changed")
        await asyncio.sleep(0)
        seen.append(variable.get())

    context = contextvars.copy_context()
    context.run(variable.set, "inside")
    found: list[Any] = []

    def turn() -> None:
        if not found:
            found.append(loop.start_now(look(), context))
            assert seen[0] == "inside"  # already
            found[0].add_done_callback(lambda _: loop.stop())
        assert asyncio.current_task(loop) is None

    loop.turn = turn
    loop.run_forever()

    assert seen == ["inside", found[0], loop, "changed"] and variable.get() == "outside"


def test_an_error_in_the_first_step_stays_in_the_task(loop: ActorLoop) -> None:
    async def fail() -> None:
        raise KeyError("x")

    task, at_once = _start_in_turn(loop, fail)
    assert at_once and isinstance(task.exception(), KeyError)


def test_timeouts_groups_and_tasks_work_inside(loop: ActorLoop) -> None:
    order: list[str] = []

    async def child(name: str, delay_s: float) -> str:
        await asyncio.sleep(delay_s)
        order.append(name)
        return name

    async def work() -> list[str]:
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            tasks = [group.create_task(child("slow", 0.02)), group.create_task(child("fast", 0.001))]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(child("never", 9.0))
                group.create_task(asyncio.sleep(0, 1 / 1)).add_done_callback(lambda _: None)
                raise KeyError("x")
        return [task.result() for task in tasks]

    task, at_once = _start_in_turn(loop, work)
    assert not at_once and task.result() == ["slow", "fast"] and order == ["fast", "slow"]


def test_a_started_task_can_be_cancelled_while_it_waits(loop: ActorLoop) -> None:
    cleaned: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("cleaned")

    found: list[Any] = []

    def turn() -> None:
        if not found:
            found.append(loop.start_now(wait(), contextvars.copy_context()))
            found[0].add_done_callback(lambda _: loop.stop())
            found[0].cancel()

    loop.turn = turn
    loop.run_forever()
    assert found[0].cancelled() and cleaned == ["cleaned"]


def test_a_task_made_inside_a_first_step_is_an_ordinary_one(loop: ActorLoop) -> None:
    order: list[str] = []

    async def inner() -> None:
        order.append("inner")

    async def outer() -> None:
        task = asyncio.create_task(inner())
        order.append("outer")
        await task

    _start_in_turn(loop, outer)
    assert order == ["outer", "inner"]


def test_another_thread_wakes_the_loop(loop: ActorLoop) -> None:
    async def wait() -> str:
        future = loop.create_future()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(future.set_result, "woken"))
        thread.start()
        result: str = await future
        await asyncio.to_thread(thread.join, 10)
        return result

    assert _run(loop, wait()) == "woken"
    loop.run_until_complete(loop.shutdown_default_executor())


def test_readers_and_writers_of_the_user_work_and_the_signal_still_wakes(loop: ActorLoop, signal: Signal) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)

        async def talk() -> bytes:
            await loop.sock_sendall(right, b"hello")
            got = await loop.sock_recv(left, 10)
            arrived = loop.create_future()
            loop.add_reader(left, lambda: arrived.done() or arrived.set_result(left.recv(10)))
            threading.Timer(0, lambda: right.send(b"again")).start()
            got += await arrived
            # With a descriptor registered the loop sleeps on that; a thread's wake must still come through.
            woken = loop.create_future()
            threading.Timer(0, lambda: loop.call_soon_threadsafe(woken.set_result, None)).start()
            await woken
            assert loop.remove_reader(left)
            return got

        assert _run(loop, talk()) == b"helloagain"


def test_a_message_is_dispatched_while_the_user_waits_for_a_descriptor(loop: ActorLoop, signal: Signal) -> None:
    left, right = socket.socketpair()
    with left, right:
        inbox: list[str] = []
        seen = loop.create_future()

        def turn() -> None:
            if inbox and not seen.done():
                seen.set_result(inbox.pop())

        async def wait() -> str:
            loop.add_reader(left, lambda: None)
            loop.turn = turn

            def send() -> None:
                inbox.append("message")
                signal.notify()

            threading.Timer(0.01, send).start()
            try:
                return str(await seen)
            finally:
                loop.remove_reader(left)

        assert _run(loop, wait()) == "message"


def test_streams_and_servers_work(loop: ActorLoop) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()
        await writer.wait_closed()

    async def talk() -> bytes:
        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello\n")
            line = await reader.readline()
            writer.close()
            await writer.wait_closed()
            return line

    assert _run(loop, talk()) == b"hello\n"


def test_subprocesses_work_also_outside_the_main_thread(signal: Signal) -> None:
    results: list[Any] = []

    async def work() -> tuple[int | None, bytes]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "print(input() * 2)", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate(b"ab\n")
        return process.returncode, out

    def live() -> None:
        loop = ActorLoop(signal, _NoLinks())  # type: ignore[arg-type]
        loop.turn = lambda: None
        asyncio.set_event_loop(loop)
        try:
            results.append(loop.run_until_complete(asyncio.wait_for(work(), 30)))
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    thread = threading.Thread(target=live)
    thread.start()
    thread.join(40)
    assert results == [(0, b"abab\n")]


def test_signal_handlers_work_in_the_main_thread(loop: ActorLoop) -> None:
    async def wait() -> str:
        caught = loop.create_future()
        loop.add_signal_handler(signals.SIGUSR1, lambda: caught.set_result("caught"))
        os.kill(os.getpid(), signals.SIGUSR1)
        result: str = await caught
        assert loop.remove_signal_handler(signals.SIGUSR1)
        return result

    assert _run(loop, wait()) == "caught"


class _Plain:
    """A loop that nobody has asked for asyncio, run by a thread of its own; messages are functions."""

    def __init__(self) -> None:
        self.signal = Signal()
        self.inbox: deque[Callable[[], object]] = deque()
        self.failed: list[dict[str, Any]] = []
        self.loop = ActorLoop(
            self.signal,
            _NoLinks(),  # type: ignore[arg-type]
            self._turn,
            lambda _, context: self.failed.append(context),
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _turn(self) -> None:
        while self.inbox and not self.loop.ready:
            self.inbox.popleft()()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    @property
    def has_asyncio(self) -> bool:
        return "_ready" in vars(self.loop)

    def post(self, message: Callable[[], object]) -> None:
        self.inbox.append(message)
        self.signal.notify()

    def tell(self, message: Callable[[], Any]) -> Any:
        """What `message` returns there."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.post(lambda: answers.put(message()))
        return answers.get(timeout=10)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive() and self.loop.is_closed()


@pytest.fixture
def plain() -> Iterator[_Plain]:
    plain = _Plain()
    yield plain
    plain.end()


def test_messages_need_no_asyncio(plain: _Plain) -> None:
    assert [plain.tell(lambda n=n: n) for n in range(50)] == list(range(50))  # type: ignore[misc]
    assert plain.tell(lambda: asyncio.get_running_loop()) is plain.loop
    assert plain.tell(lambda: plain.loop.is_running())
    assert not plain.has_asyncio


def test_what_a_message_asks_of_asyncio_is_done_before_the_next_message(plain: _Plain) -> None:
    order: list[str] = []

    async def task() -> None:
        order.append("task")

    def message() -> None:
        order.append("message")
        tasks.append(plain.loop.create_task(task()))
        assert plain.loop.is_running()

    tasks: list[asyncio.Task[None]] = []
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    plain.inbox.append(message)
    plain.inbox.append(lambda: answers.put(order.append("next") is None))
    plain.signal.notify()
    assert answers.get(timeout=10) and order == ["message", "task", "next"] and plain.has_asyncio
    assert plain.tell(lambda: asyncio.get_running_loop()) is plain.loop


def test_any_thread_can_ask_a_plain_loop_for_asyncio_while_it_sleeps(plain: _Plain) -> None:
    answers: queue.SimpleQueue[int] = queue.SimpleQueue()
    plain.tell(lambda: None)
    together = threading.Barrier(8)

    def ask(n: int) -> None:
        together.wait(10)
        plain.loop.call_soon_threadsafe(answers.put, n)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    assert sorted(answers.get(timeout=10) for _ in threads) == list(range(8))
    for thread in threads:
        thread.join(10)


def test_a_coroutine_that_a_plain_loop_starts_has_all_of_asyncio(plain: _Plain) -> None:
    closed: queue.SimpleQueue[bool] = queue.SimpleQueue()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)  # only a loop that has seen it begin can do that
            closed.put(True)

    async def work() -> None:
        async for _ in numbers():
            break

    task = plain.tell(lambda: plain.loop.start_now(work(), contextvars.copy_context()))
    assert closed.get(timeout=10) and isinstance(task, asyncio.Task)


def test_a_generator_that_a_plain_loop_has_seen_begin_is_closed_by_asyncio(plain: _Plain) -> None:
    closed: queue.SimpleQueue[bool] = queue.SimpleQueue()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            closed.put(True)

    def message() -> None:
        with pytest.raises(StopIteration):
            numbers().__anext__().send(None)  # type: ignore[attr-defined]

    plain.tell(message)
    assert closed.get(timeout=10)


def test_what_is_set_on_a_plain_loop_stays(plain: _Plain) -> None:
    failed: queue.SimpleQueue[str] = queue.SimpleQueue()
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Task[Any]:
        made.append("task")
        return asyncio.Task(coro, loop=loop, **more)

    def message() -> None:
        plain.loop.mark = 1  # type: ignore[attr-defined]
        plain.loop.slow_callback_duration = 30.0
        plain.loop.set_exception_handler(lambda _, context: failed.put(str(context["exception"])))
        plain.loop.set_task_factory(factory)
        assert not plain.has_asyncio
        plain.loop.set_debug(True)
        plain.loop.create_task(asyncio.sleep(0)).add_done_callback(lambda _: 1 / 0)

    plain.tell(message)
    assert failed.get(timeout=10) == "division by zero" and made == ["task"]
    assert plain.loop.get_debug() and plain.loop.slow_callback_duration == 30.0
    assert plain.loop.mark == 1  # type: ignore[attr-defined]


def test_a_failure_of_a_callback_is_told_where_it_was_asked_for(plain: _Plain) -> None:
    told = threading.Event()

    def fail() -> None:
        plain.loop.call_soon(told.set)
        raise ValueError("of the user's")

    plain.tell(lambda: plain.loop.call_soon(fail))
    assert told.wait(10)
    assert [str(context["exception"]) for context in plain.failed] == ["of the user's"]


def test_a_loop_has_no_descriptors_until_the_user_registers_one() -> None:
    before = _descriptors()
    loops = [ActorLoop(Signal(), _NoLinks()) for _ in range(1000)]  # type: ignore[arg-type]
    for loop in loops:
        loop.turn = lambda: None
        loop.run_until_complete(asyncio.sleep(0))
    assert _descriptors() <= before  # what earlier tests left may go meanwhile
    left, right = socket.socketpair()
    with left, right:
        without_reader = _descriptors()
        loops[0].add_reader(left, lambda: None)
        assert _descriptors() > without_reader
        loops[0].remove_reader(left)
    for loop in loops:
        loop.close()
    assert _descriptors() <= before


@pytest.mark.parametrize("descriptor", [False, True])
def test_a_timer_that_is_set_while_a_message_is_dispatched_fires(loop: ActorLoop, descriptor: bool) -> None:
    left, right = socket.socketpair()
    with left, right:
        if descriptor:
            loop.add_reader(left, lambda: None)
        task, at_once = _start_in_turn(loop, lambda: asyncio.sleep(0.01, "slept"))
        assert not at_once and task.result() == "slept"
        if descriptor:
            loop.remove_reader(left)


def test_timers_fire_when_they_are_due_and_not_before(loop: ActorLoop) -> None:
    async def wait() -> float:
        start_s = loop.time()
        await asyncio.sleep(0.02)
        return loop.time() - start_s

    assert 0.019 <= _run(loop, wait()) < 5


def test_a_hidden_loop_is_back_afterwards_also_after_an_error(loop: ActorLoop) -> None:
    async def look() -> list[Any]:
        seen = [hidden_loop(asyncio._get_running_loop), asyncio._get_running_loop()]
        with pytest.raises(ZeroDivisionError):
            hidden_loop(lambda: 1 / 0)
        return [*seen, asyncio._get_running_loop()]

    assert _run(loop, look()) == [None, loop, loop]


def test_a_loop_that_a_turn_hides_stays_hidden_until_asyncio_goes_on(loop: ActorLoop, signal: Signal) -> None:
    seen: list[Any] = []

    def turn() -> None:
        seen.append(asyncio._get_running_loop())
        loop.hide()
        if len(seen) < 3:
            signal.notify()
        else:
            loop.call_soon(after)

    def after() -> None:
        seen.append(asyncio._get_running_loop())
        loop.stop()

    loop.turn = turn
    loop.run_forever()

    assert seen[:4] == [loop, None, None, loop]


def test_a_hidden_loop_is_shown_to_a_handler_of_its_errors(loop: ActorLoop) -> None:
    def turn() -> None:
        loop.hide()
        raise ZeroDivisionError

    loop.turn = turn
    with pytest.raises(ZeroDivisionError):
        loop.run_forever()
    loop.turn = lambda: None

    async def look() -> Any:
        return asyncio._get_running_loop()

    assert _run(loop, look()) is loop


def test_what_a_task_waits_for_is_completed_from_inside_the_wait_for_messages() -> None:
    """As by the thread itself, which takes the answer in while it waits; nobody else wakes it."""
    future: Future[int] = Future._pending(None)
    driver = _Answers(lambda: future._complete(lambda: 7))
    loop = ActorLoop(Signal(), driver)  # type: ignore[arg-type]
    loop.turn = lambda: None

    async def wait() -> int:
        return await future

    assert loop.run_until_complete(asyncio.wait_for(wait(), 10)) == 7
    loop.close()


def test_a_task_that_is_cancelled_leaves_what_it_waits_for_alone(loop: ActorLoop) -> None:
    future: Future[int] = Future._pending(None)

    async def wait() -> None:
        await future

    async def cancelled() -> None:
        task = loop.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    loop.run_until_complete(cancelled())
    assert not future._callbacks
    future._complete(lambda: 7)
    assert future.get(0) == 7


def test_a_loop_that_is_closed_completes_nothing(loop: ActorLoop) -> None:
    waiter: asyncio.Future[None] = asyncio.Future(loop=loop)
    loop.close()
    loop.complete(waiter)
    assert not waiter.done()
