"""Which thread drives the links. The one place where this is decided.

Somebody must wait for descriptors, take frames in and hand them on: that is one call, `pump(timeout_s)`, made by one
thread at a time. A thread that has to wait for something (a reply, a message) waits on a `Signal`, through the driver:

- `ThreadDriver`: a side thread pumps, always. Each message costs a hop from it to the thread that waits.
- `CallerDriver`: the thread that waits pumps until its own signal is set (the leader); others that wait meanwhile
  follow. One of them, the deputy, takes over when the leader has been away for `_BACK_S`. Most often it is back by
  then: it sets the deputy an alarm when it leaves, and takes that back. Where it leaves all the time, the deputy goes
  on patrol: it looks for the leader itself, every `_PATROL_S`, until the leader idles. A side thread takes over where
  no waiting thread has led for `_TAKE_OVER_S`, because they are all in user code, and gives the lead back as soon as
  one asks for it; it looks that often, and less often, down to every `_LONGEST_PAUSE_S`, while it is not needed. A
  follower for which the leader takes in one message after the other, and nothing for itself, inherits the lead. So a
  call between two processes needs no thread hop, and acknowledgements never wait for user code. Who waits for a
  thread of this very process looks for that first, and needs nobody who pumps. As long as nothing comes but messages,
  by rings, the leader does not pump, but leads in one step of the compiled part (see `Poller.lead_by`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from monarch import compiled
from monarch.core.alarm import ImmediateAlarm, Watch, make_alarm, make_watch
from monarch.core.held import NOTHING_HELD, Held, NothingHeld, on_main_thread
from monarch.core.spin import Spin, cpus
from monarch.transports import ring
from monarch.wake import Wake

_TAKE_OVER_S: Final = 0.010
_LONGEST_PAUSE_S: Final = 0.040
"""Of the side thread, while calls follow each other: to look takes 50 to 200 us, in each of many processes."""
_BACK_S: Final = 200e-6
"""A short endpoint takes 20 us; to wake a thread for the time, and again to give the lead back, 100 us and more."""
_PATROL_S: Final = 1e-3
"""To set a timer and to take it back takes 10 us in a virtual machine, of the 45 of a call; to look 20 us each time."""
_ALARMS: Final = 32
"""So often a resting side thread is spared the waking; then calls are so frequent that it had better look itself."""
_INHERITS_AT: Final = 4
_LOOK_S: Final = 1.0
"""The longest sleep of the main thread, and of any that leads in one step. A signal that comes between Python's last
look at signals and the call of the system does not end that call: about one Ctrl-C in 3,000 would wait for the next
message. Right after another one it is up to one in 100; the compiled part looks again soon then."""
_JOIN_LIMIT_S: Final = 5.0
_LEAD_LIMIT_S: Final = 1.0
"""How long `stop` waits for the side thread, and for the thread that leads."""


class _Signal:
    """What the compiled part knows of a signal; so it is there, too.

    Attributes:
        looks: whether the waiter may look for a while before it sleeps.
        bell: where it looks then, before it sleeps on the lock.
        wake: what wakes it while it sleeps on a descriptor and not on the lock.
        pumping: the thread that waits while it pumps: what it finds there itself need not wake it.
    """

    __slots__ = ("_lock", "bell", "is_near", "is_set", "looks", "pumping", "wake")

    is_set: bool
    looks: bool
    is_near: bool
    bell: bytearray | None
    wake: Wake | None
    pumping: int
    _lock: threading.Lock


if not TYPE_CHECKING and compiled.part is not None:
    _Signal = compiled.part.Signal


class Signal(_Signal):
    """Wakes one waiting thread. `notify` may come from any thread, before or during the wait; it is never lost.

    The waiter calls `clear`, looks whether what it waits for is there, and only then waits.
    """

    __slots__ = ()

    def __init__(self, looks: bool = True, is_near: bool = False) -> None:
        """
        Args:
            looks: not where its answers take all CPUs. Calls to 8 and 32 processes on 2 CPUs: 640 and 2900 us with a
                look, 525 and 2040 without.
            is_near: whether another thread of this process sets it, which needs nobody who pumps.
        """
        self.looks, self.is_near, self.is_set = looks, is_near, False
        self.bell, self.wake, self.pumping = None, None, 0
        self._lock = threading.Lock()
        self._lock.acquire()

    def notify(self) -> None:
        if not self.is_set:
            self.is_set = True
            if self.pumping != threading.get_ident():
                self.nudge()

    def nudge(self) -> None:
        """Let the waiter look again, without setting the signal."""
        wake, bell = self.wake, self.bell
        if wake is not None:
            wake.set()
        elif bell is not None:
            bell[0] = 1
        elif self._lock.locked():
            try:
                self._lock.release()
            except RuntimeError:
                pass  # another thread released it in between: the waiter is awake
            if (wake := self.wake) is not None:
                wake.set()  # it has looked at the lock just before

    def clear(self) -> None:
        self.is_set = False

    def forget_nudges(self) -> None:
        """Those that came before this end no sleep from now on: an actor was busy, or new, when calls came for it."""
        self._lock.acquire(blocking=False)

    def sleep(self, timeout_s: float | None) -> None:
        """Sleep until nudged; may return early. A thread whose sleeps are short looks for a while first."""
        if not self.look():
            began_s = time.monotonic()
            self.sleep_at_once(timeout_s)
            _own.spin.slept(time.monotonic() - began_s)

    def keep(self, watch: Watch, timeout_s: float | None) -> None:
        """Sleep, as `sleep` does after a `look`; a call of the `watch` ends it, too."""
        began_s = time.monotonic()
        self.wake = watch.waker
        try:
            if not self.is_set and not self._lock.acquire(blocking=False):  # else a nudge came before
                watch.wait(_until_look(timeout_s))
        finally:
            self.wake = None
        _own.spin.slept(time.monotonic() - began_s)

    def look(self) -> bool:
        """Look for a nudge for a while, where that pays; whether one came."""
        global _looking
        spin = _own.spin
        if not self.looks or ring.why_not or not spin.pays() or cpus() == 1 or _looking >= cpus():
            return False
        self.bell = bell = bytearray(1)
        _looking += 1  # nothing that Python does from here to `try` lets a handler of a signal in
        try:
            if not self.is_set:
                found, longest_s = ring.look((), -1, spin.time_s, bell)
                spin.learn(found is not None, longest_s)
        finally:
            self.bell = None
            _looking -= 1
        return self.is_set or bool(bell[0])

    def sleep_at_once(self, timeout_s: float | None) -> None:
        """As `sleep`, on the lock only."""
        timeout_s = _until_look(timeout_s)
        if timeout_s is None:
            self._lock.acquire()
        else:
            self._lock.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))


def _until_look(timeout_s: float | None) -> float | None:
    """How long this thread may sleep, of so long: see `_LOOK_S`."""
    if not on_main_thread():
        return timeout_s
    return _LOOK_S if timeout_s is None else min(timeout_s, _LOOK_S)


class _Own(threading.local):
    """Of each thread."""

    def __init__(self) -> None:
        self.spin = Spin()
        self.leads = False


_own: Final = _Own()
_looking = 0  # threads that do, in `Signal`


Pump = Callable[[float | None], None]


class Lead(Protocol):
    """See `Poller.lead_by`."""

    def __call__(
        self, lock: threading.Lock, signal: Signal, held: Held | NothingHeld, calls_only: bool, timeout_s: float, /
    ) -> bool | None:
        """
        Args:
            held: what ends the wait, too.
            calls_only: run no code of Python meanwhile. Calls to actors need none, as a rule.
        """


class Driver(Protocol):
    leads_aside: bool
    """Whether a thread pumps now that waits for nothing itself, beside others that may be sending."""

    is_eager: bool
    """Whether who pumps now may look for a while before it sleeps."""

    thread: threading.Thread
    """The side thread. It runs no code of the user's."""

    def start(self, pump: Pump, lead: Lead, wake: Wake, name: str) -> None:
        """Begin. `pump(timeout_s)` takes in what arrives, once, and does not wait behind that; `wake` makes a running
        pump return. `lead` pumps for a signal, as far as that is simple."""
        ...

    def wait(self, signal: Signal, timeout_s: float | None = None) -> bool:
        """Block the calling thread until `signal` is set; False when the time is over first."""
        ...

    def idle(self, signal: Signal, timeout_s: float | None, on_main: bool) -> None:
        """As `wait`, of an actor that waits for calls, on the main thread or another; may return early."""
        ...

    def soon(self) -> None:
        """Something waits for the next pump: one is to come within 10 ms, also where nobody waits."""
        ...

    def stop(self) -> None:
        """Pump no more. Threads that wait go on waiting for their signals."""
        ...


