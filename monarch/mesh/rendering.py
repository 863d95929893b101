"""How a snapshot looks to people: as a tree, or as the stacks of its actors and threads.

Text for `rich`, without I/O but for the source lines of frames.
"""

from __future__ import annotations

import io
import linecache
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from monarch.core.serving import Running
from monarch.core.stacks import Frame, Stack, condensed
from monarch.mesh.snapshot import Actor, Process, ProcessState, Snapshot

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

_UNWRAPPED: Final = 10_000  # columns: what is not a terminal wraps nothing

_COLOURS: Final = {
    ProcessState.UP: "green",
    ProcessState.STARTING: "yellow",
    ProcessState.STOPPING: "yellow",
    ProcessState.HELD: "bold red",
    ProcessState.STOPPED: "bold red",
    ProcessState.UNKNOWN: "yellow",
}


def plain(snapshot: Snapshot) -> str:
    """Without colours or line breaks of a terminal."""
    from rich.console import Console

    text = io.StringIO()
    show(snapshot, Console(file=text, width=_UNWRAPPED, color_system=None, force_terminal=False, highlight=False))
    return text.getvalue().rstrip("\n")


def show(snapshot: Snapshot, console: Console) -> None:
    """The stacks, where they were asked for, else the tree. What is no terminal gets long lines whole."""
    if not console.is_terminal:
        console.width = _UNWRAPPED
    if not snapshot.shows_stacks:
        console.print(tree(snapshot))
        return
    for line in stack_lines(snapshot):
        console.print(line, soft_wrap=True)


def tree(snapshot: Snapshot) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(_program(snapshot))
    for host in snapshot.hosts:
        branch = root.add(Text.assemble("host ", (host.name, "bold")))
        for process in host.processes:
            twig = branch.add(_process(process))
            for actor in process.actors:
                twig.add(_actor(actor))
    return root


def stack_lines(snapshot: Snapshot) -> Iterator[Text]:
    """Process by process; actors that run an endpoint first, then other threads with code of the user's."""
    from rich.text import Text

    yield _program(snapshot)
    for process in snapshot.processes:
        yield Text()
        yield _process(process)
        actors = sorted(process.actors, key=lambda actor: not actor.running)  # stable: else in the order of their spawn
        for actor in actors:
            yield Text("  ").append_text(_actor(actor))
            for stack in actor.stacks:
                if not stack.is_idle:
                    title = f"    {stack.name}, at an await" if stack.waits else None
                    yield from _stack(stack, title, "    ")
        idle = 0
        for thread in process.threads:
            if thread.is_idle:
                idle += 1
            else:
                yield from _stack(thread, f"  thread {thread.name}", "    ")
        if idle:
            yield Text(f"  {_count(idle, 'more thread')} without code of the program", "dim")


def _program(snapshot: Snapshot) -> Text:
    from rich.text import Text

    processes = snapshot.processes
    size = f"{_count(len(processes), 'process', 'es')}, {_count(sum(len(p.actors) for p in processes), 'actor')}"
    program = " ".join(snapshot.program.split())
    short = program if len(program) <= 80 else f"{program[:77]}..."
    return Text.assemble((short, "bold"), f"  pid {snapshot.pid}  {size}")


def _process(process: Process) -> Text:
    from rich.text import Text

    text = Text.assemble("process ", (process.name, "bold"))
    text.append(f"  pid {process.pid}" if process.pid is not None else "  no pid yet")
    text.append("  ").append(process.state.value, _COLOURS[process.state])
    if process.memory_bytes is not None:
        text.append(f"  {process.memory_bytes / 2**20:.0f} MiB")
    if process.note:
        text.append(f"  ({process.note})")
    return text


def _actor(actor: Actor) -> Text:
    from rich.text import Text

    text = Text.assemble(actor.class_name, " ", (actor.name, "bold"), "  ")
    if actor.running:
        text.append(", ".join(map(_running, actor.running)), "yellow")
    else:
        text.append("idle" if actor.phase == "serving" else actor.phase, "dim")
    if actor.breakpoint:
        text.append(f"  at a breakpoint, {actor.breakpoint}", "yellow")
    if actor.running and actor.phase == "ending":
        text.append("  ending", "yellow")
    if actor.queued:
        text.append(f"  {actor.queued} queued", "yellow")
    if actor.restarts:
        text.append(f"  {_count(actor.restarts, 'restart')}", "yellow")
    return text


def _running(running: Running) -> str:
    return f"{running.endpoint} for {duration(running.for_s)}"


def duration(seconds: float) -> str:
    """As a reader wants it: `0.3 s`, `42 s`, `7 min 5 s`, `3 h 20 min`."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number != 1 else ''}"


def _stack(stack: Stack, title: str | None, indent: str) -> Iterator[Text]:
    from rich.text import Text

    if title is not None:
        yield Text(title)
    for line in frame_lines(stack.frames):
        yield Text(indent + line)


def frame_lines(frames: Sequence[Frame]) -> Iterator[str]:
    """As in a traceback, the most recent call last, with frames that tell little left out."""
    for shown in condensed(frames):
        if shown.frame is None:
            continue
        frame = shown.frame
        inside = f"  (and {_count(shown.inside, 'frame')} of monarch)" if shown.inside else ""
        yield f'  File "{frame.file}", line {frame.line}, in {frame.function}{inside}'
        source = linecache.getline(frame.file, frame.line).strip()
        if source:
            yield f"    {source}"
