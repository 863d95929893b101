"""Futures: a result that comes later. Block on it, or await it from any loop, any number of times.

A future is a small lock-based cell with callbacks. It is completed by whichever thread drives the links, with a thunk:
decoding (and everything of the user's that it runs) happens in the first thread that looks at the result.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings
import weakref
from _thread import RLock  # that of `threading` is a function around it
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Protocol, TypeVar

from monarch.core import duration, exceptions
from monarch.core.deadlock import Wait
from monarch.core.driver import Driver, Signal, _sleep_until_set
from monarch.core.held import ALL_BUT_INTERRUPT, Held, on_main_thread
from monarch.core.uncaught import uncaught
from monarch.errors import ActorError, CallCancelled, MonarchError
from monarch.log import get_logger

log = get_logger("monarch.future")

R = TypeVar("R")
_cell_lock = threading.Lock()  # guards every future's completion and callbacks; held for some instructions only
_unseen: Final[weakref.WeakValueDictionary[int, _Unseen]] = weakref.WeakValueDictionary()


class Outcome(Exception):
    """Raised by a thunk: `error`, of whatever kind, is what the call ended with."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class _Unseen:
    """A failure that nobody has looked at. It is told when its future goes, or the program ends."""

    __slots__ = ("__weakref__", "_words")

    def __init__(self, words: Callable[[], str]) -> None:
        self._words: Callable[[], str] | None = words
        _unseen[id(self)] = self

    def forget(self) -> None:
        self._words = None

    def tell(self) -> None:
        words, self._words = self._words, None
        if words is not None:
            tell_unseen(words())

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.tell()


_EXPLAIN_S: Final = 0.5
"""How much longer a wait whose time is over may take to find out what it waited for; never more than that time."""


class Call(Protocol):
    """The call that a future is the result of, as long as that is pending."""

    def wait_of(self, future: Future[Any]) -> Wait | None:
        """Where the endpoint that made the call notes that it waits for that future; None when none did."""
        ...

    def new_signal(self) -> Signal:
        """What a thread waits on that waits for the answer."""
        ...

    def explain(self, limit_s: float) -> str:
        """What is waited for, and what keeps it, for the text of a TimeoutError. Asks the callee, `limit_s` at most."""
        ...

    def give_up(self) -> bool:
        """Take the call back, as `Future.cancel` says; False when it was too late."""
        ...


