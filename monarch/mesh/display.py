"""Where the lines of processes are shown: on the driver's output, by one thread, behind a queue with a bound.

On a host that is not the driver's, the thread sends lines instead of showing them, one batch at a time: the next one
goes when the driver has shown this one (`receive`). So a slow driver and a slow terminal are the same to processes.

The thread starts with the first that it has to do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TextIO
from weakref import WeakSet

from attrs import define, field

from monarch.log import get_logger
from monarch.mesh.lines import Admission, Aggregator, Line, LineReader, Origin, Parcel, Tail, shown

log = get_logger("monarch.output")

_BATCH_BYTES: Final = 1 << 18  # of what was read; a batch may be a read larger
_PARTIAL_S: Final = 1.0  # a line without an end is shown after so long
_CLOSE_S: Final = 10.0  # the end of the program waits so long for output that still moves
_LOOK_S: Final = 1.0  # whoever waits for the driver looks so often whether this program has ended


@define(eq=False)
class Stream:
    """What a process writes to its standard output (1) or error (2)."""

    source: Source
    number: int
    reader: LineReader
    partial_since_s: float | None = None


@define(eq=False)
class Source:
    """The output of one process, while it runs.

    Attributes:
        key: of the process.
        shown: whether its lines are shown at all.
        aggregator: merges its equal lines with those of the other processes that have the same one.
    """

    key: int
    origin: Origin
    tail: Tail
    file: Any = None
    shown: bool = True
    aggregator: Aggregator | None = None
    streams: list[Stream] = field(init=False)

    @streams.default
    def _streams(self) -> list[Stream]:
        return [Stream(self, number, LineReader(number, self.origin)) for number in (1, 2)]

    def close(self) -> None:
        """No line of it comes any more."""
        if self.file is not None:
            self.file.close()


def _nothing() -> None:
    pass


@define(eq=False)
class _Job:
    """What the thread does next; `then` is called when all of it can be seen."""

    action: Callable[[], None] = _nothing
    size_bytes: int = 0
    lines: int = 0
    then: Callable[[], None] = _nothing


class Display:
    """See the module. Thread-safe; nothing here blocks but `close`, for as long as it is told. What is given to it is
    shown in that order; each `then` is called by the thread that shows.

    Attributes:
        on_room: called when there is room again, after a time in which `may_read` was false.
    """

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
        self.on_room: Callable[[], None] = _nothing
        self._guests: dict[int, Source] = {}  # processes of other hosts, by key
        self._lock = threading.Lock()  # over the guests
        self._admission = Admission()
        self._queue: deque[_Job] = deque()
        self._unshown_lines = 0
        self._turn = threading.Condition()  # guards the queue and the admission
        self._started = self._closed = False
        # Of the showing thread:
        self._out, self._err = bytearray(), bytearray()
        self._parcels: list[Parcel] = []  # to be sent
        self._unfinished: list[Stream] = []  # those with a partial line
        self._aggregators: WeakSet[Aggregator] = WeakSet()  # as long as a source has them

    # ---- processes

    def source(self, key: int, origin: Origin) -> Source:
        """A process of this host that is about to start."""
        return Source(key, origin, Tail(self._tail_lines), self._file(origin))

    def guest(self, key: int, origin: Origin) -> Source:
        """A process of another host, until its last line has come."""
        with self._lock:
            source = self._guests.get(key)
            if source is None:
                source = self._guests[key] = Source(key, origin, Tail(0), self._file(origin))
            return source

    def forget(self, key: int) -> None:
        """A process of another host is gone, perhaps with its host and without a last line."""
        if (source := self._guests.get(key)) is not None:
            self._enqueue(_Job(partial(self._dismiss, source)))

    def configure(self, sources: Iterable[Source], *, show: bool, window_s: float | None) -> None:
        """From now on, show the lines of `sources` or not, and merge equal ones within a window or not."""
        sources = list(sources)
        aggregator = Aggregator(window_s) if window_s else None

        def change() -> None:
            for each in {id(s.aggregator): s.aggregator for s in sources if s.aggregator is not None}.values():
                self._show_groups(each)
            if aggregator is not None:
                self._aggregators.add(aggregator)
            for source in sources:
                source.shown, source.aggregator = show, aggregator

        self._enqueue(_Job(change))

    # ---- what they print

    def may_read(self) -> bool:
        """Whether there is room for more, or patience has ended, and what is read now `withholds`."""
        with self._turn:
            return self._admission.may_read(time.monotonic())

    def withholds(self) -> bool:
        """Whether what has been read now is not to be shown."""
        with self._turn:
            return self._admission.withholds(time.monotonic())

    def show(self, stream: Stream, data: bytes) -> None:
        """A process of this host has written `data`."""
        self._enqueue(_Job(partial(self._show_data, stream, data), len(data), data.count(b"\n")))

    def tell_withheld(self, stream: Stream, count: int) -> None:
        """Say that here are `count` lines fewer than there were."""

        def tell() -> None:
            for line in stream.reader.rest():
                self._take(stream.source, line)
            text = f"[{count} lines withheld, because the driver's output is too slow for them]"
            self._take(stream.source, Line(stream.number, stream.source.origin, text.encode()))

        self._enqueue(_Job(tell, 0, count))

    def end(self, source: Source, then: Callable[[], None]) -> None:
        """A process of this host has ended: show what it has left unfinished."""
        self._enqueue(_Job(partial(self._end, source), then=then))

    def receive(self, parcels: Sequence[Parcel], then: Callable[[], None]) -> None:
        """Show lines of processes of other hosts, and call `then`."""
        for _, run in itertools.groupby(parcels, key=lambda parcel: parcel.line is not None and parcel.line.stream):
            some = list(run)
            size_bytes = sum(len(line.text) + 1 for _, _, line in some if line is not None)
            self._enqueue(_Job(partial(self._show_parcels, some), size_bytes, len(some)))
        self.mark(then)

    def mark(self, then: Callable[[], None]) -> None:
        """Call `then` when all before this can be seen, but for lines that wait for their end, or for their window."""
        self._enqueue(_Job(then=then))

    def finish(self, then: Callable[[], None]) -> None:
        """Show also what waits for its end or its window, and call `then`; at once where there never was anything."""
        if self._started:
            self._enqueue(_Job(partial(self._show_unfinished, None), then=then))
        else:
            then()

    def close(self, done: threading.Event, patience_s: float) -> None:
        """Wait until all is shown, that of other hosts too, and end the thread.

        Args:
            done: comes with the last of this host.
            patience_s: how long to wait while the output does not move; while it does, for `_CLOSE_S` at most. Then say
                how much was not shown.
        """
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
        with self._turn:
            self._turn.notify_all()

    # ---- the thread

    def _enqueue(self, job: _Job) -> None:
        with self._turn:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="monarch-show", daemon=True).start()
            self._admission.queued(job.size_bytes, time.monotonic())
            self._unshown_lines += job.lines
            self._queue.append(job)
            self._turn.notify()

    def _run(self) -> None:
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
            for job in jobs:
                with _reported():
                    job.action()
            with _reported():
                self._pass_on()
            with self._turn:
                was_full = not self._admission.may_read(time.monotonic())
                self._admission.shown(sum(job.size_bytes for job in jobs), time.monotonic())
                self._unshown_lines -= sum(job.lines for job in jobs)
            if was_full:
                self.on_room()
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

    def _pass_on(self) -> None:
        """To the driver's output; or to the driver, and wait until it has shown all of it."""
        out, err = self._out, self._err
        self._out, self._err = bytearray(), bytearray()
        write(1, out)
        write(2, err)
        if self._send is not None and self._parcels:
            parcels, self._parcels = self._parcels, []
            seen = self._send(parcels)
            while not seen.wait(_LOOK_S) and not self._closed:
                pass

    def _next_deadline_s(self) -> float:
        due = [d for each in self._aggregators if (d := each.next_deadline_s()) is not None]
        due += [each.partial_since_s + _PARTIAL_S for each in self._unfinished if each.partial_since_s is not None]
        return min(due, default=float("inf"))

    def _show_data(self, stream: Stream, data: bytes) -> None:
        lines = stream.reader.feed(data)
        for line in lines:
            self._take(stream.source, line)
        if stream.reader.unfinished:
            if stream not in self._unfinished:
                self._unfinished.append(stream)
            if lines or stream.partial_since_s is None:
                stream.partial_since_s = time.monotonic()
        elif stream.partial_since_s is not None:
            stream.partial_since_s = None
            self._unfinished.remove(stream)

    def _take(self, source: Source, line: Line) -> None:
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
                self._show_groups(source.aggregator)
        else:
            (self._out if line.stream == 1 else self._err).extend(shown(line, prefix=self._prefix))

    def _show_parcels(self, parcels: list[Parcel]) -> None:
        for key, origin, line in parcels:
            source = self.guest(key, origin)
            if line is None:
                self._dismiss(source)
            else:
                self._take(source, line)

    def _dismiss(self, source: Source) -> None:
        self._end(source)
        with self._lock:
            self._guests.pop(source.key, None)

    def _end(self, source: Source) -> None:
        self._show_unfinished(source)
        source.close()
        if self._send is not None:
            self._parcels.append(Parcel(source.key, source.origin, None))

    def _show_due(self) -> None:
        """What has waited long enough. Only while nothing is queued: the end of a line may be."""
        now_s = time.monotonic()
        for stream in list(self._unfinished):
            if stream.partial_since_s is not None and now_s >= stream.partial_since_s + _PARTIAL_S:
                self._show_partial(stream)
        for aggregator in self._aggregators:
            if aggregator.over(now_s):
                self._show_groups(aggregator)

    def _show_unfinished(self, source: Source | None) -> None:
        """What waits for its end or its window, of one process or of all."""
        for stream in [each for each in self._unfinished if source is None or each.source is source]:
            self._show_partial(stream)
        for aggregator in self._aggregators if source is None else filter(None, [source.aggregator]):
            self._show_groups(aggregator)

    def _show_partial(self, stream: Stream) -> None:
        stream.partial_since_s = None
        self._unfinished.remove(stream)
        for line in stream.reader.rest():
            self._take(stream.source, line)

    def _show_groups(self, aggregator: Aggregator) -> None:
        for line, ranks, count in aggregator.take():
            (self._out if line.stream == 1 else self._err).extend(shown(line, ranks, count, prefix=self._prefix))

    def _file(self, origin: Origin) -> Any:
        if self._directory is None:
            return None
        os.makedirs(self._directory, exist_ok=True)
        name = re.sub(r"[^\w.-]", "_", origin.name)
        for attempt in itertools.count(1):  # meshes may have the same name
            again = f".{attempt}" if attempt > 1 else ""
            with contextlib.suppress(FileExistsError):
                return open(os.path.join(self._directory, f"{name}[{origin.rank}]{again}.log"), "xb", buffering=0)


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """The thread goes on, whatever fails."""
    try:
        yield
    except Exception:
        log.exception("output.not_shown")


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
