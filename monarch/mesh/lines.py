"""From the bytes that processes print to the lines that the driver shows: who printed what. Sans-IO.

A process writes to a pipe for each of its two streams. Who of its actors printed a line stands at the start of the line
(`mark`), where Python wrote it; a line without a mark (native code, a subprocess) is the process's own, or its only
actor's, as the last `claim` said. Both are for the reader alone, which takes them off.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from attrs import define, field

MAX_LINE_BYTES: Final = 1 << 16
"""A longer line is shown in pieces, so that memory is bounded."""

_MARK: Final = "\x1e"
_CLAIM: Final = "\x1e\x1e"
_END: Final = "\x1f"


@define(frozen=True)
class Origin:
    """Who printed: an actor, or a process, by the name and the rank in its mesh."""

    name: str
    rank: int
    prefix: bytes = field(init=False, eq=False, repr=False)  # how a line of it starts where it is shown

    @prefix.default
    def _prefix(self) -> bytes:
        return f"{self.name}[{self.rank}] ".encode(errors="replace")

    def mark(self) -> str:
        """What stands before a line of it in a pipe."""
        return f"{_MARK}{self.name}{_END}{self.rank}{_END}"

    def claim(self) -> str:
        """A line that says: from here on, lines without a mark are mine."""
        return f"{_CLAIM}{self.name}{_END}{self.rank}{_END}\n"

    @classmethod
    def parse(cls, line: bytes, start: str) -> tuple[Origin, bytes] | None:
        """The origin at the start of `line` and what follows, or None where that is no mark of ours."""
        parts = line[len(start) :].split(_END.encode(), 2)
        if not line.startswith(start.encode()) or len(parts) < 3 or not parts[1].isdigit():
            return None
        return cls(parts[0].decode(errors="replace"), int(parts[1])), parts[2]


class Line(NamedTuple):
    """One line without its end, as it was printed. A tuple: a flood has 100,000 of them in a second.

    Attributes:
        stream: 1 or 2, for standard output or standard error.
    """

    stream: int
    origin: Origin
    text: bytes


class Parcel(NamedTuple):
    """A line of a process of another host, on its way to the driver.

    Attributes:
        key: of the process.
        origin: the process, whoever of its actors printed the line.
        line: None behind the last one.
    """

    key: int
    origin: Origin
    line: Line | None


@define(eq=False)
class LineReader:
    """Cuts one stream of one process into lines."""

    stream: int
    origin: Origin
    _partial: bytearray = field(factory=bytearray, init=False)
    _marks: dict[bytes, Origin] = field(factory=dict, init=False)

    def feed(self, data: bytes) -> list[Line]:
        """The lines that `data` completes."""
        *whole, rest = data.split(b"\n")
        lines: list[Line] = []
        if whole:
            whole[0] = bytes(self._partial) + whole[0]
            self._partial.clear()
            for text in whole:
                self._take(text, lines)
        self._partial += rest
        while len(self._partial) > MAX_LINE_BYTES:
            self._take(bytes(self._partial[:MAX_LINE_BYTES]), lines)
            del self._partial[:MAX_LINE_BYTES]
        return lines

    @property
    def unfinished(self) -> bool:
        """Whether the last line has no end yet."""
        return bool(self._partial)

    def rest(self) -> list[Line]:
        """The last line, though it has no end yet."""
        lines: list[Line] = []
        if self._partial:
            text = bytes(self._partial)
            self._partial.clear()
            self._take(text, lines)
        return lines

    def _take(self, text: bytes, lines: list[Line]) -> None:
        origin = self.origin
        if text.startswith(b"\x1e"):
            if (claimed := Origin.parse(text, _CLAIM)) is not None:
                self.origin = claimed[0]
                return
            end = text.find(b"\x1f", text.find(b"\x1f") + 1) + 1
            mark, text_after = text[:end], text[end:]
            known = self._marks.get(mark)
            if known is None and (parsed := Origin.parse(text, _MARK)) is not None:
                known = parsed[0]
                if len(self._marks) < 1000:
                    self._marks[mark] = known
            if known is not None:
                origin, text = known, text_after
        while len(text) > MAX_LINE_BYTES:
            lines.append(Line(self.stream, origin, text[:MAX_LINE_BYTES]))
            text = text[MAX_LINE_BYTES:]
        lines.append(Line(self.stream, origin, text))


@define(eq=False)
class Gate:
    """The bytes of one stream on their way to its `LineReader`, of which some have to be withheld: whole lines are,
    and they are counted."""

    _withheld: int = field(default=0, init=False)
    _inside: bool = field(default=False, init=False)  # the line that comes next has lost its beginning

    def refuse(self, data: bytes) -> None:
        """Withhold `data`."""
        self._withheld += data.count(b"\n")
        self._inside = not data.endswith(b"\n")

    def admit(self, data: bytes) -> tuple[int, bytes]:
        """How many lines were withheld until now, and what of `data` to show behind that."""
        if self._inside:
            end = data.find(b"\n") + 1
            if not end:
                return 0, b""
            self._inside, data = False, data[end:]
            self._withheld += 1
        return self.take_count(), data

    def take_count(self) -> int:
        """How many lines were withheld and not told of."""
        count, self._withheld = self._withheld, 0
        return count


@define(eq=False)
class _Group:
    line: Line
    ranks: set[int] = field(factory=set)
    count: int = 0


_TIME: Final = re.compile(rb"\W?(?:\d{4}[-/]\d\d[-/]\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d+)?")
"""Of a log record, at the start of its line."""

_ACTOR: Final = re.compile(rb"\[actor=[^\]]*\] ")
"""Of a log record: who it is from."""


@define(eq=False)
class Aggregator:
    """Merges equal lines that members of a mesh print within a window of time, whatever time they start with, and
    whichever of them the log records name. Nothing else is ever merged: two lines that differ in a number are two
    lines."""

    window_s: float
    max_bytes: int = 1 << 20  # of different lines; then the window ends early
    _groups: dict[tuple[int, str, bytes], _Group] = field(factory=dict, init=False)
    _bytes: int = field(default=0, init=False)
    _began_s: float = field(default=0.0, init=False)

    def add(self, line: Line, now_s: float) -> None:
        """Take a line in."""
        if not self._groups:
            self._began_s = now_s
        time = _TIME.match(line.text)
        text = line.text if time is None else line.text[time.end() :]
        key = (line.stream, line.origin.name, _ACTOR.sub(b"", text, 1))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(line)
            self._bytes += len(line.text) + 100
        group.count += 1
        group.ranks.add(line.origin.rank)

    def over(self, now_s: float) -> bool:
        """Whether the window is over."""
        return bool(self._groups) and (self._bytes > self.max_bytes or now_s >= self._began_s + self.window_s)

    def next_deadline_s(self) -> float | None:
        return self._began_s + self.window_s if self._groups else None

    def take(self) -> list[tuple[Line, str, int]]:
        """The lines of the window, in the order in which each was first seen: (one of them, ranks, how many)."""
        groups, self._groups, self._bytes = self._groups, {}, 0
        return [(group.line, ranges(group.ranks), group.count) for group in groups.values()]


def ranges(ranks: Iterable[int]) -> str:
    """`{0, 2, 3, 4}` as "0,2-4"."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def shown(line: Line, ranks: str = "", count: int = 1, *, prefix: bool = True) -> bytes:
    """A line as the driver shows it: `name[rank] text`, and for several equal ones `name[ranks] [N similar log lines]
    text`."""
    if count == 1:
        return b"%b%b\n" % (line.origin.prefix if prefix else b"", line.text)
    whose = f"{line.origin.name}[{ranks}] " if prefix else ""
    return b"%b%b\n" % (f"{whose}[{count} similar log lines] ".encode(errors="replace"), _ACTOR.sub(b"", line.text, 1))


