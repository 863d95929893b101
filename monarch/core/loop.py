"""The event loop of one actor: asyncio for the user's code, the mailbox for ours, in one thread.

`ActorLoop` is a stock selector loop whose selector, when asyncio has nothing ready, takes messages from the actor's
mailbox and dispatches them right there, inside `select`: a message costs no turn of the loop, and a process may hold a
thousand actors, because a loop has no descriptors of its own until the user registers one. It sleeps on the actor's
`Signal`, through the driver of the links.

`start_now` runs a coroutine as a real task whose first step happens at once, so that an endpoint which never really
waits is finished when the call returns.

Most actors never ask asyncio for anything. So a loop begins as a plain one, which only takes messages; asyncio's part
is made, and run, once somebody looks at it. It takes a seventh of what it takes to spawn an actor and to call it once.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import sys
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final

from monarch.core.driver import Driver, Signal
from monarch.core.held import on_main_thread
from monarch.wake import Wake


class _MailboxSelector(selectors.BaseSelector):
    """A selector that dispatches messages while it waits. The epoll behind it is made for the first descriptor."""

    def __init__(self, loop: Any, signal: Signal, driver: Driver, on_main: bool) -> None:
        self._loop = loop  # that it is to stop, asyncio notes in a private attribute
        self._signal, self._driver = signal, driver
        self._on_main = on_main
        self._epoll: selectors.EpollSelector | None = None
        self._wake: Wake | None = None
        self._is_new = True
        self.deadline_s: float | None = None  # when `select` returns at the latest

    def _real(self) -> selectors.EpollSelector:
        if self._epoll is None:
            self._epoll = selectors.EpollSelector()
            self._wake = Wake()
            self._epoll.register(self._wake, selectors.EVENT_READ)
        return self._epoll

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real().register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real().unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real().modify(fileobj, events, data)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        if self._epoll is None:
            raise KeyError(f"{fileobj!r} is not registered")
        return self._epoll.get_key(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._epoll.get_map() if self._epoll is not None else {}

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
        if self._wake is not None:
            self._wake.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.deadline_s = None if timeout is None else time.monotonic() + timeout
        if self._is_new:
            self._is_new = False
            if timeout == 0:
                return self._poll_user(0)  # what the plain loop's last message began comes before the next one
        try:
            return self._dispatch(timeout)
        finally:
            self._loop.show()

    def _dispatch(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """As `select`, and may leave the loop hidden."""
        signal, loop = self._signal, self._loop
        while True:
            signal.is_set = False  # `clear`, without the call
            loop.turn()
            if loop.ready or loop._stopping or timeout == 0:
                return self._poll_user(0)
            left_s = None if self.deadline_s is None else self.deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return self._poll_user(0)
            if self._epoll is not None and len(self._epoll.get_map()) > 1:
                events = self._wait_on_descriptors(left_s)
                if events:
                    return events
            else:
                self._driver.idle(signal, left_s, self._on_main)

    def _poll_user(self, timeout_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._epoll is None:
            return []
        assert self._wake is not None
        events = []
        for key, mask in self._epoll.select(timeout_s):
            if key.fileobj is self._wake:
                self._wake.clear()
            else:
                events.append((key, mask))
        return events

    def _wait_on_descriptors(self, left_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """The user has descriptors of his own: sleep on those and on the signal; a side thread drives the links."""
        assert self._wake is not None
        self._signal.wake = self._wake
        try:
            return self._poll_user(0 if self._signal.is_set else left_s)
        finally:
            self._signal.wake = None


_making: Final = threading.RLock()


class ActorLoop(asyncio.SelectorEventLoop):
    """See the module. Made and run by the actor's thread.

    Attributes:
        turn: dispatches what the mailbox has. Called when asyncio has nothing ready.
        ready: what asyncio is to run next.
        may_block: whether the code that runs now may block, although it sees the loop.
        is_hidden: see `hide`.
    """

    ready: Collection[Any] = ()
    may_block = False
    is_hidden = False
    _takes_messages = False  # as a plain loop
    _is_begun = False  # somebody has looked at asyncio's part
    _is_plain = True  # until that is there

    def __init__(
        self,
        signal: Signal,
        driver: Driver,
        turn: Callable[[], None] = lambda: None,
        on_error: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None,
    ) -> None:
        self._signal, self._driver = signal, driver
        self.turn, self._on_error = turn, on_error
        self._on_main = on_main_thread()
        self._captured: list[asyncio.Handle] | None = None

    def __getattr__(self, name: str) -> Any:
        """Of what asyncio's part has; from any thread."""
        self._have_asyncio()
        return object.__getattribute__(self, name)

    def _have_asyncio(self) -> None:
        with _making:
            if self._is_begun:
                return
            given = dict(vars(self))  # also what the user has set already: it stays
            self._is_begun = True
            try:
                self._mailbox_selector = _MailboxSelector(self, self._signal, self._driver, self._on_main)
                super().__init__(self._mailbox_selector)
                self.set_exception_handler(self._on_error)
                self.ready = self._ready
                vars(self).update(given)
                self._is_plain = False
            except BaseException:
                vars(self).clear()
                vars(self).update(given)
                raise
        self._signal.notify()  # it is to be run from now on

    def run_forever(self) -> None:
        if self._is_plain:
            self._take_messages()
        super().run_forever()

    def _take_messages(self) -> None:
        """Until asyncio is asked for something."""
        signal = self._signal
        hooks = sys.get_asyncgen_hooks()
        self._takes_messages = True
        asyncio._set_running_loop(self)
        try:
            sys.set_asyncgen_hooks(self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook)
            while self._is_plain:
                signal.is_set = False
                self.turn()
                if self._is_plain:
                    self._driver.idle(signal, None, self._on_main)
        finally:
            self._takes_messages = self.is_hidden = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def is_running(self) -> bool:
        return self._takes_messages or super().is_running()

    def stop(self) -> None:
        self._have_asyncio()
        super().stop()

    def hide(self) -> None:
        """From now on, until `show` or asyncio's next turn, no event loop seems to run in this thread: what is called
        may block. Each message on its own would cost 1 us more."""
        if not self.is_hidden:
            self.is_hidden = True
            asyncio._set_running_loop(None)

    def show(self) -> None:
        if self.is_hidden:
            self.is_hidden = False
            asyncio._set_running_loop(self)

    # The self-pipe of a stock loop is made only where somebody needs the descriptor: for signal handlers.

    def _make_self_pipe(self) -> None:
        self._ssock = self._csock = None
        self._internal_fds = 0

    def _close_self_pipe(self) -> None:
        if self._ssock is not None:
            super()._close_self_pipe()

    def _write_to_self(self) -> None:
        self._signal.notify()

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        if self._ssock is None:
            super()._make_self_pipe()  # type: ignore[misc]
        super().add_signal_handler(sig, callback, *args)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        captured = self._captured
        if captured is not None:
            self._captured = None
            handle = asyncio.Handle(callback, args, self, context)
            captured.append(handle)
            return handle
        return super().call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        # A message that is dispatched inside `select` may set a timer: asyncio would look at it in its next turn only.
        selector = self._mailbox_selector
        if selector.deadline_s is None or when < selector.deadline_s:
            selector.deadline_s = when
        return super().call_at(when, callback, *args, context=context)

    def complete(self, waiter: asyncio.Future[None]) -> None:
        """What a task of this loop waits for is there. From the loop's thread, also while it waits for messages: by
        `call_soon_threadsafe` it would take one more turn of the loop, 10 us."""
        if not waiter.done() and not self.is_closed():
            waiter.set_result(None)
            self._signal.notify()

    def start_now(self, coro: Coroutine[Any, Any, Any], context: contextvars.Context) -> asyncio.Task[Any]:
        """A task of this loop whose first step has been made. Called from the loop's thread, outside any task.

        A task schedules its first step with `call_soon` when it is made: catching that one handle and running it saves
        the turn of the loop (4 us of 14 are left). Python 3.12 has `eager_start` for it.
        """
        if sys.version_info >= (3, 12):
            return asyncio.Task(coro, loop=self, context=context, eager_start=True)
        captured: list[asyncio.Handle] = []
        self._captured = captured
        try:
            task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, context=context)
        finally:
            self._captured = None
        captured[0]._run()
        return task


def hidden_loop(function: Callable[[], Any]) -> Any:
    """Call `function` as if no event loop ran in this thread: blocking is legal there."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return function()
    finally:
        asyncio._set_running_loop(loop)
