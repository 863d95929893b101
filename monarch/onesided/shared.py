"""The path between processes of one host: one copy, from the owner's memory to the reader's or back, by the reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import define

from monarch.core.proc import Proc
from monarch.errors import BufferDropped, TransferError
from monarch.onesided.chunks import Chunks, owner_gone
from monarch.onesided.local import Local, copy
from monarch.onesided.neighbour import Neighbour, NeighbourGone
from monarch.onesided.path import Remote, left_of
from monarch.onesided.ranges import pieces

_PIECE_BYTES: Final = 64 << 20  # between two looks at the clock and at the owner
_MAPPED_PIECE_BYTES: Final = 1 << 30  # memory that is mapped stays; a long `memcpy` is a faster one


@define(frozen=True)
class Shared:
    """See `Path`. Atomics are the owner's to carry out: Python has none in shared memory."""

    runtime: Proc
    neighbour: Neighbour
    chunks: Chunks
    reason: str
    name: str = "shm"
    helped: bool = False

    def read(self, remote: Remote, target: Local, deadline_s: float) -> None:
        if remote.in_file is None:
            self._move(remote, target.address, self.neighbour.read, remote.address, deadline_s)
        else:
            mapping = self.neighbour.mapped(remote.in_file, remote.whole_bytes)
            source = mapping.address + remote.in_file - mapping.start + remote.offset
            self._move(remote, target.address, copy, source, deadline_s)

    def write(self, remote: Remote, source: Local, deadline_s: float) -> None:
        if remote.in_file is None:
            self._move(remote, remote.address, self.neighbour.write, source.address, deadline_s)
        else:
            mapping = self.neighbour.mapped(remote.in_file, remote.whole_bytes)
            target = mapping.address + remote.in_file - mapping.start + remote.offset
            self._move(remote, target, copy, source.address, deadline_s)

    def _move(
        self, remote: Remote, target: int, move: Callable[[int, int, int], None], source: int, deadline_s: float
    ) -> None:
        neighbour = self.neighbour
        try:
            neighbour.check_alive()
            with neighbour.using(remote.slot, remote.number):
                for offset, size in pieces(
                    remote.size_bytes, _PIECE_BYTES if move is not copy else _MAPPED_PIECE_BYTES
                ):
                    left_of(deadline_s, remote)
                    try:
                        move(target + offset, source + offset, size)
                    finally:
                        neighbour.check_alive()
        except NeighbourGone as gone:
            raise owner_gone(remote, self.runtime.monitors.gone((remote.owner.proc.key, 0)) or gone) from None
        except BufferDropped as error:
            raise BufferDropped(f"{remote} cannot be used: {error}") from None
        except TransferError as error:
            raise TransferError(f"{remote} could not be used: {error}") from None

    def fetch_add(self, remote: Remote, add: int, deadline_s: float) -> int:
        return self.chunks.fetch_add(remote, add, deadline_s)

    def compare_and_swap(self, remote: Remote, expected: int, desired: int, deadline_s: float) -> int:
        return self.chunks.compare_and_swap(remote, expected, desired, deadline_s)
