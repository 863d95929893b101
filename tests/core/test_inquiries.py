"""What a process answers about calls to its actors, by whoever drives its links."""

from __future__ import annotations

from net import LIMIT_S, Net, until

from monarch.core import inquiries
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.ids import ActorId
from monarch.core.instance import Instance
from monarch.core.proc import Proc
from monarch.core.serving import Served
from tests.core.net import take


def call(src: Proc, dst: Proc, number: int, seq: int, port: int) -> None:
    envelope = Envelope(Kind.CALL, dst.key, number, 0, src.key, 7, [b"x"], Flag.SEQUENCED, 0, seq, port)
    src.send(envelope, dst.proc_id, may_wait=False)


def state(src: Proc, dst: Proc, number: int, port: int) -> inquiries.CallState:
    return inquiries.ask(src, dst.proc_id, number, port).get(LIMIT_S)[0]


def test_where_a_call_is(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    instance = Instance(b, ActorId(b.proc_id, 500, "actor"))  # its thread is not started: it is as stuck as can be
    b.adopt(instance)
    for seq, port in enumerate((101, 102, 103)):
        call(a, b, 500, seq, port)

    assert [state(a, b, 500, port).ahead for port in (101, 102, 103, 104)] == [0, 1, 2, None]
    instance.serving.append(Served(instance, None, "busy", take(instance.mailbox)))
    found = state(a, b, 500, 101)
    assert found.running is not None and found.running.endpoint == "busy" and found.ahead is None
    found = state(a, b, 500, 103)
    assert found.running is None and found.ahead == 1 and found.actor is not None
    assert [each.endpoint for each in found.actor.running] == ["busy"] and found.actor.queued == 2
    assert state(a, b, 501, 101) == inquiries.CallState(None)  # there is no such actor


def test_a_cancelled_call_leaves_the_queue(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    instance = Instance(b, ActorId(b.proc_id, 500, "actor"))
    b.adopt(instance)
    for seq, port in enumerate((101, 102, 103)):
        call(a, b, 500, seq, port)

    a.tell(b.proc_id, *inquiries.withdrawal(500, 102))
    until(lambda: len(instance.mailbox) == 2)

    assert [state(a, b, 500, port).ahead for port in (101, 102, 103)] == [0, None, 1]
    assert not instance.is_cancelled((a.key, 102))  # no mark stays


def test_a_call_is_cancelled_before_its_actor_is_there(net: Net) -> None:
    a, b = net.proc("a"), net.proc("b")
    call(a, b, 500, 0, 101)
    a.tell(b.proc_id, *inquiries.withdrawal(500, 101))
    call(a, b, 500, 1, 102)
    assert state(a, b, 500, 101) == inquiries.CallState(None)  # all three have arrived

    instance = Instance(b, ActorId(b.proc_id, 500, "actor"))
    b.adopt(instance)

    assert [state(a, b, 500, port).ahead for port in (101, 102)] == [None, 0]
