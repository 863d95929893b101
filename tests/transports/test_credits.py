"""Credits, by two sides back to back: no message ever meets an empty ring, and nobody waits for ever."""

from __future__ import annotations

import random
from collections import deque

import pytest
from attrs import define, field

from monarch.errors import RemoteProtocolError
from monarch.transports.credits import RESERVED, Credits

DEPTH = 8


@define(eq=False)
class Side:
    """One end: messages that wait in its ring, as (credits handed back, whether it took one)."""

    credits: Credits = field(factory=lambda: Credits(DEPTH))
    ring: deque[tuple[int, bool]] = field(factory=deque)
    unread: int = 0

    def post(self, to: Side, handed_back: int, counts: bool) -> None:
        assert len(to.ring) + to.unread < DEPTH, "a message met a ring that was full"
        to.ring.append((handed_back, counts))

    def send(self, to: Side) -> bool:
        if not self.credits.available:
            return False
        self.post(to, self.credits.spend(), True)
        return True

    def take_in(self) -> None:
        while self.ring:
            handed_back, counts = self.ring.popleft()
            self.credits.granted(handed_back)
            self.unread += counts

    def read(self, to: Side) -> bool:
        if not self.unread:
            return False
        self.unread -= 1
        self.credits.owed += 1
        if self.credits.is_deep_in_debt:
            self.post(to, self.credits.hand_back(), False)
        return True


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_sending_and_reading_ends_with_all_read(seed):
    rng, left, right = random.Random(seed), Side(), Side()
    sent = {left: 0, right: 0}
    read = {left: 0, right: 0}
    weights = [rng.random() for _ in range(4)]
    while read[left] < 300 or read[right] < 300:
        me, other = rng.choice([(left, right), (right, left)])
        step = rng.choices(["send", "take", "read", "stop"], weights)[0]
        if step == "send" and sent[me] < 300:
            sent[me] += me.send(other)
        elif step == "take":
            me.take_in()
        elif step == "read":
            read[me] += me.read(other)
        else:
            # Whoever stops for a while is not what the other waits for once it goes on.
            me.take_in()
            read[me] += me.read(other)
            sent[other] += sent[other] < 300 and other.send(me)

    assert sent == {left: 300, right: 300}


def test_a_sender_stops_before_a_reader_that_does_not_read():
    left, right = Side(), Side()
    while left.send(right):
        pass

    assert len(right.ring) == DEPTH - RESERVED
    right.take_in()
    assert not left.send(right)


def test_a_peer_that_hands_back_too_much_is_refused():
    credits = Credits(DEPTH)
    with pytest.raises(RemoteProtocolError, match="hands back 1 credits"):
        credits.granted(1)
