"""The threads that carry out transfers, so that an owner which does not answer holds up no others."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final

from attrs import define, field

from monarch.core.future import Future

_AT_A_TIME: Final = 8  # with one owner
_IDLE: Final = 16  # threads that are kept


@define(eq=False)
class Batch:
    """Completes a future with the end of the last of some jobs."""

    left: int
    future: Future[None]
    error: BaseException | None = None
    lock: threading.Lock = field(factory=threading.Lock)

    def ended(self, error: BaseException | None) -> None:
        """One of them, with or without an error."""
        with self.lock:
            self.error = self.error or error
            self.left -= 1
            last = not self.left
        if last and self.error is not None:
            self.future._fail(self.error)
        elif last:
            self.future._complete(lambda: None)


@define(eq=False)
class Job:
    """Something to do with the memory of `owner`, and who hears of its end; by then the user's own is let go of."""

    owner: int
    action: Callable[[], None] | None
    ended: Callable[[BaseException | None], None]

    def run(self) -> None:
        error: BaseException | None = None
        try:
            assert self.action is not None
            self.action()
        except BaseException as raised:
            error = raised
        self.action = None
        self.ended(error)


@define
class Workers:
    """Threads that end with the program, whatever they wait for. `_AT_A_TIME` of them at most serve one owner."""

    _jobs: queue.SimpleQueue[Job] = field(factory=queue.SimpleQueue)
    _lock: threading.Lock = field(factory=threading.Lock)
    _idle: int = 0
    _serving: defaultdict[int, int] = field(factory=lambda: defaultdict(int))  # by owner: how many threads
    _waiting: defaultdict[int, deque[Job]] = field(factory=lambda: defaultdict(deque))  # by owner

    def put(self, job: Job) -> None:
        with self._lock:
            if self._serving[job.owner] == _AT_A_TIME:
                self._waiting[job.owner].append(job)
                return
            if self._idle:
                self._idle -= 1
            else:  # first: where there can be no more threads, nothing has been changed
                threading.Thread(target=self._run, name="monarch-rdma", daemon=True).start()
            self._serving[job.owner] += 1
            self._jobs.put(job)

    def _run(self) -> None:
        job: Job | None = self._jobs.get()
        while job is not None:
            owner = job.owner
            job.run()
            del job
            job = self._next(owner)

    def _next(self, owner: int) -> Job | None:
        """For a thread that has served `owner`. None: there are others."""
        with self._lock:
            if waiting := self._waiting.get(owner):
                return waiting.popleft()
            self._waiting.pop(owner, None)
            self._serving[owner] -= 1
            if not self._serving[owner]:
                del self._serving[owner]
            if self._idle == _IDLE:
                return None
            self._idle += 1
        return self._jobs.get()
