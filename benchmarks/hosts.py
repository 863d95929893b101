"""`python -m benchmarks.hosts`: several hosts, which are network namespaces of this machine.

Needs root, and `ip` of iproute2. What is compared is measured in turns, in one run. Where the CPUs are the limit, the
table of a cast says whose time it was.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from statistics import median
from typing import Any, Final

from attrs import define

from monarch.actor import Actor, HostMesh, attach_to_workers, endpoint
from monarch.testing import fresh_client
from tests.mesh import netns
from tests.mesh.workers import worker

PORT: Final = 22222
SECRET: Final = {"MONARCH_SECRET": "a secret of these benchmarks, long enough"}
LIMIT_S: Final = 60.0

WORKERS: Final = 16
HOSTS: Final = 4
MEMBERS: Final = 64
BULK_BYTES: Final = 256 << 20
_IN_A_ROW: Final = 5  # to read the clocks of so many processes takes the caches from them
_PAYLOADS: Final = (0, 1 << 10, 64 << 10, 1 << 20)

_RECEIVER: Final = """
import socket, sys
listener = socket.create_server(("", int(sys.argv[1])))
print("ready", flush=True)
sock, _ = listener.accept()
buffer = memoryview(bytearray(int(sys.argv[2])))
while True:
    left = buffer
    while left:
        got = sock.recv_into(left)
        if not got:
            sys.exit()
        left = left[got:]
    sock.send(b"k")
"""
"""The other end of the bare loop. Its buffer is the same each time."""


class Member(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def take(self, data: Any) -> int:
        return len(data)


class Machines:
    """Network namespaces with a worker each, and a client outside of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._stack = ExitStack()
        self.machines: list[netns.Host] = []
        self.worker_pids: list[int] = []

    def __enter__(self) -> Machines:
        try:
            self.machines = self._stack.enter_context(netns.network(self._count))
            for machine, url in zip(self.machines, self.urls, strict=True):
                served = self._stack.enter_context(worker(url, SECRET, machine.prefix))
                self.worker_pids.append(served.pid)
            for machine in self.machines:
                _wait_until_up(machine)
            os.environ.update(SECRET)
            self._stack.enter_context(fresh_client("auto"))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def urls(self) -> list[str]:
        return [f"tcp://{machine.address}:{PORT}" for machine in self.machines]

    def attach(self) -> HostMesh:
        hosts = attach_to_workers(workers=self.urls)
        hosts.initialized.get(LIMIT_S)
        return hosts


def _wait_until_up(machine: netns.Host) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        try:
            socket.create_connection((machine.address, PORT), LIMIT_S).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def timed(run: Callable[[], Any]) -> float:
    """Seconds."""
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


# ---- attaching


def attaching(rounds: int) -> None:
    """From `attach_to_workers` until all have answered; the workers are up, the client is new."""
    print(f"attaching to {WORKERS} workers:")
    with Machines(WORKERS) as machines:
        times_s = []
        for _ in range(rounds + 1):
            began_s = time.perf_counter()
            hosts = machines.attach()
            times_s.append(time.perf_counter() - began_s)
            hosts.stop().get(LIMIT_S)
    print(f"  {times_s[0] * 1e3:.0f} ms the first time, {median(times_s[1:]) * 1e3:.0f} ms from then on")


# ---- casting


@define(frozen=True)
class Spent:
    """Of one way to reach all members, the mean over its rounds.

    Attributes:
        wall_s: median.
        cpus_s: by whose CPU time it was.
    """

    wall_s: float
    cpus_s: dict[str, float]


def _cpu_s(pids: Sequence[int]) -> float:
    """CPU time that these processes have used, over all their threads that still run."""
    used_ns = 0
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                used_ns += int(file.read().split()[0])
    return used_ns / 1e9


def casting(rounds: int) -> None:
    """A cast with its answers, and as many calls that are started together one by one."""
    print(f"{MEMBERS} members on {HOSTS} hosts, in ms (CPU time: caller + agents + members):")
    with Machines(HOSTS) as machines:
        hosts = machines.attach()
        for payload_bytes in _PAYLOADS:
            _cast(machines, hosts, bytes(payload_bytes), rounds)


