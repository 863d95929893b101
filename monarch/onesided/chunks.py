"""The path that is always there: chunks over the link between the processes, whatever transport it has.

The owner's side runs on the thread that drives its links, so that it serves while the owner's actors compute. Chunks
are small enough not to hold up other messages, and some are on their way at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from attrs import define

from monarch.core.envelope import Envelope
from monarch.core.future import Future
from monarch.core.monitor import PeerGone
from monarch.core.proc import Proc
from monarch.errors import BufferDropped, SupervisionError, TransferError
from monarch.onesided import words
from monarch.onesided.exports import Export, exports
from monarch.onesided.local import Local, on_host, snapshot, to_device, view_of
from monarch.onesided.path import Remote, late, left_of
from monarch.onesided.ranges import pieces

_CHUNK_BYTES: Final = 1 << 20
_ON_THE_WAY: Final = 4

Answer = tuple[Any, ...]


def owner_gone(remote: Remote, why: object) -> SupervisionError:
    return SupervisionError(f"the process of {remote.owner}, which owns the buffer, is gone: {why}")


@define(frozen=True)
class Chunks:
    """See `Path`."""

    runtime: Proc
    reason: str
    name: str = "tcp"
    helped: bool = True

    def ask(self, remote: Remote, what: str, *arguments: Any) -> Future[Answer]:
        return self.runtime.request(remote.owner.proc, f"rdma.{what}", remote.number, *arguments)

    def answer(self, remote: Remote, asked: Future[Answer], deadline_s: float) -> Answer:
        try:
            kind, *rest = asked.get(left_of(deadline_s, remote))
        except PeerGone as gone:
            if gone.down.kind == "failed":
                raise TransferError(f"{remote} could not be used: {gone.down.reason}") from None
            raise owner_gone(remote, gone.down) from None
        except TimeoutError:
            raise late(remote) from None
        if kind == "dropped":
            raise BufferDropped(f"{remote} cannot be used: {rest[0]}")
        return tuple(rest)

    def read(self, remote: Remote, target: Local, deadline_s: float) -> None:
        def ask(offset: int, size: int) -> Future[Answer]:
            return self.ask(remote, "read", remote.offset + offset, size)

        def take(offset: int, size: int, answer: Answer) -> None:
            view_of(target.address + offset, size)[:] = answer[0]

        self._in_chunks(remote, ask, take, deadline_s)

    def write(self, remote: Remote, source: Local, deadline_s: float) -> None:
        def ask(offset: int, size: int) -> Future[Answer]:
            return self.ask(remote, "write", remote.offset + offset, snapshot(source.address + offset, size))

        self._in_chunks(remote, ask, lambda offset, size, answer: None, deadline_s)

    def _in_chunks(
        self,
        remote: Remote,
        ask: Callable[[int, int], Future[Answer]],
        take: Callable[[int, int, Answer], None],
        deadline_s: float,
    ) -> None:
        asked: deque[tuple[int, int, Future[Answer]]] = deque()
        for offset, size in pieces(remote.size_bytes, _CHUNK_BYTES):
            if len(asked) == _ON_THE_WAY:
                self._take_first(remote, asked, take, deadline_s)
            asked.append((offset, size, ask(offset, size)))
        while asked:
            self._take_first(remote, asked, take, deadline_s)

    def _take_first(
        self,
        remote: Remote,
        asked: deque[tuple[int, int, Future[Answer]]],
        take: Callable[[int, int, Answer], None],
        deadline_s: float,
    ) -> None:
        offset, size, future = asked.popleft()
        take(offset, size, self.answer(remote, future, deadline_s))

    def fetch_add(self, remote: Remote, add: int, deadline_s: float) -> int:
        (before,) = self.answer(remote, self.ask(remote, "add", remote.offset, add), deadline_s)
        return int(before)

    def compare_and_swap(self, remote: Remote, expected: int, desired: int, deadline_s: float) -> int:
        asked = self.ask(remote, "swap", remote.offset, expected, desired)
        (before,) = self.answer(remote, asked, deadline_s)
        return int(before)


# The owner's side


def serve(runtime: Proc) -> None:
    """Answer for the buffers of this process. Idempotent."""
    handlers = runtime.handlers
    if "rdma.read" in handlers:
        return

    def served(action: Callable[..., Answer]) -> Callable[..., None]:
        def handle(envelope: Envelope, number: int, *arguments: Any) -> None:
            try:
                with exports().using(number) as export:
                    answer = action(export, *arguments)
            except BufferDropped as error:
                runtime.answer(envelope, "dropped", str(error))
            else:
                runtime.answer(envelope, *answer)

        return handle

    def drop(envelope: Envelope, number: int) -> None:
        exports().withdraw(number, lambda: runtime.answer(envelope, "done"))

    handlers["rdma.write"] = served(_write)
    handlers["rdma.add"] = served(_add)
    handlers["rdma.swap"] = served(_swap)
    handlers["rdma.drop"] = drop
    handlers["rdma.read"] = served(_read)


def _address(export: Export, offset: int, size: int) -> int:
    if offset < 0 or size < 1 or offset + size > export.local.size_bytes:
        raise ValueError(f"bytes {offset} to {offset + size} are not in a buffer of {export.local.size_bytes} bytes")
    return export.local.address + offset


def _read(export: Export, offset: int, size: int) -> Answer:
    address = _address(export, offset, size)
    if export.local.device != "cpu":
        return "data", bytes(on_host(export.local, offset, size))
    return "data", snapshot(address, size)


def _write(export: Export, offset: int, data: Any) -> Answer:
    view = memoryview(data)
    address = _address(export, offset, view.nbytes)
    if not export.local.writable:
        raise ValueError("the buffer is read-only")
    if export.local.device != "cpu":
        to_device(export.local, offset, view)
    else:
        view_of(address, view.nbytes)[:] = view
    return ("done",)


def _add(export: Export, offset: int, add: int) -> Answer:
    return "done", words.fetch_add(_address(export, offset, 8), add)


def _swap(export: Export, offset: int, expected: int, desired: int) -> Answer:
    return "done", words.compare_and_swap(_address(export, offset, 8), expected, desired)
