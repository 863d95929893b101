"""Who drives: no wake-up is lost, somebody always pumps, never two at once, and an idle process is idle."""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch.core import driver as driver_module
from monarch.core.alarm import ImmediateAlarm, make_alarm
from monarch.core.driver import CallerDriver, Signal, ThreadDriver, make_driver
from monarch.core.spin import Spin
from monarch.transports import ring
from monarch.wake import Wake
from tests.until import until

_LIMIT_S = 20.0


class Links:
    """What a driver pumps: actions that others posted, over a descriptor as the real thing."""

    def __init__(self) -> None:
        self.wake_fd = Wake()
        self.posted: deque[Callable[[], None]] = deque()
        self.pumps = 0
        self.pumping = 0
        self.overlaps = 0
        self.by: list[int] = []
        self.entered = threading.Semaphore(0)  # released at every begin of a pump
        self._poll = select.poll()
        self._poll.register(self.wake_fd, select.POLLIN)

    def post(self, action: Callable[[], None]) -> None:
        self.posted.append(action)
        self.wake_fd.set()

    def lead(self, *_: object) -> None:
        """Nothing here is simple enough for it."""

    def pump(self, timeout_s: float | None) -> None:
        self.pumping += 1
        if self.pumping > 1:
            self.overlaps += 1
        self.pumps += 1
        self.entered.release()
        self._poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3)
        self.wake_fd.clear()
        while self.posted:
            self.by.append(threading.get_ident())
            self.posted.popleft()()
        self.pumping -= 1


@pytest.fixture
def links() -> Links:
    return Links()


@pytest.fixture(params=["caller", "thread"])
def driver(request: pytest.FixtureRequest, links: Links) -> Iterator[CallerDriver | ThreadDriver]:
    made = make_driver(request.param)
    made.start(links.pump, links.lead, links.wake_fd, "test")
    yield made  # type: ignore[misc]
    made.stop()
    assert not made.thread.is_alive()  # type: ignore[attr-defined]
    assert links.overlaps == 0
    links.wake_fd.close()


@pytest.fixture
def caller(links: Links) -> Iterator[CallerDriver]:
    made = CallerDriver()
    made.start(links.pump, links.lead, links.wake_fd, "test")
    yield made
    made.stop()
    assert not made.thread.is_alive()
    assert links.overlaps == 0
    links.wake_fd.close()


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _join(*threads: threading.Thread) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        assert not thread.is_alive(), "a wake-up was lost"


def test_what_is_no_driver_is_refused() -> None:
    with pytest.raises(ValueError, match="link_driver is 'other'"):
        make_driver("other")


def test_a_signal_that_is_set_is_no_wait(driver: CallerDriver | ThreadDriver) -> None:
    signal = Signal()
    signal.notify()

    assert driver.wait(signal) and driver.wait(signal, 0.0)


def test_a_wait_ends_with_its_time(driver: CallerDriver | ThreadDriver) -> None:
    start_s = time.monotonic()
    assert not driver.wait(Signal(), 0.02)
    assert not driver.wait(Signal(), 0.0)
    assert time.monotonic() - start_s >= 0.019


def test_an_answer_through_the_links_ends_the_wait(driver: CallerDriver | ThreadDriver, links: Links) -> None:
    for _ in range(200):
        signal = Signal()
        links.post(signal.notify)
        assert driver.wait(signal, _LIMIT_S)


@pytest.mark.parametrize("threads", [2, 8])
def test_no_wake_up_is_lost_when_many_threads_ask_and_wait(
    driver: CallerDriver | ThreadDriver, links: Links, threads: int
) -> None:
    rounds = 8000 // threads

    def ask(seed: int) -> None:
        chance = random.Random(seed)
        signal = Signal()
        for _ in range(rounds):
            signal.clear()
            links.post(signal.notify)
            if chance.random() < 0.02:
                driver.wait(Signal(), 0.0001)  # and sometimes one gives up, maybe just when it is to lead
            while not signal.is_set:
                assert driver.wait(signal, _LIMIT_S), "a wake-up was lost"

    _join(*[_start(lambda n=n: ask(n)) for n in range(threads)])


