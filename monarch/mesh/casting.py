"""Which members of a view a cast reaches directly, and which by the agents of their hosts.

Directly: those on this host, where an agent between would be one hop more, and one that is alone on its host. Those of
another host get what they are sent by its agent, so that it crosses the network once, and so do their answers. Among
many hosts, agents pass it on to others (`core.cast.tree`), and then nobody is reached directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import define

from monarch.core.cast import Branch, tree
from monarch.core.envelope import Envelope
from monarch.core.ids import ProcId
from monarch.core.peer import State
from monarch.core.proc import Proc

FAN_OUT: Final = 16
"""So many hosts get a cast from where it comes from: 16 frames leave in the millisecond that one more hop costs."""

_UNNUMBERED: Final[Mapping[int, int]] = MappingProxyType({})

Targets = Sequence[tuple[int, ProcId]]
"""[rank in the view] -> key and id of the process."""


@define(frozen=True)
class Ways:
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
    """Send `message`, which names no process, to all of `targets`, behind what was sent to the agents of their hosts.

    Args:
        seqs: position in `targets` -> number of the message for that process.
    """
    found = ways(runtime, targets, deep=False)
    if found.branches:
        runtime.relay.cast(message, found.branches, seqs)
    for at in found.direct:
        key, proc = targets[at]
        runtime.send(message.for_member(key, at, seqs.get(at, 0), list(message.parts)), proc)
    if found.branches:
        runtime.relay.wait_for_room(found.branches)


def ways(runtime: Proc, targets: Targets, deep: bool = True) -> Ways:
    """How a cast from this process reaches `targets`; not `deep`: each agent hears from this process itself."""
    gateway, own = runtime.gateway, runtime.proc_id.keeper
    by_host: dict[int, tuple[ProcId, list[int]]] = {}
    for rank, (_, proc) in enumerate(targets):
        keeper = proc.keeper
        if keeper is not None:
            by_host.setdefault(keeper.uid.number, (keeper, []))[1].append(rank)
    direct = set(range(len(targets)))
    hosts: list[Branch] = []
    lasting = True
    for host, ranks in by_host.values():
        if host.key == runtime.key or host == own or (len(ranks) == 1 and len(by_host) <= FAN_OUT):
            continue
        elsewhere = gateway.is_elsewhere(host)
        if elsewhere is None:
            lasting = False
        elif elsewhere:
            hosts.append(Branch(host, tuple(targets[rank][0] for rank in ranks), tuple(ranks)))
            direct.difference_update(ranks)
    fan_out = FAN_OUT if deep else len(hosts)
    if len(hosts) > fan_out:
        # An agent that is not up could be refused by others; and each brings the answers of its host here.
        peers = [gateway.connect(host.host) for host in hosts]
        if any(peer.state is not State.UP for peer in peers):
            fan_out, lasting = len(hosts), False
    for branch in hosts:
        for rank in branch.ranks:
            gateway.peer(targets[rank][1])  # known from now on: it is gone when its host is
    return Ways(tuple(sorted(direct)), tree(hosts, fan_out), lasting)
