"""The program whose processes are killed: rounds of random traffic, in each of which somebody dies at a random moment.

`python -m tests.chaos.rounds SEED FIRST LAST` runs rounds in one driver, and prints `round N: ...` after each. A round
is a function of its seed and its number, but for what the scheduler does: the same number gives the same mesh, the same
traffic and the same victim.

What must hold after each: every call has ended, within `LIMIT_S` of the death, with its value or with an error that
names the death; who had nothing to do with the dead has its value; the owner has heard of each dead member exactly
once, and of no other; and no process is left, whatever the dead had started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from attrs import define

import monarch.actor
from monarch.actor import Actor, ActorError, Channel, Port, SupervisionError, context, current_rank, endpoint, this_host
from monarch.mesh.client import RootClient
from monarch.testing import Recorder, wait_until_gone
from tests.chaos.drivers import LIMIT_S

SIZES: Final = (0, 100, 70_000, 3 << 20)
_UP_S: Final = 25.0  # for processes to come up, before anybody dies


class Member(Actor):
    """Echoes in every way there is."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def echo_later(self, value: Any) -> Any:
        await asyncio.sleep(0.001)
        return value

    @endpoint
    def rank(self, value: Any) -> tuple[int, Any]:
        return current_rank().rank, value

    @endpoint
    def relay(self, other: Any, value: Any) -> Any:
        """To another process and back, while this one waits."""
        return other.echo_later.call_one(value).get()

    @endpoint
    def stream_to(self, other: Any, port: Port[Any], count: int) -> None:
        """Has another send to a port of the caller."""
        other.send_to.broadcast(port, count)

    @endpoint
    def send_to(self, port: Port[Any], count: int) -> None:
        for number in range(count):
            port.send(number)

    @endpoint
    def litter(self) -> list[int]:
        """Start what does not end by itself, in a session of its own or not."""
        apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.held = [apart, subprocess.Popen(["sleep", "600"])]
        return [each.pid for each in self.held]

    @endpoint
    def leave(self, code: int) -> None:
        os._exit(code)

    def _handle_undeliverable_message(self, message: Any) -> bool:
        return True


class Owner(Actor):
    """Owns members in processes of their own, and tells a port of each failure."""

    def __init__(self, port: Port[Any]) -> None:
        self.port = port

    @endpoint
    def spawn(self, count: int) -> Any:
        self.members = this_host().spawn_procs({"gpus": count}, name="owned").spawn("members", Member)
        return self.members

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    def __supervise__(self, failure: Any) -> bool:
        self.port.send((failure.mesh_name, failure.crashed_ranks[0]))
        return True


@define(eq=False)
class Call:
    """One call under way.

    Attributes:
        what: for people.
        ranks: members of whom at least one has to be dead for it to fail.
        check: whether a value is right.
    """

    what: str
    future: Any
    ranks: frozenset[int]
    check: Callable[[Any], bool]