def test_a_follower_inherits_the_lead_when_the_leader_works_for_it_alone(caller: CallerDriver, links: Links) -> None:
    idle = Signal()
    leader = _start(lambda: caller.wait(idle, _LIMIT_S))
    links.entered.acquire(timeout=_LIMIT_S)

    def ask() -> None:
        deadline_s = time.monotonic() + _LIMIT_S
        while threading.get_ident() not in links.by:
            assert time.monotonic() < deadline_s, "the leader never left"
            signal = Signal()  # a new one each time, as for each future
            links.post(signal.notify)
            assert caller.wait(signal, _LIMIT_S)

    _join(_start(ask))
    links.post(idle.notify)
    _join(leader)


def test_no_wake_up_is_lost_when_threads_notify_each_other_directly(driver: CallerDriver | ThreadDriver) -> None:
    signals = [Signal() for _ in range(6)]
    turns = [0] * 6

    def pass_on(at: int) -> None:
        for _ in range(1000):
            assert driver.wait(signals[at], _LIMIT_S), "a wake-up was lost"
            signals[at].clear()
            turns[at] += 1
            signals[(at + 1) % 6].notify()

    threads = [_start(lambda at=at: pass_on(at)) for at in range(6)]
    signals[0].notify()
    _join(*threads)
    assert turns == [1000] * 6


def test_no_wake_up_is_lost_between_the_clear_and_the_wait(driver: CallerDriver | ThreadDriver, links: Links) -> None:
    """The loop of an actor: clear, look, wait; a sender puts and notifies at any moment of it."""
    inbox: deque[int] = deque()
    signal = Signal()
    got = 0

    def send() -> None:
        for n in range(3000):
            inbox.append(n)
            if n % 2:
                signal.notify()
            else:
                links.post(signal.notify)

    senders = [_start(send) for _ in range(3)]
    deadline_s = time.monotonic() + _LIMIT_S
    while got < 9000 and time.monotonic() < deadline_s:
        signal.clear()
        while inbox:
            inbox.popleft()
            got += 1
        if got < 9000:
            driver.wait(signal, 5.0)
    _join(*senders)
    assert got == 9000


def test_one_that_waits_leads_itself(caller: CallerDriver, links: Links) -> None:
    for _ in range(20):
        signal = Signal()

        def answer(signal: Signal = signal) -> None:
            _until(lambda: bool(signal.pumping))
            links.post(signal.notify)

        other = _start(answer)
        assert caller.wait(signal, _LIMIT_S)
        _join(other)
        assert links.by[-1] == threading.get_ident()


def test_a_follower_is_promoted_when_the_leader_leaves(caller: CallerDriver, links: Links) -> None:
    first, second = Signal(), Signal()
    idents: dict[str, int] = {}

    def wait(name: str, signal: Signal) -> None:
        idents[name] = threading.get_ident()
        assert caller.wait(signal, _LIMIT_S)

    leader = _start(lambda: wait("leader", first))
    _until(lambda: bool(first.pumping))
    follower = _start(lambda: wait("follower", second))
    _until(lambda: second in caller._followers)
    links.post(first.notify)
    _join(leader)
    _until(lambda: bool(second.pumping))
    links.post(second.notify)
    _join(follower)

    assert links.by[-2:] == [idents["leader"], idents["follower"]]


