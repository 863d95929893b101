"""The terminal of this process, while what is typed there is meant for somebody else.

In raw mode every key is passed on, Ctrl-C too. The mode that was before is restored at the end of `with`, at the exit
of the program, and before a signal stops it. Signals that would end the program at once raise `Ended` in the main
thread instead, so that what the program has to tidy up is done before; a second one does not wait for that. Python has
handlers of signals in the main thread only: elsewhere `Terminal` looks after none of them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import termios
import threading
import tty
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, Self

from monarch.job.pseudo_terminal import Size

_ENDINGS: Final = (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)
_DEFAULT_SIZE: Final = 24, 80


class Ended(BaseException):
    """A signal that ends programs has come; `again` sends it once more, and nobody handles it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    def again(self) -> None:
        signal.signal(self.signum, signal.SIG_DFL)
        os.kill(os.getpid(), self.signum)


class Terminal:
    """Of two descriptors, either of which may be something else: a pipe, a file.

    Args:
        keyboard: what is typed comes from there; if it is a terminal, it is in raw mode within `with`.
        screen: where it shows.
        on_resize: called in the main thread when the window may have another size; must not block.

    Attributes:
        is_typed: whether a person types, as far as one can tell: `keyboard` is a terminal, or was one that is gone.
    """

    def __init__(self, keyboard: int, screen: int, on_resize: Callable[[], None]) -> None:
        self._keyboard, self._screen = keyboard, screen
        self.is_typed = os.isatty(keyboard)
        self._on_resize = on_resize
        self._before: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    @property
    def size(self) -> Size:
        """Of the window; of an old screen where there is none."""
        for fd in (self._screen, self._keyboard):
            with contextlib.suppress(OSError):
                columns, rows = os.get_terminal_size(fd)
                if rows and columns:
                    return rows, columns
        return _DEFAULT_SIZE

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in _ENDINGS:
                self._handle(signum, self._end)
            self._handle(signal.SIGTSTP, self._stop)
            self._handle(signal.SIGWINCH, self._resized)
        atexit.register(self.restore)
        try:
            self._make_raw()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()

    def restore(self) -> None:
        """Have the mode that was before; harmless where it is."""
        before, self._before = self._before, None
        if before is not None:
            with contextlib.suppress(termios.error):  # it is gone
                termios.tcsetattr(self._keyboard, termios.TCSANOW, before)

    def _make_raw(self) -> None:
        if self.is_typed and self._before is None:
            with contextlib.suppress(termios.error):  # it is gone
                self._before = termios.tcgetattr(self._keyboard)
                tty.setraw(self._keyboard, termios.TCSANOW)

    def _leave(self) -> None:
        self.restore()
        atexit.unregister(self.restore)
        handlers, self._handlers = self._handlers, {}
        for signum, handler in handlers.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, handler: Callable[[int, FrameType | None], None]) -> None:
        """Unless the program does, or wants none of it."""
        if signal.getsignal(signum) is signal.SIG_DFL:
            self._handlers[signum] = signal.signal(signum, handler)

    def _end(self, signum: int, frame: FrameType | None) -> None:
        self.restore()
        signal.signal(signum, signal.SIG_DFL)  # of a second one the program ends at once
        raise Ended(signum)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._make_raw()
        self._on_resize()

    def _resized(self, signum: int, frame: FrameType | None) -> None:
        self._on_resize()
