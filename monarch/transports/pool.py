"""The memory that a process shares with others: what it lends, what comes back, and what the system gets back.

Theory of operation. A slot of a segment goes through

```
            allocate            lent to receivers        lease and all loans have ended
    FREE ─────────────► LEASED ───────────────────► LENT ──────────────────────────────► FREE
      └── unused for a while: its pages go back to the system, its place in the segment stays
```

- A *lease* is this process's own hold on a slot, for as long as it may have to send it (again).
- Slots have sizes of powers of two, and pages for what was needed so far. The slot that was free last is taken first:
  its pages are in the caches. Fresh pages cost ten times a copy, so the pool keeps what it has while it is used.
- What a receiver held when its process died is free again, and so is what was in flight over a link that is given up.
- What a receiver holds when it forks comes back then; where it could not copy that, never (`segments`: KEPT).
- A slot that a receiver sends back with its answer is lent to this process itself, until the answer is let go.
- Segments are never closed while their pool lives, so that a receiver maps each of them once.
- Where pages cannot be had, or the pool's limit is reached, `allocate` returns None, and the caller takes another way.
  The limit may change: when it is lower than what the pool has, nothing is taken from those it was lent to.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Final

from monarch.log import get_logger
from monarch.transports.available import available_bytes
from monarch.transports.base import Buffer
from monarch.transports.mappings import in_pages
from monarch.transports.memory import Memory, at_end, copy
from monarch.transports.segments import MARKS_EACH, SMALLEST_BYTES, Holder, Segment, Slot, borrow

log = get_logger("monarch.shm")

_LOOKS: Final = 8  # so many lent slots are looked at for one that is free again, before the pool grows
_IDLE_S: Final = 5.0
_REFUSED_S: Final = 1.0


class Lease(Memory):  # type: ignore[misc, valid-type]
    """The owner's hold on a slot: what exports its memory."""

    slot: Slot
    pool: Pool
    keeper: object
    end: CodeType


class _Here:
    """The pool's own process, as a holder of what comes back."""

    is_gone = is_over = False


_HERE: Final = _Here()


