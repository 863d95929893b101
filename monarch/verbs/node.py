"""This process on its RDMA device: opened once, at the first use.

A fork shares its parent's device descriptors, and would destroy the parent's queue pairs with its own copies of the
objects. So in a forked child they are replaced by /dev/null: there, and only there, every call fails.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import threading
import time
import weakref
from typing import Final

from monarch.errors import NotViable
from monarch.log import get_logger
from monarch.verbs import devices
from monarch.verbs.adapter import Peer, QueuePair, Timing, find_binding
from monarch.verbs.registrations import Registrations

log = get_logger("monarch.verbs")

_GID_LIMIT_S: Final = 1.0  # an address comes into the table some ms after it is set
_HOP_LIMIT: Final = 64


class Node:
    """See the module. Thread-safe.

    Attributes:
        choice: device, port and GID, and why.
        binding: the name of the binding to libibverbs.
    """

    def __init__(self, target: str, binding_name: str = "auto") -> None:
        """Raises: NotViable, with the reason in words."""
        self.choice = _choose(target)
        binding = find_binding(binding_name)
        self.binding = binding.name
        try:
            self.device = binding.open_device(self.choice.port.device, self.choice.port.number)
            self._mtu = self.device.mtu()
        except OSError as error:
            name = self.choice.port.device
            raise NotViable(f"{name} cannot be opened: {error}; is /dev/infiniband readable for this user?") from error
        self.registrations = Registrations(self.device)
        _opened.append(self.choice.port.device)
        self._queue_pairs: weakref.WeakSet[Wire] = weakref.WeakSet()
        log.info("verbs.device", binding=self.binding, choice=self.choice.reason)

    def wire(self, depth: int) -> Wire:
        """A queue pair that is not connected yet. Raises: OSError."""
        wire = Wire(self, self.device.queue_pair(depth), self._mtu)
        self._queue_pairs.add(wire)
        return wire

    def close(self) -> None:
        """In the order that libibverbs wants."""
        for wire in list(self._queue_pairs):
            wire.close()
        self.registrations.close()
        with contextlib.suppress(Exception):  # the program ends, and somebody still has memory registered
            self.device.close()


class Wire:
    """One queue pair between this process and another, for as long as it works."""

    def __init__(self, node: Node, queue_pair: QueuePair, mtu: int) -> None:
        self.node, self.queue_pair = node, queue_pair
        gid = node.choice.gid
        self.mine = Peer(
            queue_pair.number, random.getrandbits(24), gid.gid if gid is not None else "", node.choice.port.lid, mtu
        )
        self.is_closed = False
        self._lock = threading.Lock()

    def connect(self, peer: Peer, timing: Timing | None = None) -> None:
        """Join with the queue pair of the other side, which does the same with `mine`. Blocks. Raises: OSError."""
        gid = self.node.choice.gid
        self.queue_pair.connect(
            peer,
            gid.index if gid is not None else 0,
            _HOP_LIMIT,
            self.mine.psn,
            min(peer.mtu, self.mine.mtu),
            timing or Timing(),
        )

    def close(self) -> None:
        """Idempotent. The device touches no memory for this queue pair any more once it has returned."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            self.queue_pair.close()


def _choose(target: str) -> devices.Choice:
    deadline_s = time.monotonic() + _GID_LIMIT_S
    while True:
        found = devices.ports()
        try:
            return devices.choose(found, target)
        except NotViable:
            if not any(port.state == "ACTIVE" for port in found) or time.monotonic() > deadline_s:
                raise
        time.sleep(0.05)


_nodes: dict[tuple[str, str], Node | str] = {}  # or why there is none: an error would keep the frames that it came from
_lock = threading.Lock()


_opened: list[str] = []  # devices that this process has used
_preferred = ("", "auto")
_disabled = False


def prefer(target: str, binding: str, *, disabled: bool = False) -> None:
    """Which device and binding `node` takes from now on (see `devices.choose` and `find_binding`), or none."""
    global _preferred, _disabled
    _preferred, _disabled = (target, binding), disabled


def node() -> Node:
    """The node of this process; opened at first use. A refusal is remembered, too.

    Raises:
        NotViable: there is none; says why.
    """
    if _disabled:
        raise NotViable("rdma_disable_ibverbs is set")
    preferred = _preferred
    with _lock:
        found = _nodes.get(preferred)
        if found is None:
            try:
                found = Node(*preferred)
            except NotViable as error:
                found = str(error)
            _nodes[preferred] = found
    if isinstance(found, str):
        raise NotViable(found)
    return found


@atexit.register
def _close_all() -> None:
    for each in _nodes.values():
        if isinstance(each, Node):
            each.close()
    _nodes.clear()


_of_the_parent: list[Node | str] = []  # in a forked child, whose end is not to close them


def _in_forked_child() -> None:
    if not _opened:
        return
    _of_the_parent.extend(_nodes.values())
    _nodes.clear()
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/infiniband/"):
                os.dup2(null, int(name), inheritable=False)
        except OSError:
            continue
    os.close(null)


os.register_at_fork(after_in_child=_in_forked_child)
