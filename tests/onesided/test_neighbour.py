"""Memory of a process and the one beside it: what is exported, found, copied, dropped, and what a death does."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from monarch import sealed
from monarch.errors import BufferDropped, TransferError
from monarch.onesided.exports import Exports, Place, exports
from monarch.onesided.local import local
from monarch.onesided.neighbour import Neighbour, NeighbourGone
from monarch.onesided.path import NotReachable

ROOT = Path(__file__).parents[2]

OTHER = """
import pickle, sys
from monarch.onesided.exports import exports
from monarch.onesided.local import local
held = []
def say(value):
    sys.stdout.buffer.write(pickle.dumps(value).hex().encode() + b"\\n")
    sys.stdout.buffer.flush()
say(exports().place)
for line in sys.stdin:
    what, *rest = line.split()
    if what == "offer":
        view = exports().allocate(int(rest[1])) if rest[0] == "file" else memoryview(bytearray(int(rest[1])))
        view[:] = bytes(i % 251 for i in range(len(view)))
        export = exports().add(local(view))
        held.append((view, export))
        say((export.number, export.slot, export.local.address, exports().place_of(export.local)))
    elif what == "show":
        say(bytes(held[int(rest[0])][0]))
    elif what == "drop":
        exports().withdraw(held[int(rest[0])][1].number, lambda: say("dropped"))
"""


class Other:
    """A process with exports that does what it is told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.place: Place = self.hear()

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return pickle.loads(bytes.fromhex(self.process.stdout.readline()))

    def ask(self, *words: object) -> Any:
        self.tell(*words)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def other() -> Iterator[Other]:
    other = Other()
    yield other
    other.kill()


def content(size: int) -> bytes:
    return bytes(i % 251 for i in range(size))


def test_any_memory_is_copied_in_both_directions(other):
    neighbour = Neighbour(other.place)
    number, slot, address, in_file = other.ask("offer", "heap", 100_000)
    mine, written = bytearray(100_000), bytearray(b"written here")
    with neighbour.using(slot, number):
        neighbour.read(local(mine).address, address, 100_000)
        neighbour.write(address + 10, local(written).address, 12)

    assert in_file is None
    assert bytes(mine) == content(100_000)
    assert other.ask("show", 0)[:30] == content(100_000)[:10] + b"written here" + content(100_000)[22:30]


def test_allocated_memory_is_mapped(other):
    neighbour = Neighbour(other.place)
    _, _, _, in_file = other.ask("offer", "file", 100_000)
    mapping = neighbour.mapped(in_file, 100_000)
    assert ctypes.string_at(mapping.address + in_file - mapping.start, 100_000) == content(100_000)

    ctypes.memmove(mapping.address, b"here", 4)
    assert other.ask("show", 0)[:4] == b"here"
    assert neighbour.mapped(in_file, 100_000) is mapping


def test_a_drop_waits_for_those_who_use_the_buffer_and_refuses_new_ones(other):
    neighbour = Neighbour(other.place)
    number, slot, address, _ = other.ask("offer", "heap", 64)
    mine = bytearray(64)
    with neighbour.using(slot, number):
        other.tell("drop", 0)
        assert other.ask("show", 0) == content(64)  # it has seen the drop, and does not say that it is done
        with pytest.raises(BufferDropped), neighbour.using(slot, number):
            pass
        neighbour.read(local(mine).address, address, 64)

    assert other.hear() == "dropped"
    assert bytes(mine) == content(64)
    with pytest.raises(BufferDropped, match="has been dropped"), neighbour.using(slot, number):
        pass


def test_the_slot_of_a_dropped_buffer_is_used_again_and_does_not_stand_for_it(other):
    neighbour = Neighbour(other.place)
    number, slot, _, _ = other.ask("offer", "heap", 64)
    assert other.ask("drop", 0) == "dropped"
    again, same_slot, _, _ = other.ask("offer", "heap", 64)

    assert same_slot == slot
    with pytest.raises(BufferDropped), neighbour.using(slot, number):
        pass
    with neighbour.using(slot, again):
        pass


