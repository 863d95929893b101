"""What comes from a peer counts, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from monarch.core.driver import CallerDriver
from monarch.core.envelope import Envelope, Kind
from monarch.core.ids import ProcId, Uid
from monarch.core.intake import Intake
from monarch.core.limits import Limits
from monarch.core.peer import Peer
from monarch.core.poller import Poller
from monarch.core.protocol import FrameType, Session

HERE, THERE = ProcId(Uid("here", 7)), ProcId(Uid("there", 8))


class Link:
    """Has what it is given: frames, and messages that it delivers itself, before these. Others acknowledge."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.messages: list[Envelope] = []
        self.session: Any = None

    def deliver(self, take: Any, proc: int, now_s: float) -> bool:
        for message in self.messages:
            take(message)
            self.session.took(message.size_bytes, now_s)
            self.session.delivered += 1
        return bool(self.messages) and not self.frames and self.session.ack_is_timed

    def recv_nowait(self) -> list[Any]:
        return self.frames


class World:
    def __init__(self) -> None:
        self.delivered: list[Envelope] = []
        self.later: list[Any] = []
        self.poller = Poller()
        session = Session()
        self.peer = Peer(THERE, session, self.poller, 1 << 20, lambda peer: None)
        self.peer.heard, self.peer.burst = False, 5
        self.link: Any = Link()
        self.link.session = session
        self.intake = Intake(
            HERE,
            CallerDriver(),
            Limits(),
            deliver=self.delivered.append,
            pass_on=lambda message: None,
            call_later=lambda delay_s, action: self.later.append(action),
        )


@pytest.fixture
def world() -> Any:
    world = World()
    yield world
    world.poller.shut()
    world.poller.close()


def test_where_nothing_has_come_nobody_was_heard(world: World) -> None:
    world.intake.take_from(world.peer, world.link)
    assert (world.peer.heard, world.peer.burst, world.later) == (False, 5, [])


def test_a_frame_of_any_kind_is_a_sign_of_life(world: World) -> None:
    world.link.frames = [Session().control(FrameType.ACK)]
    world.intake.take_from(world.peer, world.link)
    assert (world.peer.heard, world.peer.burst) == (True, 0)


def test_what_the_link_has_delivered_is_acknowledged_later(world: World) -> None:
    message = Envelope(Kind.CALL, HERE.key, 1, 0, THERE.key, 2, [b"x"])
    world.link.messages = [message]

    world.intake.take_from(world.peer, world.link)
    world.intake.take_from(world.peer, world.link)

    assert world.delivered == [message] * 2 and world.peer.was_heard() and not world.peer.was_heard()
    assert world.peer.session.owes_ack and len(world.later) == 1
