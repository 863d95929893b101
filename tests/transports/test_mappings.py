"""What was lent to a process that forks: ordinary memory from then on, in the process and in its child."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from attrs import define

from monarch import compiled
from monarch.transports import mappings, registry
from monarch.transports.mappings import Mapping
from monarch.transports.memory import Claim, claim
from monarch.transports.pool import Pool
from monarch.transports.segments import borrow, can_share
from monarch.verbs.registrations import register
from tests.forks import LIMIT_S, fork
from tests.transports.drive import Receiver, exchange, wait_until

TRANSPORT = registry.get("shm")
MIB = 1 << 20

pytestmark = [
    pytest.mark.skipif(bool(can_share()), reason=can_share() or "it can"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

without_populate = pytest.mark.skipif(bool(compiled.why_not), reason=compiled.why_not or "there is a compiled part")


@define
class Holder:
    is_gone: bool = False
    is_over: bool = False


def lent(pool: Pool, content: bytes, mapping: Mapping | None = None, holder: Holder | None = None) -> memoryview:
    """As a receiver gets it."""
    memory = pool.allocate(len(content))
    memory[:] = content
    slot = pool.slot_of(memory)
    return borrow(mapping or attached(pool, slot), slot.offset, len(content), slot.lend(holder or Holder()))


def attached(pool: Pool, slot: Any) -> Mapping:
    return Mapping(os.dup(slot.segment.fd))


def mapping_of(pool: Pool, size: int) -> Mapping:
    return attached(pool, pool.slot_of(pool.allocate(size)))


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Child:
    """A fork that calls `look` when it is asked to."""

    def __init__(self, look: Callable[[], bytes]) -> None:
        (go, self._go), (self._said, said) = os.pipe(), os.pipe()
        self._pid = fork()
        if not self._pid:
            faulthandler.disable()
            try:
                os.read(go, 1)
                os.write(said, look())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(go)
        os.close(said)

    def ask(self) -> bytes:
        """What `look` gave; b"" where the child died of it."""
        os.write(self._go, b"!")
        os.close(self._go)
        said = os.read(self._said, 1000)
        os.close(self._said)
        self.status = os.waitpid(self._pid, 0)[1]
        return said


def ends(memory: memoryview) -> bytes:
    """The first and the last byte, and one of a page in the middle."""
    return bytes((memory[0], memory[len(memory) // 2], memory[-1]))


def test_neither_parent_nor_child_sees_what_the_other_writes(pool):
    theirs = lent(pool, b"a" * MIB)

    def write_and_look() -> bytes:
        seen = ends(theirs)
        theirs[1] = ord("c")
        return seen

    child = Child(write_and_look)
    theirs[:] = b"b" * MIB
    assert child.ask() == b"aaa"
    assert theirs == b"b" * MIB


def test_the_place_is_the_owners_at_once_and_lent_again_elsewhere(pool):
    mapping = mapping_of(pool, MIB)
    theirs = [lent(pool, b"a" * MIB, mapping)]
    place = address_of(theirs[0])
    assert pool.statistics()["lent_slots"] == 1
    child = Child(lambda: ends(theirs[0]))
    assert pool.statistics()["lent_slots"] == 0 and address_of(theirs[0]) == place
    others = [lent(pool, bytes([at]) * MIB, mapping) for at in range(5)]
    assert theirs == [b"a" * MIB] and child.ask() == b"aaa"
    assert others == [bytes([at]) * MIB for at in range(5)]
    theirs.clear()
    assert pool.statistics()["lent_slots"] == 5
    others.clear()
    assert pool.statistics()["lent_slots"] == 0


def test_a_child_sees_what_its_parent_lets_go_of(pool):
    mapping = mapping_of(pool, MIB)
    theirs = [lent(pool, b"a" * MIB, mapping)]
    child = Child(lambda: ends(theirs[0]))
    theirs.clear()
    others = [lent(pool, b"b" * MIB, mapping) for _ in range(5)]
    assert child.ask() == b"aaa"
    assert len(others) == 5


def test_a_child_of_the_child_and_a_second_child_see_the_same(pool):
    theirs = lent(pool, b"a" * MIB)

    def look_below() -> bytes:
        child = Child(lambda: ends(theirs))
        theirs[:] = b"b" * MIB
        return child.ask() + ends(theirs)

    first = Child(look_below)
    second = Child(look_below)
    theirs[:] = b"c" * MIB
    assert first.ask() == second.ask() == b"aaabbb"


def test_nothing_is_left_of_what_was_held(pool):
    gc.collect()
    before = len(mappings._ranges), len(mappings._holds)
    for _ in range(3):
        theirs = [lent(pool, b"a" * MIB), lent(pool, b"b" * MIB)]
        Child(lambda: b"").ask()
        theirs.clear()
    assert len(mappings._ranges) <= before[0] + 2  # the pool's own
    assert len(mappings._holds) == before[1]


def test_what_several_objects_show_is_one_memory_still(pool):
    theirs = lent(pool, b"a" * MIB)
    view = memoryview(theirs.obj).cast("B")[: MIB // 2]
    Child(lambda: b"").ask()
    theirs[0] = 7
    assert view[0] == 7
    del theirs
    assert view[0] == 7 and view[-1] == ord("a")


@pytest.mark.parametrize("populate", [mappings.POPULATE_WRITE, pytest.param(-1, marks=without_populate)])
def test_a_thread_that_writes_meanwhile_loses_nothing(pool, monkeypatch, populate):
    monkeypatch.setattr(mappings, "POPULATE_WRITE", populate)
    numpy = pytest.importorskip("numpy")
    for _ in range(5):
        array = numpy.frombuffer(lent(pool, bytes(8 * MIB)), numpy.uint64)
        going, stop = threading.Event(), threading.Event()
        count = 0

        def write(array: Any = array, going: threading.Event = going, stop: threading.Event = stop) -> None:
            nonlocal count
            while not stop.is_set():
                numpy.add(array, 1, out=array)  # without the interpreter
                count += 1
                going.set()

        writer = threading.Thread(target=write)
        writer.start()
        assert going.wait(LIMIT_S)
        Child(lambda: b"").ask()
        stop.set()
        writer.join(LIMIT_S)
        assert (array == count).all()


def test_forks_while_others_receive_and_let_go(pool):
    mapping = mapping_of(pool, MIB)
    stop = threading.Event()
    wrong: list[int] = []

    def receive(number: int) -> None:
        content = bytes([number]) * MIB
        while not stop.is_set():
            kept = lent(pool, content, mapping)
            if kept != content:
                wrong.append(number)

    threads = [threading.Thread(target=receive, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        kept = [lent(pool, b"a" * MIB, mapping)]
        for _ in range(20):
            child = Child(lambda: ends(kept[0]))
            kept = [lent(pool, b"a" * MIB, mapping)]
            assert child.ask() == b"aaa"
    finally:
        stop.set()
        for thread in threads:
            thread.join(LIMIT_S)
    kept.clear()
    assert not wrong and pool.statistics()["lent_slots"] == 0


# What is passed on


def claimed(arrived: list[memoryview]) -> Claim | None:
    (memory,) = arrived
    return claim(address_of(memory), len(memory))


def test_what_has_become_private_is_passed_on_as_a_copy(pool, links):
    left, right = links
    arrived = exchange(left, right, [[b"a" * MIB]])[0]
    early = claimed(arrived)
    assert early is not None
    Child(lambda: b"").ask()
    assert claimed(arrived) is None
    arrived[0][:] = b"b" * MIB
    arrived.clear()
    part = early.settle()
    assert part is not None
    others = exchange(left, right, [[b"c" * MIB] for _ in range(3)])
    ((back,),) = exchange(right, left, [[part]])
    assert back == b"b" * MIB and all(other == [b"c" * MIB] for other in others)


def test_what_was_passed_on_before_comes_back_as_it_is(pool, links):
    left, right = links
    arrived = exchange(left, right, [[b"a" * MIB]])[0]
    early = claimed(arrived)
    arrived.clear()
    part = early.settle()
    assert right.send_nowait([[part]]) == 1
    Child(lambda: b"").ask()
    receiver = Receiver(left)
    wait_until(lambda: (right.flush_nowait(), receiver.step())[1] == 1, left, right)
    assert receiver.frames == [[b"a" * MIB]]
    del part, early
    receiver.frames.clear()
    assert pool.statistics()["lent_slots"] == 0


def test_what_came_back_in_a_slot_of_ones_own_is_private_too(pool, links):
    left, right = links
    arrived = exchange(left, right, [[b"a" * MIB]])[0]
    early = claimed(arrived)
    arrived.clear()
    ((back,),) = exchange(right, left, [[early.settle()]])
    del early
    child = Child(lambda: ends(back))
    assert pool.statistics()["lent_slots"] == 0
    back[:] = b"b" * MIB
    frames = exchange(left, right, [[bytes([at]) * MIB] for at in range(3)])
    assert frames == [[bytes([at]) * MIB] for at in range(3)]
    assert child.ask() == b"aaa" and back == b"b" * MIB


def test_what_is_on_its_way_arrives_after_a_fork(pool, links):
    left, right = links
    kept = exchange(left, right, [[b"a" * MIB]])[0]
    memory = pool.allocate(MIB)
    memory[:] = b"b" * MIB
    assert left.send_nowait([[memory]]) == 1
    Child(lambda: b"").ask()
    del memory
    receiver = Receiver(right)
    wait_until(lambda: (left.flush_nowait(), receiver.step())[1] == 1, left, right)
    assert receiver.frames == [[b"b" * MIB]] and kept == [b"a" * MIB]


# Where it cannot be had


@without_populate
def test_on_kernels_that_do_not_know_how_to_populate_pages_are_touched(pool, monkeypatch):
    monkeypatch.setattr(mappings, "POPULATE_WRITE", -1)
    mapping = mapping_of(pool, MIB)
    content = os.urandom(MIB)
    theirs = lent(pool, content, mapping)
    child = Child(lambda: hashlib.sha256(theirs).digest())
    assert pool.statistics()["lent_slots"] == 0
    other = lent(pool, b"b" * MIB, mapping)
    assert child.ask() == hashlib.sha256(content).digest()
    assert theirs == content and other == b"b" * MIB


@pytest.mark.parametrize("why", ["no memory", "no way to copy"])
def test_without_copies_the_place_is_never_used_again(pool, monkeypatch, why):
    if why == "no memory":
        monkeypatch.setattr(mappings, "available_bytes", lambda: MIB)
    else:
        monkeypatch.setattr(mappings, "POPULATE_WRITE", -1)
        monkeypatch.setattr(compiled, "part", None)
    mapping, holder = mapping_of(pool, MIB), Holder()
    theirs = [lent(pool, b"a" * MIB, mapping, holder)]
    child = Child(lambda: ends(theirs[0]))
    theirs[0][0] = ord("b")
    theirs.clear()
    holder.is_gone = True
    assert pool.statistics()["lent_slots"] == 1
    others = [lent(pool, b"c" * MIB, mapping) for _ in range(5)]
    assert child.ask() == b"aaa"
    del others
    assert pool.statistics()["lent_slots"] == 1


def refuse_to_map(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mapping: Mapping) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Mapping, "_map", refuse)


class Region:
    lkey, rkey = 1, 2

    def close(self) -> None: ...


class Device:
    def register(self, address: int, size: int) -> Any:
        return Region()


def test_what_cannot_be_made_private_is_not_in_the_child(pool, monkeypatch):
    theirs = lent(pool, b"a" * MIB)
    with monkeypatch.context() as patch:
        refuse_to_map(patch)
        child = Child(lambda: ends(theirs))
    theirs[:] = b"b" * MIB
    assert child.ask() == b"" and os.WTERMSIG(child.status) == signal.SIGSEGV
    assert theirs == b"b" * MIB and pool.statistics()["lent_slots"] == 1
    child = Child(lambda: ends(theirs))
    assert child.ask() == b"bbb" and pool.statistics()["lent_slots"] == 0


def test_what_a_device_uses_stays_where_it_is(pool):
    theirs, other = lent(pool, b"a" * MIB), lent(pool, b"b" * MIB)
    region = register(Device(), address_of(theirs) + 5, 100)
    child, second = Child(lambda: ends(theirs)), Child(lambda: ends(other))
    assert pool.statistics()["lent_slots"] == 1
    assert child.ask() == b"" and os.WTERMSIG(child.status) == signal.SIGSEGV
    assert second.ask() == b"bbb"
    region.close()
    assert Child(lambda: ends(theirs)).ask() == b"aaa"
    assert pool.statistics()["lent_slots"] == 0
