"""When silence counts as the end of a host, in a table of what is heard between the beats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import define, field

from monarch.core.heartbeats import Heartbeats
from monarch.core.ids import ProcId, Uid
from monarch.core.monitor import Down
from monarch.core.peer import Peer, State
from monarch.core.poller import Poller
from monarch.core.protocol import FrameType, Session


@define(eq=False)
class _Agent(Peer):
    said: list[FrameType] = field(factory=list)

    def say(self, kind: FrameType) -> None:
        self.said.append(kind)


class Scene:
    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.lost: list[tuple[Peer, Down]] = []
        self.heartbeats = Heartbeats(
            5.0,
            lambda delay_s, action: self.due.append((delay_s, action)),
            lambda peer, down: self.lost.append((peer, down)),
        )

    def agent(self) -> _Agent:
        proc = ProcId(Uid.instance("host"))
        poller: Poller = None  # type: ignore[assignment]
        agent = _Agent(proc, Session(), poller, 1, lambda peer: None, state=State.UP, host="far", heard=True)
        self.heartbeats.watch(agent)
        return agent

    def beat(self) -> None:
        ((delay_s, action),) = self.due
        assert delay_s == 1.0
        self.due.clear()
        action()


@pytest.mark.parametrize(
    ("heard", "lost_at"),
    [
        ("hhhhhhhhhh", None),
        ("h.....", 6),
        ("h....h.....", 11),
        (".....", 6),  # being up counts as heard, once
        ("h....h....h....", None),
    ],
)
def test_a_silence_of_five_beats_is_the_end(heard: str, lost_at: int | None) -> None:
    scene = Scene()
    agent = scene.agent()
    found = None
    for number, each in enumerate(heard + "." * (1 if lost_at == 6 else 0), 1):
        agent.heard = agent.heard or each == "h"
        scene.beat()
        if scene.lost:
            found = number
            break
    assert found == lost_at
    if lost_at is not None:
        assert (
            f"nothing was heard from process {agent.proc.uid} on far for 5 s (setting host_timeout)"
            in scene.lost[0][1].reason
        )


def test_every_beat_asks_those_that_are_up() -> None:
    scene = Scene()
    agent = scene.agent()
    scene.beat()
    agent.state = State.BROKEN
    scene.beat()
    assert agent.said == [FrameType.HEARTBEAT]


def test_beats_end_with_the_last_agent_and_begin_again() -> None:
    scene = Scene()
    agent = scene.agent()
    agent.down = Down("stopped", "it left")
    scene.beat()
    assert scene.due == []
    scene.agent()
    assert len(scene.due) == 1


def test_one_that_was_held_itself_judges_by_beats_and_not_by_the_clock() -> None:
    """The beat that was due while this process was held comes once, however late."""
    scene = Scene()
    agent = scene.agent()
    scene.beat()
    scene.beat()  # a minute late
    agent.heard = True  # what had arrived meanwhile
    for _ in range(4):
        scene.beat()
    assert not scene.lost
