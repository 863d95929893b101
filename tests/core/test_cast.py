"""The tree of a cast reaches every host once, with bounded fan-out and depth, and its bodies say all of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.core.cast import Branch, Order, body_of, tree
from monarch.core.ids import ProcId, Uid
from monarch.errors import RemoteProtocolError


def hosts_of(sizes: list[int]) -> list[Branch]:
    """Hosts with so many members, whose ranks follow each other."""
    hosts = []
    first = 0
    for at, size in enumerate(sizes):
        ranks = tuple(range(first, first + size))
        hosts.append(Branch(ProcId(Uid("host", at + 1), "inproc://x"), tuple(rank + 1000 for rank in ranks), ranks))
        first += size
    return hosts


sizes = st.lists(st.integers(1, 4), max_size=80)


@given(sizes, st.integers(1, 9))
def test_every_host_is_in_the_tree_once_with_at_most_so_many_below(sizes: list[int], fan_out: int) -> None:
    hosts = hosts_of(sizes)
    branches = tree(hosts, fan_out)
    flat = [host for branch in branches for host in branch.hosts()]
    assert sorted(flat, key=lambda host: host.ranks) == hosts
    level = list(branches)
    assert len(level) <= fan_out
    for branch in level:
        assert len(branch.below) <= fan_out
        level.extend(branch.below)


@given(st.integers(1, 3000), st.integers(2, 32))
def test_the_depth_grows_with_the_logarithm(count: int, fan_out: int) -> None:
    depth = max(branch.depth for branch in tree(hosts_of([1] * count), fan_out))
    assert depth <= math.ceil(math.log(count * (fan_out - 1) + fan_out, fan_out))


@given(sizes, st.integers(1, 9), st.booleans())
def test_agents_read_what_they_are_to_do_and_pass_the_rest_on_unread(
    sizes: list[int], fan_out: int, numbered: bool
) -> None:
    hosts = hosts_of(sizes)
    seqs = {rank: 7 * rank for rank in range(sum(sizes))} if numbered else {}
    told: list[tuple[int, int, int]] = []
    todo = [(7, branch.host.key, body_of(branch, 7, seqs)) for branch in tree(hosts, fan_out)]
    for parent, agent, body in todo:
        order = Order.read(body)
        assert order.parent == parent
        told += order.members
        assert all(host.address == "inproc://x" for host, _ in order.below)
        todo += [(agent, host.key, below) for host, below in order.below]
    assert sorted(told) == [(rank + 1000, seqs.get(rank, 0), rank) for rank in range(sum(sizes))]


def test_what_is_no_body_is_refused() -> None:
    body = body_of(tree(hosts_of([2, 3]), 1)[0], 7, {})
    for bad in (b"", body[:-1], body + b"x", bytes(len(body) - 16)):
        with pytest.raises(RemoteProtocolError, match="plan of a cast"):
            Order.read(bad)
