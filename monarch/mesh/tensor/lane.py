"""Commands for the same workers: in which batches they go, and how far ahead of the workers the controller may run.

Batches of up to `BATCH` leave when somebody waits for a result, when the workers are idle, or when a batch is full.
Lanes that share a worker never hold commands at the same time: whoever appends to one sends the others first, so each
worker gets all of its commands in the controller's order.

A worker answers each batch with the failures in it. At most `AHEAD` batches of a lane are unanswered: then the
controller waits. Where commands were issued is remembered until their batch is answered.

Threads may use one lane at the same time: a command, with what it defines, is appended under the lock of its engine.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from monarch.core.future import Future
from monarch.mesh.tensor.commands import Op, Template, View
from monarch.mesh.tensor.errors import Stack

if TYPE_CHECKING:
    from monarch.mesh.actor_mesh import ActorMesh
    from monarch.mesh.proc_mesh import ProcMesh
    from monarch.mesh.tensor.engine import Engine
    from monarch.mesh.tensor.streams import Stream

BATCH: Final = 128
FREED: Final = 64
"""So many small shards wait to be freed; a large one is freed with the next command."""
FEWEST: Final = 16
"""A batch leaves before it is full when the workers are idle and it has so many."""
AHEAD: Final = 32


class Place:
    """Where tensors live: the workers of a lane, and a stream. One object for each pair."""

    __slots__ = ("lane", "stream")

    def __init__(self, lane: Lane, stream: Stream) -> None:
        self.lane, self.stream = lane, stream


class _Sent:
    """A batch that is on its way: its number of commands, and where they were issued."""

    __slots__ = ("answer", "first", "stacks")

    def __init__(self, answer: Future[Any], first: int, stacks: list[Stack]) -> None:
        self.answer, self.first, self.stacks = answer, first, stacks


class Lane:
    """Commands for the same workers. See the module."""

    def __init__(self, engine: Engine, number: int, mesh: ProcMesh) -> None:
        self.engine, self.number, self.mesh = engine, number, mesh
        self.region = region = engine.region_of(mesh)
        self.ranks = tuple(region._slice)  # of the workers
        workers = engine.workers._with_region(region)
        self.workers: ActorMesh[Any] = workers
        self._execute: Callable[..., Future[Any]] = workers.execute.call
        self.commands: list[tuple[Any, ...]] = []
        self.freed: list[int] = []
        self.frees_now = False
        self.known: set[int] = set()  # functions and graphs that the workers have, by number
        self.templates: dict[int, Template] = {}  # and templates
        self.shared: list[Lane] = []  # lanes that have workers of this one
        self._stacks: list[Stack] = []
        self._definitions: list[tuple[int, Any]] = [(number, View(region))]
        self._issued = 0
        self._sent: deque[_Sent] = deque()
        self.places: dict[Stream, Place] = {}

    def is_part_of(self, other: Lane) -> bool:
        return self.engine is other.engine and set(self.ranks) <= set(other.ranks)

    def where(self, other: Lane) -> str:
        """Its sizes, and what tells it from another one of the same sizes."""
        sizes = str(dict(self.mesh.sizes))
        if self.engine is not other.engine or self.mesh.sizes != other.mesh.sizes:
            return sizes
        return f"{sizes} (ranks {', '.join(map(str, self.ranks))} of {len(self.engine.ranks)})"

    def worker_at(self, coordinates: dict[str, int]) -> Any:
        """One worker, as a mesh of no dimensions. Coordinates that are not given are 0.

        Raises:
            TypeError, IndexError: the mesh has no such dimension, or it is smaller.
        """
        return self.workers.slice(**{**dict.fromkeys(self.region._labels, 0), **coordinates})

    def place(self, stream: Stream) -> Place:
        found = self.places.get(stream)
        if found is None:
            found = self.places[stream] = Place(self, stream)
        return found

    def define(self, number: int, what: Any) -> None:
        """Tell the workers once what a number means, before the next command."""
        with self.engine.lock:
            if number not in self.known:
                self.known.add(number)
                self._definitions.append((number, what))

    def define_template(self, number: int, template: Template) -> None:
        self.templates[number] = template
        self._definitions.append((number, template))

    def append(self, command: tuple[Any, ...], stack: Stack) -> int:
        """The next command; returns its number in this lane. `stack` is where it was issued."""
        with self.engine.lock:
            for other in self.shared:
                if other.commands:
                    other.flush()
            commands = self.commands
            if self.frees_now or len(self.freed) >= FREED:
                self._append_freed()
            commands.append(command)
            self._stacks.append(stack)
            number = self._issued + len(commands) - 1
            recorder = self.engine.recorder
            if recorder is not None:
                recorder.takes(self, command)
            if len(commands) >= FEWEST and not self.engine.coalescing:
                sent = self._sent
                if len(commands) >= BATCH or not sent or sent[-1].answer.done():
                    self.flush()
            return number

    def _append_freed(self) -> None:
        self.frees_now = False
        count = len(self.freed)  # another thread may add some at any time
        command = (int(Op.FREE), *self.freed[:count])
        del self.freed[:count]
        self.commands.append(command)
        self._stacks.append(())
        if self.engine.recorder is not None:
            self.engine.recorder.takes(self, command)

    def flush(self) -> None:
        """Send what is there; waits while the workers are too far behind.

        Raises:
            DeviceException: a worker is gone.
        """
        engine = self.engine
        with engine.lock:
            engine.refuse_lost()
            engine.wait_for_depots()
            if self.freed:
                if not self.commands:
                    for other in self.shared:
                        if other.commands:
                            other.flush()
                self._append_freed()
            if not self.commands:
                return
            commands, stacks, definitions = self.commands, self._stacks, self._definitions
            self.commands, self._stacks, self._definitions = [], [], []
            first = self._issued
            self._issued += len(commands)
            batch = pickle.dumps((definitions, commands), 5)
            answer = self._execute(self.number, first, batch)
            answer._on_done(lambda: engine.answered(answer))
            self._sent.append(_Sent(answer, first, stacks))
            while len(self._sent) > AHEAD or (self._sent and self._sent[0].answer.done()):
                self._settle(self._sent[0])
                self._sent.popleft()  # afterwards: Ctrl-C may end the wait

    def _settle(self, sent: _Sent) -> None:
        """Take the answer to a batch; where it tells of failures, keep where the commands were issued."""
        try:
            answers = sent.answer.get()
        except Exception as error:
            raise self.engine.lost_by(error) from error
        for failed in answers.values():
            for number in failed or ():
                self.engine.remember(self.number, number, sent.stacks[number - sent.first])

    def forget(self, numbers: Iterable[int]) -> None:
        """What these stand for is not used any more."""
        with self.engine.lock:
            gone = [number for number in numbers if number in self.known or number in self.templates]
            if gone and self.engine.lost is None:
                self.append((int(Op.FORGET), *gone), ())
                for number in gone:
                    self.known.discard(number)
                    self.templates.pop(number, None)
                self.flush()  # who still uses one defines it again, and a batch defines before it forgets

    def stack(self, number: int) -> Stack:
        """Where a command was issued that has failed."""
        for sent in list(self._sent):
            if sent.first <= number < sent.first + len(sent.stacks):
                return sent.stacks[number - sent.first]
        return self.engine.failures.get((self.number, number), ())
