"""Hosts that are network namespaces of this machine, joined by a bridge, and the workers and clients of tests on them.

Needs root, and `ip` of iproute2: `needed` are the marks of tests that use it. The fixtures come with `conftest`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

import pytest
from attrs import define

from monarch.testing import TestClient, fresh_client
from tests.mesh.workers import worker

PORT = 22222
SECRET = {"MONARCH_SECRET": "a secret of these tests, long enough"}


@cache
def why_not() -> str:
    """Why there can be none here; "" where there can."""
    if shutil.which("ip") is None:
        return "network namespaces are made by `ip`, which is not installed"
    if os.getuid() != 0:
        return "only root makes network namespaces"
    try:
        with network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces do not work here: {error.stderr.decode(errors='replace').strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def needed() -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@define(frozen=True)
class Host:
    namespace: str
    address: str
    cable: str  # our end

    @property
    def prefix(self) -> Sequence[str]:
        """Runs a command there."""
        return ["ip", "netns", "exec", self.namespace]

    def url(self, port: int = PORT) -> str:
        return f"tcp://{self.address}:{port}"

    def cut(self) -> None:
        _ip("link", "set", self.cable, "down")

    def heal(self) -> None:
        _ip("link", "set", self.cable, "up")


_numbers = itertools.count()


@contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """Some hosts beside this one, which all reach each other."""
    number = next(_numbers)  # a test may have one beside that of its module
    tag = f"{os.getpid() % 10_000}{'abcdefgh'[number % 8]}"
    subnet = f"198.{18 + number % 2}.{os.getpid() % 250}"
    bridge = f"mb{tag}"
    hosts: list[Host] = []
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for i in range(count):
            host = Host(f"mn{tag}-{i}", f"{subnet}.{10 + i}", f"mc{tag}-{i}")
            _ip("netns", "add", host.namespace)
            hosts.append(host)
            _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("link", "set", host.cable, "master", bridge, "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)
            # A namespace lives on while its kernel still wants to say something over a cable that is cut.
            subprocess.run(["ip", "link", "del", host.cable], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


@pytest.fixture(scope="module")
def machines(request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    """As many as `HOSTS` of the module says, each with a worker at its `url()` that no test kills."""
    with ExitStack() as stack:
        hosts = stack.enter_context(network(request.module.HOSTS))
        for host in hosts:
            stack.enter_context(worker(host.url(), SECRET, host.prefix))
        yield hosts


@pytest.fixture
def network_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A fresh client that knows the secret of these workers."""
    for name, value in SECRET.items():
        monkeypatch.setenv(name, value)
    with fresh_client("auto", cleanup_timeout="1s", process_exit_timeout="3s") as client:
        yield client
