"""What the processes of a host print, forwarded to the driver's output.

Each process writes to two pipes. One thread reads them all, so that no process ever waits for the driver's interpreter
longer than its pipe is full; another cuts what was read into lines (`lines`) and shows them, so that a terminal which
is stuck holds up nobody but itself. Between the two is a bounded queue; what does not fit is withheld, and counted.

What a process had written when it ended is in its pipes: `finish` shows all of that, and only then says so.

On a host that is not the driver's, the second thread sends lines instead of showing them, one batch at a time: the next
one goes when the driver has shown this one (`receive`). So a slow driver and a slow terminal are the same to processes.

The threads start with the first process whose output is forwarded.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TextIO
from weakref import WeakSet

from attrs import define, field

from monarch.core import settings
from monarch.log import get_logger
from monarch.mesh.lines import Admission, Aggregator, Intake, Line, LineReader, Origin, Parcel, Tail, shown
from monarch.wake import Wake

log = get_logger("monarch.output")

_READ_BYTES: Final = 1 << 16
_DRAIN_BYTES: Final = 4 << 20  # of a process that has ended: more than a pipe holds, and a bound for its orphans
_BATCH_BYTES: Final = 1 << 18  # of what was read; a batch may be a read larger
_PARTIAL_S: Final = 1.0  # a line without an end is shown after so long
_CLOSE_S: Final = 10.0  # the end of the program waits so long for output that still moves
_STUCK_S: Final = 1.0  # the report of a death waits so long for the output before it


@define(eq=False)
class _Pipe:
    source: Source
    stream: int
    fd: int
    reader: LineReader
    intake: Intake = field(factory=Intake)
    partial_since_s: float | None = None


@define(eq=False)
class Source:
    """The output of one process, while it runs.

    Attributes:
        key: of the process.
        write_ends: for its standard output and error; whoever starts the process owns them. -1: it is on another host.
        shown: whether its lines are shown at all.
        aggregator: merges its equal lines with those of the other processes that have the same one.
    """

    key: int
    origin: Origin
    write_ends: tuple[int, int]
    tail: Tail
    shown: bool = True
    aggregator: Aggregator | None = None
    file: Any = None
    pipes: list[_Pipe] = field(factory=list)


def _nothing(*_: object) -> None:
    pass


@define(eq=False)
class _Job:
    """What the showing thread does next; `then` is called when all of it can be seen."""

    action: Callable[[bytearray, bytearray], None]
    size_bytes: int = 0
    lines: int = 0
    then: Callable[[], None] = _nothing


class Forwarder:
    """See the module. Thread-safe; nothing here blocks but `flush` and `close`, for as long as they are told."""

    def __init__(
        self,
        *,
        prefix: bool = True,
        tail_lines: int = 0,
        directory: str | None = None,
        send: Callable[[list[Parcel]], threading.Event] | None = None,
    ) -> None:
        """Show nothing yet.

        Args:
            prefix: whether lines start with who printed them.
            tail_lines: how many of a process's last lines are kept for the report of its death.
            directory: where to keep all that each process prints, in a file of its own; None keeps nothing.
            send: sends lines to the driver; the event comes when it has shown them, or is gone. None: this is it.
        """
        self._prefix, self._tail_lines, self._directory = prefix, tail_lines, directory
        self._send = send
        self._guests: dict[int, Source] = {}  # processes of other hosts, by key
        self._admission = Admission()
        self._queue: deque[_Job] = deque()
        self._unshown_lines = 0
        self._turn = threading.Condition()  # guards the queue and the admission
        self._commands: deque[Callable[[], None]] = deque()
        # Of the reading thread:
        self._pipes: dict[int, _Pipe] = {}  # by descriptor
        self._overdue: deque[tuple[float, Callable[[], None]]] = deque()
        # Of the showing thread:
        self._parcels: list[Parcel] = []  # to be sent
        self._open: list[_Pipe] = []  # those with a partial line
        self._aggregators: WeakSet[Aggregator] = WeakSet()  # as long as a source has them
        self._lock = threading.Lock()  # over the start and the guests
        self._bell: Wake  # wakes the reading thread
        self._started = self._closed = False

    # ---- from any thread

    def open(self, origin: Origin, key: int = 0) -> Source:
        """Pipes for a process that is about to be started.

        Raises:
            OSError: there are no descriptors left.
        """
        self._ensure_started()
        file = self._file(origin)
        fds: list[int] = []
        try:
            for _ in (1, 2):
                fds += os.pipe()
        except OSError:
            for fd in fds:
                os.close(fd)
            if file is not None:
                file.close()
            raise
        source = Source(key, origin, (fds[1], fds[3]), Tail(self._tail_lines), file=file)
        for stream, fd in ((1, fds[0]), (2, fds[2])):
            os.set_blocking(fd, False)
            source.pipes.append(_Pipe(source, stream, fd, LineReader(stream, origin)))
        self._command(lambda: self._watch(source))
        return source

    def finish(self, source: Source, then: Callable[[], None]) -> None:
        """A process has ended: show what it has printed, and call `then`, from a thread of this module; after a second
        in any case."""
        then = _once(then)
        self._command(lambda: self._drain(source, then))

    def guest(self, key: int, origin: Origin) -> Source:
        """A process of another host, until its last line has come."""
        with self._lock:
            source = self._guests.get(key)
            if source is None:
                source = self._guests[key] = Source(key, origin, (-1, -1), Tail(0), file=self._file(origin))
            return source

    def receive(self, parcels: Sequence[Parcel], then: Callable[[], None]) -> None:
        """Show lines of processes of other hosts, and call `then`, from a thread of this module, when that is done."""
        self._ensure_started()
        for _, run in itertools.groupby(parcels, key=lambda parcel: parcel.line is not None and parcel.line.stream):
            some = list(run)
            size_bytes = sum(len(line.text) + 1 for _, _, line in some if line is not None)
            self._enqueue(_Job(partial(self._show_parcels, some), size_bytes, len(some)))
        self._enqueue(_Job(_nothing, then=then))

    def forget(self, key: int) -> None:
        """A process of another host is gone, perhaps with its host and without a last line."""
        if (source := self._guests.get(key)) is not None:
            self._enqueue(_Job(partial(self._dismiss, source)))

    def configure(self, sources: Iterable[Source], *, show: bool, window_s: float | None) -> None:
        """From now on, show the lines of `sources` or not, and merge equal ones within a window or not."""
        sources = list(sources)
        aggregator = Aggregator(window_s) if window_s else None

        def change(out: bytearray, err: bytearray) -> None:
            for each in {id(s.aggregator): s.aggregator for s in sources if s.aggregator is not None}.values():
                self._show_groups(each, out, err)
            if aggregator is not None:
                self._aggregators.add(aggregator)
            for source in sources:
                source.shown, source.aggregator = show, aggregator

        self._enqueue(_Job(change))

    def settle(self, then: Callable[[], None]) -> None:
        """Call `then`, from a thread of this module, when all lines that have been printed by now have been shown,
        but for those that wait for their end; after a second in any case."""
        then = _once(then)

        def read() -> None:
            for pipe in list(self._pipes.values()):
                self._read_all(pipe)
            self._promise(_nothing, then)

        self._command(read)

    def flush(self, timeout_s: float) -> bool:
        """Show all that has been printed by now, partial lines too; False if there was not enough time."""
        return self._flushing().wait(timeout_s)

    def _flushing(self) -> threading.Event:
        """Begin to show all that has been printed by now; the event comes with the last of it."""
        done = threading.Event()
        if not self._started:
            done.set()
            return done

        def read() -> None:
            for pipe in list(self._pipes.values()):
                self._read_all(pipe)
            self._enqueue(_Job(partial(self._show_unfinished, None), then=done.set))

        self._command(read)
        return done

    def close(self, patience_s: float) -> None:
        """Show what is left, here and on other hosts, and end the threads. Waits while the output moves, `_CLOSE_S` at
        most, and `patience_s` while it does not; then says how much was not shown."""
        if not self._started or self._closed:
            return
        done = self._flushing()
        began_s = time.monotonic()
        while not done.wait(0.02) or self._guests:
            now_s = time.monotonic()
            with self._turn:
                idle_s = now_s - max(began_s, self._admission.moved_s)
            if idle_s >= patience_s or now_s - began_s >= _CLOSE_S:
                if lines := self._unshown_lines:
                    _say(f"monarch: about {lines} lines of output were not shown: the driver's output is stuck\n")
                break
            time.sleep(0.02 if done.is_set() else 0.0)
        self._closed = True
        self._bell.set()
        with self._turn:
            self._turn.notify_all()

    # ---- the reading thread

    def _ensure_started(self) -> None:
        with self._lock:
            if not self._started:
                self._start()

    def _start(self) -> None:
        self._bell = Wake()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for name, run in (("monarch-output", self._read), ("monarch-show", self._show)):
            threading.Thread(target=run, name=name, daemon=True).start()
        self._started = True

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._bell.set()

    def _watch(self, source: Source) -> None:
        for pipe in source.pipes:
            self._pipes[pipe.fd] = pipe
            self._selector.register(pipe.fd, selectors.EVENT_READ)

    def _read(self) -> None:
        bell = select.poll()
        bell.register(self._bell, select.POLLIN)
        while not self._closed:
            while self._overdue and self._overdue[0][0] <= time.monotonic():
                self._overdue.popleft()[1]()
            with self._turn:
                may_read = self._admission.may_read(time.monotonic())
            ready: list[int] = []
            if may_read:
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
        with self._turn:
            withhold = self._admission.withholds(time.monotonic())
        if withhold:
            pipe.intake.refuse(data)
            return len(data)
        count, kept = pipe.intake.admit(data)
        if count:
            self._tell_withheld(pipe, count)
        if kept:
            lines = kept.count(b"\n")
            self._enqueue(_Job(partial(self._show_data, pipe, kept), len(kept), lines))
        return len(data)

    def _read_all(self, pipe: _Pipe) -> None:
        left = _DRAIN_BYTES
        while left > 0:
            got = self._read_some(pipe)
            if not got:
                return
            left -= got

    def _drain(self, source: Source, then: Callable[[], None]) -> None:
        for pipe in source.pipes:
            if self._pipes.get(pipe.fd) is pipe:  # else it has ended, and its descriptor may be another's by now
                self._read_all(pipe)
                self._forget(pipe)
            if count := pipe.intake.take_count():
                self._tell_withheld(pipe, count)
        self._promise(partial(self._end, source), then)

    def _promise(self, action: Callable[[bytearray, bytearray], None], then: Callable[[], None]) -> None:
        """Call `then`, which does nothing at a second call, when the action is done, or could not be in time."""
        self._enqueue(_Job(action, then=then))
        self._overdue.append((time.monotonic() + _STUCK_S, then))

    def _forget(self, pipe: _Pipe) -> None:
        self._selector.unregister(pipe.fd)
        del self._pipes[pipe.fd]
        os.close(pipe.fd)

    def _tell_withheld(self, pipe: _Pipe, count: int) -> None:
        def show(out: bytearray, err: bytearray) -> None:
            for line in pipe.reader.rest():
                self._take(pipe.source, line, out, err)
            text = f"[{count} lines withheld, because the driver's output is too slow for them]"
            self._take(pipe.source, Line(pipe.stream, pipe.source.origin, text.encode()), out, err)

        self._enqueue(_Job(show, 0, count))

    # ---- the showing thread

    def _enqueue(self, job: _Job) -> None:
        with self._turn:
            self._admission.queued(job.size_bytes, time.monotonic())
            self._unshown_lines += job.lines
            self._queue.append(job)
            self._turn.notify()

    def _show(self) -> None:
        while True:
            with self._turn:
                while not self._queue and not self._closed:
                    left_s = self._next_deadline_s() - time.monotonic()
                    if left_s <= 0:
                        break
                    self._turn.wait(min(left_s, 3600.0))
                if self._closed and not self._queue:
                    return
                jobs = self._next_jobs()
            out, err = bytearray(), bytearray()
            for job in jobs:
                with _reported():
                    job.action(out, err)
            with _reported():
                self._pass_on(out, err)
            with self._turn:
                waited = not self._admission.may_read(time.monotonic())
                self._admission.shown(sum(job.size_bytes for job in jobs), time.monotonic())
                self._unshown_lines -= sum(job.lines for job in jobs)
            if waited:
                self._bell.set()
            for job in jobs:
                with _reported():
                    job.then()

    def _next_jobs(self) -> list[_Job]:
        """Those that are done at once: where they are sent, the more, the more are waiting."""
        jobs = [self._queue.popleft() if self._queue else _Job(self._show_due)]
        size_bytes = jobs[0].size_bytes
        while self._send is not None and self._queue and size_bytes < _BATCH_BYTES:
            jobs.append(self._queue.popleft())
            size_bytes += jobs[-1].size_bytes
        return jobs

    def _pass_on(self, out: bytearray, err: bytearray) -> None:
        """To the driver's output; or to the driver, and wait until it has shown all of it."""
        if self._send is None:
            write(1, out)
            write(2, err)
        elif self._parcels:
            parcels, self._parcels = self._parcels, []
            seen = self._send(parcels)
            while not seen.wait(_STUCK_S) and not self._closed:
                pass

    def _next_deadline_s(self) -> float:
        due = [d for each in self._aggregators if (d := each.next_deadline_s()) is not None]
        due += [pipe.partial_since_s + _PARTIAL_S for pipe in self._open if pipe.partial_since_s is not None]
        return min(due, default=float("inf"))

    def _show_data(self, pipe: _Pipe, data: bytes, out: bytearray, err: bytearray) -> None:
        lines = pipe.reader.feed(data)
        for line in lines:
            self._take(pipe.source, line, out, err)
        if pipe.reader.unfinished:
            if pipe not in self._open:
                self._open.append(pipe)
            if lines or pipe.partial_since_s is None:
                pipe.partial_since_s = time.monotonic()
        elif pipe.partial_since_s is not None:
            pipe.partial_since_s = None
            self._open.remove(pipe)

    def _take(self, source: Source, line: Line, out: bytearray, err: bytearray) -> None:
        source.tail.add(line)
        if self._send is not None:
            self._parcels.append(Parcel(source.key, source.origin, line))
            return
        if source.file is not None:
            source.file.write(line.text + b"\n")
        if not source.shown:
            return
        if source.aggregator is not None:
            now_s = time.monotonic()
            source.aggregator.add(line, now_s)
            if source.aggregator.over(now_s):
                self._show_groups(source.aggregator, out, err)
        else:
            (out if line.stream == 1 else err).extend(shown(line, prefix=self._prefix))

    def _show_parcels(self, parcels: list[Parcel], out: bytearray, err: bytearray) -> None:
        for key, origin, line in parcels:
            source = self.guest(key, origin)
            if line is None:
                self._dismiss(source, out, err)
            else:
                self._take(source, line, out, err)

    def _dismiss(self, source: Source, out: bytearray, err: bytearray) -> None:
        self._end(source, out, err)
        with self._lock:
            self._guests.pop(source.key, None)

    def _end(self, source: Source, out: bytearray, err: bytearray) -> None:
        self._show_unfinished(source, out, err)
        if source.file is not None:
            source.file.close()
        if self._send is not None:
            self._parcels.append(Parcel(source.key, source.origin, None))

    def _show_due(self, out: bytearray, err: bytearray) -> None:
        """What has waited long enough. Only while nothing is queued: the end of a line may be."""
        now_s = time.monotonic()
        for pipe in list(self._open):
            if pipe.partial_since_s is not None and now_s >= pipe.partial_since_s + _PARTIAL_S:
                self._show_partial(pipe, out, err)
        for aggregator in self._aggregators:
            if aggregator.over(now_s):
                self._show_groups(aggregator, out, err)

    def _show_unfinished(self, source: Source | None, out: bytearray, err: bytearray) -> None:
        """What waits for its end or its window, of one process or of all."""
        for pipe in [p for p in self._open if source is None or p.source is source]:
            self._show_partial(pipe, out, err)
        for aggregator in self._aggregators if source is None else filter(None, [source.aggregator]):
            self._show_groups(aggregator, out, err)

    def _show_partial(self, pipe: _Pipe, out: bytearray, err: bytearray) -> None:
        pipe.partial_since_s = None
        self._open.remove(pipe)
        for line in pipe.reader.rest():
            self._take(pipe.source, line, out, err)

    def _show_groups(self, aggregator: Aggregator, out: bytearray, err: bytearray) -> None:
        for line, ranks, count in aggregator.take():
            (out if line.stream == 1 else err).extend(shown(line, ranks, count, prefix=self._prefix))

    def _file(self, origin: Origin) -> Any:
        if self._directory is None:
            return None
        os.makedirs(self._directory, exist_ok=True)
        name = re.sub(r"[^\w.-]", "_", origin.name)
        for attempt in itertools.count(1):  # meshes may have the same name
            again = f".{attempt}" if attempt > 1 else ""
            with contextlib.suppress(FileExistsError):
                return open(os.path.join(self._directory, f"{name}[{origin.rank}]{again}.log"), "xb", buffering=0)


