"""To lead in one step: what the rings bring is delivered until a signal is set, and all else is left to who polls."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch import compiled
from monarch.core.driver import Signal
from monarch.core.envelope import Kind
from monarch.core.held import NOTHING_HELD, Held, NothingHeld
from monarch.core.spin import Spin
from monarch.transports import ring
from monarch.wake import Wake
from tests.core.test_lanes import Home, Way, post, push_elsewhere
from tests.until import until

pytestmark = pytest.mark.skipif(bool(compiled.why_not), reason=compiled.why_not or "there are rings")
WAIT_S = 30.0


class Leader:
    """A process with one actor, one ring, and a descriptor beside."""

    def __init__(self) -> None:
        self.way, self.home = Way(), Home()
        self.signal = self.home.mailbox.signal
        self.lock = threading.Lock()
        self.waker, self.byte, self.bell = Wake(), bytearray(1), ring.bell()
        self.beside = os.eventfd(0, os.EFD_NONBLOCK)
        self.epoll = select.epoll()
        self.epoll.register(self.bell.fd, select.EPOLLIN | select.EPOLLET)
        self.epoll.register(self.waker.fileno(), select.EPOLLIN)
        self.epoll.register(self.beside, select.EPOLLIN)
        self.epoll.poll(0)  # the bell has rung for others

    def lead(
        self,
        *,
        calls_only: bool = True,
        look_s: float = 0.0,
        timeout_s: float = 1e-3,
        held: Held | NothingHeld = NOTHING_HELD,
        due_s: tuple[float, ...] = (),
        first: tuple[str, ...] = (),
    ) -> bool | None:
        self.spin = Spin(look_s or WAIT_S)  # which has not looked yet, or not slept
        while look_s and not self.spin.pays():
            self.spin.slept(0.0)
        timers = [(each_s, 0, None) for each_s in due_s]
        looks = self.waker, self.byte, self.spin
        self.failures: list[BaseException] = []
        lead = ring.Lead(self.epoll.fileno(), self.bell.fd, *looks, timers, first, self.failures.append)
        lead.readers, lead.take, lead.proc = (self.way.reader,), self.home.delivery, 7
        try:
            return lead.until(self.lock, self.signal, held, calls_only, timeout_s)
        finally:
            assert self.signal.wake is None and not self.signal.pumping and self.waker.bell is None
            assert not self.byte[0]

    @property
    def has_slept(self) -> bool:
        return self.spin._short_left not in (0, self.spin._short_wanted)

    def lead_aside(self, look_s: float) -> Callable[[], Any]:
        """On another thread, which leads already, or looks; returns what waits for its end, and has what came of it."""
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(self.lead(look_s=look_s, timeout_s=WAIT_S)))
        thread.start()
        until(lambda: self.waker.bell is not None if look_s else self.lock.locked())

        def end() -> Any:
            thread.join(WAIT_S / 2)
            (result,) = results
            return result

        return end

    def close(self) -> None:
        self.epoll.close()
        os.close(self.beside)
        self.waker.close()
        self.way.close()


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.close()


@pytest.mark.parametrize("look_s", [0.0, 1e-4])
def test_a_call_that_is_there_is_delivered_at_once(leader: Leader, look_s: float) -> None:
    post(leader.way.target())

    assert leader.lead(look_s=look_s) and len(leader.home.mailbox.calls) == 1 and not leader.lock.locked()
    assert leader.spin._short_wanted and not leader.has_slept, "there was no need to look, or to sleep"


@pytest.mark.parametrize("look_s", [0.0, WAIT_S])
def test_a_call_that_comes_later_ends_the_wait_for_it(leader: Leader, look_s: float) -> None:
    end = leader.lead_aside(look_s)
    post(leader.way.target())

    assert end() and len(leader.home.mailbox.calls) == 1  # long before a look in vain would end
    assert leader.has_slept is not bool(look_s)


@pytest.mark.parametrize("look_s", [0.0, WAIT_S])
@pytest.mark.parametrize("how", ["signal", "waker"])
def test_whoever_wants_the_leader_ends_the_wait(leader: Leader, how: str, look_s: float) -> None:
    for _ in range(20):
        leader.signal.clear()
        end = leader.lead_aside(look_s)
        if how == "signal":
            leader.signal.notify()
        else:
            leader.waker.set()
        assert end() is (how == "signal") and not leader.lock.locked()
        leader.waker.clear()


def test_after_a_look_in_vain_it_sleeps(leader: Leader) -> None:
    began_s = time.monotonic()
    assert leader.lead(look_s=1e-4, timeout_s=0.01) is False and time.monotonic() >= began_s + 0.01
    assert not leader.spin.pays(), "it has looked"


def test_a_signal_that_came_during_the_look_ends_the_wait_with_the_lead_released(leader: Leader) -> None:
    """It would wait for the next message, and its handler, which may take long, would keep the lead."""
    was_free: list[bool] = []

    def handler(*_: object) -> None:
        was_free.append(not leader.lock.locked())
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            leader.lead(look_s=0.1, timeout_s=WAIT_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert was_free == [True]


def test_a_signal_that_is_held_back_ends_the_wait_after_a_look(leader: Leader) -> None:
    old = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        with Held() as held:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            assert leader.lead(look_s=0.1, timeout_s=WAIT_S, held=held) is False
            assert held.noted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_the_sleep_after_one_that_a_signal_ended_is_short(leader: Leader) -> None:
    """Another may be right behind it, and come too early to end that sleep."""
    old = signal.signal(signal.SIGALRM, lambda *_: None)
    leader.lead(timeout_s=0.001)  # one that has come before, in another test, is forgotten
    began_s = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        assert leader.lead(timeout_s=WAIT_S) is False
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert leader.lead(timeout_s=WAIT_S) is False
        assert time.monotonic() < began_s + WAIT_S, "it slept to the end"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_nobody_leads_where_a_signal_was_held_back_before(leader: Leader) -> None:
    """Nothing would end the sleep: who is nudged is not asleep yet."""
    old = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        with Held(leader.signal.nudge) as held:
            signal.raise_signal(signal.SIGALRM)
            assert held.noted and leader.lead(held=held) is None
    finally:
        signal.signal(signal.SIGALRM, old)


def test_what_a_look_finds_for_others_is_delivered_and_the_wait_goes_on(leader: Leader) -> None:
    theirs, leader.signal = leader.signal, Signal()
    end = leader.lead_aside(WAIT_S)
    post(leader.way.target())
    until(lambda: theirs.is_set)
    leader.signal.notify()
    end()
    assert len(leader.home.mailbox.calls) == 1


def test_what_is_due_ends_the_wait(leader: Leader) -> None:
    now_s = time.monotonic()
    assert leader.lead(timeout_s=WAIT_S, due_s=(now_s + 0.01,)) is False and time.monotonic() >= now_s + 0.01
    assert leader.lead(timeout_s=WAIT_S, due_s=(now_s,)) is None, "it is due already"


def test_nobody_leads_where_there_is_something_to_do_first(leader: Leader) -> None:
    post(leader.way.target())
    assert leader.lead(first=("a peer",)) is None and leader.lead()


def test_a_bell_that_rang_for_no_ring_of_its_own_ends_the_wait(leader: Leader) -> None:
    """It may be for one that is polled since this wait has begun."""
    os.eventfd_write(leader.bell.fd, 1)
    assert leader.lead(timeout_s=WAIT_S) is False


def test_where_another_leads_nothing_is_done(leader: Leader) -> None:
    post(leader.way.target())
    with leader.lock:
        assert leader.lead() is None
    assert not leader.home.mailbox.calls and leader.lead()


def test_what_a_descriptor_has_is_left_to_who_polls(leader: Leader) -> None:
    os.eventfd_write(leader.beside, 1)
    assert leader.lead(timeout_s=WAIT_S) is False
    assert [fd for fd, _ in leader.epoll.poll(0)] == [leader.beside]


def test_the_time_is_over(leader: Leader) -> None:
    began_s = time.monotonic()
    assert leader.lead(timeout_s=0.01) is False and time.monotonic() >= began_s + 0.01 and leader.has_slept
    assert leader.lead(timeout_s=0.0) is None


def test_calls_for_others_do_not_end_the_wait(leader: Leader) -> None:
    mine = Signal()
    theirs, leader.signal = leader.signal, mine
    post(leader.way.target())
    assert leader.lead(timeout_s=0.01) is False
    assert theirs.is_set and len(leader.home.mailbox.calls) == 1


def test_the_time_is_over_also_where_calls_for_others_come_all_the_time(leader: Leader) -> None:
    leader.signal = Signal()
    posted, stop = threading.Event(), threading.Event()

    def flood() -> None:
        while not stop.is_set() and len(leader.home.mailbox.calls) < 100_000:
            post(leader.way.target())
            leader.way.there.told()
            posted.set()
            time.sleep(0)

    thread = threading.Thread(target=flood)
    thread.start()
    assert posted.wait(WAIT_S)
    led = leader.lead(timeout_s=0.05)
    goes_on = thread.is_alive()
    stop.set()
    thread.join(WAIT_S)
    assert goes_on and led is False


def _is_a_value(leader: Leader) -> None:
    compiled.post((leader.way.target(),), [b"value"], b"", Kind.PORT, 0, 60, 3, 4, 5, 6, 0)


def _is_for_another_process(leader: Leader) -> None:
    post(leader.way.target(proc=8))


def _is_for_nobody(leader: Leader) -> None:
    leader.home.actors.clear()
    post(leader.way.target())


@pytest.mark.parametrize("comes", [_is_a_value, _is_for_another_process, _is_for_nobody])
def test_what_needs_code_of_python_is_left_until_somebody_has_looked(leader: Leader, comes: Any) -> None:
    comes(leader)
    for _ in range(2):
        assert leader.lead(timeout_s=WAIT_S) is False, "it is left, and does not wait"
    assert not leader.home.values and not leader.home.left and leader.way.there.received == 0

    assert _sleeps(leader) == [(1, 0)]
    leader.way.deliver(leader.home.delivery)
    leader.way.take()
    assert leader.way.there.received == 1 and _sleeps(leader) == []


def _sleeps(leader: Leader) -> Any:
    return ring.sleep((leader.way.reader,), ((1, 0),), leader.epoll.fileno(), leader.bell.fd, 0.0)[0]


def test_values_are_delivered_where_code_of_python_may_run(leader: Leader) -> None:
    leader.home.deliver = lambda message: (leader.home.values.append(message), leader.signal.notify())  # type: ignore[method-assign]
    _is_a_value(leader)
    assert leader.lead(calls_only=False)
    assert [value.parts for value in leader.home.values] == [[b"value"]]


def test_what_lies_elsewhere_is_found_where_code_of_python_may_run(leader: Leader) -> None:
    leader.way.reader.find = bytearray
    push_elsewhere(leader.way, b"there")
    assert leader.lead() is False and not leader.home.mailbox.calls
    assert leader.lead(calls_only=False)
    assert [call.parts for call in leader.home.mailbox.calls] == [[bytearray(b"there")]]


def test_values_that_were_left_are_delivered_where_code_of_python_may_run(leader: Leader) -> None:
    leader.home.deliver = lambda message: leader.signal.notify()  # type: ignore[method-assign]
    _is_a_value(leader)
    assert leader.lead() is False
    assert leader.lead(calls_only=False) and _sleeps(leader) == []


def test_an_error_of_who_takes_a_value_is_told_and_the_lead_is_free(leader: Leader) -> None:
    def refuse(message: Any) -> None:
        raise ValueError("no")

    leader.home.deliver = refuse  # type: ignore[method-assign]
    _is_a_value(leader)
    assert leader.lead(calls_only=False) is False
    (failed,) = leader.failures
    assert isinstance(failed, ValueError) and failed.__traceback__ is not None
    assert not leader.lock.locked() and leader.way.there.received == 1
    assert _sleeps(leader) == [(1, 0)], "its link is looked at: it may owe something"


@pytest.mark.parametrize("wants", ["ack", "room"])
def test_who_is_to_acknowledge_or_to_tell_of_room_is_left_something(leader: Leader, wants: str) -> None:
    if wants == "ack":
        leader.way.there.ack_is_timed = False
    else:
        leader.way.there.room_is_awaited = True
        leader.way.there.keep([b""], 1)
        leader.way.session.took(0, 0.0)  # what goes out says that it has come
    post(leader.way.target())
    assert leader.lead() and len(leader.home.mailbox.calls) == 1
    assert _sleeps(leader) == [(1, 0)]


def test_a_handler_that_raises_leaves_nothing_behind(leader: Leader) -> None:
    """Whenever it comes: the lead is free, and of the calls none is lost, and none comes twice."""

    class Interrupt(Exception):
        pass

    armed: list[int] = []

    def handler(*_: object) -> None:
        if armed:
            armed.clear()
            raise Interrupt

    gc.collect()  # not meanwhile: a finalizer that is interrupted complains
    gc.disable()
    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1.1e-4)
    interrupted, calls = 0, leader.home.mailbox.calls
    try:
        for _ in range(1_000_000):
            try:
                armed.append(1)
                if len(calls) == leader.way.session.sent:
                    post(leader.way.target())
                leader.signal.clear()
                leader.lead(timeout_s=1e-3)
                leader.way.there.told()
                armed.clear()
            except Interrupt:
                interrupted += 1
            assert not leader.lock.locked()
            if interrupted == 200:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        gc.enable()
    leader.signal.clear()
    leader.lead()
    assert interrupted == 200
    assert [call.seq for call in calls] == list(range(leader.way.session.sent))
