"""Casts to many hosts: which way they go, and that order, failures and endings are as with direct messages."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    ActorMesh,
    Channel,
    HostMesh,
    SupervisionError,
    attach_to_workers,
    context,
    current_rank,
    endpoint,
)
from monarch.core.address import EVERYWHERE
from monarch.core.ids import ProcId, Uid
from monarch.core.proc import Proc
from monarch.mesh import casting
from monarch.mesh.casting import FAN_OUT, FEW, routes, tell_all
from monarch.testing import TestClient
from tests.core.net import SECRET, Net, until
from tests.core.test_relay import World
from tests.mesh import netns
from tests.mesh.workers import worker

LIMIT_S = 30.0
HOSTS, EACH = 3, 2


# ---- which way


@pytest.fixture
def runtime() -> Iterator[Proc]:
    net = Net()
    proc = net.proc("client")
    proc.gateway.ways.secrets[EVERYWHERE] = SECRET
    yield proc
    net.close()


def _host(number: int, address: str = "tcp://198.51.100.1:1") -> ProcId:
    return ProcId(Uid("host", number), address)


def _targets(*hosts: ProcId) -> list[tuple[int, ProcId]]:
    procs = [ProcId(Uid("p", 100 + at), "", host) for at, host in enumerate(hosts)]
    return [(proc.key, proc) for proc in procs]


def test_members_of_this_host_and_few_of_another_are_reached_directly(runtime: Proc) -> None:
    far, few, near = _host(1), _host(2), _host(3, "other.domain=inproc://x")
    hosts = [runtime.proc_id, few, *[far] * (FEW + 1), runtime.proc_id, few, *[near] * (FEW + 1)]
    many = range(2, FEW + 3)
    found = routes(runtime, _targets(*hosts))
    assert found.direct == tuple(rank for rank in range(len(hosts)) if rank not in many)
    assert [(branch.host, branch.ranks, branch.below) for branch in found.branches] == [(far, tuple(many), ())]
    assert not found.lasting  # the address of the third is not known
    assert [branch.host for branch in routes(runtime, _targets(*hosts), few=1).branches] == [few, far]


def test_a_mesh_of_one_host_has_no_branches(runtime: Proc) -> None:
    found = routes(runtime, _targets(*[runtime.proc_id] * 5))
    assert (found.direct, found.branches, found.lasting) == ((0, 1, 2, 3, 4), (), True)


def test_until_their_agents_are_up_many_hosts_are_reached_side_by_side(runtime: Proc) -> None:
    hosts = [_host(number + 1) for number in range(FAN_OUT + 1)]
    for host in hosts:
        runtime.gateway.peers.attach(host, 1.0)
    found = routes(runtime, _targets(*hosts))
    assert not found.direct and not found.lasting
    assert [branch.host for branch in found.branches] == hosts


def test_nobody_on_another_host_is_dialed_to_be_told_something() -> None:
    net = Net()
    try:
        world = World(net, hosts=2, each=3, fan_out=2)
        told: list[int] = []
        for rank, member in enumerate(world.members):
            member.handlers["news"] = lambda envelope, what, rank=rank: told.append(rank + what)
        linked, *others = world.members
        world.root.gateway.peers.connect(linked.proc_id)
        until(lambda: world.root.gateway.peers[linked.key].link is not None)
        by_agents: list[int] = []
        cast = world.root.caster.cast
        world.root.caster.cast = lambda message, branches, seqs: (  # type: ignore[method-assign]
            by_agents.extend(key for branch in branches for key in branch.keys),
            cast(message, branches, seqs),
        )[1]
        tell_all(world.root, [member.proc_id for member in world.members], "news", 10)
        until(lambda: sorted(told) == [10, 11, 12, 13, 14, 15])
        assert by_agents == [member.key for member in others]
        assert all(world.root.gateway.peers[member.key].link is None for member in others)
    finally:
        net.close()


# ---- over a network


class Member(Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def take(self, number: int) -> None:
        self.seen.append(number)

    @endpoint
    def taken(self) -> list[int]:
        return self.seen

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def say(self, port: Any) -> str:
        for number in range(3):
            port.send(number)
        return "said"

    @endpoint
    def back(self, data: bytes) -> bytes:
        return data

    @endpoint
    def pids_of(self, mesh: Any) -> list[int]:
        return list(mesh.pid.call().get(LIMIT_S).values())

    @endpoint
    def write(self, folder: str) -> None:
        with open(f"{folder}/{current_rank().rank}", "a") as file:
            file.write("x")

    @endpoint
    def wait(self, folder: str) -> int:
        """Until there is a file "go"; some die of it."""
        rank = current_rank().rank
        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.01)
        if os.path.exists(f"{folder}/die{rank}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return rank


@pytest.fixture(params=[FAN_OUT, 1], ids=["flat", "deep"])
def hosts(
    request: pytest.FixtureRequest,
    network_client: TestClient,
    machines: list[netns.Host],
    monkeypatch: pytest.MonkeyPatch,
) -> HostMesh:
    """Deep: each host passes on to one other."""
    monkeypatch.setattr(casting, "FAN_OUT", request.param)
    monkeypatch.setattr(casting, "FEW", 1)
    found = attach_to_workers(workers=[machine.url() for machine in machines])
    found.initialized.get(LIMIT_S)
    return found


def _links_to_processes(mesh: Any) -> int:
    peers = context().actor_instance.proc_runtime.gateway.peers
    return sum(peers[proc.key].link is not None for proc in mesh._procs)


class TestOverANetwork:
    pytestmark = netns.needed()

    def test_a_cast_needs_no_links_to_the_processes(self, hosts: HostMesh) -> None:
        members = hosts.spawn_procs({"gpus": EACH}).spawn("member", Member)
        assert len(set(members.pid.call().get(LIMIT_S).values())) == HOSTS * EACH
        members.take.broadcast(1)
        assert [*members.taken.call().get(LIMIT_S).values()] == [[1]] * HOSTS * EACH
        assert sorted(future.get(LIMIT_S) for future in members.taken.stream()) == [[1]] * HOSTS * EACH
        assert _links_to_processes(members) == 0

    def test_the_order_of_a_sender_holds_over_views_and_single_members(self, hosts: HostMesh) -> None:
        members = hosts.spawn_procs({"gpus": EACH}).spawn("member", Member)
        last, column = members.slice(hosts=HOSTS - 1, gpus=EACH - 1), members.slice(gpus=EACH - 1)
        for number in range(300):
            (members, last, column)[number % 3].take.broadcast(number)
        taken = [*members.taken.call().get(LIMIT_S).values()]
        assert taken[0] == list(range(0, 300, 3))
        assert taken[1] == [number for number in range(300) if number % 3 != 1]
        assert taken[-1] == list(range(300))

    def test_large_arguments_and_results_and_values_to_ports_arrive(self, hosts: HostMesh) -> None:
        members = hosts.spawn_procs({"gpus": EACH}).spawn("member", Member)
        data = os.urandom(3 << 20)
        assert [*members.back.call(data).get(LIMIT_S).values()] == [data] * HOSTS * EACH
        port, receiver = Channel[int].open()
        members.say.call(port).get(LIMIT_S)
        # What was sent before the answer is here before the answer.
        assert sorted(receiver.recv().get(0) for _ in range(3 * HOSTS * EACH)) == sorted([0, 1, 2] * HOSTS * EACH)

    def test_members_of_other_meshes_cast_too(self, hosts: HostMesh) -> None:
        procs = hosts.spawn_procs({"gpus": EACH})
        members, others = procs.spawn("member", Member), procs.spawn("other", Member)
        pids = list(members.pid.call().get(LIMIT_S).values())
        assert list(others.pids_of.call(members).get(LIMIT_S).values()) == [pids] * HOSTS * EACH

    def test_what_was_cast_before_a_stop_is_served(self, hosts: HostMesh, tmp_path: Path) -> None:
        procs = hosts.spawn_procs({"gpus": EACH})
        for stop in (lambda mesh: ActorMesh.stop(mesh), lambda mesh: procs.stop()):
            members = procs.spawn("member", Member)
            for _ in range(20):
                members.write.broadcast(str(tmp_path))
            members.slice(hosts=1, gpus=0).write.broadcast(str(tmp_path))
            stop(members).get(LIMIT_S)
        sizes = [os.path.getsize(tmp_path / str(rank)) for rank in range(HOSTS * EACH)]
        assert [size >= 40 for size in sizes] == [True] * HOSTS * EACH

    def test_a_member_that_dies_in_the_middle_is_the_failure_of_its_rank(
        self, hosts: HostMesh, network_client: TestClient, tmp_path: Path
    ) -> None:
        members = hosts.spawn_procs({"gpus": EACH}).spawn("member", Member)
        members.pid.call().get(LIMIT_S)
        network_client.allow_faults()
        (tmp_path / "die3").touch()
        waiting = members.wait.call_settled(str(tmp_path))
        (tmp_path / "go").touch()
        outcomes = [*waiting.get(LIMIT_S).values()]
        assert [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, SupervisionError)] == [3]
        assert [*members.pid.call_settled().get(LIMIT_S).values()].count(outcomes[3]) == 0
        again = [*members.taken.call_settled().get(LIMIT_S).values()]
        assert [rank for rank, outcome in enumerate(again) if outcome != []] == [3]

    def test_a_host_that_dies_in_the_middle_is_the_failure_of_its_ranks(
        self, network_client: TestClient, machines: list[netns.Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(casting, "FAN_OUT", 1)
        monkeypatch.setattr(casting, "FEW", 1)
        with worker(machines[1].url(netns.PORT + 1), netns.SECRET, machines[1].prefix) as served:
            urls = [machines[0].url(), served.url, machines[2].url()]
            hosts = attach_to_workers(workers=urls)
            hosts.initialized.get(LIMIT_S)
            members = hosts.spawn_procs({"gpus": EACH}).spawn("member", Member)
            members.pid.call().get(LIMIT_S)
            waiting = members.wait.call_settled(str(tmp_path))
            members.take.broadcast(1)
            network_client.allow_faults()
            served.kill()
            (tmp_path / "go").touch()
            outcomes = [*waiting.get(LIMIT_S).values()]
            assert [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, SupervisionError)] == [2, 3]
            left = members.slice(hosts=slice(0, 3, 2))
            left.take.broadcast(2)
            assert [*left.taken.call().get(LIMIT_S).values()] == [[1, 2]] * 2 * EACH
