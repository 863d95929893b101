"""Which members of a view a cast reaches directly, and which by the agents of their hosts.

Directly: those on this host, where an agent between would be one hop more, and few small messages for another host,
for the same reason. Otherwise the members of another host get what they are sent by its agent, so that it crosses the
network once, and their answers come back together. Among many hosts, agents pass it on to others (`core.cast.tree`),
and nobody on another host is reached directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from attrs import define

from monarch.core import codec
from monarch.core.cast import Branch, tree
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.ids import ProcId
from monarch.core.peer import State
from monarch.core.proc import PROC_AGENT, Proc

FAN_OUT: Final = 16
"""So many hosts get a cast from where it comes from: 16 frames leave in the millisecond that one more hop costs."""

FEW: Final = 7
"""So many members of a host are quicker reached directly. Over namespaces of one machine, with 2 hosts, by the agent /
directly, in ms: 2 members on each 1.5 / 1.0, 4 members 2.1 / 1.8, 8 members 3.9 / 4.1."""

LARGE_BYTES: Final = 1 << 16
"""Such a message goes by the agent wherever a host has several members."""

_UNNUMBERED: Final[Mapping[int, int]] = MappingProxyType({})

Targets = Sequence[tuple[int, ProcId]]
"""[rank in the view] -> key and id of the process."""


@define(frozen=True)
class Routes:
    """How a cast reaches the members of a view.

    Attributes:
        direct: ranks of those that get a message of their own.
        branches: the hosts whose agents pass it on.
        lasting: it will be the same at the next cast.
    """

    direct: tuple[int, ...]
    branches: tuple[Branch, ...]
    lasting: bool


def send_to_all(runtime: Proc, message: Envelope, targets: Targets, seqs: Mapping[int, int] = _UNNUMBERED) -> None:
    """Send `message`, which names no process, to all of `targets`; to those on other hosts always by their agents, so
    that it comes behind all that was sent in this way, and behind what the agents were told: to launch them, say.

    Args:
        seqs: position in `targets` -> number of the message for that process.
    """
    far = _by_host(runtime, targets)
    branches = [_branch(host, targets, ranks) for host, ranks in far]
    if branches:
        runtime.caster.cast(message, branches, seqs)
    passed_on = {at for _, ats in far for at in ats}
    for at in passed_on:
        runtime.gateway.peers.of(targets[at][1])  # known from now on: it is gone when its host is
    for at, (key, proc) in enumerate(targets):
        if at not in passed_on:
            runtime.send(message.for_member(key, at, seqs.get(at, 0), list(message.parts)), proc)
    if branches:
        runtime.caster.wait_for_taken(branches)


def tell_all(runtime: Proc, procs: Sequence[ProcId], *message: Any) -> None:
    """Tell the agents of these processes something that has no answer. Does not wait, and dials nobody on another
    host: its agent passes it on to those to which there is no link."""
    news = Envelope(Kind.SYSTEM, 0, PROC_AGENT, 0, runtime.key, PROC_AGENT, codec.encode(message), Flag.SILENT)
    far = [(proc.key, proc) for proc in procs if not runtime.gateway.peers.is_linked(proc)]
    branches = [_branch(host, far, ats) for host, ats in _by_host(runtime, far)]
    if branches:
        runtime.caster.cast(news, branches, _UNNUMBERED)
    passed_on = {key for branch in branches for key in branch.keys}
    for proc in procs:
        if proc.key not in passed_on:
            runtime.send(news.for_member(proc.key, 0, 0, list(news.parts)), proc, may_wait=False)


def routes(runtime: Proc, targets: Targets, few: int | None = None) -> Routes:
    """How a cast from this process reaches `targets`.

    Args:
        few: so many members of a host are reached directly.
    """
    gateway, few = runtime.gateway, FEW if few is None else few
    far = _by_host(runtime, targets)
    direct = set(range(len(targets)))
    hosts: list[Branch] = []
    lasting = True
    for host, ranks in far:
        if len(ranks) <= few and len(far) <= FAN_OUT:
            continue
        elsewhere = gateway.peers.is_elsewhere(host)
        if elsewhere is None:
            lasting = False
        elif elsewhere:
            hosts.append(_branch(host, targets, ranks))
            direct.difference_update(ranks)
    fan_out = FAN_OUT
    if len(hosts) > FAN_OUT:
        # An agent that is not up could be refused by others; and each brings the answers of its host here.
        peers = [gateway.peers.connect(host.host) for host in hosts]
        if any(peer.state is not State.UP for peer in peers):
            fan_out, lasting = len(hosts), False
    for branch in hosts:
        for rank in branch.ranks:
            gateway.peers.of(targets[rank][1])  # known from now on: it is gone when its host is
    return Routes(tuple(sorted(direct)), tree(hosts, fan_out), lasting)


def _by_host(runtime: Proc, targets: Targets) -> list[tuple[ProcId, list[int]]]:
    """The positions of those that are not on this host, by the agents of theirs."""
    found: dict[int, tuple[ProcId, list[int]]] = {}
    for at, (_, proc) in enumerate(targets):
        if proc.keeper is not None:
            found.setdefault(proc.keeper.uid.number, (proc.keeper, []))[1].append(at)
    return [each for each in found.values() if each[0].key != runtime.key and each[0] != runtime.proc_id.keeper]


def _branch(host: ProcId, targets: Targets, ranks: Sequence[int]) -> Branch:
    return Branch(host, tuple(targets[rank][0] for rank in ranks), tuple(ranks))
