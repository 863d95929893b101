"""What `monarch rdma check` says of machines that lack something."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from monarch.core import settings
from monarch.errors import NotViable
from monarch.onesided.check import Report
from monarch.verbs import devices
from monarch.verbs.adapter import find_binding
from monarch.verbs.devices import Gid, Port

PORT = Port("rxe0", 1, "DOWN", "Ethernet", 0, (Gid(1, "0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2", "eth0"),))


@pytest.fixture
def refused(monkeypatch):
    def refuse() -> Any:
        raise NotViable("what is wrong")

    monkeypatch.setattr("monarch.onesided.check.node", refuse)
    monkeypatch.setattr("monarch.onesided.ibverbs.node", refuse)


def test_without_a_device_it_says_so_and_which_ways_are_left(monkeypatch, refused):
    monkeypatch.setattr(devices, "ports", list)
    report = Report()
    lines = list(report.lines())

    assert report.works and not report.device_works
    assert "  none: /sys/class/infiniband is empty. A software device will do: see docs/rdma.md" in lines
    assert "  cannot be used: what is wrong" in lines
    assert lines[-2:] == ["  path: tcp, in chunks over the link", "Transfers work"]


@pytest.mark.parametrize(
    ("asked", "fallback", "why"),
    [
        ("tcp", True, ""),
        ("ibverbs", True, "no RDMA device can be used"),
        ("shm", True, "other memory cannot be copied: it does not copy"),
        ("auto", False, "and rdma_allow_tcp_fallback is off"),
    ],
)
def test_what_was_asked_for_and_does_not_work_is_a_failure(monkeypatch, refused, asked, fallback, why):
    monkeypatch.setattr("monarch.onesided.transfers.no_copying_here", lambda: "Function not implemented")
    monkeypatch.setattr("monarch.onesided.neighbour.Neighbour._try_copying", lambda self: "it does not copy")
    with settings.overridden(rdma_path=asked, rdma_allow_tcp_fallback=fallback):
        report = Report()
        lines = list(report.lines())

    assert report.works is not bool(why)
    assert why in lines[-1]


def test_ports_are_listed_with_their_state_and_addresses(monkeypatch, refused):
    monkeypatch.setattr(devices, "ports", lambda: [PORT])
    lines = list(Report().lines())

    at = lines.index("  rxe0 port 1: DOWN, Ethernet")
    assert lines[at + 1] == "    GID 1: 10.77.0.1 (RoCE v2, eth0)"


def test_a_kernel_that_does_not_copy_is_told_from_one_that_does(monkeypatch, refused):
    monkeypatch.setattr("monarch.onesided.transfers.no_copying_here", lambda: "Function not implemented")
    monkeypatch.setattr("monarch.onesided.neighbour.Neighbour._try_copying", lambda self: "it does not copy")
    lines = list(Report().lines())

    at = lines.index("Between processes of this host")
    assert lines[at + 1] == "  memory of monarch.rdma.empty is mapped; other memory cannot be copied: it does not copy"
    assert lines[at + 2].startswith("  path: tcp, as the kernel does not copy between processes of this host")


def test_little_memory_that_may_be_locked_is_called_little(monkeypatch, refused):
    monkeypatch.setattr("monarch.onesided.check.memlock_limit", lambda: 8 << 20)

    assert any(f"{8 << 20} bytes, which is little" in line for line in Report().lines())


def test_a_missing_binding_is_an_error_that_says_where_it_comes_from(monkeypatch):
    for name in ("ibverbs", "pyverbs"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotViable) as told:
        find_binding()

    assert "ibverbs cannot be imported" in str(told.value) and "pip install 'monarch-actors[rdma]'" in str(told.value)
    assert "pyverbs cannot be imported" in str(told.value) and "the package python3-pyverbs" in str(told.value)


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch", "rdma", "check", *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)


def test_devices_that_a_setting_forbids_are_not_used():
    told, asked = check(MONARCH_RDMA_DISABLE_IBVERBS="1"), check("--path", "ibverbs", MONARCH_RDMA_DISABLE_IBVERBS="1")

    assert (told.returncode, told.stderr, asked.returncode) == (0, "", 1)
    assert "  cannot be used: rdma_disable_ibverbs is set\n" in told.stdout


@pytest.mark.rdma
def test_a_device_is_tried():
    told = check()

    assert (told.returncode, told.stderr) == (0, "")
    assert "the best of" in told.stdout and "a transfer of 4 MiB to this process itself: " in told.stdout
    assert told.stdout.endswith("  path: ibverbs, where the other host has a device too\nTransfers work\n")


@pytest.mark.rdma
def test_a_device_that_is_not_there_is_named():
    told = check("--target", "nic:none")

    assert told.returncode == 1
    assert "is not what 'nic:none' asks for" in told.stdout
