"""pdb whose terminal is elsewhere: see `breakpoints`, which loads this module when an actor meets the first."""

from __future__ import annotations

import inspect
import os
import pdb
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from monarch.mesh.breakpoints import PDB_PROMPT, Place, Waiter

_SKIPPED: Final = ("monarch.core.*", "monarch.mesh.*", "asyncio.*")  # stepping does not stop in there


class _Terminal:
    """What pdb reads from and writes to."""

    encoding = "utf-8"

    def __init__(self, waiter: Waiter, readline: Callable[[], str], tell: Callable[..., None]) -> None:
        self._waiter, self._readline, self._tell = waiter, readline, tell
        self._text: list[str] = []
        self.place: Place | None = None  # pdb has stopped there, and the driver does not know

    def write(self, text: str) -> int:
        self._text.append(text)
        return len(text)

    def flush(self) -> None:
        if self._text and self.place is None:
            self._tell("debug_said", self._waiter.id, self._take())

    def readline(self) -> str:
        self.flush()
        if self.place is not None:  # who waits has a prompt
            place, self.place = self.place, None
            self._tell("debug_stopped", self._waiter, place, self._take())
        return self._readline()

    def _take(self) -> str:
        text, self._text = "".join(self._text), []
        return text


class RemotePdb(pdb.Pdb):
    """Reads lines from `readline`, "" at the end, and tells the driver where it stops and what it prints. `on_over` is
    called when the actor has left it for good."""

    def __init__(
        self, waiter: Waiter, readline: Callable[[], str], tell: Callable[..., None], on_over: Callable[[], None]
    ) -> None:
        self._terminal = _Terminal(waiter, readline, tell)
        terminal: Any = self._terminal
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True, readrc=False, skip=_SKIPPED)
        self.use_rawinput = False
        self.prompt = PDB_PROMPT
        self._waiter, self._tell, self._on_over = waiter, tell, on_over
        self._outermost: FrameType | None = None
        self._goes_on = False
        self.waits_at: Place | None = None

    def set_trace(self, frame: FrameType | None = None, **kwargs: Any) -> None:
        outer = frame
        while outer is not None and not self.is_skipped_module(outer.f_globals.get("__name__", "")):
            self._outermost, outer = outer, outer.f_back
        super().set_trace(frame, **kwargs)

    def interaction(self, frame: FrameType | None, *args: Any) -> None:
        if frame is not None:
            code = frame.f_code
            self._terminal.place = Place(code.co_name, os.path.basename(code.co_filename), frame.f_lineno)
        self._goes_on = False
        self.waits_at = self._terminal.place
        super().interaction(frame, *args)
        self.waits_at = None
        self._leave()

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        super().user_return(frame, return_value)
        if frame is self._outermost and not (self._goes_on or self.quitting or _may_go_on(frame)):
            self.set_continue()  # the endpoint is over, and stepping would go on in the next call
            self._leave()

    def _leave(self) -> None:
        self._terminal.flush()
        over = self.quitting or self._goes_on
        self._tell("debug_resumed", self._waiter.id, over)
        if over:
            self._on_over()

    def set_continue(self) -> None:
        super().set_continue()
        self._goes_on = not self.breaks

    def do_release(self, arg: str) -> bool | None:
        """release

        Clear all breakpoints, and continue.
        """
        self.clear_all_breaks()
        return self.do_continue(arg)


def _may_go_on(frame: FrameType) -> bool:
    """Whether the end of a frame, as pdb sees it, may be an `await` or a `yield`."""
    return bool(frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR))