def test_what_woke_a_thread_before_ends_no_sleep_of_a_follower(
    caller: CallerDriver, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Signal(), Signal()
    rest = caller._rest
    rested: list[bool] = []

    def note(signal: Signal, *others: Any) -> None:
        if signal is second:
            rested.append(signal._lock.locked())
        rest(signal, *others)

    monkeypatch.setattr(caller, "_rest", note)
    leader = _start(lambda: caller.wait(first, _LIMIT_S))
    _until(lambda: bool(first.pumping))
    second.notify()  # as for an actor that is busy
    second.clear()
    follower = _start(lambda: caller.wait(second, _LIMIT_S))
    _until(lambda: bool(rested))
    links.post(second.notify)
    links.post(first.notify)
    _join(leader, follower)

    assert rested[0]


@pytest.fixture
def deputy(caller: CallerDriver, monkeypatch: pytest.MonkeyPatch) -> Signal:
    """That of a thread which stands by while others lead, and is not called before the test says so."""
    if caller._watch is None:
        pytest.skip("there are no timers with descriptors")
    monkeypatch.setattr("monarch.core.driver._BACK_S", 1000.0)
    return Signal()


@pytest.mark.parametrize("limit_s", [1e9, 1e300])
def test_who_stands_by_may_wait_for_any_time(
    limit_s: float, caller: CallerDriver, links: Links, deputy: Signal
) -> None:
    done: list[bool] = []
    signal = Signal()
    leader = _start(lambda: caller.wait(signal, _LIMIT_S) and None)
    _until(lambda: bool(signal.pumping))
    thread = _start(lambda: done.append(caller.wait(deputy, limit_s)))
    _until(lambda: deputy.wake is not None)
    deputy.notify()
    _join(thread)
    links.post(signal.notify)
    _join(leader)

    assert done == [True]


def _lead_once(caller: CallerDriver, links: Links) -> None:
    signal = Signal()
    links.post(signal.notify)
    assert caller.wait(signal, _LIMIT_S)


def _stand_by(caller: CallerDriver, links: Links, deputy: Signal) -> threading.Thread:
    """Return while nobody leads, and the deputy keeps the watch."""
    signal = Signal()
    leader = _start(lambda: caller.wait(signal, _LIMIT_S) and None)
    _until(lambda: bool(signal.pumping))
    thread = _start(lambda: caller.wait(deputy, _LIMIT_S) and None)
    _until(lambda: deputy.wake is not None)
    links.post(signal.notify)
    _join(leader)
    return thread


def test_a_leader_that_is_back_soon_wakes_nobody(caller: CallerDriver, links: Links, deputy: Signal) -> None:
    thread = _stand_by(caller, links, deputy)
    for _ in range(100):
        _lead_once(caller, links)
    assert thread.ident not in links.by
    assert deputy.wake is not None  # it has not moved
    deputy.notify()
    _join(thread)


def _on_patrol(caller: CallerDriver, links: Links, deputy: Signal) -> threading.Thread:
    """As `_stand_by`, after so many calls that the deputy looks itself."""
    thread = _stand_by(caller, links, deputy)
    caller._calls = driver_module._ALARMS + 1
    deputy.nudge()
    _until(lambda: not caller._deputy_sleeps)
    return thread


@pytest.mark.parametrize("stand_by", [_stand_by, _on_patrol])
def test_a_deputy_leads_when_the_leader_stays_away(
    stand_by: Callable[[CallerDriver, Links, Signal], threading.Thread],
    caller: CallerDriver,
    links: Links,
    deputy: Signal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = stand_by(caller, links, deputy)
    monkeypatch.setattr("monarch.core.driver._BACK_S", 200e-6)
    _lead_once(caller, links)
    links.post(deputy.notify)
    _join(thread)
    assert links.by[-1] == thread.ident


def test_a_deputy_that_is_called_all_the_time_looks_itself_and_costs_no_timer(
    caller: CallerDriver, links: Links, deputy: Signal, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float | None] = []
    assert caller._watch is not None
    thread = _stand_by(caller, links, deputy)
    monkeypatch.setattr(caller._watch, "call", times.append)
    for _ in range(100):
        _lead_once(caller, links)
    most = driver_module._ALARMS
    assert (times.count(1000.0), times.count(None)) == (most, most), "one was before; the last is to ring"

    deputy.nudge()  # in place of the alarm
    _until(lambda: not caller._deputy_sleeps)
    for _ in range(100):
        _lead_once(caller, links)
    assert times.count(1000.0) == most and thread.ident not in links.by
    deputy.notify()
    _join(thread)


def test_a_deputy_goes_home_when_the_leader_idles(caller: CallerDriver, links: Links, deputy: Signal) -> None:
    thread = _on_patrol(caller, links, deputy)
    signal = Signal()
    leader = _start(lambda: caller.wait(signal, _LIMIT_S) and None)
    _until(lambda: caller._deputy_sleeps and not caller._calls)
    links.post(signal.notify)
    _join(leader)
    deputy.notify()
    _join(thread)


def test_a_deputy_on_patrol_waits_for_no_longer_than_it_wants(
    caller: CallerDriver, links: Links, deputy: Signal
) -> None:
    caller._calls = driver_module._ALARMS + 1
    signal = Signal()
    leader = _start(lambda: caller.wait(signal, _LIMIT_S) and None)
    _until(lambda: bool(signal.pumping))
    assert not caller.wait(deputy, 0.01)
    links.post(signal.notify)
    _join(leader)


def test_when_the_deputy_leaves_meanwhile_the_side_thread_takes_over(
    caller: CallerDriver, links: Links, deputy: Signal
) -> None:
    thread = _stand_by(caller, links, deputy)
    _lead_once(caller, links)
    deputy.notify()
    _join(thread)
    arrived = threading.Event()
    links.post(arrived.set)
    assert arrived.wait(_LIMIT_S)


def test_a_nudge_is_not_lost_with_a_call_that_is_taken_back(caller: CallerDriver, links: Links, deputy: Signal) -> None:
    thread = _stand_by(caller, links, deputy)
    deputy.notify()
    for _ in range(100):
        _lead_once(caller, links)
    _join(thread)


def test_when_a_promoted_follower_gives_up_another_one_leads(caller: CallerDriver) -> None:
    """Promotion and time-out at the same moment: whoever leaves passes the lead on."""
    last = Signal()
    waiter = _start(lambda: caller.wait(last, _LIMIT_S) or None)
    for _ in range(300):
        quitters = [_start(lambda: caller.wait(Signal(), 0.0005) and None) for _ in range(3)]
        _join(*quitters)
    _until(caller._lead_lock.locked)
    last.notify()
    _join(waiter)


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        os.sched_yield()


def test_the_side_thread_takes_over_while_every_waiter_is_in_user_code(caller: CallerDriver, links: Links) -> None:
    for _ in range(5):
        signal = Signal()
        links.post(signal.notify)
        caller.wait(signal, _LIMIT_S)
        # Now this thread is in user code; what arrives is taken in all the same.
        arrived = threading.Event()
        links.post(arrived.set)
        assert arrived.wait(_LIMIT_S)
        assert links.by[-1] == caller.thread.ident


def test_the_side_thread_takes_over_after_many_calls_in_a_row(caller: CallerDriver, links: Links) -> None:
    _until(lambda: caller.leads_aside)
    for _ in range(3):
        first = Signal()
        idle = _start(lambda signal=first: caller.wait(signal, _LIMIT_S) and None)
        _until(lambda: caller._side_rests)
        links.post(first.notify)
        _join(idle)
        for _ in range(100):
            _lead_once(caller, links)
        arrived = threading.Event()
        links.post(arrived.set)
        assert arrived.wait(_LIMIT_S)


@pytest.mark.parametrize("how", ["its time is over", "another leads", "an interrupt"])
def test_who_does_not_lead_in_the_end_leaves_the_side_thread_its_alarm(
    how: str, caller: CallerDriver, links: Links
) -> None:
    """Else nobody would take in what comes, until somebody waits again."""
    _until(lambda: caller.leads_aside)
    first, signal = Signal(), Signal()
    waiter = _start(lambda: caller.wait(first, _LIMIT_S) and None)
    _until(lambda: caller._side_rests)
    links.post(first.notify)
    _join(waiter)

    def lead(*_: object) -> None:
        signal.notify()
        if how == "an interrupt":
            raise KeyboardInterrupt

    caller._lead_until_set = lead
    if how == "its time is over":
        assert not caller.wait(signal, 0.0) and not caller.wait(signal, 1e-9)
    elif how == "another leads":
        assert caller.wait(signal, _LIMIT_S)
    else:
        with pytest.raises(KeyboardInterrupt):
            caller.wait(signal, _LIMIT_S)
    arrived = threading.Event()
    links.post(arrived.set)
    assert arrived.wait(_LIMIT_S)


def test_the_side_thread_gives_way_to_one_that_waits(caller: CallerDriver, links: Links) -> None:
    _until(lambda: caller.leads_aside)
    signal = Signal()
    waiter = _start(lambda: caller.wait(signal, _LIMIT_S) and None)
    _until(lambda: bool(signal.pumping))
    assert not caller.leads_aside
    links.post(signal.notify)
    _join(waiter)


@pytest.mark.parametrize("waiting", [False, True], ids=["nobody waits", "one waits"])
def test_an_idle_process_makes_no_periodic_wake_ups(caller: CallerDriver, links: Links, waiting: bool) -> None:
    naps = 0
    sleep = caller._side_signal.sleep

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

        def sleep(self, timeout_s: float | None) -> None:
            nonlocal naps
            naps += 1
            sleep(timeout_s)

    inner = caller._side_signal
    caller._side_signal = Counting()  # type: ignore[assignment]
    signal = Signal()
    if waiting:
        waiter = _start(lambda: caller.wait(signal, _LIMIT_S) and None)
        _until(lambda: bool(signal.pumping))
        _until(lambda: caller._side_rests)
    else:
        _until(lambda: caller.leads_aside and links.pumping == 1)
    before = (links.pumps, naps)
    threading.Event().wait(0.5)

    assert links.pumps - before[0] <= 1 and naps - before[1] <= 1
    signal.notify()
    if waiting:
        _join(waiter)


def test_stop_leaves_waits_to_their_signals_and_times(driver: CallerDriver | ThreadDriver, links: Links) -> None:
    signals = [Signal() for _ in range(3)]
    waiters = [_start(lambda s=s: driver.wait(s, _LIMIT_S) or pytest.fail("lost")) for s in signals]
    _until(lambda: links.pumping == 1)
    driver.stop()
    pumps = links.pumps
    assert not driver.wait(Signal(), 0.01)
    for signal in signals:
        signal.notify()
    _join(*waiters)
    assert driver.wait(signals[0])
    assert links.pumps == pumps and links.pumping == 0
    driver.stop()


@pytest.fixture
def no_limit_to_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for itself waits until the test is out of time."""
    monkeypatch.setattr("monarch.core.driver._JOIN_LIMIT_S", 3600.0)
    monkeypatch.setattr("monarch.core.driver._LEAD_LIMIT_S", 3600.0)


@pytest.mark.usefixtures("no_limit_to_a_stop")
def test_stop_from_inside_the_pump_returns(driver: CallerDriver | ThreadDriver, links: Links) -> None:
    stopped = threading.Event()
    signal = Signal()

    def stop() -> None:
        driver.stop()
        stopped.set()
        signal.notify()

    links.post(stop)
    assert driver.wait(signal, _LIMIT_S) and stopped.wait(_LIMIT_S)


@pytest.mark.usefixtures("no_limit_to_a_stop")
def test_stop_by_the_leader_does_not_wait_for_itself(caller: CallerDriver, links: Links) -> None:
    signal, stopped = Signal(), Signal()

    def stop() -> None:
        caller.stop()
        stopped.notify()

    def post() -> None:
        _until(lambda: bool(stopped.pumping))
        links.post(stop)

    other = _start(post)
    assert caller.wait(stopped, _LIMIT_S)
    _join(other)
    assert links.by[-1] == threading.get_ident()
    assert not caller.wait(signal, 0.001)


def test_an_exception_in_a_wait_does_not_keep_the_lead(caller: CallerDriver, links: Links) -> None:
    """A KeyboardInterrupt, say, in the thread that leads."""
    _until(lambda: caller.leads_aside)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):  # until the action runs in this thread and not in the side thread
            signal = Signal()
            me = threading.get_ident()

            def interrupt(signal: Signal = signal, me: int = me) -> None:
                signal.notify()
                if threading.get_ident() == me:
                    links.pumping -= 1
                    raise KeyboardInterrupt

            links.post(interrupt)
            caller.wait(signal, _LIMIT_S)
    after = Signal()
    links.post(after.notify)
    assert caller.wait(after, _LIMIT_S)


Look = Callable[..., tuple[list[int] | None, float]]


@pytest.fixture
def looks_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Look], None]:
    """Makes this thread look before it sleeps, whatever it has met before, with the function that it is given."""
    if ring.why_not:
        pytest.skip(ring.why_not)
    monkeypatch.setattr(driver_module, "cpus", lambda: 100)  # others of this process may be looking, too
    spin = Spin()
    while not spin.pays():
        spin.slept(0.0)
    monkeypatch.setattr(driver_module._own, "spin", spin)
    me, real = threading.get_ident(), ring.look

    def use(look: Look) -> None:
        monkeypatch.setattr(ring, "look", lambda *args: (look if threading.get_ident() == me else real)(*args))

    return use


def test_who_waits_for_a_thread_of_its_own_process_looks_and_leaves_the_links_alone(
    caller: CallerDriver, looks_by: Callable[[Look], None]
) -> None:
    signal = Signal(is_near=True)

    def look(readers: object, epoll: int, time_s: float, bell: bytearray) -> tuple[list[int], float]:
        _join(_start(signal.notify))
        assert bell[0] and not caller._followers
        return [], 0.0

    looks_by(look)
    leads = caller._leads

    assert caller.wait(signal, _LIMIT_S) and caller._leads == leads


@pytest.mark.parametrize("rings", [False, True])
def test_a_look_without_the_answer_is_followed_by_a_wait(
    caller: CallerDriver, links: Links, looks_by: Callable[[Look], None], rings: bool
) -> None:
    signal = Signal(is_near=True)

    def look(readers: object, epoll: int, time_s: float, bell: bytearray) -> tuple[list[int] | None, float]:
        if rings:
            signal.nudge()
        links.post(signal.notify)
        return [] if rings else None, 0.0

    looks_by(look)

    assert caller.wait(signal, _LIMIT_S) and links.by


def test_an_interrupt_of_a_look_leaves_nothing_behind(caller: CallerDriver, looks_by: Callable[[Look], None]) -> None:
    signal = Signal(is_near=True)

    def interrupted(*_: object) -> tuple[None, float]:
        raise KeyboardInterrupt

    def look(*_: object) -> tuple[list[int], float]:
        signal.notify()
        return [], 0.0

    looks_by(interrupted)
    for _ in range(150):  # more than may look at a time
        with pytest.raises(KeyboardInterrupt):
            caller.wait(signal, _LIMIT_S)
    assert signal.bell is None and not caller.wait(signal, 0)  # which does not look

    looks_by(look)
    leads = caller._leads
    assert caller.wait(signal, _LIMIT_S) and caller._leads == leads


def test_who_leads_instead_of_looking_learns_that_a_look_would_have_paid(
    caller: CallerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller of an actor, say: it would lead for ever."""
    spin = Spin(_LIMIT_S)
    monkeypatch.setattr(driver_module._own, "spin", spin)
    monkeypatch.setattr(caller, "_join", lambda signal, deadline_s, on_main: True)
    for _ in range(3):
        assert not spin.pays()
        assert caller.wait(Signal(is_near=True), _LIMIT_S)

    assert spin.pays()


def test_an_alarm_rings_when_it_was_set_last() -> None:
    alarm = make_alarm()
    rang = threading.Event()
    alarm.set(0.001)
    alarm.set(None)
    thread = _start(lambda: (alarm.wait(), rang.set()))  # type: ignore[func-returns-value]
    assert not rang.wait(0.05)
    alarm.set(0.001)
    assert rang.wait(_LIMIT_S)
    thread.join(_LIMIT_S)


def test_an_alarm_may_ring_before_somebody_waits() -> None:
    for alarm in (make_alarm(), ImmediateAlarm()):
        alarm.set(0.0)
        alarm.wait()


@pytest.mark.parametrize("make", [make_alarm, ImmediateAlarm])
def test_the_side_thread_leads_after_a_rest_whatever_wakes_it(
    make: Callable[[], Any], links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch.core.driver.make_alarm", make)
    driver = CallerDriver()
    driver.start(links.pump, links.lead, links.wake_fd, "test")
    for _ in range(3):
        signal = Signal()
        waiter = _start(lambda signal=signal: driver.wait(signal, _LIMIT_S))  # type: ignore[misc]
        until(lambda: driver._side_rests)
        signal.notify()
        waiter.join(_LIMIT_S)
        done = threading.Event()
        links.post(done.set)
        assert done.wait(_LIMIT_S)  # nobody waits any more: the side thread has taken over
        assert links.by[-1] == driver.thread.ident
    driver.stop()
    assert not driver.thread.is_alive()