class Future(Generic[R]):
    """The result of a call. Made by the library; constructing one is a TypeError.

    The message has left when the verb returned; waiting only observes. The result is kept: every observer, in any
    thread and loop, gets the same value or the same exception object. A time-out neither cancels nor consumes.
    """

    _call: Call | None
    _callbacks: list[Callable[[], object]] | None
    _done: bool
    _driver: Driver | None
    _error: BaseException | None
    _explain: Callable[[], str] | None
    _outcome: Any
    _reading: RLock | None
    _traceback: TracebackType | None
    _unseen: _Unseen | None
    _value: Any

    __slots__ = (
        "__weakref__",
        "_call",
        "_callbacks",
        "_done",
        "_driver",
        "_error",
        "_explain",
        "_outcome",
        "_reading",
        "_traceback",
        "_unseen",
        "_value",
    )

    def __init__(self) -> None:
        raise TypeError("futures come from calls; they cannot be constructed")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Future cannot be sent, only its value: `await` it, or use `get()`")

    @classmethod
    def _pending(
        cls, driver: Driver | None, explain: Callable[[], str] | None = None, call: Call | None = None
    ) -> Future[R]:
        """A future that nobody has completed. `explain` says what is waited for, for the text of a TimeoutError, where
        it is not the result of a `call`."""
        self = cls.__new__(cls)
        self._begin(driver, explain, call)
        return self

    def _begin(self, driver: Driver | None, explain: Callable[[], str] | None = None, call: Call | None = None) -> None:
        """Of the constructor of a subclass: be pending."""
        self._driver = driver
        self._explain = explain
        self._call = call
        self._done = False
        self._outcome = None
        self._reading = None
        self._callbacks = None
        self._value = None
        self._error = None
        self._traceback = None
        self._unseen = None

    @classmethod
    def _completed(cls, value: R) -> Future[R]:
        self = cls._pending(None)
        self._done = True
        self._value = value
        return self

    @classmethod
    def _from_coro(cls, coro: Coroutine[Any, Any, R]) -> Future[R]:
        """Run `coro` on a thread of its own with a loop of its own."""
        self = cls._pending(None)

        def run() -> None:
            try:
                value = asyncio.run(coro)
            except BaseException as error:
                self._fail(error)
            else:
                self._complete(lambda: value)

        threading.Thread(target=run, daemon=True, name="monarch-coroutine").start()
        return self

    # ---- completion, by the library

    def _complete(
        self, outcome: Any, trouble: Callable[[], str] | None = None, error: BaseException | None = None
    ) -> bool:
        """Complete with what `_read` makes the value of; False when it was complete already. If that is to raise,
        `trouble` says so in words: they are logged when the future or the program ends, and nobody has looked."""
        unseen = _Unseen(trouble) if trouble is not None else None
        reading = RLock() if error is None else None
        with _cell_lock:
            is_late = self._done
            if not is_late:
                self._outcome, self._reading, self._unseen = outcome, reading, unseen
                if error is not None:
                    self._keep(error)
                self._done = True
                self._call = None  # it has this future, too
                callbacks, self._callbacks = self._callbacks, None
        if is_late:
            if unseen is not None:
                unseen.forget()
            return False
        if callbacks is not None:
            for callback in callbacks:
                callback()
        return True

    def _fail(self, error: BaseException) -> bool:
        return self._complete(None, None, error)

    def _read(self, outcome: Any) -> R:
        """The value, or raises. Here `outcome` is a thunk; a subclass may have messages."""
        value: R = outcome()
        return value

    def _on_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, when complete; at once if it is. It must not block or raise."""
        with _cell_lock:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = [callback]
                else:
                    self._callbacks.append(callback)
                return
        callback()

    def _discard_callback(self, callback: Callable[[], object]) -> None:
        with _cell_lock:
            if self._callbacks is not None and callback in self._callbacks:
                self._callbacks.remove(callback)

    # ---- giving up

    def cancel(self) -> bool:
        """Give the call up. Whoever waits for this future, now or later, gets `CallCancelled`.

        A call that has not begun will not run. An async endpoint is cancelled at its next `await`, as an asyncio task
        is; a sync one runs on, and may look at `context().cancelled`. The actor lives on in any case, and an answer
        that comes later is dropped. Futures of a `stream` are cancelled together.

        Returns:
            False when there was nothing to cancel: the result is there, or this is not the future of a call.
        """
        call = self._call
        return call is not None and not self._done and call.give_up()

    def cancelled(self) -> bool:
        """Whether `cancel` has ended it."""
        return self._done and isinstance(self.exception(0), CallCancelled)

    # ---- observation, by anybody

    def done(self) -> bool:
        """Whether the result is there."""
        return self._done

    def _resolve(self) -> R:
        """The value, or raises the exception. Reads the outcome once, in the first thread that looks."""
        reading = self._reading
        if reading is not None:
            with reading:
                if self._reading is not None:  # no other thread was here before
                    interrupt = None
                    try:
                        self._value = self._read(self._outcome)
                    except Exception as error:
                        interrupt = self._read_again(error)
                    self._reading = self._outcome = None
                    if self._unseen is not None:
                        self._unseen.forget()
                        self._unseen = None
                    if interrupt is not None:
                        raise interrupt
        if self._error is not None:
            # Every raise prepends its frames to the traceback of the object: start over, or it grows with each look.
            raise self._error.with_traceback(self._traceback)
        value: R = self._value
        return value

    def _read_again(self, error: Exception) -> Exception | None:
        """Reading has raised `error`; returned is it where it comes from the handler of a signal: it is not the result
        then, and for who looks now. Another BaseException interrupts a look, and is not what the call ended with."""
        failed: Exception | None = error
        if on_main_thread() and ALL_BUT_INTERRUPT.handlers():
            with Held(signals=ALL_BUT_INTERRUPT):  # once more, without them
                try:
                    self._value = self._read(self._outcome)
                    failed = None
                except Exception as again:
                    failed = again
        if failed is not None:
            self._keep(failed.error if isinstance(failed, Outcome) else failed)
        return error if type(failed) is not type(error) else None

    def _keep(self, error: BaseException) -> None:
        self._error = error
        if not isinstance(error, MonarchError):
            self._traceback = error.__traceback__  # of ours, it is where we have read the reply

    def _wait(self, timeout: float | None) -> bool:
        if self._done:
            return True
        call = self._call
        signal = Signal() if call is None else call.new_signal()
        self._on_done(signal.notify)
        wait = None if call is None else call.wait_of(self)
        if wait is not None:
            wait.begin(None, bounded=timeout is not None)
        try:
            driver = self._driver
            done = driver.wait(signal, timeout) if driver is not None else _sleep_until_set(signal, timeout)
        finally:
            if wait is not None:
                wait.end(None)
        if not done:
            self._discard_callback(signal.notify)
        return done

    def _waited_for(self, timeout_s: float) -> str:
        call = self._call
        if call is not None:
            return f" for {call.explain(min(timeout_s, _EXPLAIN_S))}"
        return f" for {self._explain()}" if self._explain is not None else ""

    def get(self, timeout: float | None = None) -> R:
        """Block until the result is there, and return it or raise its exception.

        Args:
            timeout: seconds; None waits for as long as the other side lives.

        Raises:
            ValueError: `timeout` is negative, infinite or NaN; TypeError where it is no number at all.
            TimeoutError: it was not there in time; the future can be waited for again. The text says what the actor
                that was called is doing. To find out may take half a second more, unless `timeout` is shorter.
            DeadlockError: the call waits for the very endpoint that waits for it here.
        """
        if timeout is not None:
            duration.check("timeout", timeout)
        if not self._done:
            loop = asyncio._get_running_loop()
            if loop is not None and not getattr(loop, "may_block", False):
                warnings.warn(
                    "Future.get() blocks the active event loop of this thread: use `await future`",
                    UserWarning,
                    stacklevel=2,
                )
            if not self._wait(timeout):
                assert timeout is not None
                raise TimeoutError(f"no result within {timeout:g} s{self._waited_for(timeout)}")
        return self._resolve()

    result = get

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception, or None for a value. A time-out is returned as a TimeoutError, not raised."""
        if timeout is not None:
            duration.check("timeout", timeout)
        try:
            self.get(timeout)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)) and error is not self._error:
                raise
            return error
        return None

    def __await__(self) -> Generator[Any, None, R]:
        if asyncio._get_running_loop() is None:
            raise ValueError("a future can be awaited only inside a running event loop; use .get() here")
        call = self._call
        if not self._done:
            wait = None if call is None else call.wait_of(self)
            if wait is None:
                yield from self._wait_on_loop()
            else:
                task = asyncio.current_task()
                wait.begin(task)
                try:
                    yield from self._wait_on_loop()
                finally:
                    wait.end(task)
        return self._resolve()

    def _wait_on_loop(self) -> Generator[Any, None, None]:
        """Until this is done; a task that is cancelled meanwhile leaves it alone."""
        loop: Any = asyncio.get_running_loop()
        bridge: asyncio.Future[None] = loop.create_future()
        complete, thread = getattr(loop, "complete", None), threading.get_ident()

        def finish() -> None:
            if not bridge.done():
                bridge.set_result(None)

        def on_done() -> None:
            if complete is not None and threading.get_ident() == thread:
                complete(bridge)
                return
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more

        self._on_done(on_done)
        try:
            yield from bridge.__await__()
        finally:
            if not self._done:
                self._discard_callback(on_done)

    def as_asyncio(self) -> asyncio.Future[R]:
        """An asyncio future of the running loop with the same result.

        Raises:
            RuntimeError: no loop runs in this thread; nothing is consumed.
        """
        loop = asyncio.get_running_loop()

        async def observe() -> R:
            return await self

        return loop.create_task(observe())

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> NoReturn:
            text = f"a Future has no attribute {name!r}; its value may have: `await` it, or use `get()`"
            raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error is not None else "done"
        return f"<Future {state}>"


def tell_unseen(failure: str) -> None:
    """A call has failed, and nobody looks at its future any more. What the traceback at the end of the script has shown
    is not told again."""
    raised = (exceptions.summary(each.exception) for each in uncaught() if isinstance(each, ActorError))
    if any(failure.endswith(f" raised {text}") for text in raised):
        return
    log.warning("call.failure_unseen", failure=failure, hint="`get()` or `await` its future")


def tell_all_unseen() -> None:
    """The program ends, and with it all its futures."""
    for found in _unseen.valuerefs():
        each = found()
        if each is not None:
            each.tell()
