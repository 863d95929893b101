"""How long a process is dialed, what counts as its end, and on how many threads."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest
from net import LIMIT_S, until

from monarch.core.address import Place
from monarch.core.dialer import Dialer, Refused
from monarch.core.ids import ProcId, Uid
from monarch.core.monitor import Down
from monarch.core.peer import Peer, State
from monarch.core.poller import Poller
from monarch.core.protocol import Session

HERE, ELSEWHERE = "ipc://@somewhere", "tcp://192.0.2.1:7000"


class Scene:
    """A dialer whose transport, keeper and gateway do what a test says. `limit_s` is over with the first try."""

    def __init__(self, limit_s: float = 0.0) -> None:
        self.tries: list[str] = []
        self.outcomes: list[Any] = []  # what the next dials do: an exception, or an object that is the link
        self.asked: list[Callable[[str | Down], None]] = []
        self.greeted: list[tuple[Any, Refused]] = []
        self.given_up: list[Down] = []
        self.failed: list[str] = []  # why tries have
        self.hold = threading.Event()
        self.hold.set()
        self.dialing_now = self.most_at_once = 0
        self._lock = threading.Lock()
        self.dialer = Dialer(
            self,
            limit_s,
            10.0,
            locate=lambda proc, found: self.asked.append(found),
            greet=lambda peer, link, refused: self.greeted.append((link, refused)),
            give_up=lambda peer, down: self.given_up.append(down),
            failed=lambda peer, why: self.failed.append(why),
            call_later=lambda delay_s, callback: callback(),
        )

    def find(self, *addresses: str) -> Place | None:
        return next((Place("", address) for address in addresses if address), None)

    def dial(self, place: Place, timeout_s: float) -> Any:
        with self._lock:
            self.tries.append(place.url)
            self.dialing_now += 1
            self.most_at_once = max(self.most_at_once, self.dialing_now)
        self.hold.wait(LIMIT_S)
        with self._lock:
            self.dialing_now -= 1
            outcome = self.outcomes.pop(0) if self.outcomes else object()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def peer(self, address: str = "", keeper: ProcId | None = None) -> Peer:
        proc = ProcId(Uid.instance("p"), address, keeper)
        return Peer(proc, Session(1000, 0.5), Poller(), 1 << 20, lambda peer: None)


def test_silence_on_this_host_is_no_end_and_silence_elsewhere_is_one() -> None:
    scene = Scene()
    scene.outcomes = [TimeoutError("no answer")] * 5
    scene.dialer.start(scene.peer(HERE))
    until(lambda: scene.greeted)
    for _ in range(3):
        scene.greeted.pop()[1](silent=True)
        until(lambda: scene.greeted)
    assert len(scene.tries) == 9 and scene.given_up == []

    scene.outcomes = [TimeoutError("no answer")]
    scene.dialer.start(scene.peer(ELSEWHERE))
    until(lambda: scene.given_up)
    assert "could not be reached for 0 s: TimeoutError: no answer" in scene.given_up[0].reason


def test_a_link_that_is_ended_again_and_again_is_given_up_in_time() -> None:
    scene = Scene()
    scene.dialer.start(scene.peer(HERE))
    until(lambda: scene.greeted)
    scene.greeted[0][1](silent=False)
    assert "accepted the connection and ended it again" in scene.given_up[0].reason


def test_a_refused_connection_is_the_end_unless_a_keeper_knows_better() -> None:
    scene = Scene(limit_s=60.0)
    scene.outcomes = [ConnectionRefusedError("refused")] * 3
    scene.dialer.start(scene.peer(HERE))
    until(lambda: scene.given_up)
    assert "nobody listens at ipc://@somewhere" in scene.given_up[0].reason

    kept = scene.peer(keeper=ProcId(Uid.instance("k")))
    scene.dialer.start(kept)
    for _ in range(3):
        until(lambda: scene.asked)
        scene.asked.pop()(HERE)
    until(lambda: scene.greeted)
    assert len(scene.given_up) == 1

    scene.greeted[0][1](silent=False)
    until(lambda: scene.asked)
    scene.asked.pop()(Down("killed", "by signal 9"))
    assert scene.given_up[1].reason == "by signal 9" and kept.dialing is None


def test_descriptors_that_ran_out_are_named_at_once_but_waited_for_where_there_was_a_link() -> None:
    scene = Scene(limit_s=60.0)
    scene.outcomes = [OSError(errno.EMFILE, "Too many open files")]
    scene.dialer.start(scene.peer(HERE))
    until(lambda: scene.given_up)
    assert "ulimit -n" in scene.given_up[0].reason

    known = scene.peer(HERE)
    known.breaks = 1
    scene.outcomes = [OSError(errno.EMFILE, "Too many open files")] * 3
    scene.dialer.start(known)
    until(lambda: scene.greeted)
    assert len(scene.given_up) == 1


@pytest.mark.parametrize("state", [State.UP, State.GONE])
def test_nobody_is_dialed_in_vain(state: State) -> None:
    scene = Scene()
    peer = scene.peer(HERE)
    peer.state = state
    scene.dialer.start(peer)
    assert peer.dialing is None

    peer.state = State.NEW
    scene.dialer.start(peer)
    scene.dialer.start(peer)  # goes on already
    until(lambda: scene.greeted)
    peer.dialing = None  # it has dialed us
    scene.greeted[0][1](silent=False)
    assert len(scene.tries) == 1 and scene.given_up == []


def test_hundreds_are_dialed_by_a_few_threads_that_end() -> None:
    scene = Scene()
    scene.hold.clear()
    for _ in range(200):
        scene.dialer.start(scene.peer(HERE))
    until(lambda: scene.dialing_now == 8)
    scene.hold.set()
    until(lambda: len(scene.greeted) == 200)
    assert scene.most_at_once == 8
    until(lambda: not [t for t in threading.enumerate() if t.name == "monarch-dial"])
