"""What the processes of a host print, read from them, and forwarded to where it is shown.

Each process writes to two pipes. One thread reads them all, so that no process ever waits for the driver's interpreter
longer than its pipe is full; another cuts what was read into lines and shows them (`display`), so that a terminal which
is stuck holds up nobody but itself. What does not fit between the two is withheld, and counted.

What a process had written when it ended is in its pipes: `finish` shows all of that, and only then says so.

The thread starts with the first process whose output is forwarded.
"""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from attrs import define, field

from monarch.core import settings
from monarch.log import get_logger
from monarch.mesh.display import Display, Source, Stream
from monarch.mesh.lines import Gate, Origin
from monarch.wake import Wake

log = get_logger("monarch.output")

_READ_BYTES: Final = 1 << 16
_DRAIN_BYTES: Final = 4 << 20  # of a process that has ended: more than a pipe holds, and a bound for its orphans
_STUCK_S: Final = 1.0  # the report of a death waits so long for the output before it


@define(eq=False)
class _Pipe:
    stream: Stream
    fd: int
    gate: Gate = field(factory=Gate)


@define(eq=False)
class Pipes:
    """What one process writes to, while it runs.

    Attributes:
        write_ends: for its standard output and error; whoever starts the process owns them.
    """

    source: Source
    write_ends: tuple[int, int]
    _pipes: list[_Pipe]