class Pool:
    """See the module. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit: Callable[[], int] = lambda: limit_bytes
        self.reserved_bytes = 0
        """What the slots have of the system's memory."""
        self._lock = threading.RLock()  # a finalizer or a log handler may send, wherever it runs
        self._segments: list[Segment] = []
        self._unused: dict[int, Iterator[Slot]] = {}  # by exponent of the size: places that no slot was made for yet
        self._free: defaultdict[int, list[Slot]] = defaultdict(list)
        self._lent: defaultdict[int, deque[Slot]] = defaultdict(deque)  # without a lease
        self._returned: deque[Slot] = deque()  # those whose leases have ended, not sorted yet
        self._headroom_bytes = 0  # the pool may grow by so much before it looks at the system's memory again
        self._refused_until_s = 0.0
        self._trimmer: threading.Thread | None = None

    def allocate(self, size_bytes: int, receivers: int = 1) -> memoryview | None:
        """Writable memory for a part that will be sent to so many receivers, not zeroed; or None: take another way.

        What is sent to one belongs to that one as soon as it has arrived: write nothing to it after sending.
        """
        if size_bytes < SMALLEST_BYTES or size_bytes > self.limit() or receivers > MARKS_EACH:
            return None
        slot = self._slot(size_bytes)
        if slot is None:
            return None
        slot.receivers = receivers
        slot.lent_count = 0
        address, keeper = slot.place()
        lease = Lease.from_address(address)
        lease.slot, lease.pool, lease.keeper, lease.end = slot, self, keeper, at_end(self._returned.append, slot)
        return memoryview(lease).cast("B")[:size_bytes]

    def slot_of(self, part: Buffer) -> Slot | None:
        """The slot that `part` fills from its start, if it is memory of this pool."""
        lease = part.obj if type(part) is memoryview else None
        return lease.slot if type(lease) is Lease and lease.pool is self else None

    def copied(self, part: Buffer) -> memoryview | None:
        """Memory as from `allocate`, for one receiver, with the bytes of `part` in it."""
        size = len(part)
        memory = self.allocate(size)
        if memory is not None:
            copy(memory, part)
        return memory

    def returned(self, number: int, mark: int, size_bytes: int, holder: Holder) -> memoryview:
        """The slot with that mark, which `holder` sends back with what is in it. It keeps its loan until it knows that
        the message has arrived; from now on the slot is lent to this process, too.

        Raises:
            ValueError: it was not lent to `holder`.
        """
        with self._lock:
            slots = self._segments[number].slots if number < len(self._segments) else []
            slot = slots[mark // MARKS_EACH] if mark // MARKS_EACH < len(slots) else None
            if slot is None or (mark, holder) not in slot.lent or size_bytes > slot.reserved_bytes:
                raise ValueError(f"no slot of segment {number} has lent the mark {mark}")
            own = slot.lend(_HERE)
        if own is None:
            raise ValueError(f"a slot of segment {number} was lent too often")
        memory = borrow(slot.segment.mapping, slot.offset, size_bytes, own)
        self._replace(slot)
        return memory

    def _replace(self, taken: Slot) -> None:
        """Have another of that size, if there is none, for the next message: what one is answered with in its own slot,
        may be kept, and fresh pages take longer than the message."""
        others = (
            slot
            for segment in list(self._segments)
            if segment.slot_bytes == taken.segment.slot_bytes
            for slot in list(segment.slots)
        )
        if not any(slot.reserved_bytes and slot is not taken for slot in others):
            slot = self._slot(taken.reserved_bytes)
            if slot is not None:
                with self._lock:
                    self._put(slot)

    def _slot(self, size_bytes: int) -> Slot | None:
        kind = (size_bytes - 1).bit_length()
        with self._lock:
            self._sort_returned()
            excess = self.reserved_bytes - self.limit()
            if excess > 0:  # the limit is lower than it was
                self._give_back(excess)
            slot = self._take(kind)
            if slot is None:
                return None
            missing = in_pages(size_bytes) - slot.reserved_bytes
            if missing <= 0:
                return slot
            if not self._may_grow(missing):
                self._put(slot)
                return None
            self.reserved_bytes += missing
        try:
            slot.reserve(in_pages(size_bytes))
        except OSError as error:
            with self._lock:
                self._refused(missing, str(error))
                self.reserved_bytes -= in_pages(size_bytes) - slot.reserved_bytes
                self._put(slot)
            return None
        self._start_trimming()
        return slot

    def _take(self, kind: int) -> Slot | None:
        free = self._free[kind]
        if free:
            return free.pop()
        lent = self._lent[kind]
        for _ in range(min(_LOOKS, len(lent))):
            slot = lent.popleft()
            if slot.is_free:
                return slot
            lent.append(slot)
        for slot in self._unused.get(kind, ()):
            return slot
        if time.monotonic() < self._refused_until_s:
            return None
        try:
            segment = Segment(len(self._segments), 1 << kind)
        except OSError as error:  # no descriptor, or no address space
            self._refused(1 << kind, str(error))
            return None
        self._segments.append(segment)
        self._unused[kind] = segment.new_slots()
        return next(self._unused[kind])

    def _refused(self, size_bytes: int, reason: str) -> None:
        """Ask no more for a while: asking costs time."""
        log.info("shm.refused", size_bytes=size_bytes, reserved_bytes=self.reserved_bytes, reason=reason)
        self._refused_until_s = time.monotonic() + _REFUSED_S

    def _put(self, slot: Slot) -> None:
        slot.free_since_s = time.monotonic()
        self._free[slot.kind].append(slot)

    def _sort_returned(self) -> None:
        returned = self._returned
        while returned:
            slot = returned.popleft()
            if slot.is_free:
                self._put(slot)
            else:
                self._lent[slot.kind].append(slot)

    def _sort_lent(self) -> None:
        for kind, lent in list(self._lent.items()):
            free = [slot for slot in lent if slot.is_free]
            if free:
                self._lent[kind] = deque(slot for slot in lent if slot.lent)
            for slot in free:
                self._put(slot)

    # ---- memory of the system

    def _may_grow(self, size_bytes: int) -> bool:
        excess = self.reserved_bytes + size_bytes - self.limit()
        if excess > 0 and self._give_back(excess) < excess:
            return False
        if size_bytes > self._headroom_bytes:
            if time.monotonic() < self._refused_until_s:
                return False
            self._headroom_bytes = available_bytes() // 2  # a kernel without memory kills before it refuses
            if size_bytes > self._headroom_bytes:
                self._refused(size_bytes, f"the system has {2 * self._headroom_bytes} bytes to spare")
                return False
        self._headroom_bytes -= size_bytes
        return True

    def _give_back(self, size_bytes: int, unused_since_s: float = float("inf")) -> int:
        """Return pages of free slots to the system, those unused for longest first; returns how many bytes."""
        idle = [slot for slots in list(self._free.values()) for slot in slots if slot.reserved_bytes]
        idle.sort(key=lambda slot: slot.free_since_s)
        given = 0
        for slot in idle:
            if given >= size_bytes or slot.free_since_s > unused_since_s:
                break
            reserved = slot.reserved_bytes
            if slot.discard():
                given += reserved
        self.reserved_bytes -= given
        return given

    def trim(self, idle_s: float = _IDLE_S) -> None:
        """Return to the system what nobody has used for so long."""
        with self._lock:
            self._headroom_bytes = 0
            self._sort_returned()
            self._sort_lent()
            self._give_back(self.reserved_bytes, time.monotonic() - idle_s)

    def _start_trimming(self) -> None:
        """A thread looks after the pool while it has memory."""
        if self._trimmer is None:
            with self._lock:
                if self._trimmer is None:
                    self._trimmer = threading.Thread(target=self._keep_trimming, name="monarch-shm", daemon=True)
                    self._trimmer.start()

    def _keep_trimming(self) -> None:
        while True:
            time.sleep(_IDLE_S / 2)
            self.trim()
            with self._lock:
                if not self.reserved_bytes:
                    self._trimmer = None
                    return

    def statistics(self) -> dict[str, int]:
        with self._lock:
            self._sort_returned()
            self._sort_lent()
            return {
                "limit_bytes": self.limit(),
                "reserved_bytes": self.reserved_bytes,
                "segments": len(self._segments),
                "free_slots": sum(map(len, self._free.values())),
                "lent_slots": sum(map(len, self._lent.values())),
            }
