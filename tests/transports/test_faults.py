"""Faults on demand on in-process links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch.errors import LinkSevered
from monarch.transports.faults import Faults
from monarch.transports.inproc import InprocLink, pair
from tests.transports.drive import Receiver, Sender, exchange, wait_until

NUMBERED = [[b"%d" % i] for i in range(20)]


@pytest.fixture
def links() -> Iterator[tuple[InprocLink, InprocLink]]:
    left, right = pair()
    yield left, right
    left.abort()
    right.abort()


def test_a_cut_severs_both_ends_and_loses_what_was_on_its_way(links):
    links[0].send_nowait(NUMBERED)
    Faults(links[0]).cut()
    for link in links:
        receiver = Receiver(link)
        assert type(receiver.until_end()) is LinkSevered
        assert receiver.frames == []


def test_held_frames_arrive_after_release(links):
    left, right = links
    faults = Faults(left)
    faults.hold()
    left.send_nowait(NUMBERED)
    assert right.recv_nowait() == []
    assert faults.held_count == 20
    assert exchange(right, left, [[b"the other way is free"]])
    faults.release()
    receiver = Receiver(right)
    wait_until(receiver.step, right)
    assert receiver.frames == NUMBERED


def test_a_link_can_break_between_two_frames(links):
    left, right = links
    faults = Faults(left)
    faults.hold()
    left.send_nowait(NUMBERED)
    faults.release(7)
    receiver = Receiver(right)
    assert type(receiver.until_end()) is LinkSevered
    assert receiver.frames == NUMBERED[:7]


def test_even_the_end_is_held(links):
    left, right = links
    faults = Faults(left)
    faults.hold()
    left.send_nowait(NUMBERED)
    left.close()
    assert right.recv_nowait() == []
    faults.release()
    receiver = Receiver(right)
    receiver.until_end()
    assert receiver.frames == NUMBERED


def test_reordering_is_the_same_for_the_same_seed(links):
    orders = []
    for seed in (1, 1, 2):
        left, right = pair()
        faults = Faults(left, seed)
        faults.hold()
        left.send_nowait(NUMBERED)
        faults.reorder()
        faults.release()
        orders.append(right.recv_nowait())
        left.abort()
        right.abort()
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(NUMBERED)
    assert orders[0] != NUMBERED


def test_a_slow_link_takes_one_frame_at_a_time(links):
    left, right = links
    Faults(left).slow(1)
    assert left.send_nowait(NUMBERED) == 1
    assert left.blocked
    sender, receiver = Sender(left, NUMBERED), Receiver(right)
    sender.sent = 1

    def done() -> bool:
        sender.step()
        return receiver.step() == 20

    wait_until(done, left, right)
    assert receiver.frames == NUMBERED