class Forwarder:
    """See the module. Thread-safe; nothing here blocks but `flush` and `close`, for as long as they are told."""

    def __init__(self, display: Display) -> None:
        """Read nothing yet; what will be read is shown by `display`."""
        self.display = display
        self._lock = threading.Lock()  # over the start
        self._commands: deque[Callable[[], None]] = deque()
        self._bell: Wake  # wakes the thread
        self._started = self._closed = False
        # Of the reading thread:
        self._pipes: dict[int, _Pipe] = {}  # by descriptor
        self._overdue: deque[tuple[float, Callable[[], None]]] = deque()

    # ---- from any thread

    def open(self, origin: Origin, key: int = 0) -> Pipes:
        """Pipes for a process that is about to be started.

        Raises:
            OSError: there are no descriptors left.
        """
        self._ensure_started()
        source = self.display.source(key, origin)
        fds: list[int] = []
        try:
            for _ in source.streams:
                fds += os.pipe()
        except OSError:
            for fd in fds:
                os.close(fd)
            source.close()
            raise
        pipes = [_Pipe(stream, fd) for stream, fd in zip(source.streams, fds[::2], strict=True)]
        self._command(lambda: self._watch(pipes))
        return Pipes(source, (fds[1], fds[3]), pipes)

    def finish(self, pipes: Pipes, then: Callable[[], None]) -> None:
        """A process has ended: show what it has printed, and call `then`, from a thread of ours; after a second in any
        case."""
        then = _once(then)

        def drain() -> None:
            for pipe in pipes._pipes:
                if self._pipes.get(pipe.fd) is pipe:  # else it has ended, and its descriptor may be another's by now
                    self._read_all(pipe)
                    self._forget(pipe)
                if count := pipe.gate.take_count():
                    self.display.tell_withheld(pipe.stream, count)
            self.display.end(pipes.source, then)
            self._overdue.append((time.monotonic() + _STUCK_S, then))

        self._command(drain)

    def settle(self, then: Callable[[], None]) -> None:
        """Call `then`, from a thread of ours, when all lines that have been printed by now have been shown, but for
        those that wait for their end; after a second in any case."""
        then = _once(then)

        def read() -> None:
            self._read_all(*self._pipes.values())
            self.display.mark(then)
            self._overdue.append((time.monotonic() + _STUCK_S, then))

        self._command(read)

    def flush(self, timeout_s: float) -> bool:
        """Show all that has been printed by now, partial lines too; False if there was not enough time."""
        return self._flushing().wait(timeout_s)

    def _flushing(self) -> threading.Event:
        """Begin to show all that has been printed by now; the event comes with the last of it."""
        done = threading.Event()

        def read() -> None:
            self._read_all(*self._pipes.values())
            self.display.finish(done.set)

        if self._started:
            self._command(read)
        else:
            self.display.finish(done.set)
        return done

    def close(self, patience_s: float) -> None:
        """Show what is left, here and on other hosts, and end the threads. Waits while the output moves, and for
        `patience_s` while it does not; see `Display.close`."""
        if self._closed:
            return
        self.display.close(self._flushing(), patience_s)
        self._closed = True
        if self._started:
            self._bell.set()

    def _ensure_started(self) -> None:
        with self._lock:
            if not self._started:
                self._bell = Wake()
                self._selector = selectors.DefaultSelector()
                self._selector.register(self._bell, selectors.EVENT_READ)
                self.display.on_room = self._bell.set
                threading.Thread(target=self._run, name="monarch-output", daemon=True).start()
                self._started = True

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._bell.set()

    # ---- the thread

    def _watch(self, pipes: list[_Pipe]) -> None:
        for pipe in pipes:
            os.set_blocking(pipe.fd, False)
            self._pipes[pipe.fd] = pipe
            self._selector.register(pipe.fd, selectors.EVENT_READ)

    def _run(self) -> None:
        bell = select.poll()
        bell.register(self._bell, select.POLLIN)
        while not self._closed:
            while self._overdue and self._overdue[0][0] <= time.monotonic():
                self._overdue.popleft()[1]()
            ready: list[int] = []
            if self.display.may_read():
                ready = [key.fd for key, _ in self._selector.select(0.1 if self._overdue else None)]
            else:
                bell.poll(100)
            self._bell.clear()
            while self._commands:
                try:
                    self._commands.popleft()()
                except Exception:  # whoever waits for the ends of other processes shall hear of them
                    log.exception("output.command_failed")
            for fd in ready:
                if (pipe := self._pipes.get(fd)) is not None and self._read_some(pipe) is None:
                    self._forget(pipe)
        for pipe in list(self._pipes.values()):
            self._forget(pipe)
        self._selector.close()
        self._bell.close()

    def _read_some(self, pipe: _Pipe) -> int | None:
        """Read once: how many bytes, 0 where there are none now, None at the end."""
        try:
            data = os.read(pipe.fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            return None
        if self.display.withholds():
            pipe.gate.refuse(data)
            return len(data)
        count, kept = pipe.gate.admit(data)
        if count:
            self.display.tell_withheld(pipe.stream, count)
        if kept:
            self.display.show(pipe.stream, kept)
        return len(data)

    def _read_all(self, *pipes: _Pipe) -> None:
        for pipe in pipes:
            left = _DRAIN_BYTES
            while left > 0 and (got := self._read_some(pipe)):
                left -= got

    def _forget(self, pipe: _Pipe) -> None:
        self._selector.unregister(pipe.fd)
        del self._pipes[pipe.fd]
        os.close(pipe.fd)


def make_forwarder() -> Forwarder:
    """The forwarder that the settings ask for, as of now."""
    keep = os.path.join("monarch_logs", str(os.getpid())) if settings.get("enable_file_capture") else None
    display = Display(
        prefix=settings.get("prefix_with_rank"), tail_lines=settings.get("tail_log_lines"), directory=keep
    )
    forwarder = Forwarder(display)
    _flush_after_cells(forwarder)
    return forwarder


def _flush_after_cells(forwarder: Forwarder) -> None:
    """In a notebook, what was printed during a cell appears below that cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        shell.events.register("post_run_cell", lambda *_: forwarder.flush(_STUCK_S))


def _once(then: Callable[[], None]) -> Callable[[], None]:
    left = [then]
    lock = threading.Lock()

    def call() -> None:
        with lock:
            due = left.pop() if left else None
        if due is not None:
            due()

    return call