def make_forwarder() -> Forwarder:
    """The forwarder that the settings ask for, as of now."""
    keep = os.path.join("monarch_logs", str(os.getpid())) if settings.get("enable_file_capture") else None
    forwarder = Forwarder(
        prefix=settings.get("prefix_with_rank"), tail_lines=settings.get("tail_log_lines"), directory=keep
    )
    _flush_after_cells(forwarder)
    return forwarder


def _flush_after_cells(forwarder: Forwarder) -> None:
    """In a notebook, what was printed during a cell appears below that cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        shell.events.register("post_run_cell", lambda *_: forwarder.flush(_STUCK_S))


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """The showing thread goes on, whatever fails."""
    try:
        yield
    except Exception:
        log.exception("output.not_shown")


def _once(then: Callable[[], None]) -> Callable[[], None]:
    left = [then]
    lock = threading.Lock()

    def call() -> None:
        with lock:
            due = left.pop() if left else None
        if due is not None:
            due()

    return call


def _say(text: str) -> None:
    """To standard error, unless that is stuck as well."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if any(event & select.POLLOUT for _, event in poll.poll(0)):
        write(2, text.encode())


def write(stream: int, data: bytes | bytearray) -> None:
    """Whole lines to the driver's output: to its descriptor, past the buffer in which the driver's own next line may
    be waiting for its end; or to what somebody has put in place of `sys.stdout`, as notebooks do."""
    if not data:
        return
    current: TextIO | None
    current, original = (sys.stdout, sys.__stdout__) if stream == 1 else (sys.stderr, sys.__stderr__)
    if current is None and original is None:
        return  # closed when the program began; the descriptor may be something else by now
    if current is not None and current is not original:
        current.write(data.decode(errors="replace"))
        current.flush()
        return
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(stream, view) :]
        except BlockingIOError:  # somebody made it so
            poll = select.poll()
            poll.register(stream, select.POLLOUT)
            poll.poll()
        except OSError:  # nobody reads any more
            return
