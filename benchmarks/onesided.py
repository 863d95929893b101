"""One-sided transfers, and frames over an RDMA device, each beside what it is made of.

    python -m benchmarks.onesided [GROUP ...]

- `copies`: reads from another process of this host beside `memcpy`, also while the owner computes in pure Python;
- `chunks`: the same over the link between the processes;
- `device`: READs of an RDMA device beside a loop over a bare queue pair, also while the owner holds the lock of
  its interpreter;
- `frames`: round trips over the transport ibverbs beside those of `ibv_rc_pingpong` with events.

What is compared is measured in turns, so that both meet the same load.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from attrs import define

from benchmarks import beside
from benchmarks.beside import Row
from benchmarks.clock import median, now_s, timed
from benchmarks.figures import GIB, MIB, in_words
from monarch.actor import Actor, Channel, endpoint, this_host
from monarch.config import configure
from monarch.errors import LinkClosed, LinkSevered
from monarch.onesided.local import copy, local
from monarch.rdma import RDMABuffer, empty, is_ibverbs_available
from monarch.transports import registry
from monarch.verbs.adapter import SUCCESS, Opcode, Peer, QueuePair
from monarch.verbs.moves import IN_FLIGHT, PIECE_BYTES
from monarch.verbs.node import Node, Wire, node
from monarch.verbs.registrations import register

ROUNDS: Final = 5
_LIMIT_S: Final = 300
_FRAME: Final = b"x" * 64
_SECRET: Final = b"benchmark secret"
_TOOL: Final = "ibv_rc_pingpong"


def pages(size_bytes: int, fill: int) -> mmap.mmap:
    """Memory that has been touched, in pages as the allocator gives them."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset(local(memory).address, fill, size_bytes)
    return memory


class Owner(Actor):
    """Has memory, and a byte that ends what it does meanwhile."""

    def __init__(self) -> None:
        self.end = empty(8)
        self.held: list[Any] = []

    @endpoint
    def offer(self, size_bytes: int, mapped: bool) -> tuple[RDMABuffer, RDMABuffer]:
        """Memory of `monarch.rdma.empty`, or any other; and the byte."""
        if mapped:
            memory: Any = empty(size_bytes)
            ctypes.memset(local(memory).address, 7, size_bytes)
        else:
            memory = pages(size_bytes, 7)
        for each in self.held:
            each.drop().get(_LIMIT_S)
        self.held = [RDMABuffer(memory), RDMABuffer(self.end)]
        return self.held[0], self.held[1]

    @endpoint
    def spin(self, started: Any) -> None:
        """Compute in pure Python."""
        self.end[0], rounds = 0, 0
        started.send(None)
        while not self.end[0]:
            rounds += 1

    @endpoint
    def hold(self, started: Any) -> None:
        """Hold the interpreter lock, and use no CPU."""
        self.end[0] = 0
        usleep = ctypes.PyDLL(None).usleep
        before = sys.getswitchinterval()
        sys.setswitchinterval(_LIMIT_S)
        started.send(None)
        while not self.end[0]:
            usleep(1000)
        sys.setswitchinterval(before)

    @endpoint
    def connect(self, peer: tuple[Any, ...], size_bytes: int) -> tuple[tuple[Any, ...], int, int]:
        """A bare queue pair, and memory to READ from; its address and key."""
        memory = pages(size_bytes, 7)
        wire, region = node().wire(IN_FLIGHT), register(node().device, local(memory).address, size_bytes)
        wire.connect(Peer(*peer))
        self.held += [_Bare(memory, wire, region)]
        return _plain(wire.mine), local(memory).address, region.rkey


@define
class _Bare:
    """What a bare queue pair needs at the owner."""

    memory: mmap.mmap
    wire: Wire
    region: Any

    def drop(self) -> _Bare:
        self.wire.close()
        self.region.close()
        return self

    def get(self, timeout_s: float) -> None: ...


