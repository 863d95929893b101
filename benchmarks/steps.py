"""One call, taken apart: the time of each step on its way to an actor of another process and back.

    python -m benchmarks.steps [TRANSPORT]

Functions at the edges of the layers note the time when they are entered or left, in both processes, whose clock is the
same. Each note costs some 0.3 us, which the steps contain.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from functools import wraps
from types import ModuleType
from typing import Any, Final

from attrs import define

from benchmarks.clock import median, now_s
from benchmarks.load import Watch
from benchmarks.report import in_units
from monarch import compiled
from monarch.actor import Actor, context, endpoint, this_host
from monarch.core.future import Future
from monarch.core.instance import Instance
from monarch.core.mailbox import Mailbox
from monarch.core.peer import Peer

Note = tuple[str, float]


@define(frozen=True)
class Step:
    """Ends with the note `until`; begins with the one of the step before."""

    until: str
    text: str


STEPS: Final = (
    Step("called", ""),
    Step("caller addressed", "bind and pickle the arguments, open a reply port, number the message"),
    Step("caller numbered", "number the frame for the peer, and keep it until it is acknowledged"),
    Step("callee read", "over the link, and the wake-up of the callee where it sleeps"),
    Step("callee queued", "acknowledge, route by the head"),
    Step("callee taken", "mailbox: order, then the turn of the actor"),
    Step("entered", "decode the arguments, make the context"),
    Step("callee addressed", "return from the endpoint, pickle the result"),
    Step("callee numbered", "number the frame of the reply"),
    Step("caller read", "over the link, and the wake-up of the caller where it sleeps"),
    Step("caller delivered", "acknowledge, route, to the reply port"),
    Step("returned", "wake who waits, decode the result, return from `get`"),
)

_notes: list[Note] = []


def _note(label: str) -> None:
    _notes.append((label, now_s()))


def _entered(owner: type | ModuleType, name: str, label: str) -> None:
    """Note when a method or function is entered."""
    method: Callable[..., Any] = getattr(owner, name)

    @wraps(method)
    def noting(*args: Any, **kwargs: Any) -> Any:
        _note(label)
        return method(*args, **kwargs)

    setattr(owner, name, noting)


def _left_with_something(cls: type, name: str, label: str) -> None:
    """Note when a method has returned something that is not empty."""
    method: Callable[..., Any] = getattr(cls, name)

    @wraps(method)
    def noting(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if result:
            _note(label)
        return result

    setattr(cls, name, noting)


def _note_links(who: str) -> None:
    """Where messages leave and enter this process, whatever its links are."""
    gateway = context().actor_instance.proc_runtime.gateway
    _entered(Peer, "send", f"{who} addressed")
    _entered(compiled, "post", f"{who} addressed")
    for link in {type(peer.link) for peer in gateway.peers if peer.link is not None}:
        _entered(link, "send_nowait", f"{who} numbered")
        _left_with_something(link, "recv_nowait", f"{who} read")


class Noting(Actor):
    @endpoint
    def begin(self) -> None:
        _note_links("callee")
        _entered(Mailbox, "put", "callee queued")
        _entered(Instance, "_serve", "callee taken")

    @endpoint
    def ping(self, value: int) -> int:
        _note("entered")
        return value

    @endpoint
    def notes(self) -> list[Note]:
        return _notes


def measure(calls: int) -> list[tuple[Step, float]]:
    """The median of each step, in seconds."""
    procs = this_host().spawn_procs(per_host={"procs": 1})
    actor = procs.spawn("noting", Noting)
    actor.begin.call_one().get()
    _note_links("caller")
    _entered(Future, "_complete", "caller delivered")
    for value in range(calls):
        _note("called")
        actor.ping.call_one(value).get()
        _note("returned")
    mine = list(_notes)
    notes = sorted(mine + actor.notes.call_one().get(), key=lambda note: note[1])
    procs.stop().get()
    noted = Counter(label for label, _ in notes)
    steps = list(made({label for label, count in noted.items() if count > calls // 2}))
    times = list(_complete(notes, steps))
    return [(step, median([each[at] - each[at - 1] for each in times])) for at, step in enumerate(steps) if at]


def made(labels: Set[str]) -> Iterator[Step]:
    """The steps that end with these notes. What the compiled part does in one has the texts of all that are in it."""
    texts: list[str] = []
    for step in STEPS:
        texts.append(step.text)
        if step.until in labels:
            yield Step(step.until, "; ".join(texts))
            texts = []


def _complete(notes: Sequence[Note], steps: Sequence[Step]) -> Iterator[list[float]]:
    """The times of all steps of those calls in which each came after the one before."""
    seen: dict[str, float] = {}
    for label, at_s in notes:
        if label == "called":
            seen = {}
        seen[label] = at_s
        if label == "returned":
            times = [seen.get(step.until, 0.0) for step in steps]
            if times == sorted(times) and times[0]:
                yield times


def markdown(steps: Sequence[tuple[Step, float]], conditions: str) -> str:
    lines = ["| step | time |", "|---|---:|"]
    lines += [f"| {step.text} | {in_units(seconds, 's')} |" for step, seconds in steps]
    lines.append(f"| all | {in_units(sum(seconds for _, seconds in steps), 's')} |")
    return "\n".join([*lines, "", conditions, ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description="Take one call apart.")
    parser.add_argument("transport", nargs="?", default="auto")
    parser.add_argument("--calls", type=int, default=3000)
    options = parser.parse_args()
    os.environ["MONARCH_TRANSPORT"] = options.transport
    watch = Watch()
    measured = measure(options.calls)
    load = watch.stop()
    text = f"Medians of {options.calls} calls over {options.transport}; {os.cpu_count()} CPUs; load {load.average:.1f}."
    print(markdown(measured, text))


if __name__ == "__main__":
    from benchmarks import steps  # by its name, which the other process knows, too

    steps.main()