def _cast(machines: Machines, hosts: HostMesh, data: bytes, rounds: int) -> None:
    """To members that are new, so that nobody has a link to them."""
    each = MEMBERS // HOSTS
    procs = hosts.spawn_procs({"gpus": each})
    members = procs.spawn("member", Member)
    pids = [*members.pid.call().get(LIMIT_S).values()]
    singles = [members.slice(hosts=host, gpus=gpu) for host, gpu in product(range(HOSTS), range(each))]

    def cast() -> None:
        members.take.call(data).get(LIMIT_S)

    def one_by_one() -> None:
        for future in [single.take.call_one(data) for single in singles]:
            future.get(LIMIT_S)

    ways = {"cast": cast, "one by one": one_by_one}
    first_s = {name: timed(run) for name, run in ways.items()}
    spent = _in_turns(ways, {"caller": [os.getpid()], "agents": machines.worker_pids, "members": pids}, rounds)
    for name, of in spent.items():
        cpus = " + ".join(f"{used_s * 1e3:.1f}" for used_s in of.cpus_s.values())
        times = f"first {first_s[name] * 1e3:6.1f}, then {of.wall_s * 1e3:6.1f} ({cpus})"
        print(f"  {len(data):>9,} B, {name:<10}: {times}")
    first = first_s["one by one"] / first_s["cast"]
    then = spent["one by one"].wall_s / spent["cast"].wall_s
    print(f"  {len(data):>9,} B, so many times as fast: first {first:.1f}, then {then:.2f}")
    procs.stop().get(LIMIT_S)


def _in_turns(ways: dict[str, Callable[[], None]], who: dict[str, Sequence[int]], rounds: int) -> dict[str, Spent]:
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    cpus_s = {name: dict.fromkeys(who, 0.0) for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            before = {each: _cpu_s(pids) for each, pids in who.items()}
            times_s[name] += [timed(run) for _ in range(_IN_A_ROW)]
            for each, pids in who.items():
                cpus_s[name][each] += (_cpu_s(pids) - before[each]) / rounds / _IN_A_ROW
    return {name: Spent(median(times_s[name]), cpus_s[name]) for name in ways}


# ---- bulk


@contextmanager
def _bare(machine: netns.Host, size_bytes: int) -> Iterator[Callable[[bytes], None]]:
    """Sends bytes to a process on `machine` with sendmsg, and waits until it has them all with recv_into."""
    command = [*machine.prefix, sys.executable, "-c", _RECEIVER, str(PORT + 1), str(size_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        with socket.create_connection((machine.address, PORT + 1)) as sock:

            def send(data: bytes) -> None:
                left = memoryview(data)
                while left:
                    left = left[sock.sendmsg([left]) :]
                assert sock.recv(1) == b"k"

            yield send


def bulk(rounds: int) -> None:
    """One argument of 256 MiB to a process on another host, and its answer."""
    import torch

    print(f"{BULK_BYTES >> 20} MiB to another host, in GB/s:")
    with Machines(1) as machines, _bare(machines.machines[0], BULK_BYTES) as bare:
        member = machines.attach().spawn_procs().spawn("member", Member)
        array = torch.randint(256, (BULK_BYTES,), dtype=torch.uint8)  # untouched zeros are all the same page
        data = array.numpy().tobytes()
        ways: dict[str, Callable[[], object]] = {
            "bare sendmsg and recv_into": lambda: bare(data),
            "a tensor": lambda: member.take.call_one(array).get(LIMIT_S),
            "bytes": lambda: member.take.call_one(data).get(LIMIT_S),
        }
        times_s: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, run in ways.items():
                took_s = timed(run)
                if turn:
                    times_s[name].append(took_s)
    bare_s = median(times_s["bare sendmsg and recv_into"])
    for name, found_s in times_s.items():
        print(f"  {name:<27}{BULK_BYTES / median(found_s) / 1e9:6.2f}, {bare_s / median(found_s):.2f} of the bare loop")


BENCHMARKS: Final[dict[str, Callable[[int], None]]] = {"attach": attaching, "cast": casting, "bulk": bulk}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("which", nargs="*", choices=[*BENCHMARKS, []], default=[], metavar="WHICH")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    why_not = netns.why_not()
    if why_not:
        parser.error(why_not)
    for name in options.which or BENCHMARKS:
        BENCHMARKS[name](options.rounds)


if __name__ == "__main__":
    main()