def test_a_user_that_dies_does_not_hold_up_a_drop(other):
    number, slot, _, _ = other.ask("offer", "heap", 64)
    code = (
        "import pickle, sys, os\n"
        "from monarch.onesided.neighbour import Neighbour\n"
        f"neighbour = Neighbour(pickle.loads(bytes.fromhex({pickle.dumps(other.place).hex()!r})))\n"
        f"with neighbour.using({slot}, {number}):\n"
        "    print('using', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert user.stdout is not None
    assert user.stdout.readline() == "using\n"
    other.tell("drop", 0)
    user.kill()
    user.communicate()

    assert other.hear() == "dropped"


def test_a_dead_neighbour_is_told_from_a_living_one(other):
    neighbour = Neighbour(other.place)
    _, _, address, _ = other.ask("offer", "heap", 64)
    neighbour.check_alive()
    other.kill()

    with pytest.raises(NeighbourGone, match=str(other.place.pid)):
        neighbour.check_alive()
    with pytest.raises(NeighbourGone):
        neighbour.read(local(bytearray(64)).address, address, 64)
    with pytest.raises(NeighbourGone):
        Neighbour(other.place)


def test_another_process_with_the_same_pid_is_not_taken_for_it(other):
    with pytest.raises(NeighbourGone):
        Neighbour(evolve(other.place, token=b"0123456789abcdef"))
    with pytest.raises(NeighbourGone):
        Neighbour(evolve(other.place, fd=9999))


def test_nobody_can_cut_off_what_a_neighbour_shares(other):
    _, _, _, in_file = other.ask("offer", "file", 100_000)
    with open(f"/proc/{other.place.pid}/fd/{other.place.fd}", "r+b") as file, pytest.raises(PermissionError):
        file.truncate(in_file)
    assert other.ask("show", 0) == content(100_000)


def test_memory_that_a_neighbour_could_cut_off_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sealed, "seal", lambda fd, may_grow: None)
        book = Exports()
    with pytest.raises(NotReachable, match=f"process {os.getpid()} shares is refused: the file can be cut off"):
        Neighbour(book.place)


@pytest.mark.parametrize("place", [(1 << 40, 100), (0, 1 << 40), (-4096, 100)])
def test_a_place_outside_of_what_a_neighbour_shares_is_an_error_and_not_a_crash(other, place):
    with pytest.raises(TransferError, match=f"process {other.place.pid} shares no"):
        Neighbour(other.place).mapped(*place)


def test_a_neighbour_that_may_not_be_looked_into_says_so(other, monkeypatch):
    def forbidden(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(NotReachable, match=r"does not let others look into it.*Permission denied"):
        Neighbour(other.place)


def test_an_address_that_is_not_there_is_an_error_and_not_a_crash(other):
    with pytest.raises(TransferError, match="Bad address"):
        Neighbour(other.place).read(local(bytearray(8)).address, 8, 8)


# Exports, seen from inside


def test_memory_is_found_in_the_file_wherever_in_it_a_part_begins():
    book = Exports()
    one, two = book.allocate(5000), book.allocate(3 * 4096)
    first, second = book.place_of(local(one)), book.place_of(local(two))

    assert first is not None and second == first + 8192
    assert book.place_of(local(two[100:200])) == second + 100
    assert book.place_of(local(bytearray(10))) is None


def test_memory_is_freed_with_its_last_user():
    book = Exports()
    view = book.allocate(1 << 20)
    part = view[10:20]
    view[:4] = b"data"
    before = os.stat(f"/proc/self/fd/{book.fd}").st_blocks
    del view
    part[:] = b"still here"
    assert os.stat(f"/proc/self/fd/{book.fd}").st_blocks == before
    del part

    assert os.stat(f"/proc/self/fd/{book.fd}").st_blocks < before


def test_a_withdrawal_waits_for_users_of_the_same_process():
    book, done = Exports(), threading.Event()
    export = book.add(local(bytearray(8)))
    with book.using(export.number):
        book.withdraw(export.number, done.set)
        assert not done.wait(0.01)
        with pytest.raises(BufferDropped), book.using(export.number):
            pass

    assert done.wait(10)
    assert len(book) == 0


def test_a_withdrawal_lets_the_memory_go_and_may_be_repeated():
    book, calls = Exports(), []
    data = bytearray(8)
    export = book.add(local(data))
    with pytest.raises(BufferError):
        data.extend(b"grow")
    number = export.number
    del export
    book.withdraw(number, lambda: calls.append(1))
    book.withdraw(number, lambda: calls.append(2))
    data.extend(b"grow")

    assert calls == [1, 2]


def test_a_process_has_one_book():
    assert exports() is exports()
    assert exports().place.pid == os.getpid()
