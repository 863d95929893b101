"""Who sends faster than the receiver serves, waits; and nobody waits for one who waits for him."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from monarch.actor import Actor, context, current_rank, endpoint, this_host, this_proc
from monarch.testing import fresh_client
from tests.until import until

LIMIT_S = 30
LIMIT_BYTES = 64 << 10  # some 60 small messages
WAITS_S = 0.3


class Worker(Actor):
    def __init__(self) -> None:
        self.taken: list[int] = []

    @endpoint
    def hold(self, gate: str) -> None:
        """Be busy until a file is there."""
        while not os.path.exists(gate):
            threading.Event().wait(0.005)

    @endpoint
    def take(self, number: int, data: bytes = b"") -> None:
        self.taken.append(number)

    @endpoint
    def count(self) -> int:
        return len(self.taken)

    @endpoint
    def is_in_order(self) -> bool:
        return self.taken == list(range(len(self.taken)))

    @endpoint
    def flood(self, target: Any, n: int) -> int:
        for number in range(n):
            target.take.broadcast(number)
        return n

    @endpoint
    async def flood_async(self, target: Any, n: int) -> int:
        for number in range(n):
            target.take.broadcast(number)
        return n

    @endpoint
    def flood_until(self, gate: str, target: Any) -> int:
        sent = 0
        while not os.path.exists(gate):
            target.take.broadcast(sent)
            sent += 1
        return sent

    @endpoint
    def flood_next(self, ring: Any, n: int) -> None:
        target = ring.slice(gpus=(current_rank()["gpus"] + 1) % 3)
        for number in range(n):
            target.take.broadcast(number)

    @endpoint
    def fetch(self, other: Any, me: Any, n: int) -> int:
        """Wait for one who sends to this very actor meanwhile."""
        return other.flood.call_one(me, n).get()

    @endpoint
    async def fetch_async(self, other: Any, me: Any, n: int) -> int:
        return await other.flood.call_one(me, n)

    @endpoint
    def fetch_through(self, between: Any, other: Any, me: Any, n: int) -> int:
        return between.fetch.call_one(other, me, n).get()

    @endpoint
    def seven(self) -> int:
        return 7

    @endpoint
    def take_asking(self, number: int, whom: Any) -> None:
        assert whom.seven.call_one().get() == 7
        self.taken.append(number)

    @endpoint
    def flood_asking(self, target: Any, me: Any, n: int) -> None:
        for number in range(n):
            target.take_asking.broadcast(number, me)


@define
class Trio:
    """Three processes with a worker each; `many` messages are more than a mailbox and the way there take."""

    procs: Any
    workers: Any
    many: int

    def worker(self, rank: int) -> Any:
        return self.workers.slice(gpus=rank)

    def have_taken(self, *counts: int) -> bool:
        """Whether each worker has taken so many in the end, and no more: what others send, it may get after a call."""
        until(lambda: list(self.workers.count.call().get(LIMIT_S).values()) == list(counts))
        return True


@pytest.fixture(
    params=[("inproc", 2_000), pytest.param(("shm", 10_000), marks=pytest.mark.slow)],
    ids=lambda param: param[0],
)
def trio(request: pytest.FixtureRequest) -> Iterator[Trio]:
    transport, many = request.param
    with fresh_client(transport, mailbox_bytes=LIMIT_BYTES):
        procs = this_host().spawn_procs({"gpus": 3})
        workers = procs.spawn("workers", Worker)
        workers.initialized.get(LIMIT_S)
        yield Trio(procs, workers, many)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "open"


class Flood:
    """The client sends to an actor as fast as it can, until `end`."""

    def __init__(self, target: Any) -> None:
        self.sent = 0
        self._target, self._ending = target, threading.Event()
        self._backpressure = context().actor_instance.proc_runtime.backpressure
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._target.take.broadcast(self.sent)
            self.sent += 1

    def is_waiting(self) -> bool:
        return any(self._backpressure.full.values())

    def end(self) -> bool:
        """Whether it does."""
        self._ending.set()
        self._thread.join(LIMIT_S)
        return not self._thread.is_alive()


def test_a_sender_waits_while_the_mailbox_is_full_and_goes_on_when_there_is_room(trio: Trio, gate: Path) -> None:
    slow = trio.worker(0)
    slow.hold.broadcast(str(gate))
    flood = Flood(slow)
    until(flood.is_waiting)
    before = flood.sent
    assert before > 50
    gate.touch()
    until(lambda: flood.sent > before + 50)

    assert flood.end()
    assert slow.count.call_one().get(LIMIT_S) == flood.sent
    assert slow.is_in_order.call_one().get(LIMIT_S)


def test_nobody_else_waits_meanwhile(trio: Trio, gate: Path) -> None:
    trio.worker(0).hold.broadcast(str(gate))
    flooding = trio.worker(1).flood_until.call_one(str(gate), trio.worker(0))
    until(lambda: "flood_until has been running" in str(flooding.exception(WAITS_S)))
    beside = trio.procs.spawn("beside", Worker)

    assert list(beside.seven.call().get(LIMIT_S).values()) == [7, 7, 7]
    assert beside.slice(gpus=1).fetch.call_one(trio.worker(2), beside.slice(gpus=0), 10).get(LIMIT_S) == 10
    gate.touch()
    assert trio.have_taken(flooding.get(LIMIT_S), 0, 0)


def test_who_sends_little_to_a_full_mailbox_does_not_wait_for_those_who_have_filled_it(trio: Trio, gate: Path) -> None:
    full = trio.worker(0)
    beside = trio.procs.slice(gpus=0).spawn("beside", Worker)
    full.hold.broadcast(str(gate))
    flooding = trio.worker(1).flood_until.call_one(str(gate), full)
    until(lambda: "flood_until has been running" in str(flooding.exception(WAITS_S)))
    for number in range(3):
        full.take.broadcast(number)
        assert beside.seven.call_one().get(LIMIT_S) == 7  # whatever that process had to tell, has come
        assert not context().actor_instance.proc_runtime.backpressure.full

    gate.touch()
    assert trio.have_taken(flooding.get(LIMIT_S) + 3, 0, 0)


@pytest.mark.parametrize("flood", ["flood", "flood_async"])
def test_two_who_flood_each_other_end(trio: Trio, flood: str) -> None:
    a, b = trio.worker(0), trio.worker(1)
    floods = [getattr(a, flood).call_one(b, trio.many), getattr(b, flood).call_one(a, trio.many)]

    assert [each.get(LIMIT_S) for each in floods] == [trio.many] * 2
    assert trio.have_taken(trio.many, trio.many, 0)


def test_all_may_send_to_all_before_any_of_them_takes(trio: Trio) -> None:
    trio.workers.flood.call(trio.workers, trio.many // 2).get(LIMIT_S)

    assert trio.have_taken(*[3 * (trio.many // 2)] * 3)


def test_a_ring_of_floods_ends(trio: Trio) -> None:
    trio.workers.flood_next.call(trio.workers, trio.many).get(LIMIT_S)

    assert trio.have_taken(*[trio.many] * 3)


@pytest.mark.parametrize("fetch", ["fetch", "fetch_async"])
def test_a_receiver_that_waits_for_the_sender_is_sent_everything(trio: Trio, fetch: str) -> None:
    a, b = trio.worker(0), trio.worker(1)

    assert getattr(b, fetch).call_one(a, b, trio.many).get(LIMIT_S) == trio.many
    assert trio.have_taken(0, trio.many, 0)


def test_also_one_that_waits_through_others(trio: Trio) -> None:
    a, b, c = (trio.worker(rank) for rank in range(3))

    assert b.fetch_through.call_one(c, a, b, trio.many).get(LIMIT_S) == trio.many
    assert trio.have_taken(0, trio.many, 0)


def test_a_receiver_may_ask_the_sender_about_each_message(trio: Trio) -> None:
    a, b = trio.worker(0), trio.worker(1)
    a.flood_asking.call_one(b, a, trio.many // 2).get(LIMIT_S)

    assert trio.have_taken(0, trio.many // 2, 0)


def test_an_actor_may_flood_itself_and_others_of_its_process(trio: Trio) -> None:
    a, beside = trio.worker(0), trio.procs.spawn("beside", Worker).slice(gpus=0)

    assert a.flood.call_one(a, trio.many).get(LIMIT_S) == trio.many
    assert a.flood.call_one(beside, trio.many).get(LIMIT_S) == trio.many
    assert trio.have_taken(trio.many, 0, 0)
    assert beside.count.call_one().get(LIMIT_S) == trio.many


def test_the_client_waits_for_actors_of_its_own_process(gate: Path) -> None:
    with fresh_client("inproc", mailbox_bytes=LIMIT_BYTES):
        slow = this_proc().spawn("slow", Worker)
        slow.hold.broadcast(str(gate))
        flood = Flood(slow)
        until(flood.is_waiting)
        gate.touch()

        assert flood.end()
        assert slow.count.call_one().get(LIMIT_S) == flood.sent


def test_who_waits_for_an_actor_that_ends_waits_no_more(trio: Trio, gate: Path) -> None:
    slow = trio.procs.slice(gpus=0).spawn("slow", Worker)
    slow.hold.broadcast(str(gate))
    flood = Flood(slow)
    until(flood.is_waiting)
    stopping = slow.stop()
    gate.touch()
    stopping.get(LIMIT_S)

    assert flood.end()


@pytest.mark.slow
def test_who_waits_for_a_process_that_is_killed_waits_no_more(gate: Path) -> None:
    with fresh_client("shm", mailbox_bytes=LIMIT_BYTES) as client:
        procs = this_host().spawn_procs({"gpus": 1})
        slow = procs.spawn("slow", Worker)
        slow.hold.broadcast(str(gate))
        flood = Flood(slow)
        until(flood.is_waiting)
        client.kill(procs)
        client.expect_fault("Killed")

        assert flood.end()


class Meter(Worker):
    """Measures its own memory while it is slow."""

    @endpoint
    def take_slowly(self, data: bytes) -> None:
        threading.Event().wait(0.0002)

    @endpoint
    def relay(self, target: Any, data: bytes) -> None:
        target.take_slowly.broadcast(data)

    @endpoint
    def peak_bytes(self) -> int:
        """The most that was resident since the process was made."""
        status = Path("/proc/self/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("size_bytes", "n"), [(100, 20_000), (10_000, 10_000), (1 << 20, 800)])
def test_memory_of_a_pipeline_is_bounded_whatever_is_sent(transport: str, size_bytes: int, n: int) -> None:
    """From the client to an actor, which passes it on to one that is slow: 20 to 800 MB, in mailboxes of 8 MiB. What is
    sent before a sender hears that one is full comes on top, most of all where messages are large."""
    with fresh_client(transport, mailbox_bytes=8 << 20):
        meters = this_host().spawn_procs({"gpus": 2}).spawn("meters", Meter)
        first, last = meters.slice(gpus=0), meters.slice(gpus=1)
        first.take_slowly.call_one(b"").get(LIMIT_S)
        before = meters.peak_bytes.call().get(LIMIT_S).values()
        data = b"x" * size_bytes
        for _ in range(n):
            first.relay.broadcast(last, data)
        first.count.call_one().get(LIMIT_S)
        after = meters.peak_bytes.call().get(LIMIT_S).values()

        grown = [(a - b) >> 20 for a, b in zip(after, before, strict=True)]
        assert max(grown) < (64 if size_bytes < 1 << 20 else 400), grown
