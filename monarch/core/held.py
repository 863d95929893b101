"""Signals that wait: Python's handlers run in the main thread, between any two of its instructions.

While the main thread moves frames, an exception from a handler (KeyboardInterrupt, a time-out by SIGALRM) would tear
a message apart. So it holds the handlers back meanwhile: a signal is noted, the wait ends early, and the handlers run
then, with nothing half done. A block costs 1.3 us.
"""

from __future__ import annotations

# `signal` makes enums of what goes in and out of these, and takes 13 us where they take 1.3.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

Handler = Callable[[int, FrameType | None], Any]


class _Signals:
    """Some signals, and those handlers of theirs that are Python's, as of the last look.

    Attributes:
        found: what the last look has found, for each of the `numbers`.
    """

    def __init__(self, *names: str) -> None:
        self.numbers = tuple(int(getattr(signal, name)) for name in names if hasattr(signal, name))
        self.found: tuple[object, ...] = ()
        self.known: dict[int, Handler] = {}

    def handlers(self) -> dict[int, Handler]:
        found = tuple(map(_signal.getsignal, self.numbers))
        if found != self.found:
            self.known = {n: handler for n, handler in zip(self.numbers, found, strict=True) if callable(handler)}
            self.found = found
        return self.known


_OTHERS: Final = ("SIGALRM", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGPROF", "SIGVTALRM")
ALL: Final = _Signals("SIGINT", *_OTHERS)
ALL_BUT_INTERRUPT: Final = _Signals(*_OTHERS)


_all_are_held = False  # by a block around what runs now

interrupted_because = ""
"""Why this process interrupts its main thread itself: the text of that KeyboardInterrupt."""


class Held:
    """The signals that a block of the main thread holds back; their handlers run at its end, and may raise there.

    Attributes:
        noted: whether a signal came. `nudge` was called then, to end a wait.
    """

    __slots__ = ("_around", "_handlers", "_is_over", "_nudge", "_pending", "_signals", "noted")

    def __init__(self, nudge: Callable[[], None] = lambda: None, signals: _Signals = ALL) -> None:
        self._nudge, self._signals = nudge, signals
        self._handlers: dict[int, Handler] = {}
        self._around = False
        self._pending: list[tuple[int, FrameType | None]] | None = None
        self._is_over = False
        self.noted = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:  # what another handler raised came before this signal's own was back
            self._handlers[number](number, frame)
            return
        self.noted = True
        if self._pending is None:
            self._pending = []
        self._pending.append((number, frame))
        self._nudge()

    def __enter__(self) -> Held:
        global _all_are_held
        signals, self._around = self._signals, _all_are_held
        found = tuple(map(_signal.getsignal, signals.numbers))  # `handlers`, most often without the call
        self._handlers = signals.known if found == signals.found else signals.handlers()
        try:
            for number in self._handlers:
                _signal.signal(number, self._note)
            _all_are_held = self._around or signals is ALL
        except BaseException:  # of one whose turn had not come
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        global _all_are_held
        _all_are_held = self._around
        failed: BaseException | None = None
        try:
            for number, handler in self._handlers.items():
                try:
                    _signal.signal(number, handler)
                except BaseException as error:  # of another that is back
                    failed = error
                    _signal.signal(number, handler)
        finally:
            self._is_over = True
            if self.noted:
                self._run_pending()
        if failed is not None:
            raise failed

    def _run_pending(self) -> None:
        """All of them, whatever one of them raises."""
        if not self._pending:
            return
        number, frame = self._pending.pop(0)
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not error.args and interrupted_because:
                error.args = (interrupted_because,)
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise
        finally:
            self._run_pending()


class NothingHeld:
    """Where no handler runs anyway: in other threads, and in a block within one that holds all signals."""

    noted: Final = False

    def __enter__(self) -> NothingHeld:
        return self

    def __exit__(self, *_: object) -> None:
        pass


NOTHING_HELD: Final = NothingHeld()


_main_thread = threading.main_thread().ident


def _in_forked_child() -> None:
    global _main_thread
    _main_thread = threading.get_ident()


os.register_at_fork(after_in_child=_in_forked_child)


def on_main_thread() -> bool:
    return threading.get_ident() == _main_thread


def undisturbed() -> Held | NothingHeld:
    """For a block that is to run to its end, in whatever thread it runs."""
    return Held() if on_main_thread() and not _all_are_held else NOTHING_HELD
