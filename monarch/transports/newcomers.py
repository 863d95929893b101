"""Who has connected to a listener and has not proved the secret yet, and who must go when there are too many."""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from attrs import define, field

from monarch.transports.auth import Handshake


@define(eq=False, repr=False)
class Newcomer:
    sock: socket.socket
    deadline_s: float
    greeting_bytes: int
    address: Any = None
    is_heir: bool = False  # it has nothing to prove
    handshake: Handshake | None = None  # None: it has said nothing yet
    unsent: bytes = b""
    greeting: bytes = b""  # what it sent after the handshake
    is_watched: bool = False
    is_here: bool = True
    fd: int = field(init=False)
    network: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.fd = self.sock.fileno()
        self.network = network_of(self.address)

    def greet(self) -> None:
        """Say what we say first, which fits into an empty socket; TLS comes before it, where there is any."""
        with suppress(BlockingIOError):
            self.unsent = self.unsent[self.sock.send(self.unsent) :] if self.unsent else b""


@define(eq=False)
class Crowd:
    """Newcomers, oldest first.

    Who is to go is of the network that most come from, so that a flood pushes out itself: the oldest that has said
    nothing, because a friend speaks at once, else the oldest, because a friend needs milliseconds.
    """

    _all: OrderedDict[int, Newcomer] = field(factory=OrderedDict)  # by descriptor
    _networks: dict[str, tuple[OrderedDict[int, Newcomer], OrderedDict[int, Newcomer]]] = field(factory=dict)
    """Of each network those that have said nothing, and those that have said something."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Newcomer]:
        return iter(self._all.values())

    def add(self, newcomer: Newcomer) -> None:
        self._all[newcomer.fd] = newcomer
        silent, _ = self._networks.setdefault(newcomer.network, (OrderedDict(), OrderedDict()))
        silent[newcomer.fd] = newcomer

    def has_spoken(self, newcomer: Newcomer) -> None:
        silent, others = self._networks[newcomer.network]
        others[newcomer.fd] = silent.pop(newcomer.fd)

    def remove(self, newcomer: Newcomer) -> None:
        del self._all[newcomer.fd]
        groups = self._networks[newcomer.network]
        for group in groups:
            group.pop(newcomer.fd, None)
        if not any(groups):
            del self._networks[newcomer.network]

    def last_choice(self) -> Newcomer:
        """Who is to go, if one must."""
        silent, others = max(self._networks.values(), key=lambda groups: len(groups[0]) + len(groups[1]))
        return next(iter((silent or others).values()))


def network_of(address: Any) -> str:
    """Whoever has one address of a network can have the others, too: over IPv6 there are 2^64. "" for unix sockets."""
    if not isinstance(address, tuple):
        return ""
    host: str = address[0]
    if ":" not in host:
        return host
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return (packed[:8] if any(packed[:8]) else packed).hex()  # those without are IPv4 addresses, or loopback
