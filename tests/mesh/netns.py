"""Hosts that are network namespaces of this machine, joined by a bridge. Needs root, and `ip` of iproute2."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attrs import define


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


@define(frozen=True)
class Host:
    namespace: str
    address: str
    cable: str  # our end

    @property
    def prefix(self) -> Sequence[str]:
        """Runs a command there."""
        return ["ip", "netns", "exec", self.namespace]

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
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)