class Reader(Actor):
    """Reads, and does in turns with it what it is compared with."""

    def __init__(self) -> None:
        self.memory = pages(mmap.PAGESIZE, 1)

    @endpoint
    def read(self, buffer: RDMABuffer, times: int, memcpy: bool) -> tuple[list[float], list[float]]:
        """Seconds of each read, and of each `memcpy`."""
        target = self._target(buffer.size())
        source = local(pages(buffer.size() if memcpy else 1, 2))
        reads, copies = [], []
        for _ in range(times):
            if memcpy:
                copies.append(timed(lambda: copy(target.address, source.address, buffer.size())))
            reads.append(timed(lambda: buffer.read_into(self.memory).get()))
        return reads, copies

    def _target(self, size_bytes: int) -> Any:
        if len(self.memory) != size_bytes:
            self.memory = pages(size_bytes, 1)
        return local(self.memory)

    @endpoint
    def set(self, end: RDMABuffer) -> None:
        end.write_from(b"\x01" * 8).get()

    @endpoint
    def read_bare(self, owner: Owner, buffer: RDMABuffer, times: int) -> tuple[list[float], list[float]]:
        """Seconds of each read, and of each loop over a bare queue pair."""
        size_bytes = buffer.size()
        target, device = self._target(size_bytes), node()
        wire, region = device.wire(IN_FLIGHT), register(device.device, target.address, size_bytes)
        theirs, address, rkey = owner.connect.call_one(_plain(wire.mine), size_bytes).get(_LIMIT_S)
        wire.connect(Peer(*theirs))
        buffer.read_into(self.memory).get()
        reads, loops = [], []
        for _ in range(times):
            once = lambda: bare_read(wire.queue_pair, target.address, region.lkey, address, rkey, size_bytes)  # noqa: E731
            loops.append(timed(once))
            reads.append(timed(lambda: buffer.read_into(self.memory).get()))
        wire.close()
        region.close()
        return reads, loops


def _plain(peer: Peer) -> tuple[Any, ...]:
    return peer.number, peer.psn, peer.gid, peer.lid, peer.mtu


def bare_read(queue_pair: QueuePair, here: int, lkey: int, there: int, rkey: int, size_bytes: int) -> None:
    """READ as much as fits at a time, and sleep on the completion channel: no more than verbs need."""
    offset = pending = 0
    while offset < size_bytes or pending:
        while offset < size_bytes and pending < IN_FLIGHT:
            size = min(PIECE_BYTES, size_bytes - offset)
            queue_pair.post_send(Opcode.READ, 0, here + offset, size, lkey, there + offset, rkey)
            offset += size
            pending += 1
        done = queue_pair.poll()
        if not done:
            queue_pair.arm()
            done = queue_pair.poll()
        if not done:
            select.select([queue_pair.fileno()], [], [])
            queue_pair.take_event()
        assert all(each.status == SUCCESS for each in done), done
        pending -= len(done)


@contextmanager
def actors(path: str) -> Iterator[tuple[Any, Any]]:
    """An owner and a reader, in a process each, between which transfers take that path."""
    configure(rdma_path=path)
    procs = this_host().spawn_procs({"procs": 2})
    yield procs.slice(procs=0).spawn("owner", Owner), procs.slice(procs=1).spawn("reader", Reader)
    procs.stop().get()


def _while(owner: Any, reader: Any, what: str, offered: Sequence[RDMABuffer], times: int) -> tuple[float, float]:
    """The median of reads while the owner does something, and of those, in turns with them, while it does nothing."""
    buffer, end = offered
    reader.set.call_one(end).get(_LIMIT_S)  # a first transfer asks the owner for its key
    idle, busy = [], []
    for _ in range(times):
        idle += reader.read.call_one(buffer, 3, False).get(_LIMIT_S)[0]
        started, receiver = Channel[None].open()
        doing = getattr(owner, what).call_one(started)
        receiver.recv().get(_LIMIT_S)
        busy += reader.read.call_one(buffer, 3, False).get(_LIMIT_S)[0]
        reader.set.call_one(end).get(_LIMIT_S)
        doing.get(_LIMIT_S)
    return median(busy), median(idle)


def copies(sizes: Sequence[int] = (64 * MIB, GIB), times: int = ROUNDS) -> Iterator[Row]:
    with actors("shm") as (owner, reader):
        for size_bytes in sizes:
            for mapped, kind in ((True, "of monarch.rdma.empty"), (False, "of any kind")):
                offered = owner.offer.call_one(size_bytes, mapped).get(_LIMIT_S)
                reader.read.call_one(offered[0], 2, False).get(_LIMIT_S)
                reads, memcpys = reader.read.call_one(offered[0], times, True).get(_LIMIT_S)
                title = f"read of {in_words(size_bytes)} {kind}"
                yield Row(title, median(reads), "memcpy", median(memcpys), size_bytes)
                if size_bytes == sizes[0]:
                    busy_s, idle_s = _while(owner, reader, "spin", offered, times)
                    yield Row(f"{title}, the owner computes", busy_s, "the owner is idle", idle_s, size_bytes)