class Round:
    """See the module."""

    def __init__(self, seed: int, number: int, heard: Recorder[Any]) -> None:
        self.random = random.Random(f"{seed}:{number}")
        self.heard = heard
        self.calls: list[Call] = []
        self.pids: list[int] = []

    def run(self) -> str:
        choose = self.random.choice
        self.count = choose((1, 2, 3, 4))
        owned = self.random.random() < 0.3
        victim = choose(("member",) * 8 + ("exit", "two", "template", "guardian") + ("owner",) * (2 * owned))
        self._spawn(owned)
        litter = self.random.random() < 0.2
        if litter:
            self.pids += [pid for pids in self.members.litter.call().get(_UP_S).values() for pid in pids]
        dead = self._victims(victim)
        threads = [
            threading.Thread(target=self._traffic, args=(self.random.random(),)) for _ in range(choose((1, 1, 2)))
        ]
        for thread in threads:
            thread.start()
        time.sleep(self.random.random() * 0.02)
        self._kill(victim, dead)
        killed_s = time.monotonic()
        for thread in threads:
            thread.join()
        self._traffic(self.random.random())
        slowest_s = self._settle(dead, killed_s)
        self._owner_has_heard(victim, dead, owned)
        self._stop(owned)
        for pid in self.pids:
            wait_until_gone(pid, LIMIT_S)
        self._nothing_more_was_heard(victim, dead, owned)
        return f"{victim}{' with litter' if litter else ''}, {len(self.calls)} calls, slowest {slowest_s * 1e3:.0f} ms"

    # ---- acts

    def _spawn(self, owned: bool) -> None:
        self.owner: Any = None
        if owned:
            port, self.told = Channel[Any].open()
            self.owner = this_host().spawn_procs(name="owner").spawn("owner", Owner, port)
            self.members = self.owner.spawn.call_one(self.count).get(_UP_S)
        else:
            self.procs = this_host().spawn_procs({"gpus": self.count}, name="members")
            self.members = self.procs.spawn("members", Member)
        self.ranks = list(self.members.pid.call().get(_UP_S).values())
        self.pids += self.ranks
        if owned:
            self.owner_pid = self.owner.pid.call_one().get(_UP_S)
            self.pids.append(self.owner_pid)

    def _victims(self, victim: str) -> frozenset[int]:
        """The ranks that will be dead."""
        if victim in ("template", "guardian", "owner"):
            return frozenset(range(self.count))
        return frozenset(self.random.sample(range(self.count), min(self.count, 2 if victim == "two" else 1)))

    def _kill(self, victim: str, dead: frozenset[int]) -> None:
        client = context().actor_instance
        assert isinstance(client, RootClient)
        if victim in ("template", "guardian"):
            template = client.agent._starter.launcher._template  # type: ignore[attr-defined]
            self.pids += [template.pid, template.guardian]
            os.kill(getattr(template, "pid" if victim == "template" else "guardian"), signal.SIGKILL)
        elif victim == "owner":
            os.kill(self.owner_pid, signal.SIGKILL)
        elif victim == "exit":
            (rank,) = dead
            self.members.slice(gpus=rank).leave.broadcast(self.random.randrange(3))
        else:
            signum = self.random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGABRT))
            for rank in dead:
                os.kill(self.ranks[rank], signum)

    def _traffic(self, seed: float) -> None:
        """Calls of all kinds, one after the other."""
        rand = random.Random(seed)
        every = frozenset(range(self.count))
        for _ in range(rand.randrange(1, 12)):
            rank, other = rand.randrange(self.count), rand.randrange(self.count)
            value = rand.randbytes(rand.choice(SIZES))
            one = self.members.slice(gpus=rank)
            kind = rand.choice(("call", "call_one", "later", "choose", "stream", "relay", "port", "broadcast", "slice"))
            if kind == "call":
                self._add(
                    kind, self.members.echo.call(value), every, lambda got, v=value: all(x == v for x in got.values())
                )
            elif kind == "call_one":
                self._add(kind, one.echo.call_one(value), {rank}, lambda got, v=value: got == v)
            elif kind == "later":
                self._add(kind, one.echo_later.call_one(value), {rank}, lambda got, v=value: got == v)
            elif kind == "choose":
                self._add(kind, self.members.echo.choose(value), every, lambda got, v=value: got == v)
            elif kind == "stream":
                for future in self.members.rank.stream(value):
                    self._add(kind, future, every, lambda got, v=value: got[1] == v)
            elif kind == "relay" and rank < other:  # two that wait for each other would wait for ever
                future = one.relay.call_one(self.members.slice(gpus=other), value)
                self._add(kind, future, {rank, other}, lambda got, v=value: got == v)
            elif kind == "port":
                self._by_port(rank, other)
            elif kind == "broadcast":
                self.members.echo.broadcast(value)
            elif kind == "slice":
                part = self.members.slice(gpus=slice(0, rank + 1))
                self._add(kind, part.echo.call(value), set(range(rank + 1)), lambda got, v=value: len(got) > 0)

    def _by_port(self, rank: int, other: int) -> None:
        """One member has another send to a port of ours, and the receiver takes what comes."""
        port, receiver = Channel[Any].open()
        self.members.slice(gpus=rank).stream_to.broadcast(self.members.slice(gpus=other), port, 3)
        asked = receiver.recv()
        # Nobody promises that a value comes; if the members live, it does.
        self._add("port", asked, {rank, other, -1}, lambda got: got == 0)

    def _add(self, what: str, future: Any, ranks: Any, check: Callable[[Any], bool]) -> None:
        self.calls.append(Call(what, future, frozenset(ranks), check))

    # ---- what must hold

    def _settle(self, dead: frozenset[int], killed_s: float) -> float:
        """Every call ends in time, and as it should; returns when the last one did, in seconds after the death."""
        slowest_s = 0.0
        for call in self.calls:
            concerned = bool(call.ranks & dead)
            if -1 in call.ranks and concerned:
                continue  # a value on a port of one's own: nobody can know that it will not come
            try:
                got = call.future.get(max(0.1, killed_s + LIMIT_S - time.monotonic()))
                assert call.check(got), f"{call.what}: wrong value"
            except (SupervisionError, ActorError) as error:
                assert concerned, f"{call.what} to {sorted(call.ranks)} failed, and {sorted(dead)} died: {error}"
                text = str(error)
                assert any(word in text for word in ("Killed(", "exited with", "owner", "ended")), text
            slowest_s = max(slowest_s, time.monotonic() - killed_s)
        return slowest_s

    def _expected(self, victim: str, dead: frozenset[int], owned: bool) -> tuple[Counter[Any], Counter[Any]]:
        """What the client and the owner hear of."""
        members = Counter(("members", rank) for rank in dead)
        if not owned:
            return members, Counter()
        if victim in ("template", "guardian", "owner"):
            return Counter([("owner", 0)]), Counter()
        return Counter(), members

    def _owner_has_heard(self, victim: str, dead: frozenset[int], owned: bool) -> None:
        client, owner = self._expected(victim, dead, owned)
        self.heard.wait_for(lambda heard: not client - Counter(heard), LIMIT_S)
        self.told_of = Counter(self.told.recv().get(LIMIT_S) for _ in range(owner.total())) if owned else Counter()

    def _nothing_more_was_heard(self, victim: str, dead: frozenset[int], owned: bool) -> None:
        client, owner = self._expected(victim, dead, owned)
        assert Counter(self.heard.values) == client, f"the client heard {self.heard!r}, and should {client}"
        assert self.told_of == owner, f"the owner heard {self.told_of}, and should {owner}"
        if owned:
            with contextlib.suppress(TimeoutError):
                raise AssertionError(f"the owner heard {self.told.recv().get(0)} as well")

    def _stop(self, owned: bool) -> None:
        this_host().stop().get(10)


def main(seed: int, first: int, last: int) -> None:
    failures: Recorder[Any] = Recorder()

    def hook(failure: Any) -> None:
        if failure.mesh_name != "client":  # its own: a broadcast came back from those whom another owns
            failures((failure.mesh_name, failure.crashed_ranks[0]))

    monarch.actor.unhandled_fault_hook = hook
    for number in range(first, last):
        failures._values.clear()
        print(f"round {number}: begins", flush=True)
        print(f"round {number}: {Round(seed, number, failures).run()}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
