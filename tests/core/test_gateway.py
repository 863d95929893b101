"""Gateways in pairs and more, over links that break: nothing is lost, repeated or waited for without end."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
from attrs import evolve
from net import LIMIT_S, SECRET, Collector, Net, cut, descriptors, peer, send, until, value

from monarch import compiled
from monarch.core import goodbye
from monarch.core import peers as peers_module
from monarch.core.driver import Signal
from monarch.core.envelope import Envelope, Kind
from monarch.core.future import Future
from monarch.core.ids import ActorId, ProcId, Uid
from monarch.core.monitor import Down, PeerGone
from monarch.core.peer import State
from monarch.core.proc import Proc
from monarch.core.protocol import SESSION, FrameType, Hello, Session
from monarch.errors import TransportError
from monarch.transports.faults import Faults
from monarch.transports.pool import Pool

WAITS_S = 0.3


class NoWay:
    """A transport that can be unplugged: dialing then fails, and not because nobody listens."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.dials = 0
        self.unplugged = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dial(self, url: str, secret: bytes, timeout_s: float) -> Any:
        self.dials += 1
        if self.unplugged:
            raise TransportError("unplugged")
        return self._inner.dial(url, secret, timeout_s)


def _threads(*works: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def _join(threads: list[threading.Thread], limit_s: float = 40.0) -> None:
    deadline_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        assert not thread.is_alive()


def _numbers(got: list[bytes], sender: bytes) -> list[int]:
    return [int(each.split(b"/")[1]) for each in got if each.split(b"/")[0] == sender]


def test_messages_go_both_ways_in_order(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    at_a, at_b = net.port(a), net.port(b)
    for n in range(300):
        send(a, b, at_b[0], b"a/%d" % n)
        send(b, a, at_a[0], b"b/%d" % n)
    until(lambda: len(at_a[1].got) == len(at_b[1].got) == 300)

    assert _numbers(at_b[1].got, b"a") == _numbers(at_a[1].got, b"b") == list(range(300))
    until(lambda: peer(a, b).state is peer(b, a).state is State.UP)  # of two links at once, one may end last


def test_messages_of_many_sizes_and_parts_arrive_unchanged(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    number, at_b = net.port(b)
    arrived: list[list[bytes]] = []
    at_b.deliver = lambda envelope: arrived.append([bytes(p) for p in envelope.parts])  # type: ignore[method-assign]
    messages = [[], [b""], [b"x", b"", b"y"], [bytes(1 << 16)], [bytes(100), bytes([7]) * (3 << 20)], [b"end"]]
    for parts in messages:
        a.send(evolve_parts(value(a, b, number, b""), parts), b.proc_id)
    until(lambda: len(arrived) == len(messages))

    assert arrived == messages


def evolve_parts(envelope: Envelope, parts: list[bytes]) -> Envelope:
    envelope.parts = list(parts)
    return envelope


def test_both_may_dial_at_once_and_one_link_stays(net: Net) -> None:
    for _ in range(15):
        a, b = net.proc("a"), net.proc("b")
        at_a, at_b = net.port(a), net.port(b)
        barrier = threading.Barrier(2)

        def talk(src: Proc, dst: Proc, port: int, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(LIMIT_S)
            for n in range(20):
                send(src, dst, port, b"x/%d" % n)

        _join(_threads(lambda: talk(a, b, at_b[0]), lambda: talk(b, a, at_a[0])))
        until(lambda: len(at_a[1].got) == len(at_b[1].got) == 20)
        assert _numbers(at_a[1].got, b"x") == _numbers(at_b[1].got, b"x") == list(range(20))
        links = [each.gateway.peers._links for each in (a, b)]
        # One that was dialed is in neither list for a moment, after its hello.
        until(lambda: peer(a, b).we_dialed != peer(b, a).we_dialed and not any(each.new for each in links))
        assert list(map(len, links)) == [1, 1]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_link_that_is_cut_many_times_loses_and_repeats_nothing(net: Net, seed: int) -> None:
    a, b = net.proc("a"), net.proc("b")
    at_a, at_b = net.port(a), net.port(b)
    chance = random.Random(seed)
    count, senders, over = 800, 2, threading.Event()
    cuts = 0

    def talk(src: Proc, dst: Proc, port: int, name: bytes) -> None:
        for n in range(count):
            send(src, dst, port, b"%s/%d" % (name, n))
            if n % 20 == 0:
                over.wait(0.002)

    def break_links() -> None:
        nonlocal cuts
        while not over.is_set() or cuts < 5:
            cuts += cut(*chance.choice([(a, b), (b, a)]))
            over.wait(chance.choice([0.0, 0.001, 0.004]))

    works = [lambda n=n: talk(a, b, at_b[0], b"a%d" % n) for n in range(senders)]
    works += [lambda n=n: talk(b, a, at_a[0], b"b%d" % n) for n in range(senders)]
    breaker = _threads(break_links)
    _join(_threads(*works))
    over.set()
    _join(breaker)
    until(lambda: len(at_a[1].got) >= count * senders and len(at_b[1].got) >= count * senders)
    for name, collector in ((b"a", at_b[1]), (b"b", at_a[1])):
        for n in range(senders):
            assert _numbers(collector.got, b"%s%d" % (name, n)) == list(range(count))
    assert not at_a[1].gone and not at_b[1].gone


def test_a_link_that_stays_cut_gives_messages_back_and_fires_monitors(net: Net) -> None:
    transport = NoWay(net.transport)
    a = net.proc("a", transport=transport, message_delivery_timeout_s=0.3)
    b = net.proc("b", transport=transport)
    number, at_b = net.port(b)
    answer, waiting = net.port(a)
    send(a, b, number, b"arrives")
    until(lambda: at_b.got == [b"arrives"])
    heard: list[Down] = []
    a.monitors.watch((b.key, 0), heard.append)
    a.monitors.watch((b.key, 77), heard.append)
    transport.unplugged = True
    at_b.gate.clear()
    try:
        cut(a, b)
        until(lambda: peer(a, b).state is State.BROKEN)
        for n in range(5):
            send(a, b, number, b"lost/%d" % n, reply_port=answer)
        until(lambda: len(waiting.bounces) == 5 and len(heard) == 2)
    finally:
        at_b.gate.set()

    assert all(down.kind == "unreachable" for _, down in waiting.bounces)
    assert "could not be reached for 0.3 s: TransportError: unplugged" in heard[0].reason
    assert [key for key, _ in waiting.gone] == [b.key]
    send(a, b, number, b"at once", reply_port=answer)
    assert len(waiting.bounces) == 6 and peer(a, b).state is State.GONE


def test_a_peer_that_is_gone_is_never_accepted_again_and_does_not_dial_wildly(net: Net) -> None:
    transport = NoWay(net.transport)
    a = net.proc("a", transport=transport)
    b = net.proc("b", transport=transport, message_delivery_timeout_s=0.4)
    at_a, at_b = net.port(a), net.port(b)
    send(a, b, at_b[0], b"hello")
    until(lambda: at_b[1].got)
    gone = Down("unreachable", "it is said to be gone")
    a.gateway.call_later(0.0, lambda: a.gateway.peers.declare_gone(b.proc_id, gone))  # by the thread that drives
    until(lambda: peer(a, b).down is not None)
    send(b, a, at_a[0], b"I live", reply_port=at_b[0])
    until(lambda: at_b[1].bounces)

    assert at_a[1].got == [] and peer(a, b).down is not None and peer(a, b).link is None
    assert transport.dials < 30


def test_a_process_that_ended_without_a_word_is_gone_at_once(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    number, at_b = net.port(b)
    heard: list[Down] = []
    send(a, b, number, b"hello")
    until(lambda: at_b.got)
    a.monitors.watch((b.key, 5), heard.append)
    b.close(0.0)
    until(lambda: heard, 3.0)

    assert "nobody listens at" in heard[0].reason


def test_close_delivers_what_was_sent_before_it_and_says_goodbye(net: Net) -> None:
    for count in (0, 1, 500):
        a, b = net.proc("a"), net.proc("b")
        number, at_b = net.port(b)
        heard: list[Down] = []
        b.monitors.watch((a.key, 0), heard.append)
        if not count:
            send(a, b, number, b"x/0")
            until(lambda: at_b.got)
        for n in range(count):
            send(a, b, number, b"x/%d" % n)  # the link is still to be dialed
        a.close(LIMIT_S)
        until(lambda: heard and len(at_b.got) == max(count, 1))
        assert _numbers(at_b.got, b"x") == list(range(max(count, 1)))
        assert heard[0].stopped, heard


def test_a_close_hears_when_all_has_arrived_and_need_not_look_again(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodbye, "_AGAIN_S", 10 * LIMIT_S)
    a, b = net.proc("a"), net.proc("b")
    number, at_b = net.port(b)
    send(a, b, number, b"x/0")
    until(lambda: at_b.got)
    assert peer(a, b).session.unacked
    began_s = time.monotonic()
    a.close(LIMIT_S)

    assert time.monotonic() - began_s < LIMIT_S / 2


def test_after_the_close_nothing_is_waited_for(quick_net: Net) -> None:
    a, b = quick_net.proc("a"), quick_net.proc("b")
    b.handlers["never"] = lambda envelope: None
    pending = a.request(b.proc_id, "never")
    until(lambda: peer(a, b).state is State.UP)
    a.close(LIMIT_S)

    assert isinstance(pending.exception(LIMIT_S), PeerGone)
    assert isinstance(a.request(b.proc_id, "never").exception(LIMIT_S), PeerGone)
    stranger = ProcId(Uid.instance("x"), "inproc://nowhere")
    assert isinstance(a.request(stranger, "never").exception(LIMIT_S), PeerGone)


def test_an_address_behind_a_keeper_is_asked_for(net: Net) -> None:
    keeper, a = net.proc("keeper"), net.proc("a")
    child = net.proc("child", keeper=keeper.proc_id)
    number, at_child = net.port(child)
    known = ProcId(child.proc_id.uid, "", keeper.proc_id)
    keeper.gateway.peers.of(known)
    a.send(value(a, child, number, b"early"), known)  # the keeper does not know yet where it listens
    child.gateway.peers.connect(keeper.proc_id)
    until(lambda: at_child.got == [b"early"])

    assert peer(a, child).address == child.gateway.address


@pytest.mark.parametrize("sender", ["keeper", "other"])
def test_a_process_that_is_not_launched_yet_is_waited_for(net: Net, sender: str) -> None:
    keeper, other = net.proc("keeper"), net.proc("other")
    child = net.proc("child", keeper=keeper.proc_id)
    number, at_child = net.port(child)
    known = ProcId(child.proc_id.uid, "", keeper.proc_id)
    a = keeper if sender == "keeper" else other
    answer, waiting = net.port(a)
    early = value(a, child, number, b"early", answer)
    a.send(early, known)
    until(lambda: child.key in keeper.locator.unlaunched)
    keeper.locator.launch(known)
    child.gateway.peers.connect(keeper.proc_id)
    until(lambda: at_child.got == [b"early"])
    assert not waiting.bounces


def test_what_waits_for_a_launch_stays_in_its_order(net: Net) -> None:
    keeper = net.proc("keeper")
    child = ProcId(Uid.instance("child"), "", keeper.proc_id)
    order: list[int] = []
    keeper.locator.when_known(child.key, lambda: order.append(1))
    keeper.locator.launch(child)
    keeper.locator.when_known(child.key, lambda: order.append(2))
    until(lambda: order == [1, 2])
    keeper.locator.when_known(child.key, lambda: order.append(3))
    assert order == [1, 2, 3]


def test_a_process_that_closes_waits_for_no_launch(net: Net) -> None:
    keeper = net.proc("keeper")
    child = ProcId(Uid.instance("child"), "", keeper.proc_id)
    waiting = keeper.request(child, "never")
    assert not waiting.done()
    keeper.close(0.0)
    assert isinstance(waiting.exception(LIMIT_S), PeerGone)


def test_a_keeper_remembers_why_a_process_is_gone_that_it_has_forgotten(net: Net) -> None:
    keeper, a = net.proc("keeper"), net.proc("a")
    child = ProcId(Uid.instance("child"), "", keeper.proc_id)
    down = Down("killed", "out of memory", 42, "h", None, 9)
    keeper.gateway.peers.declare_gone(child, down)
    del keeper.gateway.peers._by_key[child.key]
    error = a.request(child, "never").exception(LIMIT_S)
    assert isinstance(error, PeerGone) and error.down == down


def test_a_keeper_says_why_its_process_is_gone(net: Net) -> None:
    keeper, a = net.proc("keeper"), net.proc("a")
    child = ProcId(Uid.instance("child"), "", keeper.proc_id)
    stranger = ProcId(Uid.instance("stranger"), "", keeper.proc_id)
    answer, waiting = net.port(a)
    keeper.unborn_limit_s = 0.05
    keeper.gateway.peers.of(child)
    for dst in (child, stranger):
        a.send(Envelope(Kind.PORT, dst.key, 0, 1, a.key, 0, [b"x"], 4, reply_port=answer), dst)
    until(lambda: waiting.bounces)
    assert "its host does not know this process" in waiting.bounces[0][1].reason
    keeper.gateway.peers.declare_gone(child, Down("killed", "out of memory", 42, "h", None, 9))
    until(lambda: len(waiting.bounces) == 2)
    assert waiting.bounces[1][1] == Down("killed", "out of memory", 42, "h", None, 9)


@pytest.mark.parametrize("end", ["arrives", "never arrives"])
def test_the_last_words_of_a_process_that_has_ended_come_before_its_end(
    quick_net: Net, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(peers_module, "_LAST_WORDS_LIMIT_S", 60.0 if end == "arrives" else 0.05)
    keeper = quick_net.proc("keeper")
    child = quick_net.proc("child", keeper=keeper.proc_id)
    number, heard = quick_net.port(keeper)
    child.gateway.peers.connect(keeper.proc_id)
    until(lambda: keeper.key in child.gateway.peers and peer(child, keeper).state is State.UP)
    link: Any = peer(child, keeper).link
    faults = Faults(link)
    faults.hold()
    send(child, keeper, number, b"last words")
    order: list[str] = []
    down = Down("exited", "it is over")
    keeper.gateway.peers.process_ended(child.proc_id, down, lambda: order.append("".join(map(bytes.decode, heard.got))))
    if end == "arrives":
        assert not order and not heard.gone
        faults.release()
        until(lambda: heard.got)
        assert not order and not heard.gone
        child.close(LIMIT_S)
    until(lambda: order)
    assert order == ["last words" if end == "arrives" else ""]
    assert heard.gone == [(child.key, down)]

    keeper.gateway.peers.process_ended(child.proc_id, down, lambda: order.append("again"))
    assert order[1:] == ["again"] and len(heard.gone) == 1


def test_a_process_whose_keeper_is_gone_is_given_up(net: Net) -> None:
    keeper, a = net.proc("keeper"), net.proc("a")
    child = ProcId(Uid.instance("child"), "", keeper.proc_id)
    keeper.close(0.0)
    answer, waiting = net.port(a)
    a.send(Envelope(Kind.PORT, child.key, 0, 1, a.key, 0, [b"x"], 4, reply_port=answer), child)
    until(lambda: waiting.bounces, 5.0)

    assert "nobody listens" in waiting.bounces[0][1].reason


def test_an_unknown_destination_is_refused_at_once(quick_net: Net) -> None:
    a = quick_net.proc("a")
    answer, waiting = quick_net.port(a)
    a.send(Envelope(Kind.PORT, 12345, 0, 1, a.key, 0, [b"x"], 4, reply_port=answer), None)

    assert waiting.bounces[0][1] == Down("unreachable", "no gateway on its way knows the destination process")


def _send_via(src: Proc, relay: Proc, envelope: Envelope) -> None:
    found = src.gateway.peers.connect(relay.proc_id)
    found.send(envelope.frame())


def test_a_gateway_relays_and_bounces_what_it_cannot(net: Net) -> None:
    a, relay, b = net.proc("a"), net.proc("relay"), net.proc("b")
    number, at_b = net.port(b)
    answer, waiting = net.port(a)
    relay.gateway.peers.connect(b.proc_id)
    _send_via(a, relay, value(a, b, number, b"relayed"))
    until(lambda: at_b.got == [b"relayed"])
    assert b.key not in a.gateway.peers
    unknown = value(a, b, number, b"unknown", answer)
    unknown.dst_proc = 999
    _send_via(a, relay, unknown)
    until(lambda: len(waiting.bounces) == 1)
    looping = value(a, b, number, b"looping", answer)
    looping.ttl = 1
    _send_via(a, relay, looping)
    until(lambda: len(waiting.bounces) == 2)
    b.close(0.0)
    until(lambda: peer(relay, b).state is State.GONE)
    _send_via(a, relay, value(a, b, number, b"late", answer))
    until(lambda: len(waiting.bounces) == 3)

    reasons = [down.reason for _, down in waiting.bounces]
    assert "no gateway on its way" in reasons[0] and "hop limit" in reasons[1] and "nobody listens" in reasons[2]
    assert at_b.got == [b"relayed"]


def test_a_peer_that_does_not_read_makes_senders_wait_and_nothing_is_lost(net: Net) -> None:
    a, b = net.proc("a", send_buffer_bytes=1 << 20), net.proc("b")
    number, at_b = net.port(b)
    at_b.gate.clear()
    size, count, sent = 1 << 16, 400, 0

    def talk() -> None:
        nonlocal sent
        for n in range(count):
            send(a, b, number, b"x/%08d/" % n + bytes(size), may_wait=True)
            sent += 1

    sender = _threads(talk)
    try:
        until(lambda: b.key in a.gateway.peers and peer(a, b).waiting_for_room)
        held = sent
        assert held < count and peer(a, b).session.unacked_bytes <= (1 << 20) + 2 * size
    finally:
        at_b.gate.set()
    _join(sender)
    until(lambda: len(at_b.got) == count)
    assert [int(each[2:10]) for each in at_b.got] == list(range(count))
    until(lambda: not peer(a, b).outbox and not peer(a, b).waiting_for_room)


def test_a_peer_that_takes_nothing_in_is_full_however_little_its_link_holds(shm_net: Net) -> None:
    """What is lent over shared memory takes no more of a link than a small frame."""
    a, b = shm_net.proc("a", send_buffer_bytes=8 << 20), shm_net.proc("b")
    number, at_b = shm_net.port(b)
    at_b.gate.clear()
    count, sent = 40, 0

    def talk() -> None:
        nonlocal sent
        for _ in range(count):
            send(a, b, number, bytes(1 << 20), may_wait=True)
            sent += 1

    sender = _threads(talk)
    try:
        until(lambda: b.key in a.gateway.peers and peer(a, b).waiting_for_room)
        sender[0].join(WAITS_S)
        assert sent < 16 and peer(a, b).waiting_for_room and not peer(a, b).outbox
    finally:
        at_b.gate.set()
    _join(sender)
    until(lambda: len(at_b.got) == count)


def test_senders_that_wait_for_room_hear_of_the_end(net: Net) -> None:
    a, b = net.proc("a", send_buffer_bytes=1 << 18), net.proc("b")
    number, at_b = net.port(b)
    answer, waiting = net.port(a)
    at_b.gate.clear()

    def talk() -> None:
        for _ in range(400):
            send(a, b, number, bytes(1 << 16), reply_port=answer, may_wait=True)

    sender = _threads(talk)
    try:
        until(lambda: b.key in a.gateway.peers and peer(a, b).waiting_for_room)
        a.gateway.call_later(0, lambda: a.gateway.peers.declare_gone(b.proc_id, Down("killed", "it was killed")))
        _join(sender)
    finally:
        at_b.gate.set()
    assert waiting.bounces and all(down.kind == "killed" for _, down in waiting.bounces)


def test_a_link_that_has_ended_goes_at_once(net: Net) -> None:
    a, b = net.proc("a", hello_timeout_s=1000.0), net.proc("b", hello_timeout_s=1000.0)
    number, at_b = net.port(b)
    send(a, b, number, b"x")
    until(lambda: at_b.got)
    link = weakref.ref(peer(a, b).link)  # type: ignore[type-var]
    assert link() is not None
    b.close(LIMIT_S)
    until(lambda: gc.collect() >= 0 and link() is None)


def test_a_link_that_has_ended_leaves_no_descriptor_to_the_collector(net: Net) -> None:
    """Programs that train switch it off."""
    a = net.proc("a")

    def meet() -> None:
        b = net.proc("b")
        number, at_b = net.port(b)
        send(a, b, number, b"x")
        until(lambda: at_b.got)
        link = peer(a, b).link
        b.close(LIMIT_S)
        until(lambda: peer(a, b).link is not link)
        net.procs.remove(b)

    meet()
    gc.collect()
    gc.disable()
    try:
        before = descriptors()
        for _ in range(10):
            meet()
        kept = descriptors() - before
    finally:
        gc.enable()
    assert kept <= 2, "at each end of the last one"


def test_the_gateway_leaves_nothing_behind(net: Net) -> None:
    def cycle() -> None:
        a, b = net.proc("a"), net.proc("b")
        number, at_b = net.port(b)
        send(a, b, number, b"x")
        until(lambda: at_b.got)
        a.close(LIMIT_S)
        b.close(LIMIT_S)
        net.procs.clear()

    threads = set(threading.enumerate())  # other tests' clients may have some
    cycle()
    until(lambda: threads.issuperset(threading.enumerate()))
    gc.collect()  # the bell of a process goes with the last who hears it
    before = descriptors()
    for _ in range(100 if net.scheme == "inproc" else 40):
        cycle()
    until(lambda: threads.issuperset(threading.enumerate()))
    gc.collect()
    assert descriptors() <= before


def test_a_close_while_dialing_leaves_no_thread_and_no_link(net: Net) -> None:
    for _ in range(20):
        a, b = net.proc("a"), net.proc("b")
        number, _ = net.port(b)
        send(a, b, number, b"x")
        a.close(0.0)
        until(lambda: not a.gateway.peers._links)


# ---- strangers


def _dial(net: Net, proc: Proc) -> Any:
    return net.transport.dial(proc.gateway.url, SECRET, 5.0)


def _dropped(link: Any) -> bool:
    try:
        link.recv_nowait()
    except TransportError:
        return True
    return False


def test_a_hello_of_another_version_is_dropped_with_a_warning(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    a = net.proc("a")
    link = _dial(net, a)
    hello = Hello(str(ProcId(Uid.instance("old"))), "", 0, 1, "h")
    with caplog.at_level(logging.WARNING, "monarch"):
        link.send_nowait([evolve(hello, wire=77).encode()])
        until(lambda: _dropped(link))
    link.abort()

    assert "link.refused" in caplog.text and "wire version 77" in caplog.text
    assert not a.gateway.peers and not a.gateway.peers._links


@pytest.mark.parametrize("frame", [[b""], [b"nonsense"], [bytes(24)], [SESSION.pack(FrameType.DATA, 1, 0), b"x"]])
def test_nonsense_is_dropped_with_a_warning(
    quick_net: Net, caplog: pytest.LogCaptureFixture, frame: list[bytes]
) -> None:
    a = quick_net.proc("a")
    link = _dial(quick_net, a)
    with caplog.at_level(logging.WARNING, "monarch"):
        link.send_nowait([frame])
        until(lambda: _dropped(link))
    link.abort()
    assert "link.refused" in caplog.text and not a.gateway.peers._links


def test_a_connection_that_says_nothing_is_dropped(net: Net) -> None:
    a = net.proc("a", hello_timeout_s=0.05)
    link = _dial(net, a)
    until(lambda: _dropped(link))
    link.abort()
    assert not a.gateway.peers._links and not a.gateway.peers._links.new


@pytest.mark.parametrize("trouble", ["nonsense", "received too much", "ends"])
def test_a_link_that_breaks_right_after_its_hello_leaves_no_dead_link_in_use(quick_net: Net, trouble: str) -> None:
    a, b = quick_net.proc("a"), quick_net.proc("b")
    number, at_b = quick_net.port(b)
    link = _dial(quick_net, a)
    hello = Hello(str(b.proc_id), b.gateway.address, 9 if trouble == "received too much" else 0, 1, "h")
    frames = [hello.encode()] + ([[bytes(30)]] if trouble == "nonsense" else [])
    link.send_nowait(frames)
    if trouble == "ends":
        link.close()
    else:
        until(lambda: _dropped(link))
    link.abort()
    send(a, b, number, b"still heard")
    until(lambda: at_b.got == [b"still heard"], 5.0)


@pytest.mark.parametrize("who", ["one that dials", "one that is dialed"])
def test_who_says_goodbye_at_first_contact_has_ended_and_is_not_looked_for(quick_net: Net, who: str) -> None:
    a = quick_net.proc("a")
    listener = quick_net.transport.listen(f"{quick_net.scheme}://", SECRET)
    brief = ProcId(Uid.instance("brief"), str(a.gateway.ways.join(listener.url, SECRET)))
    port, at_a = quick_net.port(a)
    told: list[Down] = []
    a.monitors.watch((brief.key, 0), told.append)
    if who == "one that dials":
        link = _dial(quick_net, a)
    else:
        send(a, cast("Proc", _Known(brief)), 77, b"queued")
        accepted: list[Any] = []
        until(lambda: accepted or accepted.extend(listener.accept_nowait()))
        (link,) = accepted
        until(link.recv_nowait)
    busy, go = threading.Event(), threading.Event()
    a.gateway.call_later(0.0, lambda: busy.set() or go.wait(LIMIT_S))
    assert busy.wait(LIMIT_S)
    session = Session(1000, 1.0)
    message = value(cast("Proc", _Known(brief)), a, port, b"last words").frame()
    hello = Hello(str(brief), brief.address, 0, 1, "h").encode()
    link.send_nowait([hello, session.wrap(message, 100), session.control(FrameType.GOODBYE)])
    link.close(LIMIT_S)
    listener.close()
    go.set()

    until(lambda: told)
    assert told[0].stopped and told[0].reason.endswith("has ended")
    assert at_a.got == [b"last words"]


class _Known:
    """A process that is only known by its name."""

    def __init__(self, proc_id: ProcId) -> None:
        self.proc_id, self.key = proc_id, proc_id.key


def test_a_link_is_dropped_once_even_if_its_descriptor_has_another_owner_by_then(quick_net: Net) -> None:
    a, b = quick_net.proc("a"), quick_net.proc("b")
    number, at_b = quick_net.port(b)
    send(a, b, number, b"1")
    until(lambda: at_b.got)
    old = peer(b, a).link
    assert old is not None
    cut(a, b)
    until(lambda: peer(b, a).link not in (None, old))
    b.gateway.peers._links.drop(old)
    b.gateway.peers._links._drop_if_silent(old)
    send(a, b, number, b"2")
    until(lambda: at_b.got == [b"1", b"2"])


# ---- what goes wrong above


def test_a_sink_that_raises_does_not_cost_the_messages_behind(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    a, b = net.proc("a"), net.proc("b")
    number, at_b = net.port(b)
    broken, sink = net.port(b)
    sink.deliver = lambda envelope: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with caplog.at_level(logging.ERROR, "monarch"):
        for n in range(20):
            send(a, b, broken if n % 4 == 0 else number, b"x/%d" % n)
        until(lambda: len(at_b.got) == 15)

    assert "message.failed" in caplog.text and peer(b, a).breaks == 0


def _be_interrupted(a: Proc, b: Proc, number: int, all_sent: threading.Event, more: bytes = b"") -> None:
    """Lead `b` while `a` sends it x/1 to x/19, until what is delivered there interrupts this thread."""
    waiting = Signal()

    def talk() -> None:
        until(lambda: bool(waiting.pumping))
        for n in range(1, 20):
            send(a, b, number, b"x/%d" % n + more)
        all_sent.set()

    sender = _threads(talk)
    with pytest.raises(KeyboardInterrupt):
        b.driver.wait(waiting, LIMIT_S)
    _join(sender)


def test_an_interrupt_of_the_thread_that_leads_costs_no_message(quick_net: Net) -> None:
    a, b = quick_net.proc("a"), quick_net.proc("b")
    number, at_b = quick_net.port(b)
    send(a, b, number, b"x/0")
    until(lambda: at_b.got)
    take = at_b.deliver
    me, interrupted = threading.get_ident(), []

    def deliver(envelope: Envelope) -> None:
        if threading.get_ident() == me and not interrupted:
            interrupted.append(int(bytes(envelope.parts[0])[2:]))
            raise KeyboardInterrupt
        take(envelope)

    at_b.deliver = deliver  # type: ignore[method-assign]
    _be_interrupted(a, b, number, threading.Event())
    until(lambda: len(at_b.got) == 20)
    assert _numbers(at_b.got, b"x") == list(range(20))


def test_nobody_is_told_of_a_message_before_an_interrupt_can_have_cost_it(shm_net: Net) -> None:
    """The messages behind the one that was being delivered were read with it, and others send meanwhile."""
    a, b = shm_net.proc("a"), shm_net.proc("b")
    (number, at_b), (back, at_a) = shm_net.port(b), shm_net.port(a)
    send(a, b, number, b"x/0")
    send(b, a, back, b"y/0")
    until(lambda: bool(at_b.got and at_a.got))
    take, all_sent = at_b.deliver, threading.Event()
    me, interrupted = threading.get_ident(), []

    def deliver(envelope: Envelope) -> None:
        if threading.get_ident() == me and not interrupted:
            all_sent.wait(LIMIT_S)
            if (at := int(bytes(envelope.parts[0])[2:])) > 5:
                interrupted.append(at)
                send(b, a, back, b"y/1")
                raise KeyboardInterrupt
        take(envelope)

    at_b.deliver = deliver  # type: ignore[method-assign]
    _be_interrupted(a, b, number, all_sent)
    until(lambda: len(at_b.got) == 20 and len(at_a.got) == 2)
    assert _numbers(at_b.got, b"x") == list(range(20))


@pytest.mark.skipif(bool(compiled.why_not), reason=compiled.why_not or "there is a compiled part")
def test_an_interrupt_of_the_thread_that_leads_costs_no_shared_memory(
    shm_net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was lent over the link that ends with it, and not read there."""
    monkeypatch.setattr(shm_net.transport, "memory", pool := Pool(1 << 30))
    a, b = shm_net.proc("a"), shm_net.proc("b")
    number, at_b = shm_net.port(b)
    send(a, b, number, b"x/0")
    until(lambda: at_b.got)
    take, all_sent = at_b.deliver, threading.Event()
    me, interrupted = threading.get_ident(), []

    def deliver(envelope: Envelope) -> None:
        if threading.get_ident() == me and not interrupted:
            all_sent.wait(LIMIT_S)
            interrupted.append(pool.statistics()["lent_slots"])
            raise KeyboardInterrupt
        take(envelope)

    at_b.deliver = deliver  # type: ignore[method-assign]
    _be_interrupted(a, b, number, all_sent, bytes(1 << 20))
    until(lambda: len(at_b.got) == 20)
    assert interrupted[0] > 0
    # The traceback of the interrupt has what was read with its message.
    until(lambda: gc.collect() >= 0 and pool.statistics()["lent_slots"] == 0)


def test_a_timer_that_raises_does_not_cost_the_others(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    a = net.proc("a")
    done = threading.Event()
    with caplog.at_level(logging.ERROR, "monarch"):
        a.gateway.call_later(0.0, lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        a.gateway.call_later(0.001, done.set)
        assert done.wait(LIMIT_S)
    assert "poller.timer_failed" in caplog.text


def test_timers_run_in_the_order_in_which_they_are_due(net: Net) -> None:
    a = net.proc("a")
    order: list[int] = []
    for n in (3, 1, 2, 0):
        a.gateway.call_later(0.01 * n, lambda n=n: order.append(n))
    until(lambda: len(order) == 4)
    assert order == [0, 1, 2, 3]


def test_a_kept_process_is_given_up_only_by_the_break_that_lasts(quick_net: Net) -> None:
    keeper = quick_net.proc("keeper", message_delivery_timeout_s=0.5)
    child = quick_net.proc("child", keeper=keeper.proc_id)
    keeper.gateway.peers.of(child.proc_id)
    child.gateway.peers.connect(keeper.proc_id)
    until(lambda: keeper.gateway.peers[child.key].state is State.UP)
    found = keeper.gateway.peers[child.key]
    cut(keeper, child)
    until(lambda: found.breaks == 1 and found.state is State.UP)
    keeper.gateway.peers._give_up_broken(found, 1)  # comes when the link is up
    assert found.state is State.UP
    with found.lock:
        found.state, found.breaks = State.BROKEN, 2
    keeper.gateway.peers._give_up_broken(found, 1)  # comes for the first break, during the second
    assert found.down is None
    keeper.gateway.peers._give_up_broken(found, 2)
    assert found.state is State.GONE


def test_a_very_long_time_out_is_no_error(quick_net: Net) -> None:
    a = quick_net.proc("a")
    future: Future[int] = Future._pending(a.driver)
    threading.Timer(0.02, lambda: future._complete(lambda: 1)).start()
    assert future.get(1e9) == 1


def test_acknowledgements_travel_alone_when_there_is_no_answer(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b", ack_interval_s=0.02)
    number, at_b = net.port(b)
    for n in range(10):
        send(a, b, number, b"%d" % n)
    until(lambda: len(at_b.got) == 10 and not peer(a, b).session.unacked)
    assert peer(a, b).session.unacked_bytes == 0


def test_a_monitor_of_a_remote_actor_hears_of_its_process(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    heard: list[Down] = []
    a.watch(ActorId(b.proc_id, 77, "x"), heard.append)
    cancelled = a.watch(ActorId(b.proc_id, 78, "y"), lambda down: heard.append(Down("failed", "never")))
    cancelled()
    until(lambda: (b.key, 77) and (b.key in a.gateway.peers) and b.monitors.watched() == 2)
    b.close(LIMIT_S)
    until(lambda: heard)
    assert len(heard) == 1 and heard[0].stopped


def test_a_descriptor_of_the_user_is_polled_until_it_is_removed(quick_net: Net) -> None:
    a = quick_net.proc("a")
    read_fd, write_fd = os.pipe()
    got = Collector()
    a.gateway.add_pollable(read_fd, lambda: got.got.append(os.read(read_fd, 10)))
    os.write(write_fd, b"1")
    until(lambda: got.got == [b"1"])
    a.gateway.remove_pollable(read_fd)
    a.gateway.remove_pollable(read_fd)
    os.close(read_fd)
    os.close(write_fd)
