"""`python -m benchmarks.casting`: casts to up to 10,000 members, and who carries how much of them.

Everything is real but descriptors, threads and time: gateways with their sessions, relays and the links of `inproc`,
driven by hand in one thread. Every host has an agent and its members, every member answers. What is counted is what
leaves a node over its links: writes, the frames in them, bytes.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

from attrs import define

from monarch.core import gateway as gateway_module
from monarch.core.cast import Branch, tree
from monarch.core.driver import Lead, Pump, Signal, ThreadDriver
from monarch.core.envelope import HEAD, Envelope, Flag, Kind
from monarch.core.ids import ProcId, Uid
from monarch.core.monitor import Down
from monarch.core.proc import Proc
from monarch.core.protocol import SESSION
from monarch.transports import inproc
from monarch.transports.base import Buffer
from monarch.transports.inproc import Direction, InprocLink
from monarch.wake import Wake

SIZES: Final = (10, 30, 100, 300, 1_000, 3_000, 10_000)
PER_HOST: Final = 8
FAN_OUT: Final = 16
PAYLOAD_BYTES: Final = 1024
ANSWER_BYTES: Final = 128
_SECRET: Final = b"s" * 32
_TIMERS_S: Final = 1.0  # what is due later belongs to no cast


@define
class Counts:
    """What left a node."""

    writes: int = 0
    frames: int = 0
    size_bytes: int = 0


class World:
    """Whose turn it is, and what time. A step is one hop of all messages that are on their way."""

    def __init__(self) -> None:
        self.ready: dict[HandPoller, None] = {}
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.now_s = 0.0
        self.steps = 0
        self.numbers = itertools.count(1)

    def run(self) -> None:
        """Until nothing is on its way, and nothing is due."""
        limit_s = self.now_s + _TIMERS_S
        while True:
            while self.ready:
                self.steps += 1
                turn, self.ready = self.ready, {}
                for poller in turn:
                    poller.pump(0.0)
            if not self.timers or self.timers[0][0] > limit_s:
                return
            self.now_s, _, action = heapq.heappop(self.timers)
            action()


class HandPoller:
    """Stands for `Poller`: what rang is handled at its gateway's next turn."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pump: Callable[[float | None], None] = self.poll
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.rang: dict[int, None] = {}
        self.closed = False

    def register(self, fd: int, handler: Callable[[int], None], reader: object = None) -> None:
        self.handlers[fd] = handler
        BELLS[fd].poller = self

    replace = register

    def unregister(self, fd: int) -> None:
        self.handlers.pop(fd, None)

    def watch(self, fd: int, writable: bool) -> None:
        """A bell rings for room, too."""

    def lead_by(self, take: object, proc: int, first: object) -> None:
        """Nobody leads here."""

    def wake(self) -> None:
        self.world.ready[self] = None

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.world.timers, (self.world.now_s + delay_s, next(self.world.numbers), action))

    def poll(self, timeout_s: float | None, *, eager: bool = False) -> None:
        turn, self.rang = self.rang, {}
        for fd in turn:
            if fd in self.handlers:
                self.handlers[fd](1)

    def shut(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.handlers.clear()


BELLS: Final[dict[int, HandBell]] = {}


class HandBell:
    """Stands for `Bell`, without a descriptor."""

    def __init__(self) -> None:
        self.poller: HandPoller | None = None
        self._number = len(BELLS)
        BELLS[self._number] = self

    def fileno(self) -> int:
        return self._number

    def ring(self) -> None:
        if self.poller is not None:
            self.poller.rang[self._number] = None
            self.poller.wake()

    def silence(self) -> None:
        pass

    def close(self) -> None:
        pass


@define(eq=False, repr=False)
class CountedLink(InprocLink):
    counts: Sequence[Counts] = ()

    def send_nowait(self, frames: Any) -> int:
        taken = super().send_nowait(frames)
        for counts in self.counts:
            counts.writes += 1
            counts.frames += taken
            counts.size_bytes += sum(len(part) for frame in itertools.islice(frames, taken) for part in frame)
        return taken


class HandDriver(ThreadDriver):
    """Nobody drives but `World.run`."""

    def start(self, pump: Pump, lead: Lead, wake: Wake, name: str) -> None:
        pass

    def wait(self, signal: Signal, timeout_s: float | None = None) -> bool:
        return False

    def stop(self) -> None:
        pass


class Node(Proc):
    """A process; it answers every call."""

    def __init__(self, world: World, label: str, keeper: ProcId | None = None) -> None:
        self.counts = Counts()
        poller = HandPoller(world)
        with (
            mock.patch.object(gateway_module, "Poller", lambda: poller),
            mock.patch("monarch.core.proc.make_driver", lambda name: HandDriver()),
        ):
            super().__init__(ProcId(Uid.instance(label), "", keeper), inproc.TRANSPORT, _SECRET)
        poller.pump = self.gateway.pump

    def deliver(self, envelope: Envelope) -> None:
        if envelope.kind != Kind.CALL:
            super().deliver(envelope)
            return
        self.send(envelope.reply([bytes(ANSWER_BYTES)], Flag.SILENT), None, may_wait=False)


def join(a: Node, b: Node, back_counts: Counts | None = None) -> None:
    """A link between two processes. `back_counts` counts what `b` sends to `a`, once more."""
    bells: Any = HandBell(), HandBell()
    lock = threading.Lock()
    there, back = Direction(bells[1], bells[0], lock), Direction(bells[0], bells[1], lock)
    dialer, acceptor = CountedLink("b", there, back, bells[0]), CountedLink("a", back, there, bells[1])
    dialer.counts = [a.counts]
    acceptor.counts = [b.counts] if back_counts is None else [b.counts, back_counts]
    b.gateway.peers._links.expect(acceptor, partial(b.gateway.peers._on_hello, None))
    a.gateway.peers._greet(a.gateway.peers.of(b.proc_id), dialer, lambda *, silent, reason="": None)


class Answers:
    """The port of who casts."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()

    def deliver(self, envelope: Envelope) -> None:
        assert envelope.rank not in self.ranks
        self.ranks.add(envelope.rank)

    def bounced(self, envelope: Envelope, down: Down) -> None:
        raise AssertionError(f"rank {envelope.rank}: {down}")

    def proc_gone(self, key: int, down: Down) -> None:
        raise AssertionError(str(down))


@define(frozen=True)
class Figures:
    """One cast, with its answers.

    Attributes:
        depth: agents on the way to the lowest member.
        steps: hops in a row, until the last answer is back.
        links: of who casts.
        root, agent, member: what left who casts, the busiest agent, the busiest member.
        answers: what brought them to who casts.
    """

    members: int
    hosts: int
    depth: int
    steps: int
    links: int
    answers: Counts
    root: Counts
    agent: Counts
    member: Counts


def simulate(members: int, per_host: int = PER_HOST, fan_out: int = FAN_OUT) -> Figures:
    """Cast to so many members and gather their answers. Raises: AssertionError when one is missing."""
    BELLS.clear()
    world = World()
    root, back = Node(world, "root"), Counts()
    agents: list[Node] = []
    all_members: list[Node] = []
    hosts: list[Branch] = []
    for first in range(0, members, per_host):
        agent = Node(world, "agent")
        agents.append(agent)
        join(root, agent, back)
        ranks = tuple(range(first, min(first + per_host, members)))
        own = [Node(world, "member", agent.proc_id) for _ in ranks]
        for each in own:
            agent.gateway.peers.of(each.proc_id)
            join(each, agent)
        all_members += own
        hosts.append(Branch(agent.proc_id, tuple(each.key for each in own), ranks))
    branches = tree(hosts, fan_out)
    by_key = {agent.key: agent for agent in agents}
    todo = deque(branches)
    while todo:
        branch = todo.popleft()
        for below in branch.below:
            join(by_key[branch.host.key], by_key[below.host.key])
            todo.append(below)
    world.run()
    for counts in (back, *(node.counts for node in (root, *agents, *all_members))):
        counts.writes = counts.frames = counts.size_bytes = 0
    world.steps = 0

    answers, port = Answers(), root.new_port()
    root.ports[port] = answers
    payload: list[Buffer] = [bytes(PAYLOAD_BYTES)]
    message = Envelope(Kind.CALL, 0, 40, 0, root.key, 16, payload, Flag.SEQUENCED, reply_port=port)
    root.caster.cast(message, branches, dict.fromkeys(range(members), 0))
    while world.ready and len(answers.ranks) < members:
        world.steps += 1
        turn, world.ready = world.ready, {}
        for poller in turn:
            poller.pump(0.0)
    steps = world.steps
    world.run()
    assert answers.ranks == set(range(members)) and not root.caster._sent
    return Figures(
        members,
        len(agents),
        max(branch.depth for branch in branches),
        steps,
        len(agents),
        back,
        root.counts,
        _busiest(agents),
        _busiest(all_members),
    )


def _busiest(nodes: list[Node]) -> Counts:
    return Counts(
        max(node.counts.writes for node in nodes),
        max(node.counts.frames for node in nodes),
        max(node.counts.size_bytes for node in nodes),
    )


def table(rows: list[Figures]) -> str:
    """As Markdown."""
    titles = [
        *("members", "hosts", "agents on the way", "hops, there and back", "links of who casts"),
        *("its writes", "its bytes", "bytes of a message for each", "writes with answers to it"),
        *("writes of the busiest agent", "its bytes", "writes of a member"),
    ]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---:|" * len(titles)]
    for row in rows:
        numbers = [row.members, row.hosts, row.depth, row.steps, row.links, row.root.writes, row.root.size_bytes]
        numbers += [_directly_bytes(row), row.answers.writes]
        numbers += [row.agent.writes, row.agent.size_bytes, row.member.writes]
        lines.append("| " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(lines)


def save(rows: list[Figures], path: Path) -> None:
    """The table as curves. Raises: ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    writes, sizes = figure.subplots(1, 2)
    members = [row.members for row in rows]
    writes.loglog(members, members, "--", color="gray", label="who casts, with a message for each")
    sizes.loglog(members, list(map(_directly_bytes, rows)), "--", color="gray")
    for label, of in (("who casts", "root"), ("busiest agent", "agent"), ("a member", "member")):
        counts: list[Counts] = [getattr(row, of) for row in rows]
        writes.loglog(members, [each.writes for each in counts], "o-", label=label)
        sizes.loglog(members, [each.size_bytes for each in counts], "o-")
    writes.loglog(members, [row.depth for row in rows], "k.:", label="agents on the way")
    for axes, title in ((writes, "writes"), (sizes, "bytes sent")):
        axes.set_title(title)
        axes.set_xlabel("members")
    writes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _directly_bytes(row: Figures) -> int:
    """What who casts would send without agents."""
    return row.members * (PAYLOAD_BYTES + SESSION.size + HEAD.size)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.casting", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("members", nargs="*", type=int, default=SIZES)
    parser.add_argument("--per-host", type=int, default=PER_HOST)
    parser.add_argument("--fan-out", type=int, default=FAN_OUT)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, too; needs matplotlib")
    options = parser.parse_args()
    rows = [simulate(members, options.per_host, options.fan_out) for members in options.members]
    print(table(rows))
    if options.plot is not None:
        save(rows, options.plot)


if __name__ == "__main__":
    main()
