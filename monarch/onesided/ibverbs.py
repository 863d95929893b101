"""The path over an RDMA device: the reader's device asks the owner's, and neither the owner's Python nor its CPU helps.

A queue pair joins the two processes: made by the reader at its first transfer, over requests that the I/O side of the
owner answers, and again after any error, under a new epoch. The owner registers a buffer when the first reader asks for
its key, and ends the registration when the buffer is dropped: a reader that comes later gets an error of the device,
asks for the key again, and so learns why.

An idle queue pair never notices that its peer is dead. The monitor of the owner's process does.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from monarch.core import settings
from monarch.core.envelope import Envelope
from monarch.core.monitor import Down
from monarch.core.proc import Proc
from monarch.errors import BufferDropped, MonarchError, NotViable, TransferError
from monarch.log import get_logger
from monarch.onesided.chunks import Chunks, owner_gone
from monarch.onesided.exports import Export, exports
from monarch.onesided.local import Local, copy
from monarch.onesided.path import NotReachable, Remote, left_of
from monarch.verbs.adapter import Opcode, Peer, Region
from monarch.verbs.moves import BOUNCE_BYTES, Mover, RemoteAccess
from monarch.verbs.node import Node, Wire, node
from monarch.verbs.registrations import register, register_cuda

log = get_logger("monarch.rdma")

_PASSIVE_DEPTH: Final = 16


def why_not() -> str | None:
    """Why this process cannot use an RDMA device; None where it can."""
    try:
        node()
    except NotViable as error:
        return str(error)
    return None


class Verbs:
    """See `Path`. Transfers to one owner take turns, each with many requests in flight."""

    name: Final = "ibverbs"
    helped: Final = True

    def __init__(self, chunks: Chunks, node: Node, remote: Remote, reason: str, deadline_s: float) -> None:
        """Raises: NotReachable, when the owner has no device, or it cannot be reached from this one; TimeoutError."""
        self._chunks, self._node = chunks, node
        self._epochs = itertools.count(1)
        self._keys: dict[int, int] = {}  # by number of a buffer: its rkey
        self._lock = threading.Lock()
        self._mover: Mover | None = None
        self._down: Down | None = None
        self.reason = "; ".join(filter(None, [reason, f"{node.choice.port} by {node.binding}"]))
        owner = remote.owner.proc
        unwatch = chunks.runtime.monitors.watch((owner.key, 0), self._on_owner_gone)
        try:
            with self._connected(remote, deadline_s):
                pass
        except BaseException as error:
            unwatch()
            if isinstance(error, TransferError):
                raise NotReachable(str(error)) from error
            raise

    def _on_owner_gone(self, down: Down) -> None:
        self._down = down
        mover = self._mover
        if mover is not None:
            mover.cut(f"the process is gone: {down}")

    @contextmanager
    def _connected(self, remote: Remote, deadline_s: float) -> Iterator[Mover]:
        """A queue pair that works, for this thread alone."""
        if not self._lock.acquire(timeout=left_of(deadline_s, remote)):
            raise TimeoutError(f"other transfers kept the queue pair to {remote} busy for all of the time")
        try:
            if self._mover is not None and self._mover.broken:
                self._mover.close()
                self._mover = None
            if self._mover is None:
                self._mover = self._connect(remote, deadline_s)
                if self._down is not None:  # meanwhile, so that nobody cut it
                    self._mover.cut(str(self._down))
            try:
                yield self._mover
            except (TransferError, TimeoutError):
                if self._down is not None:
                    raise owner_gone(remote, self._down) from None
                raise
        finally:
            self._lock.release()

    def _connect(self, remote: Remote, deadline_s: float) -> Mover:
        try:
            mover = Mover(self._node, settings.get("rdma_cq_busy_poll_window"))
        except OSError as error:
            raise TransferError(f"the device gives no queue pair: {error}") from error
        try:
            asked = self._chunks.ask(remote, "verbs.connect", next(self._epochs), _plain(mover.wire.mine))
            peer, trouble = self._chunks.answer(remote, asked, deadline_s)
            if peer is None:
                raise TransferError(f"the owner cannot: {trouble}")
            try:
                mover.wire.connect(Peer(*peer))
            except OSError as error:
                raise TransferError(f"no connection between the devices: {error}") from error
        except BaseException:
            mover.close()
            raise
        self._keys.clear()
        return mover

    def _key(self, remote: Remote, deadline_s: float) -> int:
        key = self._keys.get(remote.number)
        if key is None:
            asked = self._chunks.ask(remote, "verbs.key")
            (key, trouble) = self._chunks.answer(remote, asked, deadline_s)
            if key is None:
                raise TransferError(f"{remote} cannot be used: {trouble}")
            self._keys[remote.number] = key
        return int(key)

    def check(self, remote: Remote, deadline_s: float) -> None:
        """Raises: NotReachable, when the device of the owner cannot use the buffer; TimeoutError."""
        try:
            with self._using(remote, deadline_s):
                pass
        except BufferDropped:
            raise
        except TransferError as error:
            raise NotReachable(str(error)) from error

    def read(self, remote: Remote, target: Local, deadline_s: float) -> None:
        if remote.size_bytes <= BOUNCE_BYTES:
            with self._using(remote, deadline_s) as (mover, key):
                lkey = mover.bounce_region.lkey
                mover.move(Opcode.READ, mover.bounce, lkey, remote.address, key, remote.size_bytes, deadline_s)
                copy(target.address, mover.bounce, remote.size_bytes)
            return
        with (
            self._node.registrations.of(target.address, remote.size_bytes, target.anchor) as region,
            self._using(remote, deadline_s) as (mover, key),
        ):
            mover.move(Opcode.READ, target.address, region.lkey, remote.address, key, remote.size_bytes, deadline_s)

    def write(self, remote: Remote, source: Local, deadline_s: float) -> None:
        if remote.size_bytes <= BOUNCE_BYTES or not source.writable:  # a device locks only what could be written to
            with self._using(remote, deadline_s) as (mover, key):
                for offset in range(0, remote.size_bytes, BOUNCE_BYTES):
                    size = min(BOUNCE_BYTES, remote.size_bytes - offset)
                    copy(mover.bounce, source.address + offset, size)
                    lkey = mover.bounce_region.lkey
                    mover.move(Opcode.WRITE, mover.bounce, lkey, remote.address + offset, key, size, deadline_s)
            return
        with (
            self._node.registrations.of(source.address, remote.size_bytes, source.anchor) as region,
            self._using(remote, deadline_s) as (mover, key),
        ):
            mover.move(Opcode.WRITE, source.address, region.lkey, remote.address, key, remote.size_bytes, deadline_s)

    def fetch_add(self, remote: Remote, add: int, deadline_s: float) -> int:
        with self._using(remote, deadline_s) as (mover, key):
            return mover.word(Opcode.FETCH_ADD, remote.address, key, add, 0, deadline_s)

    def compare_and_swap(self, remote: Remote, expected: int, desired: int, deadline_s: float) -> int:
        with self._using(remote, deadline_s) as (mover, key):
            return mover.word(Opcode.COMPARE_AND_SWAP, remote.address, key, expected, desired, deadline_s)

    @contextmanager
    def _using(self, remote: Remote, deadline_s: float) -> Iterator[tuple[Mover, int]]:
        left_of(deadline_s, remote)
        with self._connected(remote, deadline_s) as mover:
            try:
                yield mover, self._key(remote, deadline_s)
            except RemoteAccess as error:
                self._keys.pop(remote.number, None)
                self._key(remote, deadline_s)  # says that it has been dropped, where that is the reason
                raise TransferError(f"{remote} could not be used: {error}") from None
            except TransferError as error:
                if isinstance(error, BufferDropped):
                    raise
                raise TransferError(f"{remote} could not be used: {error}") from None


def _plain(peer: Peer) -> tuple[int, int, str, int, int]:
    return peer.number, peer.psn, peer.gid, peer.lid, peer.mtu


# The owner's side


class Passive:
    """The queue pairs of this process from which others read and write, one for each of them."""

    def __init__(self, runtime: Proc) -> None:
        self._runtime = runtime
        self._wires: dict[int, tuple[int, Wire]] = {}
        self._regions: dict[int, Region] = {}
        self._lock = threading.Lock()
        runtime.handlers["rdma.verbs.connect"] = self._on_thread(self._connect)
        runtime.handlers["rdma.verbs.key"] = self._on_thread(self._key)
        runtime.on_proc_gone.append(self._forget)

    def _on_thread(self, action: Callable[..., tuple[Any, Any]]) -> Callable[..., None]:
        """The kernel takes its time to resolve a peer, and to pin memory: not on the thread that drives the links."""

        def serve(envelope: Envelope, *arguments: Any) -> None:
            try:
                answer: tuple[Any, ...] = ("done", *action(envelope, *arguments))
            except BufferDropped as error:
                answer = ("dropped", str(error))
            except (MonarchError, OSError) as error:
                answer = ("done", None, str(error))
            self._runtime.answer(envelope, *answer)

        def handle(envelope: Envelope, *arguments: Any) -> None:
            threading.Thread(target=serve, args=(envelope, *arguments), daemon=True, name="monarch-verbs").start()

        return handle

    def _connect(self, envelope: Envelope, number: int, epoch: int, peer: tuple[Any, ...]) -> tuple[Any, Any]:
        key = envelope.src_proc
        wire = node().wire(_PASSIVE_DEPTH)
        try:
            wire.connect(Peer(*peer))
        except BaseException:
            wire.close()
            raise
        with self._lock:
            old_epoch, old = self._wires.get(key, (0, None))
            if old_epoch > epoch:
                old = wire  # a later one has overtaken it
            else:
                self._wires[key] = epoch, wire
        if old is not None:
            old.close()
        return _plain(wire.mine), ""

    def _key(self, envelope: Envelope, number: int) -> tuple[Any, Any]:
        with exports().using(number) as export, self._lock:
            region = self._regions.get(number)
            if region is None:
                region = self._regions[number] = self._register(export)
        return region.rkey, ""

    def _register(self, export: Export) -> Region:
        enter = register if export.local.device == "cpu" else register_cuda
        region = enter(node().device, export.local.address, export.local.size_bytes)
        export.on_withdraw.append(lambda: self._deregister(export.number))
        return region

    def _deregister(self, number: int) -> None:
        with self._lock:
            region = self._regions.pop(number, None)
        if region is not None:
            region.close()

    def _forget(self, key: int, down: Down) -> None:
        with self._lock:
            _, wire = self._wires.pop(key, (0, None))
        if wire is not None:
            wire.close()