class Admission:
    """What to do with output while the one who shows it is behind: its bound is in bytes, its patience in seconds.

    While there is room, everything is taken. When there is none, processes wait, as they would for a slow terminal; but
    only as long as something still moves. After `patience_s` without any, output is withheld, and processes go on,
    until half of the room is free again. `moved_s` is when something last moved.
    """

    def __init__(self, limit_bytes: int = 8 << 20, patience_s: float = 5.0) -> None:
        self._limit_bytes, self._patience_s = limit_bytes, patience_s
        self._queued_bytes = 0
        self.moved_s = 0.0
        self._withholding = False

    def queued(self, size: int, now_s: float) -> None:
        if not self._queued_bytes:
            self.moved_s = now_s
        self._queued_bytes += size

    def shown(self, size: int, now_s: float) -> None:
        self._queued_bytes -= size
        self.moved_s = now_s
        if self._queued_bytes <= self._limit_bytes // 2:
            self._withholding = False

    def may_read(self, now_s: float) -> bool:
        """Whether to read at all: to keep it, or to withhold it."""
        return self._queued_bytes < self._limit_bytes or self.withholds(now_s)

    def withholds(self, now_s: float) -> bool:
        """Whether what is read now is not shown."""
        if self._queued_bytes >= self._limit_bytes and now_s >= self.moved_s + self._patience_s:
            self._withholding = True
        return self._withholding or self._queued_bytes >= 2 * self._limit_bytes


class Tail:
    """The last lines of a process."""

    def __init__(self, lines: int) -> None:
        self._lines: deque[bytes] = deque(maxlen=lines)

    def add(self, line: Line) -> None:
        self._lines.append(line.text)

    def text(self) -> str:
        return b"\n".join(self._lines).decode(errors="replace")
