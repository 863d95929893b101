"""The driver's side of the debugger: which actors wait at a breakpoint, and what people at terminals do with them.

A `Terminal` is one `monarch debug`. It has a prompt of its own, and attaches to one waiting actor at a time, whose pdb
then gets its lines; `cast` sends one command to many. What a pdb says while nobody is attached is kept for who comes.

Nothing here reads or writes: a desk is told what actors and people do, and calls what it was given for an answer.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Final

from attrs import define

from monarch.core.ids import ProcId
from monarch.errors import UnknownDimension
from monarch.mesh.breakpoints import PDB_PROMPT, Place, Waiter

PROMPT: Final = "monarch> "
_KEPT_CHARS: Final = 1 << 16

HELP: Final = """\
list                         l   the actors that wait at a breakpoint
attach NAME RANK             a   go to the pdb of one of them; `detach` or the end of input comes back, and it waits on
cast NAME ranks(SPEC) CMD        send CMD to the pdb of several: ranks(), ranks(3), ranks(1,4,6), ranks(0:8:2), or by
                                 dimension, ranks(hosts=0:2,gpus=(3,6))
continue                     c   clear all breakpoints, and let all go on
help                         h
quit                         q   leave; actors that wait go on waiting
"""


@define(eq=False)
class _Session:
    waiter: Waiter
    place: Place | None = None  # None: it runs
    kept: str = ""
    terminal: Terminal | None = None
    attached: bool = False  # the terminal's lines go there; otherwise it only hears the answers to `cast`
    asked: int = 0  # commands of `cast` that have not been answered


class Desk:
    """See the module. Thread-safe.

    Args:
        send: takes a line to the pdb of an actor.
        announce: takes a sentence to the driver's user, when an actor waits and no terminal is there.
        command: what to run in another terminal.
    """

    def __init__(self, send: Callable[[ProcId, int, str], None], announce: Callable[[str], None], command: str) -> None:
        self._send, self._announce, self._command = send, announce, command
        self._lock = threading.RLock()
        self._sessions: dict[int, _Session] = {}
        self._terminals: list[Terminal] = []

    # ---- what actors do

    def stopped(self, waiter: Waiter, place: Place, said: str) -> None:
        """An actor is at the prompt of its pdb, which ends what that has `said`."""
        with self._lock:
            first = not self.waiting()
            session = self._sessions.setdefault(waiter.id, _Session(waiter))
            session.place = place
            attended = session.terminal is not None
            self.said(waiter.id, said)
            if not attended:
                text = f"breakpoint hit in {waiter}, {place}"
                if self._terminals:
                    for terminal in self._terminals:
                        terminal.tell(f"{text}\n")
                elif first:
                    self._announce(f"{text}. It waits; to debug it, run in another terminal: {self._command}")

    def said(self, id: int, text: str) -> None:
        with self._lock:
            session = self._sessions.get(id)
            if session is None:
                return
            terminal = session.terminal
            if terminal is None:
                session.kept = (session.kept + text)[-_KEPT_CHARS:]
            elif session.attached:
                terminal.write(text)
            else:
                answered = text.endswith(PDB_PROMPT)
                lines = text.removesuffix(PDB_PROMPT).splitlines()
                terminal.tell("".join(f"{session.waiter} {line}\n" for line in lines))
                if answered:
                    session.asked -= 1
                if not session.asked:
                    session.terminal, session.kept = None, PDB_PROMPT

    def resumed(self, id: int, over: bool) -> None:
        with self._lock:
            session = self._sessions.get(id)
            if session is None:
                return
            session.place, session.kept = None, ""
            if over:
                self._end(session, "goes on")

    def proc_gone(self, key: int) -> None:
        with self._lock:
            for session in list(self._sessions.values()):
                if session.waiter.proc.key == key:
                    self._end(session, "has ended, with its process")

    def _end(self, session: _Session, how: str) -> None:
        del self._sessions[session.waiter.id]
        terminal, session.terminal = session.terminal, None
        if terminal is not None and session.attached:
            terminal.attached = None
            terminal.write(f"{session.waiter} {how}\n{PROMPT}")

    def _waiting_as(self, name: str) -> list[_Session]:
        return [s for s in self._sessions.values() if s.waiter.name == name and s.place is not None]

    def waiting(self) -> list[tuple[Waiter, Place]]:
        """Who waits, by name and rank."""
        with self._lock:
            found = [(s.waiter, s.place) for s in self._sessions.values() if s.place is not None]
        return sorted(found, key=lambda each: (each[0].name, each[0].rank))

    # ---- what people do

    def open(self, write: Callable[[str], None]) -> Terminal:
        """Somebody has come: greet him. `write` takes text to his terminal, and must not block."""
        with self._lock:
            terminal = Terminal(self, write)
            self._terminals.append(terminal)
            write(f"{self.table()}(help shows the commands)\n{PROMPT}")
            return terminal

    def close(self, terminal: Terminal) -> None:
        """He is gone; who was attached waits on."""
        with self._lock:
            self.detach(terminal)
            for session in self._sessions.values():
                if session.terminal is terminal:
                    session.terminal, session.asked = None, 0
            if terminal in self._terminals:
                self._terminals.remove(terminal)

    def table(self) -> str:
        rows = [("ACTOR", "RANK", "COORDINATES", "HOST", "FUNCTION", "LINE")]
        for waiter, place in self.waiting():
            point = " ".join(f"{label}={at}" for label, at in waiter.point) or "-"
            rows.append(
                (waiter.name, str(waiter.rank), point, waiter.host, place.function, f"{place.file}:{place.line}")
            )
        if len(rows) == 1:
            return "no actor waits at a breakpoint\n"
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)

    def attach(self, terminal: Terminal, name: str, rank: int | None) -> str | None:
        """Returns what is wrong, if it is."""
        with self._lock:
            named = self._waiting_as(name)
            found = [s for s in named if rank in (None, s.waiter.rank)]
            if len(found) != 1:
                return f"give one of the ranks of {name!r} that wait: {_ranks(named)}" if named else _nobody(name)
            (session,) = found
            if session.terminal not in (None, terminal):
                return f"somebody else is attached to {session.waiter}"
            session.terminal, session.attached, terminal.attached = terminal, True, session.waiter.id
            session.asked = 0
            terminal.write(session.kept)
            session.kept = ""
            return None

    def detach(self, terminal: Terminal) -> None:
        with self._lock:
            session = self._sessions.get(terminal.attached or 0)
            terminal.attached = None
            if session is not None:
                session.terminal, session.attached = None, False
                session.kept = "" if session.place is None else PDB_PROMPT

    def line_from(self, terminal: Terminal, line: str) -> None:
        """A line for the pdb that the terminal is attached to."""
        with self._lock:
            session = self._sessions.get(terminal.attached or 0)
            if session is not None and session.place is not None:
                self._send_to(session, line)
            elif session is not None:
                terminal.write(f"{session.waiter} runs, and may stop again; `detach` leaves it alone\n")

    def _send_to(self, session: _Session, line: str) -> None:
        self._send(session.waiter.proc, session.waiter.id, line + "\n")

    def cast(self, terminal: Terminal | None, name: str, spec: str, command: str) -> int:
        """Send a command to several; the terminal shows their answers. Returns to how many.

        Raises:
            ValueError: the spec cannot be read, or there is nobody that it means.
        """
        with self._lock:
            named = self._waiting_as(name)
            meant = [s for s in named if matches(spec, s.waiter.rank, dict(s.waiter.point))]
            if not meant:
                raise ValueError(
                    f"ranks({spec}) is none that waits of {name!r}: {_ranks(named)}" if named else _nobody(name)
                )
            chosen = [s for s in meant if s.terminal in (None, terminal)]
            if not chosen:
                raise ValueError(f"somebody else is attached to {', '.join(str(s.waiter) for s in meant)}")
            for session in chosen:
                session.terminal, session.attached = terminal, False
                session.asked += terminal is not None
                self._send_to(session, command)
            return len(chosen)

    def release(self) -> int:
        """Let all go, clearing their breakpoints. Returns how many waited."""
        with self._lock:
            for session in self._sessions.values():
                self._send_to(session, "release")
            return len(self.waiting())


class Terminal:
    """One `monarch debug`. `attached` is the session that gets its lines."""

    def __init__(self, desk: Desk, write: Callable[[str], None]) -> None:
        self._desk = desk
        self.write = write
        self.attached: int | None = None

    def tell(self, text: str) -> None:
        """Something that was not asked for: on lines of its own, with the prompt anew."""
        self.write(text if self.attached is not None else f"\r{text}{PROMPT}")

    def line(self, line: str | None) -> bool:
        """What was typed, without its end, or None at the end of input. Returns whether to go on."""
        if self.attached is not None:
            if line is None or line.strip() == "detach":
                self._desk.detach(self)
                self.write(f"\n{PROMPT}")
            else:
                self._desk.line_from(self, line)
            return True
        if line is None:
            return False
        answer = self._run(line.strip())
        if answer is not None and self.attached is None:
            self.write(f"{answer}{PROMPT}")
        return answer is not None

    def _run(self, line: str) -> str | None:
        """The answer to a command at our own prompt; None when it was the last."""
        word, _, rest = line.partition(" ")
        if word in ("q", "quit"):
            return None
        if word in ("c", "continue"):
            return f"{self._desk.release()} actor(s) go on\n"
        if word in ("l", "list"):
            return self._desk.table()
        if word in ("a", "attach"):
            named = re.fullmatch(r"(.+?)(?:\s+(\d+))?", rest.strip())
            if named is None:
                return "attach NAME RANK\n"
            wrong = self._desk.attach(self, named[1], None if named[2] is None else int(named[2]))
            return "" if wrong is None else f"{wrong}\n"
        if word == "cast":
            parsed = re.fullmatch(r"\s*(.+?)\s+ranks\(((?:[^()]|\([^()]*\))*)\)\s+(.+)", rest)
            if parsed is None:
                return "cast NAME ranks(SPEC) CMD\n"
            try:
                return f"sent to {self._desk.cast(self, parsed[1], parsed[2], parsed[3])} actor(s)\n"
            except ValueError as error:
                return f"{error}\n"
        return HELP if word in ("h", "help", "?") else "" if not word else f"unknown command {word!r}; see help\n"


def _nobody(name: str) -> str:
    return f"no {name!r} waits; see list"


def _ranks(sessions: Sequence[_Session]) -> str:
    return ", ".join(map(str, sorted(s.waiter.rank for s in sessions)))


def matches(spec: str, rank: int, point: dict[str, int]) -> bool:
    """Whether a rank is meant by the SPEC of `ranks(SPEC)`; all are by an empty one.

    Raises:
        ValueError: it is not of the form `3`, `1,4,6`, `start:stop:step` or `dim=...,dim=(3,6)`, or there is no such
            dimension.
    """
    spec = spec.replace(" ", "")
    if "=" not in spec:
        return not spec or _among(spec, rank)
    for part in re.split(r",(?=[^,=()]+=)", spec):
        label, _, values = part.partition("=")
        if label not in point:
            raise UnknownDimension("its mesh", label, point)
        values = values[1:-1] if values.startswith("(") and values.endswith(")") else values
        if not _among(values, point[label]):
            return False
    return True


def _among(spec: str, value: int) -> bool:
    if re.fullmatch(r"\d+(,\d+)*,?", spec):
        return str(value) in spec.split(",")
    if re.fullmatch(r"\d*:\d*(:\d*)?", spec):
        start, stop, step = (int(part) if part else None for part in (spec + "::").split(":")[:3])
        if step == 0:
            raise ValueError(f"the step of {spec!r} is 0")
        return value in range(start or 0, value + 1 if stop is None else stop, step or 1)
    raise ValueError(f"{spec!r} is no rank, list of ranks, or range start:stop:step")
