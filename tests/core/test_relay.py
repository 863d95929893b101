"""Casts over real links in one process: agents of hosts, their processes, and who casts to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from monarch.core import codec
from monarch.core.cast import Branch, taken_of, tree
from monarch.core.driver import Signal
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.ids import ProcId, Uid
from monarch.core.limits import Limits
from monarch.core.mailbox import Mailbox
from monarch.core.monitor import Down
from monarch.core.peer import Peer
from monarch.core.proc import Proc
from monarch.core.relay import ALONE_BYTES
from monarch.transports.base import Buffer
from tests.core.net import LIMIT_S, SECRET, Net, take, until

ACTOR = 40


class Member(Proc):
    """A process with one actor, itself, which answers each call with `replies`."""

    def __init__(self, net: Net, agent: Proc) -> None:
        super().__init__(ProcId(Uid.instance("m"), "", agent.proc_id), net.transport, SECRET, limits=Limits())
        self.mailbox = Mailbox(Signal())
        self.got: list[bytes] = []
        self.replies: Callable[[bytes], bytes] | None = lambda data: data
        self.spawned: list[int] = []
        self.handlers["spawn"] = lambda envelope: self.spawned.append(envelope.dst_actor)
        self.gateway.listen("inproc://")
        self.actors[ACTOR] = self  # type: ignore[assignment]
        agent.gateway.peers.of(self.proc_id)
        self.gateway.peers.connect(agent.proc_id)
        net.procs.append(self)

    def post(self, envelope: Envelope) -> None:
        assert self.mailbox.put(envelope) is None
        while (call := take(self.mailbox)) is not None:
            self.got.append(bytes(call.parts[0]))
            if self.replies is not None and call.reply_port:
                self.send(call.reply([self.replies(call.parts[0])], Flag.SILENT), None, may_wait=False)  # type: ignore[arg-type]


class Answers:
    """A port for answers."""

    def __init__(self, proc: Proc) -> None:
        self.number = proc.new_port()
        self.got: dict[int, bytes] = {}
        self.bounced_ranks: list[int] = []
        self.unsure_ranks: list[int] = []
        self.gone: set[int] = set()
        proc.ports[self.number] = self

    def deliver(self, envelope: Envelope) -> None:
        assert envelope.rank not in self.got
        self.got[envelope.rank] = bytes(envelope.parts[0])

    def bounced(self, envelope: Envelope, down: Down) -> None:
        self.bounced_ranks.append(envelope.rank)
        if envelope.flags & Flag.UNSURE:
            self.unsure_ranks.append(envelope.rank)

    def proc_gone(self, key: int, down: Down) -> None:
        self.gone.add(key)


class World:
    """One who casts, and hosts with members; cast to in a tree of that fan-out."""

    def __init__(self, net: Net, hosts: int, each: int, fan_out: int) -> None:
        self.root = net.proc("root", send_buffer_bytes=1 << 20)
        self.agents = [net.proc("agent", message_delivery_timeout_s=1.0) for _ in range(hosts)]
        self.members = [Member(net, agent) for agent in self.agents for _ in range(each)]
        self.each, self.fan_out = each, fan_out
        self.counts = [0] * len(self.members)
        for agent in self.agents:
            self.root.gateway.peers.connect(agent.proc_id)
        for member in self.members:
            self.root.gateway.peers.of(member.proc_id)
        until(lambda: all(peer.link is not None for agent in self.agents for peer in agent.gateway.peers))

    def branches(self, ranks: Sequence[int] | None = None) -> tuple[Branch, ...]:
        hosts = []
        for at, agent in enumerate(self.agents):
            own = range(at * self.each, (at + 1) * self.each)
            meant = [rank for rank in own if ranks is None or rank in ranks]
            if meant:
                hosts.append(Branch(agent.proc_id, tuple(self.members[rank].key for rank in meant), tuple(meant)))
        return tree(hosts, self.fan_out)

    def call(self, data: bytes, port: int, kind: int = Kind.CALL) -> Envelope:
        flags = Flag.SEQUENCED if kind == Kind.CALL else Flag.SILENT
        return Envelope(kind, 0, ACTOR, 0, self.root.key, 16, [data], flags, reply_port=port)

    def numbers(self, ranks: Sequence[int]) -> dict[int, int]:
        found = {rank: self.counts[rank] for rank in ranks}
        for rank in ranks:
            self.counts[rank] += 1
        return found

    def cast(self, data: bytes, port: int = 0, ranks: Sequence[int] | None = None) -> None:
        meant = range(len(self.members)) if ranks is None else ranks
        self.root.caster.cast(self.call(data, port), self.branches(ranks), self.numbers(meant))

    def directly(self, data: bytes, rank: int) -> None:
        member = self.members[rank]
        call = self.call(data, 0).for_member(member.key, rank, self.numbers([rank])[rank], [data])
        self.root.send(call, member.proc_id)


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    net.close()


def test_a_cast_reaches_all_and_their_answers_come_back(net: Net) -> None:
    world = World(net, hosts=5, each=2, fan_out=2)
    answers = Answers(world.root)
    world.cast(b"x", answers.number)
    until(lambda: len(answers.got) == 10)
    assert all(member.got == [b"x"] for member in world.members)
    until(lambda: not world.root.caster._sent)
    assert not world.root.caster._load
    # Nobody was reached in another way than by the agent of its host.
    assert all(world.root.gateway.peers[member.key].link is None for member in world.members)


def test_the_order_of_a_sender_holds_over_trees_parts_of_them_and_direct_messages(net: Net) -> None:
    world = World(net, hosts=4, each=2, fan_out=1)
    expected: list[list[bytes]] = [[] for _ in world.members]
    for number in range(120):
        data = b"%d" % number
        if number % 3 == 0:
            world.cast(data)
            meant: Sequence[int] = range(8)
        elif number % 3 == 1:
            meant = (number % 8, (number + 3) % 8)
            world.cast(data, ranks=meant)
        else:
            meant = (7,)
            world.directly(data, 7)
        for rank in meant:
            expected[rank].append(data)
    until(lambda: [member.got for member in world.members] == expected)


def test_answers_that_come_close_together_travel_together(net: Net) -> None:
    world = World(net, hosts=1, each=6, fan_out=1)
    answers = Answers(world.root)
    agent = world.agents[0]
    batches: list[int] = []
    together = agent.gateway.send_together

    def counted(peer: Peer, frames: Sequence[list[Buffer]]) -> None:
        batches.append(len(frames))
        together(peer, frames)

    agent.gateway.send_together = counted  # type: ignore[method-assign]
    for member in world.members:
        member.replies = None
    world.cast(b"x", answers.number)
    until(lambda: all(member.got for member in world.members))

    def forward() -> None:
        for rank, member in enumerate(world.members):
            reply = Envelope(Kind.PORT, world.root.key, 16, answers.number, member.key, ACTOR, [b"y"], rank=rank)
            agent.relay.forward(reply)

    agent.gateway.call_later(0.0, forward)
    until(lambda: len(answers.got) == 6)
    assert len(batches) == 1 and batches[0] in (6, 7)  # and the news that all have it


def test_an_early_answer_does_not_wait_for_one_that_never_comes(net: Net) -> None:
    world = World(net, hosts=1, each=3, fan_out=1)
    answers = Answers(world.root)
    world.members[1].replies = None
    world.cast(b"x", answers.number)
    until(lambda: answers.got.keys() == {0, 2})


def test_a_large_answer_goes_directly(net: Net) -> None:
    world = World(net, hosts=1, each=2, fan_out=1)
    answers = Answers(world.root)
    world.members[1].replies = lambda data: bytes(ALONE_BYTES)
    world.cast(b"x", answers.number)
    until(lambda: len(answers.got) == 2)
    assert len(answers.got[1]) == ALONE_BYTES
    assert world.root.gateway.peers[world.members[1].key].link is not None
    assert world.root.gateway.peers[world.members[0].key].link is None


def test_an_answer_does_not_overtake_what_its_process_has_sent_to_ports(net: Net) -> None:
    world = World(net, hosts=1, each=2, fan_out=1)
    answers = Answers(world.root)
    world.members[0].relay.speaks_to(world.root.key)
    world.cast(b"x", answers.number)
    until(lambda: len(answers.got) == 2)
    assert world.root.gateway.peers[world.members[0].key].link is not None


def test_a_member_that_dies_is_told_to_who_has_cast_to_it(net: Net) -> None:
    world = World(net, hosts=2, each=2, fan_out=2)
    answers = Answers(world.root)
    for member in world.members:
        member.replies = None
    world.cast(b"x", answers.number)
    until(lambda: all(member.got for member in world.members))
    world.agents[1].gateway.peers.process_ended(world.members[3].proc_id, Down("killed", "it was killed"))
    until(lambda: answers.gone == {world.members[3].key})


def test_casts_to_a_member_that_is_gone_bounce_for_its_rank_alone(net: Net) -> None:
    world = World(net, hosts=2, each=2, fan_out=1)
    answers = Answers(world.root)
    world.agents[1].gateway.peers.declare_gone(world.members[2].proc_id, Down("killed", "it was killed"))
    world.cast(b"x", answers.number)
    until(lambda: len(answers.got) == 3)
    until(lambda: answers.bounced_ranks == [2])


def test_hosts_below_an_agent_that_dies_get_the_cast_once_all_the_same(net: Net) -> None:
    world = World(net, hosts=3, each=2, fan_out=1)
    answers = Answers(world.root)
    middle = world.agents[1]
    middle.relay.deliver = lambda envelope: None  # type: ignore[method-assign]
    world.cast(b"x", answers.number)
    until(lambda: len(answers.got) == 2)
    middle.close(0.0)
    world.root.gateway.peers.declare_gone(middle.proc_id, Down("unreachable", "its host is gone"))
    world.agents[0].gateway.peers.declare_gone(middle.proc_id, Down("unreachable", "its host is gone"))
    until(lambda: answers.got.keys() == {0, 1, 4, 5})
    until(lambda: sorted(answers.bounced_ranks) == [2, 3])
    until(lambda: not world.root.caster._sent)
    assert [member.got for member in world.members] == [[b"x"], [b"x"], [], [], [b"x"], [b"x"]]


def test_a_host_that_an_agent_cannot_reach_is_reached_by_who_casts(net: Net) -> None:
    world = World(net, hosts=3, each=1, fan_out=1)
    answers = Answers(world.root)
    world.agents[0].gateway.peers.declare_gone(world.agents[1].proc_id, Down("unreachable", "no way"))
    for number in range(3):
        world.cast(b"%d" % number, answers.number if number == 0 else 0)
    until(lambda: len(answers.got) == 3)
    until(lambda: all(member.got == [b"0", b"1", b"2"] for member in world.members))
    assert not answers.bounced_ranks


@pytest.mark.parametrize("fan_out", [1, 2])
def test_what_is_ahead_of_the_launch_of_its_process_waits_for_that(net: Net, fan_out: int) -> None:
    world = World(net, hosts=2, each=2, fan_out=fan_out)
    answers = Answers(world.root)
    agent, late = world.agents[1], world.members[3]
    launched = agent.gateway.peers._by_key.pop(late.key)
    order: list[str] = []
    late.handlers["spawn"] = lambda envelope: order.append("spawned")
    late.replies = lambda data: order.append("called") or data  # type: ignore[func-returns-value]
    parts = codec.encode(())
    world.root.caster.cast(world.call(parts[0], 0, Kind.SPAWN), world.branches(), {})  # type: ignore[arg-type]
    world.cast(b"x", answers.number)
    until(lambda: len(agent.locator.unlaunched.get(late.key, ())) == 2 and answers.got.keys() == {0, 1, 2})
    assert not order and not answers.bounced_ranks
    agent.gateway.peers._by_key[late.key] = launched
    agent.locator.launch(late.proc_id)
    until(lambda: len(answers.got) == 4)
    assert order == ["spawned", "called"] and not agent.locator.unlaunched
    until(lambda: not world.root.caster._sent)


def test_what_is_for_a_process_that_nobody_launches_comes_back(net: Net) -> None:
    world = World(net, hosts=2, each=2, fan_out=2)
    answers = Answers(world.root)
    world.agents[1].unborn_limit_s = 0.05
    del world.agents[1].gateway.peers._by_key[world.members[2].key]
    world.cast(b"x", answers.number)
    until(lambda: answers.bounced_ranks == [2] and answers.got.keys() == {0, 1, 3})
    assert not answers.unsure_ranks
    until(lambda: not world.root.caster._sent)


def test_what_a_host_may_have_passed_on_before_its_end_is_of_unknown_fate(net: Net) -> None:
    world = World(net, hosts=2, each=2, fan_out=2)
    answers = Answers(world.root)
    agent = world.agents[1]
    agent.relay._tell_taken = lambda parent: None  # type: ignore[method-assign]
    world.members[2].replies = world.members[3].replies = None
    down = Down("unreachable", "its host is gone")
    world.cast(b"x", answers.number)
    until(lambda: all(member.got for member in world.members))
    agent.close(0.0)
    world.root.gateway.peers.declare_gone(agent.proc_id, down)
    until(lambda: sorted(answers.bounced_ranks) == sorted(answers.unsure_ranks) == [2, 3])

    later = Answers(world.root)
    world.cast(b"y", later.number)
    until(lambda: sorted(later.bounced_ranks) == [2, 3])
    assert not later.unsure_ranks  # it has not left


def test_what_is_sent_again_may_have_been_served_before(net: Net) -> None:
    world = World(net, hosts=3, each=1, fan_out=1)
    answers = Answers(world.root)
    middle = world.agents[1]
    middle.relay.deliver = lambda envelope: None  # type: ignore[method-assign]
    world.cast(b"x", answers.number)
    until(lambda: answers.got.keys() == {0})
    world.agents[2].gateway.peers.declare_gone(world.members[2].proc_id, Down("killed", "it was killed"))
    middle.close(0.0)
    for proc in (world.root, world.agents[0]):
        proc.gateway.peers.declare_gone(middle.proc_id, Down("unreachable", "its host is gone"))
    until(lambda: sorted(answers.unsure_ranks) == [1, 2])


def test_messages_that_are_not_numbered_are_passed_on_as_what_they_are(net: Net) -> None:
    world = World(net, hosts=2, each=2, fan_out=2)
    world.root.caster.cast(world.call(codec.encode(())[0], 0, Kind.SPAWN), world.branches(), {})  # type: ignore[arg-type]
    until(lambda: all(member.spawned == [ACTOR] for member in world.members))


def test_who_casts_to_a_full_mailbox_hears_of_it_by_the_agent(net: Net) -> None:
    world = World(net, hosts=1, each=2, fan_out=1)
    member, full = world.members[0], world.root.backpressure.full
    member.backpressure.limit_bytes = 100
    actor: Any = SimpleNamespace(mailbox=member.mailbox, actor_id=SimpleNamespace(number=ACTOR))

    def post(call: Envelope) -> None:
        assert member.mailbox.put(call) is None
        member.backpressure.arrived(actor, call)

    actor.post = post
    member.actors[ACTOR] = actor
    world.cast(bytes(1000))
    until(lambda: [*full] == [(member.key, ACTOR)])
    while take(member.mailbox) is not None:
        pass
    member.backpressure.ended(actor)
    until(lambda: not full)
    assert world.root.gateway.peers[member.key].link is None


def test_who_casts_waits_while_a_member_takes_nothing(net: Net) -> None:
    world = World(net, hosts=2, each=2, fan_out=1)
    agent = world.agents[1]
    full = agent.gateway.peers[world.members[3].key]
    full.send_buffer_bytes = -1
    world.cast(bytes(2 << 20))
    until(lambda: all(member.got for member in world.members))
    assert world.root.caster._load[world.agents[0].key] > world.root.gateway.limits.send_buffer_bytes
    agent.gateway.call_later(0.0, lambda: _make_room(full))
    world.root.caster.wait_for_taken(world.branches())
    assert not world.root.caster._load


def _make_room(peer: object) -> None:
    peer.send_buffer_bytes = 1 << 20  # type: ignore[attr-defined]
    for notify in peer.waiting_for_room:  # type: ignore[attr-defined]
        notify()


def test_what_is_sent_once_all_have_a_cast_comes_behind_it(net: Net) -> None:
    world = World(net, hosts=3, each=1, fan_out=1)
    order: list[str] = []
    world.cast(b"x")
    world.root.caster.when_taken(lambda: order.append("taken"))
    until(lambda: order == ["taken"])
    world.root.caster.when_taken(lambda: order.append("at once"))
    assert order == ["taken", "at once"]


def test_whoever_waits_for_taken_goes_on_when_this_process_closes(net: Net) -> None:
    world = World(net, hosts=1, each=1, fan_out=1)
    caster = world.root.caster
    world.agents[0].relay.deliver = lambda envelope: None  # type: ignore[method-assign]
    world.cast(bytes(2 << 20))
    thread = threading.Thread(target=caster.wait_for_taken, args=(world.branches(),), daemon=True)
    thread.start()
    until(lambda: caster._waiting)
    world.root.close(0.1)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    caster.wait_for_taken(world.branches())  # returns


def test_what_waits_for_all_to_have_a_cast_is_done_when_this_process_closes(net: Net) -> None:
    world = World(net, hosts=2, each=1, fan_out=1)
    order: list[str] = []
    world.agents[0].relay.deliver = lambda envelope: None  # type: ignore[method-assign]
    world.cast(b"x")
    world.root.caster.when_taken(lambda: order.append("before"))
    assert not order
    world.root.close(0.1)
    world.root.caster.when_taken(lambda: order.append("after"))
    assert order == ["before", "after"]


def test_a_cast_is_known_while_what_was_below_a_lost_agent_is_sent_again(net: Net) -> None:
    """The thread that casts finds one of two agents gone; meanwhile the driving one takes TAKEN of the other."""
    world = World(net, hosts=3, each=1, fan_out=1)
    root, caster = world.root, world.root.caster
    lost, below, other = (
        Branch(agent.proc_id, (member.key,), (rank,))
        for rank, (agent, member) in enumerate(zip(world.agents, world.members, strict=True))
    )
    root.gateway.peers.declare_gone(lost.host, Down("unreachable", "its host is gone"))
    order: list[str] = []
    answers = Answers(root)

    def bounced(envelope: Envelope, down: Down) -> None:
        until(lambda: other.host.key not in caster._load)
        caster.when_taken(lambda: order.append("taken"))
        assert not order
        world.members[1].replies = lambda data: order.append("called") or data  # type: ignore[func-returns-value]
        order.append("bounced")

    answers.bounced = bounced  # type: ignore[method-assign]
    caster.cast(world.call(b"x", answers.number), (other, evolve(lost, below=(below,))), world.numbers(range(3)))
    until(lambda: len(order) == 3)
    assert order == ["bounced", "called", "taken"]
    assert not caster._sent and not caster._load


def test_a_host_below_one_that_could_not_be_reached_is_sent_a_cast_once(net: Net) -> None:
    world = World(net, hosts=3, each=1, fan_out=1)
    relay, caster = world.root.relay, world.root.caster
    answers = Answers(world.root)
    told: list[Envelope] = []
    world.agents[0].relay.deliver = told.append  # type: ignore[method-assign]
    world.cast(b"x", answers.number)
    until(lambda: told)
    lost = [agent.key for agent in world.agents[1:]]
    said = taken_of(world.root.key, told[0].seq, lost)
    taken = Envelope(Kind.TAKEN, world.root.key, 0, 0, world.agents[0].key, 0, [said], Flag.SILENT)
    world.root.gateway.call_later(0.0, lambda: relay.deliver(taken))
    until(lambda: answers.got.keys() == {1, 2} and not caster._sent)
    assert not caster._load
