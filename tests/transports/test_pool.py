"""Memory that is lent to other processes: whose it is, when it comes back, and what the system gets back."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import define

from monarch import compiled
from monarch.transports import pool as pool_module
from monarch.transports import registry, segments
from monarch.transports.mappings import Mapping
from monarch.transports.pool import Pool
from monarch.transports.segments import MARKS_EACH, SMALLEST_BYTES, TakenBack, Unmapped, borrow, can_share

pytestmark = pytest.mark.skipif(bool(can_share()), reason=can_share() or "it can")

MIB = 1 << 20


@define
class Holder:
    is_gone: bool = False
    is_over: bool = False


@pytest.fixture
def pool() -> Pool:
    return Pool(64 * MIB)


def lent(pool: Pool, memory: memoryview, holder: Holder | None = None) -> memoryview:
    """As a receiver gets it."""
    slot = pool.slot_of(memory)
    assert slot is not None
    mark = slot.lend(holder or Holder())
    assert mark is not None
    return borrow(Mapping(os.dup(slot.segment.fd)), slot.offset, len(memory), mark)


def test_a_receiver_sees_what_the_sender_wrote_and_may_write(pool):
    memory = pool.allocate(100_000)
    memory[:3] = b"abc"
    theirs = lent(pool, memory)
    assert bytes(theirs[:3]) == b"abc" and len(theirs) == 100_000 and theirs.format == "B"
    theirs[0] = 0
    assert memory[0] == 0


def test_a_slot_is_free_when_its_lease_and_all_loans_have_ended(pool):
    memory = pool.allocate(MIB, receivers=2)
    first, second = lent(pool, memory), lent(pool, memory)
    del memory
    assert pool.statistics()["lent_slots"] == 1
    part = first[5:]
    del first
    assert pool.statistics()["lent_slots"] == 1
    del part
    assert pool.statistics()["lent_slots"] == 1
    del second
    assert pool.statistics() == {
        "limit_bytes": 64 * MIB,
        "reserved_bytes": MIB,
        "segments": 1,
        "free_slots": 1,
        "lent_slots": 0,
    }


def test_a_loan_in_a_cycle_ends_after_the_finalizers_of_the_cycle(pool):
    """They may use its memory, or bring it back."""
    seen: list[int] = []

    class Owner:
        def __init__(self, memory: memoryview) -> None:
            self.memory, self.me = memory, self

        def __del__(self) -> None:
            seen.append(pool.statistics()["lent_slots"])

    memory = pool.allocate(MIB)
    Owner(lent(pool, memory))
    del memory
    gc.collect()
    assert seen == [1]
    assert pool.statistics()["lent_slots"] == 0


def test_what_a_dead_process_held_is_free(pool):
    memory, holder = pool.allocate(MIB), Holder()
    kept = lent(pool, memory, holder)
    del memory
    assert pool.statistics()["lent_slots"] == 1
    holder.is_gone = True
    assert pool.statistics()["lent_slots"] == 0
    del kept


@pytest.mark.skipif(bool(compiled.why_not), reason=compiled.why_not or "there is a compiled part")
def test_what_nobody_read_before_its_link_was_given_up_is_free_and_its_mark_is_never_used_again(pool):
    memory, holder = pool.allocate(MIB, receivers=2), Holder()
    slot = pool.slot_of(memory)
    marks = [slot.lend(holder), slot.lend(holder)]
    kept = borrow(slot.segment.mapping, slot.offset, MIB, marks[0])
    del memory
    assert pool.statistics()["lent_slots"] == 1
    holder.is_over = True
    assert pool.statistics()["lent_slots"] == 1
    del kept
    assert pool.statistics()["lent_slots"] == 0
    memory = pool.allocate(MIB, receivers=MARKS_EACH)
    assert pool.slot_of(memory) is slot
    again = [slot.lend(Holder()) for _ in range(MARKS_EACH)]
    assert again[0] == marks[0] and marks[1] not in again and again[-1] is None
    for attached in slot.segment.mapping, Unmapped(os.dup(slot.segment.fd)):
        with pytest.raises(TakenBack):
            if isinstance(attached, Unmapped):
                attached.read(slot.offset, MIB, marks[1])
            else:
                borrow(attached, slot.offset, MIB, marks[1])


def test_without_the_compiled_part_what_nobody_read_is_free_when_the_process_ends(pool, monkeypatch):
    monkeypatch.setattr(compiled, "part", None)
    memory, holder = pool.allocate(MIB), Holder()
    pool.slot_of(memory).lend(holder)
    del memory
    holder.is_over = True
    assert pool.statistics()["lent_slots"] == 1
    holder.is_gone = True
    assert pool.statistics()["lent_slots"] == 0


@pytest.mark.skipif(bool(compiled.why_not), reason=compiled.why_not or "there is a compiled part")
def test_a_byte_is_swapped_where_it_is_what_it_was_taken_for():
    memory = bytearray(b"\1\2\3")
    assert not compiled.part.swap(memory, 1, 1, 7) and compiled.part.swap(memory, 1, 2, 7)
    assert memory == b"\1\7\3"
    for at in -1, 3:
        with pytest.raises(IndexError):
            compiled.part.swap(memory, at, 0, 0)
    with pytest.raises(BufferError):
        compiled.part.swap(b"\1", 0, 1, 2)
    with pytest.raises(OverflowError):
        compiled.part.swap(memory, 0, 1, 256)
    assert memory == b"\1\7\3"


def test_slots_are_used_again(pool):
    for _ in range(300):
        memory = pool.allocate(MIB)
        theirs = lent(pool, memory)
        del memory, theirs
    assert pool.statistics()["reserved_bytes"] == MIB


def test_slots_that_are_lent_for_long_do_not_hide_those_that_come_back(pool):
    held = [lent(pool, pool.allocate(SMALLEST_BYTES)) for _ in range(100)]
    for _ in range(300):
        lent(pool, pool.allocate(SMALLEST_BYTES))
    assert pool.statistics()["reserved_bytes"] <= 120 * SMALLEST_BYTES
    assert len(held) == 100


def test_the_limit_holds_and_unused_slots_of_other_sizes_make_room(pool):
    for size in (MIB, 16 * MIB):
        del [pool.allocate(size) for _ in range(3)][:]
    assert pool.statistics()["reserved_bytes"] == 51 * MIB
    whole = pool.allocate(64 * MIB)
    assert whole is not None
    assert pool.statistics()["reserved_bytes"] == 64 * MIB
    assert pool.allocate(SMALLEST_BYTES) is None
    assert pool.allocate(65 * MIB) is None
    del whole
    assert pool.allocate(SMALLEST_BYTES) is not None


def test_small_parts_and_too_many_receivers_take_another_way(pool):
    assert pool.allocate(SMALLEST_BYTES - 1) is None
    assert pool.allocate(SMALLEST_BYTES, MARKS_EACH + 1) is None
    memory = pool.allocate(SMALLEST_BYTES, MARKS_EACH)
    slot = pool.slot_of(memory)
    marks = [slot.lend(Holder()) for _ in range(MARKS_EACH)]
    assert len(set(marks)) == MARKS_EACH
    assert slot.lend(Holder()) is None


def test_memory_goes_back_to_the_system_when_it_is_not_used(pool):
    kept = lent(pool, pool.allocate(MIB))
    kept[0] = 7
    del [pool.allocate(16 * MIB) for _ in range(2)][:]
    pages = os.stat(f"/proc/self/fd/{pool._segments[1].fd}").st_blocks
    pool.trim(idle_s=3600)
    assert pool.statistics()["reserved_bytes"] == 33 * MIB
    pool.trim(idle_s=0)
    assert pool.statistics()["reserved_bytes"] == MIB
    assert os.stat(f"/proc/self/fd/{pool._segments[1].fd}").st_blocks < pages / 100
    assert kept[0] == 7
    assert pool.allocate(16 * MIB) is not None


def test_nothing_is_taken_that_the_system_does_not_have(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "available_bytes", lambda: 3 * MIB)
    assert pool.allocate(2 * MIB) is None
    monkeypatch.setattr(pool_module, "available_bytes", lambda: 1 << 40)
    assert pool.allocate(2 * MIB) is None  # it does not ask again at once
    pool._refused_until_s = 0.0
    assert pool.allocate(2 * MIB) is not None


def test_a_lower_limit_counts_from_then_on_and_takes_nothing_from_those_who_have_it(pool):
    kept = pool.allocate(4 * MIB)
    kept[0] = 7
    del [pool.allocate(size * MIB) for size in (8, 2)][:]
    pool.limit = lambda: 5 * MIB
    assert pool.allocate(8 * MIB) is None
    assert pool.allocate(2 * MIB) is None  # of which there was one, unused
    assert pool.statistics()["reserved_bytes"] == 4 * MIB and kept[0] == 7
    assert pool.allocate(MIB) is not None
    pool.limit = lambda: 64 * MIB
    assert pool.allocate(8 * MIB) is not None


def test_a_refusal_of_the_system_leaves_the_pool_as_it_was(pool, monkeypatch):
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    assert pool.allocate(SMALLEST_BYTES) is not None
    with monkeypatch.context() as patch:
        patch.setattr(segments, "POPULATE_WRITE", -1)  # as on kernels that do not know it
        patch.setattr(os, "posix_fallocate", refuse)
        assert pool.allocate(2 * SMALLEST_BYTES - 1) is None
    pool._refused_until_s = 0.0
    assert pool.statistics()["reserved_bytes"] == SMALLEST_BYTES
    assert pool.allocate(2 * SMALLEST_BYTES - 1) is not None


def test_memory_outlives_its_pool():
    pool = Pool(MIB)
    memory = pool.allocate(MIB)
    memory[:] = b"m" * MIB
    theirs = lent(pool, memory)
    del memory, pool
    gc.collect()
    assert bytes(theirs) == b"m" * MIB


def test_nobody_can_cut_a_segment_off(pool):
    fd = pool.slot_of(pool.allocate(MIB)).segment.fd
    for size in (0, os.fstat(fd).st_size - 1, os.fstat(fd).st_size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_place_outside_the_segment_is_refused(pool):
    memory = pool.allocate(MIB)
    mapping = Mapping(os.dup(pool.slot_of(memory).segment.fd))
    with pytest.raises(ValueError, match="of a segment of"):
        borrow(mapping, mapping.size_bytes - 10, 11, 0)
    with pytest.raises(ValueError, match="of a segment of"):
        borrow(mapping, 0, 10, mapping.size_bytes)


def test_a_forked_child_gives_nothing_back_and_writes_to_its_own():
    """What a child of fork lets go of, its parent still has, and what it writes, nobody else sees."""
    code = """
import os
from monarch.transports import registry
from monarch.transports.mappings import Mapping
from monarch.transports.segments import borrow
class Holder: is_gone = is_over = False
pool = registry.get("shm").memory
memory = pool.allocate(1 << 20)
slot = pool.slot_of(memory)
theirs = borrow(Mapping(os.dup(slot.segment.fd)), slot.offset, 1 << 20, slot.lend(Holder()))
memory[0] = 1
del memory
pid = os.fork()
if not pid:
    assert theirs[0] == 1
    theirs[0] = 2
    del theirs
    assert registry.get("shm").memory is not pool
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert pool.statistics()["lent_slots"] == 0 and theirs[0] == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20, cwd=Path(__file__).parents[2])


def test_the_pool_of_the_transport_is_bounded():
    memory = registry.get("shm").memory
    assert memory is not None and memory.limit() > 0
