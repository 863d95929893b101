"""The way of a cast: which host passes it on to which, and what they tell each other. Pure.

A cast is one message to many processes. It goes down a tree whose inner nodes are the agents of hosts: they run no code
of users, so that none of them is ever busy, and each keeps the processes of its host, so that none of them can be lost
without what it was to reach on its own host. A `Branch` is a host with its own members of the cast, and the branches
below it. On the wire a branch is its *body*: what its agent must know, where the bodies of the branches below stay as
they are. The first part of the message is its *title*: what it is, and who sent it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from struct import Struct, pack, unpack_from
from typing import Final

from attrs import define, evolve

from monarch.core.envelope import Envelope, Kind
from monarch.core.ids import ProcId
from monarch.errors import RemoteProtocolError
from monarch.transports.base import Buffer

_HEAD: Final = Struct("<QII")  # key of the process that passes it on to this host; how many members; how many branches
_TAKEN: Final = Struct("<QQI")  # who cast, number of the cast, how many could not be reached; then their keys
_KEY: Final = Struct("<Q")
_CHILD: Final = Struct("<II")  # sizes in bytes: of the text of the host's agent, of the body


@define(frozen=True)
class Branch:
    """A host in the tree of a cast.

    Attributes:
        host: its agent.
        keys: of the processes there that are meant.
        ranks: theirs, in the view that is cast to.
        below: what its agent passes on to other hosts.
    """

    host: ProcId
    keys: tuple[int, ...]
    ranks: tuple[int, ...]
    below: tuple[Branch, ...] = ()

    def hosts(self) -> Iterator[Branch]:
        """This one and all below, the nearest first, each without what is below it."""
        level: Sequence[Branch] = (self,)
        while level:
            yield from (evolve(branch, below=()) for branch in level)
            level = [each for branch in level for each in branch.below]

    @property
    def depth(self) -> int:
        """How many agents a message passes on its way to the lowest process."""
        return 1 + max((each.depth for each in self.below), default=0)


def tree(hosts: Sequence[Branch], fan_out: int) -> tuple[Branch, ...]:
    """The same hosts, in their order, as at most `fan_out` branches, of which each has at most so many below it, and so
    on, all of nearly equal size."""
    count = min(fan_out, len(hosts))
    cuts = [len(hosts) * at // count for at in range(count + 1)] if count else [0]
    groups = [hosts[begin:end] for begin, end in pairwise(cuts)]
    return tuple(evolve(group[0], below=tree(group[1:], fan_out)) for group in groups)


def body_of(branch: Branch, parent: int, seqs: Mapping[int, int]) -> bytes:
    """What the agent of a branch is told.

    Args:
        parent: who passes it on to that agent.
        seqs: rank -> number of the message for that member; none for messages that are not numbered.
    """
    count = len(branch.keys)
    numbers = [seqs[rank] for rank in branch.ranks] if seqs else [0] * count
    pieces = [
        _HEAD.pack(parent, count, len(branch.below)),
        pack(f"<{count}Q{count}Q{count}I", *branch.keys, *numbers, *branch.ranks),
    ]
    for each in branch.below:
        host, body = str(each.host).encode(), body_of(each, branch.host.key, seqs)
        pieces += [_CHILD.pack(len(host), len(body)), host, body]
    return b"".join(pieces)


@define(frozen=True)
class Order:
    """A body, as the agent reads it.

    Attributes:
        parent: key of the process that hears when it has been passed on.
        members: (process key, number of the message, rank) on this host.
        below: (agent, body) of the branches below.
    """

    parent: int
    members: list[tuple[int, int, int]]
    below: list[tuple[ProcId, bytes]]

    @classmethod
    def read(cls, body: bytes) -> Order:
        """Raises: RemoteProtocolError when it is no body."""
        try:
            parent, count, branches = _HEAD.unpack_from(body)
            numbers = unpack_from(f"<{count}Q{count}Q{count}I", body, _HEAD.size)
            at = _HEAD.size + 20 * count
            below = []
            for _ in range(branches):
                host_bytes, body_bytes = _CHILD.unpack_from(body, at)
                at += _CHILD.size
                host = ProcId.from_string(body[at : at + host_bytes].decode())
                at += host_bytes
                below.append((host, body[at : at + body_bytes]))
                at += body_bytes
            if at != len(body):
                raise ValueError(f"{len(body)} bytes in place of {at}")
        except Exception as error:
            raise RemoteProtocolError(f"the plan of a cast cannot be read: {error}") from None
        keys, seqs, ranks = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        return cls(parent, list(zip(keys, seqs, ranks, strict=True)), below)


def cast_of(message: Envelope, agent: int, parts: list[Buffer], number: int) -> Envelope:
    """The message of a cast for the agent of a branch; `parts` are its title, the body of the branch, and the rest."""
    cast = message.for_member(agent, 0, number, parts)
    cast.kind = Kind.CAST
    return cast


def title_of(kind: int, origin: str) -> bytes:
    """Of a message of that kind, from the process of that text form."""
    return bytes((kind,)) + origin.encode()


def taken_of(origin: int, number: int, lost: Sequence[int]) -> bytes:
    """What an agent says when all below have a cast of the process `origin`, but for the hosts in `lost`."""
    return _TAKEN.pack(origin, number, len(lost)) + b"".join(map(_KEY.pack, lost))


def read_taken(said: bytes) -> Iterator[tuple[int, int, list[int]]]:
    """(origin, number, lost) of each `taken_of`, one after the other."""
    at = 0
    while at < len(said):
        origin, number, count = _TAKEN.unpack_from(said, at)
        at += _TAKEN.size
        yield origin, number, [key for (key,) in _KEY.iter_unpack(said[at : at + 8 * count])]
        at += 8 * count
