"""Hosts with a network between them: one machine's namespaces, whose cables are cut and put back."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    HostMesh,
    SupervisionError,
    attach,
    attach_to_workers,
    context,
    current_rank,
    endpoint,
    this_host,
)
from monarch.config import configured
from monarch.core.address import EVERYWHERE, Place
from monarch.errors import MeshError
from monarch.testing import TestClient, fresh_client, wait_until_gone
from monarch.transports.url import parse
from tests.certificates import Authority, settings_of, variables
from tests.mesh import netns
from tests.mesh.netns import PORT, SECRET
from tests.mesh.workers import worker

pytestmark = netns.needed()

LIMIT_S = 30.0
HOSTS = 2


@pytest.fixture
def hosts(network_client: TestClient, machines: list[netns.Host]) -> HostMesh:
    return attach_to_workers(workers=[machine.url() for machine in machines])


class Member(Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def place(self) -> tuple[int, int]:
        return current_rank().rank, os.getpid()

    @endpoint
    def take(self, number: int) -> None:
        self.seen.append(number)

    @endpoint
    def taken(self) -> list[int]:
        return self.seen

    @endpoint
    def size(self, data: Any) -> int:
        return len(data)

    @endpoint
    def pids_of(self, mesh: Any) -> list[int]:
        return [pid for _, pid in mesh.place.call().get(LIMIT_S).values()]

    @endpoint
    def listening(self) -> list[Place]:
        return context().actor_instance.proc_runtime.gateway.places

    @endpoint
    def hold(self, seconds: int) -> str:
        """Hold the interpreter, as a computation in native code may."""
        ctypes.PyDLL(None).sleep(seconds)
        return "done"


def test_every_process_reaches_every_other(hosts: HostMesh) -> None:
    there = hosts.spawn_procs({"gpus": 2}).spawn("there", Member)
    here = this_host().spawn_procs({"x": 2}).spawn("here", Member)
    pids = [pid for _, pid in there.place.call().get(LIMIT_S).values()]
    own = [pid for _, pid in here.place.call().get(LIMIT_S).values()]
    assert len({*pids, *own}) == 6
    assert list(here.pids_of.call(there).get(LIMIT_S).values()) == [pids, pids]
    first, last = there.slice(hosts=0, gpus=0), there.slice(hosts=1, gpus=1)
    assert first.pids_of.call_one(here).get(LIMIT_S) == own
    assert first.pids_of.call_one(there.slice(hosts=1)).get(LIMIT_S) == pids[2:]
    assert last.pids_of.call_one(there.slice(hosts=0)).get(LIMIT_S) == pids[:2]
    assert last.size.call_one(bytes(20 << 20)).get(LIMIT_S) == 20 << 20
    hosts.stop().get(LIMIT_S)
    for pid in pids:
        wait_until_gone(pid)


def test_a_cable_that_is_put_back_loses_repeats_and_reorders_nothing(
    hosts: HostMesh, machines: list[netns.Host]
) -> None:
    member = hosts.slice(hosts=0).spawn_procs().spawn("member", Member)
    member.place.call_one().get(LIMIT_S)
    for number in range(2000):
        if number == 500:
            machines[0].cut()
        if number == 1500:
            time.sleep(1.5)  # long enough for the kernel to lose packets
            machines[0].heal()
        member.take.broadcast(number)
    assert member.taken.call_one().get(LIMIT_S) == list(range(2000))


def test_a_host_that_vanishes_is_reported_with_all_its_processes(
    network_client: TestClient, machines: list[netns.Host]
) -> None:
    with configured(host_timeout="1s"), fresh_client("auto", cleanup_timeout="1s") as quick:
        hosts = attach_to_workers(workers=[machine.url() for machine in machines])
        members = hosts.spawn_procs({"gpus": 2}).spawn("member", Member)
        pids = [pid for _, pid in members.place.call().get(LIMIT_S).values()]
        machines[1].cut()
        try:
            with pytest.raises(SupervisionError, match=r"nothing was heard from .* for 1 s"):
                members.slice(hosts=1).taken.call().get(LIMIT_S)
            assert len(members.slice(hosts=0).place.call().get(LIMIT_S)) == 2
            quick.allow_faults()
        finally:
            machines[1].heal()
    for pid in pids:
        wait_until_gone(pid, 90)


def test_interpreters_that_are_held_are_no_failure(network_client: TestClient, machines: list[netns.Host]) -> None:
    with configured(host_timeout="1s"), fresh_client("auto", cleanup_timeout="1s"):
        hosts = attach_to_workers(workers=[machine.url() for machine in machines])
        members = hosts.spawn_procs({"gpus": 1}).spawn("member", Member)
        assert list(members.hold.call(8).get(LIMIT_S).values()) == ["done", "done"]
        ctypes.PyDLL(None).sleep(4)  # and so is the client
        assert len(members.place.call().get(LIMIT_S)) == 2


def test_a_killed_worker_is_the_failure_of_its_host_alone(
    network_client: TestClient, machines: list[netns.Host]
) -> None:
    with worker(machines[1].url(PORT + 1), SECRET, machines[1].prefix) as served:
        hosts = attach_to_workers(workers=[machines[0].url(), served.url])
        members = hosts.spawn_procs().spawn("member", Member)
        pids = [pid for _, pid in members.place.call().get(LIMIT_S).values()]
        served.kill()
        network_client.expect_fault("member")
        network_client.allow_faults()
        with pytest.raises(SupervisionError):
            members.slice(hosts=1).place.call().get(LIMIT_S)
        assert len(members.slice(hosts=0).place.call().get(LIMIT_S)) == 1
        wait_until_gone(pids[1])


def test_a_stranger_without_the_secret_is_turned_away(
    machines: list[netns.Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_SECRET", "another secret, as long as the first")
    with fresh_client("auto"), configured(mesh_attach_config_timeout="1s"):
        hosts = attach_to_workers(workers=[machines[0].url()])
        with pytest.raises(MeshError, match=r"does not know this job's secret|closed the connection"):
            hosts.initialized.get(LIMIT_S)


@pytest.mark.torch
@pytest.mark.timeout(180)  # each process imports torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="tensors need torch")
def test_tensors_are_reduced_between_hosts(hosts: HostMesh) -> None:
    import torch

    from monarch import inspect

    procs = hosts.spawn_procs({"gpus": 2})
    with procs.activate():
        rank = procs.rank_tensor("hosts") * 2 + procs.rank_tensor("gpus")
        large = torch.ones(1 << 20) * rank
        found = inspect([rank.reduce(None, "stack"), rank.reduce("hosts"), large.reduce()[:1]], hosts=1, gpus=0)
    assert [each.tolist() for each in found] == [[0, 1, 2, 3], 2, [6.0]]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def behind_tls(authority: Authority, machines: list[netns.Host]) -> Iterator[list[str]]:
    env = SECRET | variables(authority.sign("worker"))
    urls = [f"tls+{machine.url(PORT + 2)}" for machine in machines]
    with ExitStack() as stack:
        for url, machine in zip(urls, machines, strict=True):
            stack.enter_context(worker(url, env, machine.prefix))
        yield urls


def test_all_that_hosts_say_to_each_other_is_encrypted(
    authority: Authority, behind_tls: list[str], network_client: TestClient
) -> None:
    with fresh_client("auto", **settings_of(authority.sign("client")), cleanup_timeout="1s"):
        hosts = attach_to_workers(workers=behind_tls)
        there = hosts.spawn_procs().spawn("there", Member)
        here = this_host().spawn_procs({"x": 1}).spawn("here", Member)
        pids = [pid for _, pid in there.place.call().get(LIMIT_S).values()]
        own = [pid for _, pid in here.place.call().get(LIMIT_S).values()]
        assert here.pids_of.call_one(there).get(LIMIT_S) == pids
        assert there.slice(hosts=0).pids_of.call_one(here).get(LIMIT_S) == own
        assert there.slice(hosts=0).pids_of.call_one(there.slice(hosts=1)).get(LIMIT_S) == pids[1:]
        assert there.slice(hosts=1).size.call_one(bytes(20 << 20)).get(LIMIT_S) == 20 << 20
        schemes = {
            parse(place.url).scheme
            for host in (*there.listening.call().get(LIMIT_S).values(), here.listening.call_one().get(LIMIT_S))
            for place in host
            if place.domain == EVERYWHERE
        }
        assert schemes == {"tls+tcp"}


def test_a_client_with_a_certificate_that_has_expired_hears_it(
    authority: Authority, behind_tls: list[str], network_client: TestClient
) -> None:
    with fresh_client("auto", **settings_of(authority.sign("late", days=-1)), cleanup_timeout="1s"):
        hosts = attach_to_workers(workers=behind_tls[:1])
        with pytest.raises(MeshError, match="does not accept our certificate: it has expired"):
            hosts.initialized.get(LIMIT_S)


def test_one_client_uses_tls_for_all_hosts_or_for_none(
    authority: Authority,
    machines: list[netns.Host],
    behind_tls: list[str],
    network_client: TestClient,
) -> None:
    with fresh_client("auto", **settings_of(authority.sign("both")), cleanup_timeout="1s"):
        assert attach_to_workers(workers=[machines[0].url()]).initialized.get(LIMIT_S)
        mixed = attach_to_workers(workers=behind_tls[:1])
        with pytest.raises(RuntimeError, match=r"use one of tcp and tls\+tcp for all"):
            mixed.initialized.get(LIMIT_S)


BEHIND_A_FIREWALL = """
    import os, psutil, sys
    from monarch.actor import attach, attach_to_workers, this_host
    from monarch.transports.url import parse
    from tests.mesh.test_network import LIMIT_S, Member

    if __name__ == "__main__":
        attach(sys.argv[1])
        hosts = attach_to_workers(workers=sys.argv[1:])
        print("asked", flush=True)
        there = hosts.spawn_procs().spawn("there", Member)
        here = this_host().spawn_procs({"x": 2}).spawn("here", Member)
        pids = [pid for _, pid in there.place.call().get(LIMIT_S).values()]
        own = [pid for _, pid in here.place.call().get(LIMIT_S).values()]
        assert list(here.pids_of.call(there).get(LIMIT_S).values()) == [pids, pids]
        for host in range(2):
            assert there.slice(hosts=host).pids_of.call_one(here).get(LIMIT_S) == own
        assert there.slice(hosts=1).size.call_one(bytes(20 << 20)).get(LIMIT_S) == 20 << 20
        seen = [each for pid in (os.getpid(), *own) for each in psutil.Process(pid).net_connections("inet")]
        proxy = parse(sys.argv[1])
        assert {each.raddr for each in seen if each.status == psutil.CONN_ESTABLISHED} == {(proxy.host, proxy.port)}
        assert not [each for each in seen if each.status == psutil.CONN_LISTEN]
        print("reached", *pids, flush=True)
"""


def test_a_client_that_nobody_can_dial_talks_through_a_worker() -> None:
    """It is there before the workers, listens nowhere, has no way to the second host, and all connections of its
    processes go to one address."""
    with ExitStack() as stack:
        first, second, inside = stack.enter_context(netns.network(3))
        subprocess.run([*inside.prefix, "ip", "route", "add", "blackhole", second.address], check=True)
        script = [sys.executable, "-c", textwrap.dedent(BEHIND_A_FIREWALL)]
        command = [*inside.prefix, *script, first.url(), second.url()]
        env = os.environ | SECRET
        client = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        stack.callback(client.kill)
        assert client.stdout is not None and client.stdout.readline() == "asked\n"
        for machine in (first, second):
            stack.enter_context(worker(machine.url(), SECRET, machine.prefix))
        said, errors = client.communicate(timeout=2 * LIMIT_S)
        assert said.startswith("reached") and not errors, errors
        for pid in said.split()[1:]:
            wait_until_gone(int(pid))


def test_attach_is_for_programs_without_a_client(network_client: TestClient, machines: list[netns.Host]) -> None:
    with pytest.raises(RuntimeError, match="comes too late"):
        attach(machines[0].url())
