"""Which actor printed or logged something: marks on the lines of a process, and `[actor=...]` on its log records.

Code of an actor is known by its context. Threads that an actor starts have none, nor have native code and subprocesses:
what they print is the only actor's of the process, or, where there are several, the process's.
"""

from __future__ import annotations

import io
import logging
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO, cast

from monarch.mesh import actor_config
from monarch.mesh.context import ActorInstance, current_context
from monarch.mesh.lines import Origin

if TYPE_CHECKING:
    from monarch.mesh.mesh_proc import MeshProc


def running_actor() -> ActorInstance | None:
    """The actor whose code runs here, or None outside any."""
    found = current_context.get()
    instance = None if found is None else found.actor_instance
    return instance if isinstance(instance, ActorInstance) else None


class Attribution:
    """Marks what this process prints. `origin` is the process itself."""

    def __init__(self, runtime: MeshProc, origin: Origin) -> None:
        self._runtime = runtime
        self._process = origin
        self._claimed = origin
        sys.stdout = _MarkedStream.in_place_of(sys.stdout)
        sys.stderr = _MarkedStream.in_place_of(sys.stderr)
        vars(sys).update(__stdout__=sys.stdout, __stderr__=sys.stderr)
        runtime.on_actors_changed = self.claim

    def claim(self) -> None:
        """Tell the reader, in the stream itself, whose unmarked lines are."""
        all_actors = list(self._runtime.actors.values())
        actors = (each for each in all_actors if isinstance(each, ActorInstance) and not each.prepares)
        some = list(islice(actors, 2))  # there may be thousands
        origin = some[0].origin if len(some) == 1 else self._process
        if origin == self._claimed:
            return
        self._claimed = origin
        for stream in (sys.__stdout__, sys.__stderr__):
            if isinstance(stream, _MarkedStream):
                stream.claim(origin)


class _MarkedStream(io.TextIOWrapper):
    """A standard stream whose lines start with the mark of the actor that printed them."""

    _fresh = True  # the next character begins a line
    _due = ""  # a claim that waits for the end of a line

    @classmethod
    def in_place_of(cls, stream: TextIO) -> _MarkedStream:
        old = cast(io.TextIOWrapper, stream)
        encoding, errors, write_through = old.encoding, old.errors, old.write_through
        return cls(old.detach(), encoding, errors, line_buffering=True, write_through=write_through)

    def write(self, text: str) -> int:
        actor = running_actor()
        if not text:
            return 0
        ended = text.endswith("\n")
        marked = text
        if actor is not None:
            mark = actor.origin.mark()
            marked = (text[:-1] if ended else text).replace("\n", f"\n{mark}") + ("\n" if ended else "")
            if self._fresh:
                marked = mark + marked
        if ended and self._due:
            marked, self._due = marked + self._due, ""
        self._fresh = ended
        super().write(marked)
        return len(text)

    def claim(self, origin: Origin) -> None:
        """At once, or when the line that somebody is writing has ended."""
        if self._fresh:
            super().write(origin.claim())
        else:
            self._due = origin.claim()


_prefixing = False


def prefix_log_records() -> None:
    """From now on, log records of actors in this process say so, unless the flag in `monarch.actor.config` is off."""
    global _prefixing
    if _prefixing:
        return
    _prefixing = True
    make_record = logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        actor = running_actor()
        if actor is not None and actor_config.prefix_python_logs_with_actor and record.msg != "":
            prefix = f"[actor={actor}] "
            record.msg = (prefix.replace("%", "%%") if record.args else prefix) + str(record.msg)
        return record

    logging.setLogRecordFactory(make)


def set_log_level(level: int) -> None:
    """Show no log record of this process below `level`."""
    for handler in logging.getLogger().handlers:
        handler.setLevel(level)
    if logging.lastResort is not None:
        logging.lastResort.setLevel(max(level, logging.WARNING))
