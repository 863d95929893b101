"""The actors and ports of a process: who gets what, and who hears of what was not delivered."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from net import LIMIT_S, Collector, Net, until
from test_instance import Fake, Life

from monarch.core import codec
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.ids import ActorId
from monarch.core.instance import Instance, Sender
from monarch.core.monitor import Down, PeerGone
from monarch.core.proc import Proc
from monarch.transports import registry
from monarch.transports.pool import Pool
from monarch.transports.segments import Slot

_DOWN = Down("failed", "it broke")


def _call(src: Proc, dst: Proc, number: int, reply_port: int = 0, seq: int = 0, sender: int = 9) -> Envelope:
    return Envelope(
        Kind.CALL, dst.key, number, 0, src.key, sender, [b"%d" % seq], Flag.SEQUENCED, seq=seq, reply_port=reply_port
    )


def test_a_request_is_answered_here_and_elsewhere(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    for proc in (a, b):
        proc.handlers["add"] = lambda envelope, x, y, proc=proc: proc.answer(envelope, "sum", x + y)
    assert a.request(a.proc_id, "add", 1, 2).get(LIMIT_S) == ("sum", 3)
    assert a.request(b.proc_id, "add", [1], [2]).get(LIMIT_S) == ("sum", [1, 2])
    assert set(a.ports) == set()


@pytest.mark.parametrize("local", [True, False])
def test_a_request_that_nobody_can_serve_fails_at_once(
    quick_net: Net, local: bool, caplog: pytest.LogCaptureFixture
) -> None:
    a = quick_net.proc("a")
    b = a if local else quick_net.proc("b")
    b.handlers["broken"] = lambda envelope: 1 / 0  # type: ignore[assignment,return-value]
    with caplog.at_level(logging.CRITICAL, "monarch"):
        unknown = a.request(b.proc_id, "unknown").exception(LIMIT_S)
        broken = a.request(b.proc_id, "broken").exception(LIMIT_S)

    assert isinstance(unknown, PeerGone) and "knows no request 'unknown'" in unknown.down.reason
    assert isinstance(broken, PeerGone) and "ZeroDivisionError" in broken.down.reason


def test_what_is_told_has_no_answer(quick_net: Net) -> None:
    a, b = quick_net.proc("a"), quick_net.proc("b")
    heard: list[Any] = []
    b.handlers["note"] = lambda envelope, what: (heard.append(what), b.answer(envelope, "ignored"))
    a.tell(b.proc_id, "note", {"x": 1})
    until(lambda: heard == [{"x": 1}])
    assert not a.ports


def test_a_request_to_a_process_that_ends_fails_with_the_reason(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    asked = threading.Event()
    b.handlers["at once"] = lambda envelope: b.answer(envelope, "here")
    b.handlers["never"] = lambda envelope: asked.set()
    assert a.request(b.proc_id, "at once").get(LIMIT_S) == ("here",)
    pending = a.request(b.proc_id, "never")
    assert asked.wait(LIMIT_S)
    b.close(LIMIT_S)
    error = pending.exception(LIMIT_S)

    assert isinstance(error, PeerGone) and error.down.stopped and not a.ports


def test_what_comes_while_early_messages_are_delivered_waits_behind_them(net: Net) -> None:
    proc = net.proc("a")
    got: list[int] = []

    class Early(Instance):
        def post(self, envelope: Envelope) -> Down | None:
            got.append(envelope.seq)
            if envelope.seq == 0:
                proc.deliver(_call(proc, proc, 500, seq=2))
            return None

    for seq in range(2):
        proc.deliver(_call(proc, proc, 500, seq=seq))
    proc.adopt(Early(proc, ActorId(proc.proc_id, 500, "early")))

    assert got == [0, 1, 2] and 500 in proc.actors and not proc._unborn
    proc.actors.pop(500)


def test_messages_of_an_actor_that_is_not_born_yet_wait_for_it(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    asked: list[int] = []
    b.on_unborn = asked.append
    fake = Fake()
    instance = Instance(b, ActorId(b.proc_id, 500, "late"))
    for seq in range(5):
        a.send(_call(a, b, 500, seq=seq), b.proc_id)
    until(lambda: len(b._unborn.get(500, [])) == 5)
    assert asked[0] == 500
    b.adopt(instance)
    assert not b._unborn
    thread = threading.Thread(target=lambda: instance.run(fake))
    thread.start()
    a.send(_call(a, b, 500, seq=5), b.proc_id)
    until(lambda: len(fake.log) == 7)
    instance.request_stop(Down("stopped", "over"))
    thread.join(LIMIT_S)
    assert fake.log[:7] == ["construct", *"012345"]


def test_messages_of_an_actor_that_nobody_spawns_come_back(quick_net: Net) -> None:
    a, b = quick_net.proc("a"), quick_net.proc("b")
    b.unborn_limit_s = 0.05
    answer, waiting = quick_net.port(a)
    for seq in range(3):
        a.send(_call(a, b, 500, answer, seq), b.proc_id)
    until(lambda: len(waiting.bounces) == 3)
    assert "nobody spawned this actor" in codec_reason(waiting) and not b._unborn


def codec_reason(waiting: Collector) -> str:
    return waiting.bounces[0][1].reason


def test_messages_of_an_actor_that_has_ended_come_back_with_its_reason(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    life = Life(b)
    number = life.instance.actor_id.number
    answer, waiting = net.port(a)
    life.end(_DOWN)
    a.send(_call(a, b, number, answer), b.proc_id)
    until(lambda: waiting.bounces)
    assert waiting.bounces[0][1] == _DOWN


def test_no_call_waits_for_a_birth_while_its_actor_is_ending(quick_net: Net) -> None:
    """Whatever the moment of the call: it is served, or comes back; it is never taken for one that came too early."""
    b = quick_net.proc("b")
    answer, waiting = quick_net.port(b)
    for _ in range(60):
        life = Life(b)
        number = life.instance.actor_id.number
        waiting.bounces.clear()
        go = threading.Event()

        def talk(number: int = number, go: threading.Event = go) -> None:
            go.wait(LIMIT_S)
            for seq in range(100):
                b.send(_call(b, b, number, answer, seq), b.proc_id)

        thread = threading.Thread(target=talk)
        thread.start()
        go.set()
        life.instance.request_stop(Down("stopped", "over"))
        life.ended()
        thread.join(LIMIT_S)
        assert not b._unborn
        served = [each for each in life.fake.log if each.isdigit()]
        assert len(served) + len(waiting.bounces) + len(life.fake.abandoned) == 100


def test_the_tombstone_is_there_before_the_actor_is_not(quick_net: Net) -> None:
    b = quick_net.proc("b")
    life = Life(b)
    number = life.instance.actor_id.number
    seen: list[tuple[bool, bool]] = []
    b.monitors.watch((b.key, number), lambda down: seen.append((number in b.actors, number in b._unborn)))
    life.end()
    assert seen == [(True, False)]


def test_an_actor_far_away_is_watched(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    life, other = Life(b), Life(b)
    heard: list[Down] = []
    never: list[Down] = []
    a.watch(life.instance.actor_id, heard.append)
    a.watch(other.instance.actor_id, never.append)()
    until(lambda: b.monitors.watched() >= 4)
    life.end(_DOWN)
    other.end()
    until(lambda: heard == [_DOWN])
    late: list[Down] = []
    a.watch(life.instance.actor_id, late.append)
    assert late == [_DOWN] and never == []


def test_an_actor_that_has_ended_before_it_is_watched_is_told_at_once(quick_net: Net) -> None:
    a, b = quick_net.proc("a"), quick_net.proc("b")
    life = Life(b)
    life.end(_DOWN)
    heard: list[Down] = []
    a.watch(life.instance.actor_id, heard.append)
    until(lambda: heard == [_DOWN])


def test_a_call_to_the_client_comes_back(quick_net: Net) -> None:
    a, b = quick_net.proc("a"), quick_net.proc("b")
    b.adopt(Sender(b, ActorId(b.proc_id, 600, "client")))
    answer, waiting = quick_net.port(a)
    a.send(_call(a, b, 600, answer), b.proc_id)
    until(lambda: waiting.bounces)
    assert "the client has no endpoints" in codec_reason(waiting)


def test_a_sender_hears_of_a_message_that_nobody_waits_for_unless_it_is_silent(quick_net: Net) -> None:
    a, b = quick_net.proc("a"), quick_net.proc("b")
    heard: list[tuple[bytes, Down]] = []

    class Listening(Sender):
        def undeliverable(self, envelope: Envelope, down: Down) -> None:
            heard.append((b"", down))

    a.adopt(Listening(a, ActorId(a.proc_id, 9, "sender")))
    b.monitors.fire((b.key, 700), _DOWN)
    b.monitors.fire((b.key, 701), Down("stopped", "on purpose"))
    silent = _call(a, b, 700, seq=1)
    silent.flags |= Flag.SILENT
    a.send(silent, b.proc_id)
    a.send(_call(a, b, 701), b.proc_id)
    a.send(_call(a, b, 700), b.proc_id)
    until(lambda: heard)
    assert [down for _, down in heard] == [_DOWN]


def test_a_value_for_a_port_that_is_closed_is_dropped(quick_net: Net) -> None:
    a = quick_net.proc("a")
    a.deliver(Envelope(Kind.PORT, a.key, 0, 999, a.key, 0, codec.encode(1)))
    a.deliver(Envelope(99, a.key, 0, 0, a.key, 0, []))


def test_a_spawn_where_nobody_can_comes_back(quick_net: Net, caplog: pytest.LogCaptureFixture) -> None:
    a, b = quick_net.proc("a"), quick_net.proc("b")
    answer, waiting = quick_net.port(a)
    with caplog.at_level(logging.CRITICAL, "monarch"):
        a.send(Envelope(Kind.SPAWN, b.key, 800, 0, a.key, 9, [b"x"], reply_port=answer), b.proc_id)
        until(lambda: waiting.bounces)
    assert "knows no request 'spawn'" in codec_reason(waiting)


def test_a_port_that_raises_does_not_keep_others_from_hearing_of_an_end(
    quick_net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = quick_net.proc("a"), quick_net.proc("b")
    _, broken = quick_net.port(a)
    _, waiting = quick_net.port(a)
    hooked: list[int] = []
    broken.proc_gone = lambda key, down: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    a.on_proc_gone += [lambda key, down: 1 / 0, lambda key, down: hooked.append(key)]  # type: ignore[list-item,return-value]
    with caplog.at_level(logging.CRITICAL, "monarch"):
        a.gateway.peers.declare_gone(b.proc_id, _DOWN)
    assert waiting.gone == [(b.key, _DOWN)] and hooked == [b.key]


def test_what_an_agent_has_begun_it_ends_before_an_interrupt_counts(net: Net) -> None:
    proc = net.proc("a")
    done: list[str] = []

    def interrupted(envelope: Envelope) -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")

    proc.handlers["interrupted"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        proc.tell(proc.proc_id, "interrupted")

    assert done == ["all of it"]


def test_what_the_handler_of_an_alarm_raises_is_no_failure_of_a_request(net: Net) -> None:
    class TimeIsOver(Exception): ...

    def ring(*_: object) -> None:
        raise TimeIsOver

    proc = net.proc("a")
    answer, waiting = net.port(proc)
    proc.handlers["interrupted"] = lambda envelope: signal.raise_signal(signal.SIGALRM)
    old = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(TimeIsOver):
            proc.send(
                Envelope(Kind.SYSTEM, proc.key, 1, 0, proc.key, 1, codec.encode(("interrupted",)), reply_port=answer),
                None,
            )
    finally:
        signal.signal(signal.SIGALRM, old)

    assert not waiting.bounces


def test_what_the_handler_of_an_alarm_raises_costs_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class TimeIsOver(Exception): ...

    def ring(*_: object) -> None:
        raise TimeIsOver

    def reserve(slot: Slot, size_bytes: int, reserve: Callable[[Slot, int], None] = Slot.reserve) -> None:
        signal.raise_signal(signal.SIGALRM)
        reserve(slot, size_bytes)

    pool = Pool(1 << 30)
    monkeypatch.setattr(registry.get("shm"), "memory", pool)
    monkeypatch.setattr(Slot, "reserve", reserve)
    net = Net("shm")
    old = signal.signal(signal.SIGALRM, ring)
    try:
        allocate = net.proc("a").memory_for((1,))
        assert allocate is not None
        with pytest.raises(TimeIsOver):
            allocate(1 << 20)
    finally:
        signal.signal(signal.SIGALRM, old)
        net.close()
    held = pool.statistics()
    assert (held["free_slots"], held["lent_slots"], held["reserved_bytes"]) == (1, 0, 1 << 20)
