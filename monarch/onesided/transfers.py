"""Runs transfers: chooses the path to each process, once, and moves bytes on threads beside the actors.

Which path: between processes of one host shared memory, else ibverbs where both sides have a device, else chunks over
the link. The setting `rdma_path` forces one. Small transfers that need nobody's help are done in the calling thread.

An owner that does not answer holds up the transfers with it, until their time is over, and no others.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from attrs import define

from monarch.core import settings
from monarch.core.address import host_identity
from monarch.core.future import Future
from monarch.core.monitor import Down
from monarch.core.proc import Proc
from monarch.errors import NotViable
from monarch.log import get_logger
from monarch.onesided import chunks, ibverbs
from monarch.onesided.chunks import Chunks, owner_gone
from monarch.onesided.exports import Export, exports
from monarch.onesided.here import Here
from monarch.onesided.ibverbs import Passive, Verbs
from monarch.onesided.jobs import Batch, Job, Workers
from monarch.onesided.local import Local, local, on_host, to_device, view_of
from monarch.onesided.neighbour import Neighbour, NeighbourGone, no_copying_here
from monarch.onesided.path import NotReachable, Path, Remote, late, left_of
from monarch.onesided.shared import Shared
from monarch.verbs.node import node

log = get_logger("monarch.rdma")

_AT_ONCE_BYTES: Final = 256 << 10  # a hop to a worker and back costs as much as copying some 100 KiB


def preferred() -> tuple[str, str]:
    """The path between processes of this host for memory of any kind, and the reason; "none" where there is no path."""
    wanted = settings.get("rdma_path")
    if wanted != "auto":
        return wanted, "rdma_path asks for it"
    refused = no_copying_here() if exports().place.host else "there are no shared files"
    if not refused:
        return "shm", "the kernel copies between processes of this host"
    reason = f"the kernel does not copy between processes of this host ({refused})"
    if ibverbs.why_not() is None:
        return "ibverbs", reason
    if settings.get("rdma_allow_tcp_fallback"):
        return "tcp", reason
    return "none", f"{reason}, and rdma_allow_tcp_fallback is off"


class Move(Protocol):
    """One transfer of a batch. It holds the local memory that it uses."""

    @property
    def remote(self) -> Remote: ...

    @property
    def size_bytes(self) -> int: ...

    def carry_out(self, path: Path, deadline_s: float) -> None: ...


@define(frozen=True)
class Read:
    """All of `remote` into the beginning of `target`."""

    remote: Remote
    target: Local

    @property
    def size_bytes(self) -> int:
        return self.remote.size_bytes

    def carry_out(self, path: Path, deadline_s: float) -> None:
        if self.target.device == "cpu":
            path.read(self.remote, self.target, deadline_s)
        else:
            staged = local(bytearray(self.size_bytes))
            path.read(self.remote, staged, deadline_s)
            to_device(self.target, 0, staged.keeper)


@define(frozen=True)
class Write:
    """All of `source` to `remote`, which has its size."""

    remote: Remote
    source: Local

    @property
    def size_bytes(self) -> int:
        return self.remote.size_bytes

    def carry_out(self, path: Path, deadline_s: float) -> None:
        source = self.source if self.source.device == "cpu" else local(on_host(self.source, 0, self.source.size_bytes))
        path.write(self.remote, source, deadline_s)


@define(frozen=True)
class Atomic:
    """An operation on a word of `remote`, whose old value goes to `target`. With `expected`, compare and swap."""

    remote: Remote
    target: Local
    value: int
    expected: int | None = None
    size_bytes: int = 8

    def carry_out(self, path: Path, deadline_s: float) -> None:
        if self.expected is None:
            before = path.fetch_add(self.remote, self.value, deadline_s)
        else:
            before = path.compare_and_swap(self.remote, self.expected, self.value, deadline_s)
        view_of(self.target.address, 8)[:] = before.to_bytes(8, sys.byteorder)


_Key = tuple[int, bool, str, str]


def _key(remote: Remote) -> _Key:
    """What the choice of a path depends on."""
    return remote.owner.proc.key, remote.in_file is not None, remote.device, settings.get("rdma_path")


class Transfers:
    """Those of one `Proc`. Thread-safe."""

    def __init__(self, runtime: Proc) -> None:
        self.runtime = runtime
        self._paths: dict[_Key, Path] = {}
        self._neighbours: dict[int, Neighbour | str] = {}  # by key of the process; or why it cannot be reached
        self._choosing: dict[int, threading.Lock] = {}  # by key of the process
        self._lock = threading.Lock()
        self._workers = Workers()
        self._shared_by: dict[int, set[int]] = {}  # by number of an actor: its buffers
        runtime.on_actor_ended.append(self._release)
        runtime.on_proc_gone.append(self._forget)
        chunks.serve(runtime)
        Passive(runtime)

    # ---- what is shared

    def share(self, memory: Local, actor_number: int) -> Export:
        """Let others use this memory until it is withdrawn, or that actor of this process ends."""
        export = exports().add(memory)
        shared = self._shared_by.setdefault(actor_number, set())
        shared.add(export.number)
        export.on_withdraw.append(lambda: shared.discard(export.number))
        return export

    def _release(self, actor_number: int) -> None:
        for number in self._shared_by.pop(actor_number, set()).copy():
            exports().withdraw(number)

    # ---- which way

    def path_to(self, remote: Remote, deadline_s: float) -> Path:
        """Asks the owner at most once.

        Raises:
            NotViable: the path that was asked for does not lead there.
            SupervisionError: the owner's process is gone.
            TimeoutError: it does not answer.
        """
        key = _key(remote)
        path = self._paths.get(key)
        if path is not None:
            return path
        with self._lock:
            choosing = self._choosing.setdefault(remote.owner.proc.key, threading.Lock())
        if not choosing.acquire(timeout=left_of(deadline_s, remote)):  # two connections would replace each other
            raise late(remote)
        try:
            path = self._paths.get(key)
            if path is None:
                path = self._paths[key] = self._choose(remote, settings.get("rdma_path"), deadline_s)
                log.info("rdma.path", owner=str(remote.owner), path=path.name, reason=path.reason)
            return path
        finally:
            choosing.release()

    def _choose(self, remote: Remote, wanted: str, deadline_s: float) -> Path:
        if remote.owner.proc.key == self.runtime.key and remote.device == "cpu":
            return Here(preferred()[0], exports())
        ways: dict[str, Callable[[Remote, str, float], Path]] = {
            "shm": self._shared,
            "ibverbs": self._verbs,
            "tcp": self._chunks,
        }
        tried: list[str] = []
        for name in ways if wanted == "auto" else [wanted]:
            because = f"{name} is what rdma_path asks for" if wanted != "auto" else "; ".join(tried)
            try:
                return ways[name](remote, because, deadline_s)
            except NotReachable as error:
                tried.append(f"{name} cannot be used: {error}")
        asked = f"rdma_path asks for {wanted}" if wanted != "auto" else "no path"
        raise NotViable(f"{remote} cannot be reached: {asked}: {'; '.join(tried)}")

    def _shared(self, remote: Remote, because: str, deadline_s: float) -> Path:
        if remote.device != "cpu":
            raise NotReachable(f"the buffer is on {remote.device}")
        if not remote.place.host or remote.place.host != host_identity():
            raise NotReachable("the owner is on another host, or in another container")
        neighbour = self._neighbour(remote)
        if remote.in_file is None and neighbour.no_copying:
            raise NotReachable(f"{neighbour.no_copying}; memory from monarch.rdma.empty needs no such right")
        how = "its memory is mapped here" if remote.in_file is not None else "the kernel copies between the processes"
        return Shared(self.runtime, neighbour, Chunks(self.runtime, ""), "; ".join(filter(None, [because, how])))

    def _neighbour(self, remote: Remote) -> Neighbour:
        with self._lock:
            found = self._neighbours.get(remote.owner.proc.key)
            if found is None:
                for key, other in list(self._neighbours.items()):
                    if isinstance(other, Neighbour) and not other.is_alive():  # nobody tells where nobody watches
                        self._forget(key)
                try:
                    found = Neighbour(remote.place)
                except NotReachable as error:
                    found = str(error)
                except NeighbourGone as gone:
                    down = self.runtime.monitors.gone((remote.owner.proc.key, 0))
                    raise owner_gone(remote, down or gone) from None
                self._neighbours[remote.owner.proc.key] = found
        if isinstance(found, str):
            raise NotReachable(found)
        return found

    def _verbs(self, remote: Remote, because: str, deadline_s: float) -> Path:
        try:
            device = node()
        except NotViable as error:
            raise NotReachable(str(error)) from None
        for (owner, *_), path in list(self._paths.items()):
            if owner == remote.owner.proc.key and isinstance(path, Verbs):
                break
        else:
            path = Verbs(Chunks(self.runtime, ""), device, remote, because, deadline_s)
        if remote.device != "cpu":
            path.check(remote, deadline_s)
        return path

    def _chunks(self, remote: Remote, because: str, deadline_s: float) -> Path:
        if settings.get("rdma_path") != "tcp" and not settings.get("rdma_allow_tcp_fallback"):
            raise NotReachable("rdma_allow_tcp_fallback is off")
        return Chunks(self.runtime, because)

    def _forget(self, key: int, down: Down | None = None) -> None:
        self._neighbours.pop(key, None)
        self._choosing.pop(key, None)
        for each in [each for each in list(self._paths) if each[0] == key]:
            self._paths.pop(each, None)

    # ---- moving

    def start(self, moves: Sequence[Move], timeout_s: float, what: str) -> Future[None]:
        """Carry all of `moves` out, in no order; the future fails with the first error, once none is running any more.

        Small moves that need nobody's help are done at once.
        """
        deadline_s = time.monotonic() + timeout_s
        batch = Batch(len(moves), Future._pending(None, lambda: what))
        for move in moves:
            job = Job(move.remote.owner.proc.key, partial(self._carry_out, move, deadline_s), batch.ended)
            path = self._known_path(move.remote)
            if path is not None and not path.helped and move.size_bytes <= _AT_ONCE_BYTES:
                job.run()
            else:
                self._workers.put(job)
        return batch.future

    def _known_path(self, remote: Remote) -> Path | None:
        return self._paths.get(_key(remote))

    def _carry_out(self, move: Move, deadline_s: float) -> None:
        move.carry_out(self.path_to(move.remote, deadline_s), deadline_s)
