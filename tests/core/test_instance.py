"""One actor with a behavior of the test's own: one message at a time, and an end that everybody hears of, once."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from attrs import define
from net import LIMIT_S, Net, until

from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.ids import ActorId
from monarch.core.instance import Instance, Phase
from monarch.core.mailbox import FEW
from monarch.core.monitor import Down
from monarch.core.proc import Proc
from monarch.core.serving import Served

_STOP = Down("stopped", "it was asked to")
_FAIL = Down("failed", "it broke")


@define
class Work:
    coro: Coroutine[Any, Any, Down | None]
    concurrent: bool = False


class Fake:
    """A behavior: what a call does is looked up by the first part of its message."""

    has_cleanup = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.abandoned: list[tuple[str, Down]] = []
        self.begun: list[str] = []
        self.does: dict[str, Callable[[], Any]] = {}
        self.cleans: Callable[[], Any] = lambda: None
        self.makes: Callable[[], Down | None] = lambda: None
        self.releases: Callable[[], None] = lambda: None

    def construct(self) -> Down | None:
        self.log.append("construct")
        return self.makes()

    def handle(self, envelope: Envelope) -> Any:
        name = bytes(envelope.parts[0]).decode()
        self.log.append(name)
        return self.does.get(name, lambda: None)()

    def endpoint_of(self, envelope: Envelope) -> str:
        return bytes(envelope.parts[0]).decode()

    def abandon(self, envelope: Envelope, down: Down) -> None:
        name = bytes(envelope.parts[0]).decode()
        self.abandoned.append((name, down))
        if envelope.flags & Flag.BEGUN:
            self.begun.append(name)

    def release(self, down: Down) -> None:
        assert asyncio._get_running_loop() is None
        self.log.append("release")
        self.releases()

    def cleanup(self, down: Down) -> Any:
        self.log.append("cleanup")
        return self.cleans()


class Life:
    """A running actor of `proc`."""

    def __init__(self, proc: Proc, fake: Fake | None = None, start: bool = True) -> None:
        self.fake = fake if fake is not None else Fake()
        self.proc = proc
        self.instance = Instance(proc, ActorId(proc.proc_id, proc.new_port(), "actor"))
        self.downs: list[Down] = []
        proc.monitors.watch((proc.key, self.instance.actor_id.number), self.downs.append)
        proc.adopt(self.instance)
        self.thread = threading.Thread(target=lambda: self.instance.run(self.fake), name="monarch-test-actor")
        self.tasks: list[asyncio.Task[None]] = []
        self.seqs: Counter[int] = Counter()
        if start:
            self.thread.start()

    def call(self, name: str, sender: int = 0) -> None:
        envelope = Envelope(
            Kind.CALL, self.proc.key, self.instance.actor_id.number, 0, self.proc.key, sender, [name.encode()]
        )
        envelope.flags, envelope.seq, envelope.reply_port = Flag.SEQUENCED | Flag.SILENT, self.seqs[sender], 99
        self.seqs[sender] += 1
        self.proc.send(envelope, self.proc.proc_id)

    def end(self, down: Down = _STOP) -> Down:
        self.instance.request_stop(down)
        return self.ended()

    def ended(self) -> Down:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        assert len(self.downs) == 1 and self.instance.phase is Phase.ENDED
        assert self.instance.actor_id.number not in self.proc.actors
        return self.downs[0]


@pytest.fixture
def proc(quick_net: Net) -> Proc:
    return quick_net.proc()


def test_calls_are_served_in_order_after_the_construction(proc: Proc) -> None:
    life = Life(proc, start=False)
    for n in range(50):
        life.call(str(n))
    life.thread.start()

    assert life.end() == _STOP
    assert life.fake.log == ["construct", *map(str, range(50)), "release", "cleanup", "release"]


def test_what_the_constructor_starts_begins_before_the_first_call(proc: Proc) -> None:
    life = Life(proc, start=False)

    async def task() -> None:
        life.fake.log.append("task")

    def make() -> None:
        life.tasks = [asyncio.get_running_loop().create_task(task())]

    life.fake.makes = make
    life.call("call")
    life.thread.start()

    assert life.end() == _STOP
    assert life.fake.log[:3] == ["construct", "task", "call"]


def test_the_constructor_sets_variables_of_the_context_for_itself_only(proc: Proc) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    life = Life(proc, start=False)
    life.fake.makes = lambda: variable.set("by the constructor") and None
    life.fake.does["read"] = lambda: life.fake.log.append(variable.get())
    life.call("read")
    life.thread.start()

    assert life.end() == _STOP
    assert "unset" in life.fake.log


def test_one_call_is_served_at_a_time_while_an_async_one_waits(proc: Proc) -> None:
    life = Life(proc)
    go = asyncio.Event()
    waiting = threading.Event()

    async def slow() -> None:
        waiting.set()
        await go.wait()
        life.fake.log.append("slow is over")

    life.fake.does["slow"] = lambda: Work(slow())
    life.call("slow")
    life.call("next")
    assert waiting.wait(LIMIT_S)
    served = threading.Event()
    life.instance.post_control(served.set)  # control is served meanwhile
    assert served.wait(LIMIT_S)
    assert life.fake.log[-1] == "slow"
    life.instance.loop.call_soon_threadsafe(go.set)
    life.end()

    assert life.fake.log == ["construct", "slow", "slow is over", "next", "release", "cleanup", "release"]


def test_concurrent_calls_wait_beside_each_other(proc: Proc) -> None:
    life = Life(proc)
    barrier: list[asyncio.Event] = []
    over: list[int] = []

    async def meet() -> None:
        barrier.append(asyncio.Event())
        if len(barrier) == 3:
            for event in barrier:
                event.set()
        await barrier[-1].wait()
        over.append(1)

    life.fake.does["meet"] = lambda: Work(meet(), concurrent=True)
    for _ in range(3):
        life.call("meet")
    until(lambda: len(over) == 3)
    assert life.end() == _STOP and not life.fake.abandoned


def test_a_call_that_never_waits_costs_no_turn_of_the_loop(proc: Proc) -> None:
    life = Life(proc)

    async def quick() -> None:
        pass

    life.fake.does["quick"] = life.fake.does["first"] = lambda: Work(quick())
    life.call("first")  # asyncio's part of the loop is made for it
    until(lambda: "first" in life.fake.log)
    turns: list[int] = []
    counted = threading.Event()

    def count() -> None:
        run_once = life.instance.loop._run_once  # type: ignore[attr-defined]
        life.instance.loop._run_once = lambda: (turns.append(1), run_once())  # type: ignore[attr-defined]
        counted.set()

    life.instance.post_control(count)
    assert counted.wait(LIMIT_S)
    for n in range(50):
        life.call("quick")
        until(lambda n=n: life.fake.log.count("quick") == n + 1)
    assert len(turns) <= 2
    life.end()


def test_a_flood_of_one_sender_does_not_starve_another(proc: Proc) -> None:
    life = Life(proc, start=False)
    for n in range(FEW + 100):
        life.call(str(n))
    life.call("other", sender=7)
    life.thread.start()
    assert life.end() == _STOP

    served = [each for each in life.fake.log if each.isdecimal()]
    assert served == [str(n) for n in range(FEW + 100)]
    assert life.fake.log.index("other") < 10


def test_control_comes_before_calls(proc: Proc) -> None:
    life = Life(proc, start=False)
    for n in range(3):
        life.call(str(n))
    life.instance.post_control(lambda: life.fake.log.append("control"))
    life.thread.start()
    life.end()

    assert life.fake.log.index("control") < life.fake.log.index("0")


def test_a_stop_serves_what_is_queued_and_refuses_what_comes_after(proc: Proc) -> None:
    life = Life(proc)
    inside, go = threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        assert go.wait(LIMIT_S)

    life.fake.does["block"] = block
    for name in ("block", "queued"):
        life.call(name)
    assert inside.wait(LIMIT_S)
    life.instance.request_stop(_STOP)
    life.instance.request_stop(Down("stopped", "again"))
    envelope = Envelope(Kind.CALL, proc.key, life.instance.actor_id.number, 0, proc.key, 0, [b"late"])
    assert life.instance.post(envelope) == _STOP
    go.set()

    assert life.ended() == _STOP
    assert life.fake.log[1:3] == ["block", "queued"] and not life.fake.abandoned


def test_a_failure_ends_before_the_next_call_and_tells_the_rest(proc: Proc) -> None:
    life = Life(proc)
    inside, go = threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        assert go.wait(LIMIT_S)

    life.fake.does["block"] = block
    for name in ("block", "one", "two"):
        life.call(name)
    assert inside.wait(LIMIT_S)
    life.instance.request_end(_FAIL)
    life.instance.request_end(Down("failed", "later"))
    go.set()

    assert life.ended() == _FAIL
    assert life.fake.abandoned == [("one", _FAIL), ("two", _FAIL)]


@pytest.mark.parametrize("kind", ["at once", "waiting"])
def test_a_call_that_kills_the_actor_is_reported_once_and_the_rest_come_back(proc: Proc, kind: str) -> None:
    life = Life(proc, start=False)

    async def die() -> Down:
        await asyncio.sleep(0)
        return _FAIL

    life.fake.does["die"] = lambda: _FAIL if kind == "at once" else Work(die())
    for name in ("die", "one", "two"):
        life.call(name)
    life.thread.start()

    assert life.ended() == _FAIL
    assert [name for name, _ in life.fake.abandoned][-2:] == ["one", "two"]
    assert life.fake.log == ["construct", "die", "release", "cleanup", "release"]


def test_what_runs_when_the_actor_fails_is_cancelled_and_told(proc: Proc) -> None:
    life = Life(proc)
    cancelled: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(name)

    life.fake.does["beside"] = lambda: Work(wait("beside"), concurrent=True)
    life.fake.does["current"] = lambda: Work(wait("current"))
    for name in ("beside", "current", "queued"):
        life.call(name)
    until(lambda: "current" in life.fake.log)
    life.instance.request_end(_FAIL)

    assert life.ended() == _FAIL
    assert sorted(cancelled) == ["beside", "current"]
    assert sorted(name for name, _ in life.fake.abandoned) == ["beside", "current", "queued"]
    assert sorted(life.fake.begun) == ["beside", "current"]  # their fate is unknown, that of the other is not


def test_a_constructor_that_fails_ends_the_actor_without_a_cleanup(proc: Proc) -> None:
    fake = Fake()
    fake.makes = lambda: _FAIL
    life = Life(proc, fake, start=False)
    life.call("one")
    life.thread.start()

    assert life.ended() == _FAIL
    assert fake.log == ["construct", "release"] and [name for name, _ in fake.abandoned] == ["one"]


@pytest.mark.parametrize("where", ["construct", "handle", "coroutine", "concurrent"])
def test_a_behavior_that_raises_ends_its_actor_with_the_error(
    proc: Proc, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake = Fake()

    def fail() -> Any:
        raise KeyError("x")

    async def fail_later() -> Any:
        await asyncio.sleep(0)
        fail()

    if where == "construct":
        fake.makes = fail
    fake.does["die"] = fail if where == "handle" else lambda: Work(fail_later(), where == "concurrent")
    life = Life(proc, fake, start=False)
    life.call("die")
    with caplog.at_level(logging.CRITICAL, "monarch"):
        life.thread.start()
        down = life.ended()

    assert down.kind == "failed" and "KeyError" in down.error and "fail" in down.traceback


def test_a_cleanup_that_takes_too_long_is_cut_off_and_one_that_fails_gives_the_reason(
    proc: Proc,
) -> None:
    proc.cleanup_timeout_s = 0.05

    async def forever() -> None:
        await asyncio.Event().wait()

    fake = Fake()
    fake.cleans = forever
    down = Life(proc, fake).end()
    assert down.kind == "failed" and "__cleanup__ has not ended within 0.05 s" in down.reason

    async def fails() -> Down:
        return _FAIL

    fake = Fake()
    fake.cleans = fails
    assert Life(proc, fake).end() == _FAIL
    fake = Fake()
    fake.cleans = lambda: _FAIL
    assert Life(proc, fake).end() == _FAIL


@pytest.mark.parametrize("first", [_STOP, _FAIL], ids=["stopped", "failed"])
@pytest.mark.parametrize("when", ["while it releases", "while a task of it waits", "while it cleans up", "at its last"])
def test_what_fails_while_an_actor_ends_is_not_lost(
    proc: Proc, first: Down, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake = Fake()
    life = Life(proc, fake)
    instance = life.instance
    later = Down("failed", "something it owns broke")

    def learn() -> None:
        assert instance.post_control(lambda: instance.end(later))

    async def take_time() -> None:
        await asyncio.sleep(0.01)
        instance.end(later)

    async def last_words() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            learn()

    async def clean_up() -> None:
        instance.end(later)

    def once(action: Callable[[], object]) -> Callable[[], None]:
        actions = [action]
        return lambda: actions and actions.pop()() and None

    if when == "while it releases":
        fake.releases = once(learn)
    elif when == "while a task of it waits":
        fake.releases = once(lambda: instance.post_control(lambda: instance.start_beside(take_time())))
    elif when == "while it cleans up":
        fake.cleans = clean_up
    else:
        fake.cleans = lambda: instance.loop.create_task(last_words()) and None
    with caplog.at_level(logging.WARNING, "monarch"):
        instance.request_stop(first) if first.stopped else instance.request_end(first)
        assert life.ended() == (later if first.stopped else first)
    assert ("actor.failed_again" in caplog.text) == (not first.stopped)
    assert not instance.post_control(learn)  # whoever comes later knows that nobody listens


def test_what_the_end_of_one_process_brings_about_is_told_of_once(proc: Proc, caplog: pytest.LogCaptureFixture) -> None:
    ends = [Down("killed", f"process {pid}", pid, signal=9) for pid in (1, 2)]
    fake = Fake()
    life = Life(proc, fake)

    async def clean_up() -> None:
        for child in range(3):
            for end in ends:
                life.instance.end(Down("failed", f"child {child} is gone").because(end))

    fake.cleans = clean_up
    with caplog.at_level(logging.WARNING, "monarch"):
        life.instance.request_end(Down("failed", "a child is gone").because(ends[0]))
        assert life.ended().event == ends[0].event
    assert caplog.text.count("actor.failed_again") == 1 and "process 2" in caplog.text


def test_an_actor_whose_cleanup_blocks_is_reported_all_the_same_and_once(proc: Proc) -> None:
    proc.cleanup_timeout_s = 0.05
    go = threading.Event()
    fake = Fake()
    fake.cleans = lambda: go.wait(LIMIT_S) and None
    life = Life(proc, fake)
    life.instance.request_stop(_STOP)
    until(lambda: life.downs)
    assert life.thread.is_alive()
    go.set()
    assert "blocks its thread" in life.ended().reason


def test_a_release_that_raises_does_not_cost_the_cleanup(proc: Proc, caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake()
    fake.releases = lambda: 1 / 0  # type: ignore[assignment,return-value]
    with caplog.at_level(logging.ERROR, "monarch"):
        assert Life(proc, fake).end() == _STOP
    assert fake.log[-3:] == ["release", "cleanup", "release"] and "release.failed" in caplog.text


def test_tasks_that_the_user_left_are_cancelled_at_the_end(proc: Proc) -> None:
    life = Life(proc)
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def start() -> None:
        life.kept = asyncio.create_task(background())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    life.fake.does["start"] = lambda: Work(start())
    life.call("start")
    assert life.end() == _STOP
    assert ended == ["cancelled"]


def test_a_flood_of_calls_does_not_keep_timers_from_firing(proc: Proc) -> None:
    life = Life(proc)
    fired = threading.Event()

    def again() -> None:
        if not fired.is_set():
            life.call("again")

    async def arm() -> None:
        asyncio.get_running_loop().call_later(0.005, fired.set)

    life.fake.does["again"] = again
    life.fake.does["arm"] = lambda: Work(arm())
    life.call("arm")
    life.call("again")
    came = fired.wait(5.0)
    fired.set()
    life.end()
    assert came


def test_an_endpoint_whose_first_wait_is_a_sleep_goes_on_when_it_is_over(proc: Proc) -> None:
    """The timer is set inside `select`, after asyncio has looked at its timers."""
    life = Life(proc)
    life.call("first")
    until(lambda: "first" in life.fake.log)
    over = threading.Event()

    async def sleep() -> None:
        await asyncio.sleep(0.01)
        over.set()

    life.fake.does["sleep"] = lambda: Work(sleep())
    life.call("sleep")
    assert over.wait(5.0)
    life.end()


def test_an_actor_whose_code_stops_the_loop_lives_on_and_ends_in_order(proc: Proc) -> None:
    life = Life(proc)

    async def stop_loop() -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        life.fake.log.append("stopped it")

    life.fake.does["stop"] = lambda: Work(stop_loop())
    life.fake.cleans = stop_loop
    life.call("stop")
    life.call("next")

    assert life.end() == _STOP
    assert life.fake.log == ["construct", "stop", "stopped it", "next", "release", "cleanup", "stopped it", "release"]


def test_a_cut_off_actor_ends_without_release_and_cleanup(proc: Proc) -> None:
    life = Life(proc)
    life.call("one")
    until(lambda: "one" in life.fake.log)
    life.instance.post_control(life.instance.cut_off)
    life.ended()

    assert life.fake.log == ["construct", "one"]


def test_an_actor_may_be_cut_off_while_it_cleans_up(proc: Proc, caplog: pytest.LogCaptureFixture) -> None:
    cleaning = threading.Event()

    async def forever() -> None:
        cleaning.set()
        await asyncio.Event().wait()

    fake = Fake()
    fake.cleans = forever
    life = Life(proc, fake)
    life.instance.request_stop(_STOP)
    assert cleaning.wait(LIMIT_S)
    life.instance.post_control(life.instance.cut_off)

    assert life.ended() == _STOP
    assert "loop.unclean" not in caplog.text


def test_numbers_per_destination_have_no_hole_and_no_repetition(proc: Proc) -> None:
    life = Life(proc)
    drawn: list[int] = []

    def draw() -> None:
        for _ in range(1000):
            drawn.append(life.instance.next_seq(1, 2))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(drawn) == list(range(4000)) and life.instance.next_seq(1, 3) == 0
    life.end()


def test_a_snapshot_shows_a_busy_actor_without_asking_its_thread(proc: Proc) -> None:
    life = Life(proc)
    began, finish = threading.Event(), threading.Event()

    def busy() -> None:
        served = Served(life.instance, None, "busy")
        life.instance.serving.append(served)
        began.set()
        finish.wait(LIMIT_S)
        life.instance.finished(served)

    life.fake.does["busy"] = busy
    for name in ("busy", "later", "latest"):
        life.call(name)
    began.wait(LIMIT_S)
    until(lambda: len(life.instance.mailbox) == 2)
    state = life.instance.snapshot()
    assert (state.name, state.phase, state.queued) == ("actor", "serving", 2)
    assert [each.endpoint for each in state.running] == ["busy"] and state.running[0].for_s >= 0
    assert "actor has been running busy for" in str(state) and "2 call(s) queued" in str(state)

    finish.set()
    until(lambda: "latest" in life.fake.log and not life.instance.snapshot().running)
    assert "actor is idle, 0 call(s) queued" in str(life.instance.snapshot())
    life.end()


def test_an_actor_that_is_not_constructed_yet_says_so(proc: Proc) -> None:
    life = Life(proc, start=False)
    assert life.instance.snapshot().phase == "born"
    life.thread.start()
    until(lambda: life.instance.snapshot().phase == "serving")
    life.end()


def test_a_task_that_exits_ends_the_actor_and_says_what_it_raised(proc: Proc) -> None:
    """And not the process, which asyncio would let it end."""
    life = Life(proc)

    async def leave() -> None:
        raise SystemExit("enough")

    async def begin() -> None:
        life.kept = asyncio.create_task(leave())  # type: ignore[attr-defined]

    life.fake.does["begin"] = lambda: Work(begin())
    life.call("begin")
    down = life.ended()

    assert (down.kind, down.error) == ("failed", "SystemExit: enough")
    assert down.pid and "in leave" in down.traceback