def _sleep_until_set(signal: Signal, timeout_s: float | None) -> bool:
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while not signal.is_set:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            return False
        signal.sleep(left_s)
    return True


class ThreadDriver:
    """A side thread pumps, always."""

    leads_aside = False  # those who wait have nobody else
    is_eager = True

    def __init__(self) -> None:
        self._stopping = False

    def start(self, pump: Pump, lead: Lead, wake: Wake, name: str) -> None:
        self._pump, self._wake = pump, wake
        self.thread = threading.Thread(target=self._run, name=f"monarch-io {name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self._stopping:
            self._pump(None)

    def wait(self, signal: Signal, timeout_s: float | None = None) -> bool:
        return _sleep_until_set(signal, timeout_s)

    def idle(self, signal: Signal, timeout_s: float | None, on_main: bool) -> None:
        self.wait(signal, timeout_s)

    def soon(self) -> None:
        pass  # it pumps all the time

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if threading.current_thread() is not self.thread:
            self.thread.join(_JOIN_LIMIT_S)


class CallerDriver:
    """Leader and followers, with a side thread that leads when nobody else does.

    Beside a leader that idles the side thread rests. A leader that leaves sets it an alarm, and the next one takes that
    back: so a call to an idle process wakes one thread of it and not two, which cost 100 us where processes are many.
    So it is with the deputy, where there is one: a call to the second actor of a process does not wake the first.
    """

    def __init__(self) -> None:
        self._stopping = False
        self._lead_lock = threading.Lock()
        self._followers: OrderedDict[Signal, None] = OrderedDict()  # the oldest first; a thousand leave in any order
        self._last_follower = 0  # identity of the thread
        self._returns = 0  # how often it has followed, one time after the other, since the leader leads
        self._heir: Signal | None = None  # the follower that is to lead next, until it does, or does not wait any more
        self._led_at_s = 0.0  # when a waiting thread led last
        self._leads = 0  # how often one began to
        self._is_alone = False  # it leads without a guard, as long as nobody has to be told when it leaves
        self.leads_aside = False
        self.is_eager = False
        self._side_rests = False  # the side thread sleeps until its alarm rings
        self._alarms = 0  # set since then
        self._alarm = make_alarm()
        self._side_signal = Signal()
        self._side_is_alert = False
        self._watch: Watch | None = make_watch(make_alarm())
        self._deputy = threading.Lock()  # held by the follower that keeps the watch
        self._deputy_sleeps = False  # and is to be called; while it looks, it will see for itself
        self._deputy_is_called = False
        self._calls = 0  # for the deputy, since it was on patrol last
        self._pause_s = _TAKE_OVER_S  # of the side thread, between two looks
        self._is_wanted = False  # something has waited for a pump since the last one

    def start(self, pump: Pump, lead: Lead, wake: Wake, name: str) -> None:
        self._pump, self._lead_until_set, self._wake = pump, lead, wake
        self.thread = threading.Thread(target=self._side, name=f"monarch-io {name}", daemon=True)
        self.thread.start()

    def wait(self, signal: Signal, timeout_s: float | None = None) -> bool:
        if signal.is_set:
            return True
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        if not signal.is_near or timeout_s == 0:
            return self._join(signal, deadline_s, on_main_thread())
        if signal.look() and signal.is_set:
            return True  # and the guard against interrupts, and who leads, were none of its business: 10 us of 50
        began_s = time.monotonic()
        try:
            return self._join(signal, deadline_s, on_main_thread())
        finally:
            _own.spin.slept(time.monotonic() - began_s)  # also where it has led: a look would have found it, or not

    def idle(self, signal: Signal, timeout_s: float | None, on_main: bool) -> None:
        # Where no code of Python runs while it leads, the main thread needs no guard against interrupts: 5 us of 50.
        if signal.is_set or timeout_s == 0:
            return
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        is_alone = not self._followers and not self._side_rests and self._heir is None  # as it is most often
        if on_main and (is_alone or self._leaves_quietly()):
            self._is_alone = True
            try:
                if self._lead_in_one_step(signal, deadline_s, NOTHING_HELD, calls_only=True):
                    return
            finally:
                self._is_alone = False
        self._join(signal, deadline_s, on_main)

    def _join(self, signal: Signal, deadline_s: float | None, on_main: bool) -> bool:
        """Wait as one of those who drive."""
        if not on_main:
            done = self._lead_in_one_step(signal, deadline_s, NOTHING_HELD)
            return done or self._wait(signal, deadline_s, NOTHING_HELD)
        while True:
            with Held(signal.nudge) as held:
                done = self._lead_in_one_step(signal, deadline_s, held) or self._wait(signal, deadline_s, held)
            if not held.noted:
                return done

    def _wait(self, signal: Signal, deadline_s: float | None, held: Held | NothingHeld) -> bool:
        """As `wait`; also returns when a signal is held back."""
        try:
            while not signal.is_set and not held.noted:
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    if not self._lead_lock.locked():
                        self._promote()  # this thread may have been chosen to lead at the moment when its time was over
                    return False
                if self._stopping:
                    if held is NOTHING_HELD:
                        return _sleep_until_set(signal, left_s)
                    signal.sleep(left_s)
                elif self._heir in (None, signal) and self._lead_lock.acquire(blocking=False):
                    self._lead_until(signal, deadline_s, held)
                else:
                    self._follow(signal, left_s, held)
            return signal.is_set
        finally:
            if self._heir is signal:
                self._heir = None
                self._promote()

    def _lead_until(self, signal: Signal, deadline_s: float | None, held: Held | NothingHeld) -> None:
        """The lead is held, and is released here."""
        try:
            self._heir, self._last_follower = None, 0
            self._leads += 1
            if self._side_is_alert or self._deputy_is_called:
                self._take_calls_back()
            signal.wake = self._wake
            self.is_eager = signal.looks
            signal.pumping = threading.get_ident()
            _own.leads = True
            while not signal.is_set and not self._stopping and not held.noted:
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if (left_s is not None and left_s <= 0) or self._heir is not None:
                    return
                if held is not NOTHING_HELD:
                    left_s = _LOOK_S if left_s is None else min(left_s, _LOOK_S)
                self._pump(left_s)
        finally:
            signal.wake = None
            self.is_eager = False
            signal.pumping = 0
            _own.leads = False
            self._led_at_s = time.monotonic()
            self._lead_lock.release()
            self._go_away()

    def _lead_in_one_step(
        self, signal: Signal, deadline_s: float | None, held: Held | NothingHeld, *, calls_only: bool = False
    ) -> bool:
        """As `_lead_until`, by the compiled part, where nobody else wants the lead. Whether the signal is set."""
        if self._heir is not None or self._lead_lock.locked() or self._stopping:
            return False
        left_s = _LOOK_S if deadline_s is None else min(deadline_s - time.monotonic(), _LOOK_S)
        if left_s <= 0.0:
            return False
        self._last_follower = 0
        self._leads += 1
        done: bool | None = False  # also where the handler of a signal raises
        has_changed = self._side_is_alert or self._deputy_is_called
        try:
            _own.leads = True
            if has_changed:
                self._take_calls_back()
            done = self._lead_until_set(self._lead_lock, signal, held, calls_only, left_s)
        finally:
            _own.leads = False
            if done is not None:
                has_changed = True
                self._led_at_s = time.monotonic()
            if has_changed and (self._followers or self._side_rests or self._heir is not None):
                self._go_away()
        return bool(done)

    def _come_out(self) -> None:
        """Somebody is to be told when the leader leaves, from now on: it shall lead within its guard, so that no
        handler of a signal, which may take long, comes before that."""
        if self._is_alone:
            self._wake.set()

    def _leaves_quietly(self) -> bool:
        """Whether nobody has to be told when a thread leaves the lead."""
        if self._heir is not None:
            return False
        if self._deputy.locked() and self._watch is not None:
            return not self._deputy_sleeps or self._calls > _ALARMS
        return not self._followers and not self._side_rests

    def _go_away(self) -> None:
        """This thread has left the lead, and is back soon, perhaps: see who is to be told."""
        if self._leaves_quietly():
            return
        watch = self._watch
        if watch is not None and self._deputy.locked() and self._heir is None:
            self._deputy_is_called = True
            self._calls += 1
            watch.call(_BACK_S)
        else:
            self._promote()
            self._alert_side()

    def _alert_side(self) -> None:
        if self._side_rests and self._alarms <= _ALARMS:
            self._alarms += 1
            self._side_is_alert = True
            self._alarm.set(_TAKE_OVER_S)

    def _take_calls_back(self) -> None:
        watch = self._watch
        if watch is not None and self._deputy_is_called:
            self._deputy_is_called = False
            if self._calls <= _ALARMS:  # the last one sends it on patrol
                watch.call(None)
        if self._side_is_alert:
            self._side_is_alert = False
            if self._alarms <= _ALARMS:  # the last one wakes it
                self._alarm.set(None)

    def _follow(self, signal: Signal, left_s: float | None, held: Held | NothingHeld) -> None:
        signal.forget_nudges()
        self._followers[signal] = None
        try:
            if self._heir in (None, signal) and not self._lead_lock.locked():
                return  # the leader left before it could see this follower, or has told it already
            if self.leads_aside or self._inherits(signal):
                self._wake.set()
            if not signal.is_set and not held.noted:
                self._rest(signal, left_s, held)
        finally:
            try:
                del self._followers[signal]
            except KeyError:
                # Promoted. When the signal was set at the same moment, this thread will not lead: pass it on.
                if signal.is_set or held.noted:
                    self._promote()

    def _rest(self, signal: Signal, left_s: float | None, held: Held | NothingHeld) -> None:
        watch = self._watch
        if watch is None or not self._deputy.acquire(blocking=False):
            if watch is None:
                self._come_out()
            signal.sleep(left_s)
            return
        try:
            if not signal.look():
                self._stand_by(signal, watch, left_s, held)
        finally:
            self._deputy_sleeps = False
            self._deputy.release()
            if not self._lead_lock.locked():  # the leader is away, and nobody keeps the watch now
                self._alert_side()
                if signal.is_set or held.noted:
                    self._promote()

    def _stand_by(self, signal: Signal, watch: Watch, left_s: float | None, held: Held | NothingHeld) -> None:
        """As the deputy: sleep until nudged, or until the leader has been away for long enough."""
        deadline_s = None if left_s is None else time.monotonic() + left_s
        while True:
            on_patrol, leads = self._calls > _ALARMS, self._leads
            self._deputy_sleeps = not on_patrol
            if not on_patrol and not self._lead_lock.locked():
                return  # who leaves from now on calls
            if not on_patrol:
                self._come_out()
            signal.keep(watch, _PATROL_S if on_patrol and (left_s is None or left_s > _PATROL_S) else left_s)
            now_s = time.monotonic()
            left_s = None if deadline_s is None else deadline_s - now_s
            is_over = signal.is_set or held.noted or self._stopping or (left_s is not None and left_s <= 0)
            if is_over or self._heir is signal or signal not in self._followers or self._calls <= _ALARMS:
                return
            if not self._lead_lock.locked():
                if now_s - self._led_at_s >= _BACK_S:
                    return
            elif self._leads == leads:
                self._calls = 0  # the leader idles

    def _inherits(self, signal: Signal) -> bool:
        """Whether this follower is to be the next leader, from now on."""
        thread = threading.get_ident()
        if thread != self._last_follower:
            self._last_follower, self._returns = thread, 0
        self._returns += 1
        if self._returns < _INHERITS_AT or self._heir is not None:
            return False
        self._heir = signal
        return True

    def _promote(self) -> None:
        heir = self._heir
        if heir is not None:
            heir.nudge()
        elif self._followers:
            try:
                self._followers.popitem(last=False)[0].nudge()
            except KeyError:
                pass  # it has just left

    def _side(self) -> None:
        """Lead whenever no waiting thread has led for a while; give way as soon as one waits.

        While calls follow each other it only looks from time to time; beside a leader that idles it sleeps, so that
        an idle process is idle.
        """
        seen = -1
        while not self._stopping:
            idle_s = time.monotonic() - self._led_at_s
            if idle_s < _TAKE_OVER_S:
                self._pause_s = _TAKE_OVER_S if self._is_wanted else min(2 * self._pause_s, _LONGEST_PAUSE_S)
                self._is_wanted = False
                self._side_signal.sleep_at_once(self._pause_s - idle_s)
            elif self._lead_lock.acquire(blocking=False):
                self._pause_s = _TAKE_OVER_S
                self.leads_aside = True
                try:
                    while not self._followers and not self._stopping:
                        self._pump(None)
                finally:
                    self.leads_aside = False
                    self._led_at_s = time.monotonic()
                    self._lead_lock.release()
                    self._promote()
            elif seen != self._leads:
                seen = self._leads
                self._side_signal.sleep_at_once(_TAKE_OVER_S)
            else:
                self._alarms = 0
                self._side_rests = True
                self._come_out()
                if self._lead_lock.locked() and not self._stopping:
                    self._alarm.wait()
                self._side_rests = False

    def soon(self) -> None:
        self._is_wanted = True
        if self._pause_s > _TAKE_OVER_S:
            self._pause_s = _TAKE_OVER_S
            self._side_signal.nudge()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        self._side_signal.nudge()
        self._watch = None
        alarm, self._alarm = self._alarm, ImmediateAlarm()  # the descriptors go with whoever uses them still
        for each in (alarm, self._alarm):
            each.set(0.0)
        for signal in list(self._followers):
            signal.nudge()
        if threading.current_thread() is self.thread:
            return
        self.thread.join(_JOIN_LIMIT_S)
        if _own.leads:
            return  # called from inside the pump
        # Whoever led is out of the pump then, and nobody leads any more: what it polls may be closed now.
        self._lead_lock.acquire(timeout=_LEAD_LIMIT_S)


def make_driver(name: str) -> Driver:
    """Raises: ValueError for a name that is none of the drivers."""
    if name == "caller":
        return CallerDriver()
    if name == "thread":
        return ThreadDriver()
    raise ValueError(f"link_driver is {name!r}; it can be 'caller' or 'thread'")
