"""`monarch rdma check`: what one-sided transfers can use on this machine, tried out, and in words what is wrong."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

from monarch.core import settings
from monarch.errors import MonarchError, NotViable, TransferError
from monarch.onesided.exports import Place, exports
from monarch.onesided.local import local
from monarch.onesided.neighbour import Neighbour, NeighbourGone
from monarch.onesided.path import NotReachable
from monarch.onesided.transfers import preferred
from monarch.verbs import devices
from monarch.verbs.adapter import Opcode
from monarch.verbs.moves import Mover
from monarch.verbs.node import Node, node
from monarch.verbs.registrations import memlock_limit, register

_MIB: Final = 1 << 20
_LIMIT_S: Final = 20.0
_WITH_DEVICE: Final = "ibverbs, where the other host has a device too"

_NEIGHBOUR: Final = """
import sys
from monarch.onesided.exports import exports
place = exports().place
print(place.host, place.pid, place.fd, place.token.hex(), place.table, flush=True)
sys.stdin.read()
"""


class Report:
    """Lines for people, and whether transfers work in the way that was asked for: by the setting rdma_path, and with
    the device that was named, if one was.

    Attributes:
        device_works: whether an RDMA device does; set once all lines were taken, as `works` is.
    """

    device_works = False
    works = False

    def __init__(self, *, needs_device: bool = False) -> None:
        self._path = settings.get("rdma_path")
        self._needs_device = needs_device or self._path == "ibverbs"

    def lines(self) -> Iterator[str]:
        yield "RDMA devices"
        yield from _device_lines()
        yield "Limits"
        yield _limit_line()
        yield "Use of a device"
        try:
            found = node()
        except NotViable as error:
            yield f"  cannot be used: {error}"
        else:
            yield f"  {found.choice.reason}"
            yield f"  binding to libibverbs: {found.binding}"
            yield from self._loopback(found)
        yield "Between processes of this host"
        mapped, not_copied = _shared_memory()
        yield f"  {mapped}{not_copied or 'the kernel copies other memory (process_vm_readv)'}"
        path, reason = preferred()
        yield f"  path: {path}, as {reason}"
        yield "Between hosts"
        yield f"  path: {self._between_hosts()}"
        missing = "no RDMA device can be used" if self._needs_device and not self.device_works else ""
        if self._path == "shm":
            missing = missing or not_copied
        elif path == "none":
            missing = missing or reason
        self.works = not missing
        yield f"What was asked for does not work: {missing}" if missing else "Transfers work"

    def _between_hosts(self) -> str:
        if self._path == "shm":
            return "none, as rdma_path asks for shm"
        if self.device_works and self._path != "tcp":
            return _WITH_DEVICE
        if self._path == "ibverbs":
            return "none, as rdma_path asks for ibverbs"
        if self._path == "auto" and not settings.get("rdma_allow_tcp_fallback"):
            return "none, as rdma_allow_tcp_fallback is off"
        return "tcp, in chunks over the link"

    def _loopback(self, found: Node) -> Iterator[str]:
        try:
            took_s = loopback(found)
        except (MonarchError, OSError, TimeoutError) as error:
            yield f"  a transfer to this process itself failed: {error}"
        else:
            self.device_works = True
            yield f"  a transfer of 4 MiB to this process itself: {4 * _MIB / took_s / 1e9:.2f} GB/s"


def _device_lines() -> Iterator[str]:
    ports = devices.ports()
    if not ports:
        yield f"  none: {devices.SYSFS} is empty. A software device will do: see docs/rdma.md"
    for port in ports:
        yield f"  {port}: {port.state}, {port.link_layer}" + (f", LID {port.lid}" if port.lid else "")
        for gid in port.gids:
            yield f"    GID {gid.index}: {gid}"


def _limit_line() -> str:
    limit = memlock_limit()
    if limit is None:
        return "  memory that may be locked (`ulimit -l`): any amount"
    few = ", which is little: larger buffers cannot be registered" if limit < 64 * _MIB else ""
    return f"  memory that may be locked (`ulimit -l`): {limit} bytes{few}"


def loopback(found: Node) -> float:
    """READ 4 MiB over two queue pairs of this process, and look at each byte; seconds.

    Raises:
        TransferError, OSError, TimeoutError: it does not work.
    """
    source, target = bytearray(bytes(range(256)) * (4 * _MIB // 256)), bytearray(4 * _MIB)
    there, here = local(source), local(target)
    passive = found.wire(2)
    mover = Mover(found)
    regions = [register(found.device, memory.address, memory.size_bytes) for memory in (there, here)]
    try:
        passive.connect(mover.wire.mine)
        mover.wire.connect(passive.mine)
        began_s = time.monotonic()
        mover.move(
            Opcode.READ,
            here.address,
            regions[1].lkey,
            there.address,
            regions[0].rkey,
            here.size_bytes,
            began_s + _LIMIT_S,
        )
        took_s = time.monotonic() - began_s
    finally:
        passive.close()
        mover.close()
        for region in regions:
            region.close()
    if source != target:
        raise TransferError("what arrived is not what was sent")
    return took_s


def _shared_memory() -> tuple[str, str]:
    """What this process can use of the memory of another one, which is started for it, and why not all, or ""."""
    if not exports().place.host:
        return "", "shared memory cannot be used: the kernel has no memfd, or no /proc"
    other = subprocess.Popen(
        [sys.executable, "-c", _NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        host, pid, fd, token, table = other.stdout.readline().split()
        neighbour = Neighbour(Place(host, int(pid), int(fd), bytes.fromhex(token), int(table)))
        mapped = "memory of monarch.rdma.empty is mapped; "
        if neighbour.no_copying:
            return mapped, f"other memory cannot be copied: {neighbour.no_copying}"
        found = ctypes.create_string_buffer(16)
        neighbour.read(ctypes.addressof(found), int(table), 16)
        return mapped, ""
    except (NotReachable, NeighbourGone, TransferError, ValueError) as error:
        return "", f"shared memory cannot be used: {error}"
    finally:
        other.communicate()
