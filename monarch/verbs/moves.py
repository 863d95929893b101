"""Bytes over a queue pair, from and to memory that the other side has registered: READ, WRITE and atomics.

Large transfers are cut: a long READ answers with all its packets at once, which a lossy network drops. Some pieces are
in flight at a time, so that the wire never idles. The thread that moves sleeps on the completion channel.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from typing import Final

from monarch.errors import TransferError
from monarch.verbs.adapter import REMOTE_ACCESS, SUCCESS, Completion, Opcode, Region
from monarch.verbs.node import Node
from monarch.verbs.registrations import register
from monarch.wake import Wake

PIECE_BYTES: Final = 1 << 20
IN_FLIGHT: Final = 16  # no more READs than that are outstanding anyway (`max_rd_atomic`)
BOUNCE_BYTES: Final = 64 << 10  # below some 16 KiB a copy is cheaper than a registration; this also is room for a word

_LOOK_AGAIN_S: Final = 0.2  # an event that a driver loses costs no more than this


class RemoteAccess(TransferError):
    """The other side does not have the memory registered (any more). The queue pair is dead."""


class Mover:
    """One queue pair of this side's, from which transfers are started, one at a time.

    Any error ends it: `broken` says why, and somebody makes a new one. `cut` may come from any thread.
    """

    def __init__(self, node: Node, busy_poll_s: float = 0.0) -> None:
        """Raises: OSError, TransferError."""
        self.broken = ""
        self._busy_poll_s = busy_poll_s
        self._bounce = bytearray(BOUNCE_BYTES)
        self._bounce_view = memoryview(self._bounce)
        self.bounce = ctypes.addressof(ctypes.c_char.from_buffer(self._bounce))
        self.bounce_region: Region = register(node.device, self.bounce, BOUNCE_BYTES)
        try:
            self.wire = node.wire(2 * IN_FLIGHT)
        except BaseException:
            self.bounce_region.close()
            raise
        self._queue_pair = self.wire.queue_pair
        self._wake = Wake()
        self._poll = select.poll()
        self._poll.register(self._queue_pair.fileno(), select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self.lock = threading.Lock()

    def move(
        self, opcode: Opcode, address: int, lkey: int, remote: int, rkey: int, size_bytes: int, deadline_s: float
    ) -> None:
        """READ or WRITE. The lock is held.

        Raises:
            RemoteAccess, TransferError: it failed.
            TimeoutError: the time is over. In each case this mover is broken, and touches no memory any more.
        """
        post, in_flight, offset = self._queue_pair.post_send, 0, 0
        while offset < size_bytes or in_flight:
            try:
                while offset < size_bytes and in_flight < IN_FLIGHT:
                    size = min(PIECE_BYTES, size_bytes - offset)
                    post(opcode, offset, address + offset, size, lkey, remote + offset, rkey)
                    offset += size
                    in_flight += 1
            except OSError as error:
                raise self._refused(error) from error
            in_flight -= len(self._completions(deadline_s))

    def word(self, opcode: Opcode, remote: int, rkey: int, compare_add: int, swap: int, deadline_s: float) -> int:
        """An atomic operation on 8 bytes; the value before. The lock is held. Errors as for `move`."""
        lkey = self.bounce_region.lkey
        try:
            self._queue_pair.post_send(opcode, 0, self.bounce, 8, lkey, remote, rkey, compare_add, swap)
        except OSError as error:
            raise self._refused(error) from error
        self._completions(deadline_s)
        return int.from_bytes(self._bounce_view[:8], "little")

    def _completions(self, deadline_s: float) -> list[Completion]:
        """One completion or more; all of them successes."""
        queue_pair = self._queue_pair
        busy_until_s = time.monotonic() + self._busy_poll_s
        while True:
            done = queue_pair.poll()
            if not done and self._busy_poll_s and time.monotonic() < busy_until_s:
                os.sched_yield()
                continue
            if not done:
                queue_pair.arm()
                done = queue_pair.poll()  # what came between the poll and the arming
            if done:
                break
            self._sleep(deadline_s)
        for each in done:
            if each.status != SUCCESS:
                kind = RemoteAccess if each.status == REMOTE_ACCESS else TransferError
                raise self._fail(kind(each.text))
        return done

    def _sleep(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise self._fail(TimeoutError("the transfer did not end in time; its bytes are undefined"))
        ready = dict(self._poll.poll(min(left_s, _LOOK_AGAIN_S) * 1e3))
        if self._wake.fileno() in ready:
            raise self._fail(TransferError(self.broken or "the connection was given up"))
        if ready:
            self._queue_pair.take_event()

    def _refused(self, error: OSError) -> Exception:
        return self._fail(TransferError(f"the queue pair takes no more requests: {error}"))

    def _fail(self, error: Exception) -> Exception:
        self.broken = self.broken or str(error)
        self.wire.close()
        return error

    def cut(self, reason: str) -> None:
        """Give this queue pair up, also under a running transfer."""
        self.broken = self.broken or reason
        self._wake.set()

    def close(self) -> None:
        self.wire.close()
        self.bounce_region.close()
        self._wake.close()
