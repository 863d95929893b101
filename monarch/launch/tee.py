"""The standard error of a process, passed on as it comes, with its last lines kept for whoever asks why it ended."""

from __future__ import annotations

import os
import select
from typing import Final

from attrs import define, field

_TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 8192


@define(eq=False)
class Tee:
    """The standard error of an exec'd child: shown where the driver's goes, its end kept. Never blocks: reads only
    what it can pass on, so that a stuck terminal holds back the child, as it would without us."""

    source: int | None
    sink: int
    waiting: bytearray = field(factory=bytearray)
    kept: bytearray = field(factory=bytearray)

    def read(self) -> bool:
        """Take one piece in; False at the end or when nothing is there."""
        if self.source is None:
            return False
        try:
            data = os.read(self.source, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            os.close(self.source)
            self.source = None
            return False
        self.waiting += data
        self.kept = (self.kept + data)[-_TAIL_BYTES:]
        return True

    def write(self) -> None:
        """Pass on what fits: a pipe that polls as writable takes 4096 bytes without blocking (pipe(7), PIPE_BUF)."""
        while self.waiting:
            poll = select.poll()
            poll.register(self.sink, select.POLLOUT)
            ready = poll.poll(0)
            if not ready:
                return
            try:
                del self.waiting[: os.write(self.sink, self.waiting[:4096])]
            except BlockingIOError:
                return
            except OSError:  # nobody reads any more
                self.waiting.clear()

    def finish(self) -> str:
        """Take in what is left and return the last lines."""
        while self.read() and len(self.waiting) < 1 << 20:
            pass
        if self.source is not None:
            os.close(self.source)
            self.source = None
        self.write()
        return "\n".join(self.kept.decode(errors="replace").splitlines()[-_TAIL_LINES:])
