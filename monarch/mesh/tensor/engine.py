"""The workers of one mesh, for one controller: numbers, what the workers must know, and what becomes of failures.

Commands go to them by lanes (`lane`), one for each set of workers. Threads may use one engine at the same time.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from monarch.core import codec
from monarch.core.future import Future, Outcome
from monarch.core.ids import new_number
from monarch.errors import SupervisionError
from monarch.mesh.context import context
from monarch.mesh.shape import Region
from monarch.mesh.tensor.commands import Failure, Function
from monarch.mesh.tensor.errors import DeviceException, RemoteException, Stack, format_stack
from monarch.mesh.tensor.lane import Lane
from monarch.mesh.tensor.slots import Depot
from monarch.mesh.tensor.worker import Worker

if TYPE_CHECKING:
    from monarch.mesh.actor_mesh import ActorMesh
    from monarch.mesh.proc_mesh import ProcMesh
    from monarch.mesh.tensor.graphs import Recorder

R = TypeVar("R")
_FAILURES: Final = 1000


class Engine:
    """The workers of a mesh, for one controller."""

    def __init__(self, root: ProcMesh) -> None:
        self.lock = threading.RLock()
        self.root = root
        self.owner = context().actor_instance
        self.ranks = {proc.key: rank for rank, proc in enumerate(root._procs)}  # by process
        hosts = [(proc.keeper or proc).key for proc in root._procs]
        self.number = new_number()
        self.depots: ActorMesh[Any] = root.spawn("tensor_depots", Depot, self.number)  # type: ignore[assignment]
        self.workers: ActorMesh[Any] = root.spawn(  # type: ignore[assignment]
            "tensor_workers", Worker, self.number, self.depots, os.getpid(), hosts
        )
        self._unborn: Future[None] | None = self.depots.initialized
        self.lanes: dict[Region, Lane] = {}
        self.by_number: dict[int, Lane] = {}
        self.failures: dict[tuple[int, int], Stack] = {}  # the last ones, and of reductions, which may fail later
        self.recorder: Recorder | None = None
        self.recording = threading.Lock()  # held meanwhile
        self._compiled: dict[int, frozenset[int]] = {}  # by graph, the templates and functions in it
        self.coalescing: Counter[int] = Counter()  # blocks, by thread
        self.lost: BaseException | None = None
        self._next = 1
        self._waiting: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._asking = threading.Lock()  # guards it
        self._functions: weakref.WeakKeyDictionary[Any, tuple[int, Function]] = weakref.WeakKeyDictionary()
        self._paths: dict[str, tuple[int, Function]] = {}
        self._unused: list[int] = []  # functions and graphs that are gone

    def region_of(self, mesh: ProcMesh) -> Region:
        """The region of the actor meshes of this engine, whose ranks count from 0, that a view of the root means."""
        from monarch.mesh.slice import Slice

        root = self.root._region._slice
        if root == Slice.new_row_major(root._sizes):
            return mesh._region
        # A reference to a part of a mesh, as the root: its base ranks have gaps, and those of its actors have not.
        if mesh._region == self.root._region:
            return Region(self.root._region.labels, Slice.new_row_major(root._sizes))
        raise NotImplementedError(
            "views of a received part of a mesh are planned for tensors: activate the whole of it"
        )

    def lane(self, mesh: ProcMesh) -> Lane:
        found = self.lanes.get(mesh._region)
        if found is not None:
            return found
        with self.lock:
            self.refuse_lost()
            found = self.lanes.get(mesh._region)
            if found is None:
                found = Lane(self, next(_numbers), mesh)
                for other in self.lanes.values():
                    if not set(other.ranks).isdisjoint(found.ranks):
                        other.shared.append(found)
                        found.shared.append(other)
                self.lanes[mesh._region] = self.by_number[found.number] = found
        return found

    def new(self, count: int = 1) -> int:
        """The first of `count` numbers for tensors that follow each other."""
        with self.lock:
            first = self._next
            self._next += count
            return first

    def flush(self) -> None:
        """Send all commands that wait."""
        with self.lock:
            for lane in self.lanes.values():
                if lane.commands or lane.freed:
                    lane.flush()

    def flush_to_ask(self) -> None:
        """As `flush`, before something is fetched.

        Raises:
            NotImplementedError: inside a coalescing block.
        """
        if get_ident() in self.coalescing:
            raise NotImplementedError("fetching inside a coalescing block, or a compiled function: fetch after it")
        self.flush()

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Commands of the block leave together, at its end."""
        thread = get_ident()
        self.coalescing[thread] += 1
        try:
            yield
        finally:
            self.coalescing[thread] -= 1
            if not self.coalescing[thread]:
                del self.coalescing[thread]
                self.flush()

    # ---- results, and failures

    def ask(self, future: Future[Any], convert: Callable[[Any], R]) -> Future[R]:
        """A future of `convert(answer)`. It fails at once when a worker is lost."""
        driver = context().actor_instance.proc_runtime.driver
        result: Future[R] = Future._pending(driver, call=future._call)

        def convert_answer() -> R:
            try:
                with torch._C._DisableTorchDispatch():  # the tensors in it are local ones
                    answer = future.get(0)
            except SupervisionError as error:
                raise self.lost_by(error) from error
            return convert(answer)

        with self._asking:
            self._waiting.add(result)
        future._on_done(lambda: result._complete(convert_answer))
        if self.lost is not None:
            result._fail(self.lost_by(self.lost))
        return result

    def value(self, answer: Any) -> Any:
        """What a worker answered, or raises what it says of a failure."""
        if isinstance(answer, Failure):
            raise Outcome(self.failed(answer))
        return answer

    def failed(self, failure: Failure) -> RemoteException:
        lane = self.by_number.get(failure.lane)
        stack = lane.stack(failure.number) if lane is not None else ()
        return RemoteException(failure.what, format_stack(stack), failure.trace, failure.worker)

    def answered(self, answer: Future[Any]) -> None:
        """A batch came back; runs on the driving thread. It fails at once when a worker is gone."""
        error = answer.exception(0)
        if error is not None:
            self.lost_by(error)

    def remember(self, lane: int, number: int, stack: Stack) -> None:
        """Where a command was issued that has failed, or may still fail when its batch is answered."""
        self.failures[lane, number] = stack
        if len(self.failures) > _FAILURES:
            del self.failures[next(iter(self.failures))]

    def lost_by(self, error: BaseException) -> BaseException:
        """A worker is gone: all who wait hear of it, here and at other workers. What they wait for may never come."""
        if self.lost is None:
            self.lost = error
            # Not here: it may be the driving thread, which must not block.
            threading.Thread(target=self.depots.close.call_settled, name="monarch-tensors-lost", daemon=True).start()
        lost = error if isinstance(error, DeviceException) else DeviceException(f"a tensor worker is gone: {error}")
        with self._asking:
            waiting = list(self._waiting)
        for future in waiting:
            future._fail(lost)
        return lost

    def wait_for_depots(self) -> None:
        """Before the first batch: a depot that was told to stop before it was made would not wait for its worker.

        Raises:
            DeviceException: a process did not come up.
        """
        if self._unborn is not None:
            try:
                self._unborn.get()
            except Exception as error:
                raise self.lost_by(error) from error
            self._unborn = None

    def refuse_lost(self) -> None:
        """Raises: DeviceException, when a worker is gone."""
        if self.lost is not None:
            raise self.lost_by(self.lost) from self.lost

    # ---- what workers must know

    def function(self, function: Any) -> tuple[int, Function]:
        """The number of a function of the user's, and how it travels: once, as it is at its first use."""
        known: Any = self._paths if isinstance(function, str) else self._functions
        try:
            found = known.get(function)
        except TypeError:
            found = None  # it has no hash
        if found is None:
            self.forget_unused()
            number = next(_numbers)
            found = number, Function([bytes(part) for part in codec.encode(function)])
            try:
                known[function] = found
                if known is self._functions:
                    weakref.finalize(function, self._unused.append, number).atexit = False
            except TypeError:
                self._unused.append(number)  # no hash, or no weak references: it is sent with each call
        return found

    def keep(self, number: int, recorded: object, uses: Iterable[int]) -> None:
        """The graph of that number, and templates and functions that it uses, are known while there is `recorded`."""
        self.forget_unused()
        self._compiled[number] = frozenset(uses)
        weakref.finalize(recorded, self._unused.append, number).atexit = False

    def forget_unused(self, and_templates: bool = False) -> None:
        """Tell the workers which functions and graphs are gone, with all templates that are in no graph where asked."""
        with self.lock:
            if self.recorder is not None:
                return
            count = len(self._unused)  # a finalizer may add some at any time
            for number in self._unused[:count]:
                self._compiled.pop(number, None)
            kept = frozenset().union(*self._compiled.values())
            unused = [number for number in self._unused[:count] if number not in kept]
            self._unused[:count] = [number for number in self._unused[:count] if number in kept]
            for lane in self.lanes.values():
                lane.forget([*unused, *(lane.templates.keys() - kept if and_templates else ())])


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_making = threading.Lock()  # guards them
_numbers = itertools.count(1)
"""Of lanes, templates, functions and graphs: one series for all of them."""


def next_number() -> int:
    return next(_numbers)


def forget_templates() -> None:
    """The plans that know of the templates are gone; so that workers do not keep them for ever."""
    with _making:
        engines = list(_engines)
    for engine in engines:
        try:
            engine.forget_unused(and_templates=True)
        except DeviceException:
            pass  # its workers are gone, which whoever uses it next is told


def engine_of(mesh: ProcMesh) -> Engine:
    """The engine of the mesh that `mesh` is a view of, for the current actor; the first call spawns its workers.

    Raises:
        TypeError: it is no mesh of processes.
        RuntimeError: it was stopped.
    """
    root: Any = getattr(mesh, "_root", None)
    if root is None:
        raise TypeError(f"tensors are on meshes of processes, and {mesh!r} is none")
    root._refuse_stopped()
    if root._engine is None:
        with _making:
            if root._engine is None:
                owner = context().actor_instance
                same = (each for each in _engines if each.owner is owner and each.root == root and each.lost is None)
                root._engine = next(same, None) or Engine(root)
                _engines.add(root._engine)
    engine: Engine = root._engine
    return engine