def chunks(size_bytes: int = 64 * MIB, times: int = ROUNDS) -> Iterator[Row]:
    with actors("tcp") as (owner, reader):
        buffer, _ = owner.offer.call_one(size_bytes, True).get(_LIMIT_S)
        reader.read.call_one(buffer, 2, False).get(_LIMIT_S)
        reads, memcpys = reader.read.call_one(buffer, times, True).get(_LIMIT_S)
        yield Row(f"read of {in_words(size_bytes)} over the link", median(reads), "memcpy", median(memcpys), size_bytes)


def device(size_bytes: int = 16 * MIB, times: int = 2 * ROUNDS) -> Iterator[Row]:
    with actors("ibverbs") as (owner, reader):
        offered = owner.offer.call_one(size_bytes, False).get(_LIMIT_S)
        reads, loops = reader.read_bare.call_one(owner, offered[0], times).get(_LIMIT_S)
        title = f"READ of {in_words(size_bytes)} by {node().binding}"
        yield Row(title, median(reads), "a bare queue pair", median(loops), size_bytes)
        busy_s, idle_s = _while(owner, reader, "hold", offered, times)
        yield Row(f"{title}, the owner holds the lock", busy_s, "the owner is idle", idle_s, size_bytes)


def frames(trips: int = 1000, times: int = ROUNDS) -> Iterator[Row]:
    transport = registry.get("ibverbs")
    listener = transport.listen("ibverbs://127.0.0.1:0", _SECRET)
    other = multiprocessing.get_context("spawn").Process(target=_echo, args=(listener.url,))
    other.start()
    accepted: list[Any] = []
    while not accepted:
        select.select([listener.fileno()], [], [], 1)
        accepted = list(listener.accept_nowait())
    link = accepted[0]
    ours, theirs = [], []
    for _ in range(times):
        ours.append(median([timed(lambda: _round_trip(link)) for _ in range(trips)]))
        theirs.append(pingpong(node(), trips))
    link.abort()
    listener.close()
    other.join()
    title = f"round trip of a frame of {len(_FRAME)} bytes by {node().binding}"
    yield Row(title, median(ours), f"{_TOOL} -e", median(theirs))


def _round_trip(link: Any) -> None:
    link.send_nowait([[_FRAME]])
    while not link.recv_nowait():
        _wait(link)


def _wait(link: Any) -> None:
    select.select([link.fileno()], [], [])
    if link.blocked:
        link.flush_nowait()


def _echo(url: str) -> None:
    link = registry.get("ibverbs").dial(url, _SECRET, 60)
    try:
        while True:
            for frame in link.recv_nowait():
                link.send_nowait([frame])
            _wait(link)
    except (LinkClosed, LinkSevered):
        pass


def pingpong(device: Node, trips: int) -> float:
    """Seconds of a round trip between two processes in C, which sleep on the completion channel."""
    choice = device.choice
    command = [_TOOL, "-e", "-s", str(len(_FRAME)), "-n", str(trips), "-d", choice.port.device]
    command += ["-i", str(choice.port.number), *(["-g", str(choice.gid.index)] if choice.gid is not None else [])]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        end_s = now_s() + _LIMIT_S
        while now_s() < end_s:
            client = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, check=False)
            if told := re.search(r"iters in .* = ([\d.]+) usec/iter", client.stdout):
                return float(told[1]) * 1e-6
            if server.poll() is not None:
                break
            time.sleep(0.05)  # it does not listen yet
        server.kill()
    raise RuntimeError(f"{_TOOL} does not work: {client.stderr}")


GROUPS: Final[dict[str, Callable[[], Iterator[Row]]]] = {
    "copies": copies,
    "chunks": chunks,
    "device": device,
    "frames": frames,
}


def why_not(group: str) -> str:
    """Why a group cannot be measured here; "" where it can."""
    if group in ("device", "frames") and not is_ibverbs_available():
        return "there is no RDMA device: `monarch rdma check` says more"
    if group == "frames" and shutil.which(_TOOL) is None:
        return f"{_TOOL} is missing: it comes with the package ibverbs-utils"
    return ""


def main() -> None:
    beside.main("onesided", __doc__, GROUPS, why_not)


if __name__ == "__main__":
    from benchmarks import onesided  # by its name, which the other processes know, too

    onesided.main()
