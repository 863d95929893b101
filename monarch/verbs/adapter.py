"""What is needed of a binding to libibverbs: some twenty operations, the same over each. Finds a binding that works.

Reliable connected queue pairs with one completion queue each. All calls may be made from any thread, one at a time for
each queue pair. Only what says so blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol

from attrs import define

from monarch.errors import NotViable


class Opcode(Enum):
    SEND = "send"
    WRITE = "write"
    READ = "read"
    FETCH_ADD = "fetch_add"
    COMPARE_AND_SWAP = "compare_and_swap"


POLLED: Final = 16

SUCCESS: Final = 0
FLUSHED: Final = 5
REMOTE_ACCESS: Final = 10

# Source: infiniband/verbs.h, `enum ibv_wc_status`
_STATUS: Final = {
    1: "local length error",
    2: "local queue pair error",
    4: "local protection error",
    5: "flushed, because the queue pair is in error",
    9: "remote invalid request",
    10: "remote access error: the memory is not registered there any more, or does not allow it",
    11: "remote operation error",
    12: "the peer does not answer: it is gone, or the cable is out (transport retries exceeded)",
    13: "the peer was not ready to receive (RNR retries exceeded)",
}


class Completion(NamedTuple):
    """The end of a work request."""

    wr_id: int
    status: int
    size_bytes: int

    @property
    def text(self) -> str:
        return f"status {self.status}, {_STATUS.get(self.status, 'unknown')}"


@define(frozen=True)
class Timing:
    """When a queue pair gives up. The time-out is about `4.096 us * 2**timeout * (retries + 1)`: 1.9 s here."""

    timeout: int = 16
    retries: int = 6  # not 7: that is for ever with soft-RoCE
    rnr_retries: int = 6  # finite: credits see to it that a peer is ready, so that a bug is no hang


@define(frozen=True)
class Peer:
    """A queue pair as the other side must know it. A plain value."""

    number: int
    psn: int
    gid: str
    lid: int
    mtu: int


class Region(Protocol):
    """Registered memory."""

    @property
    def lkey(self) -> int: ...

    @property
    def rkey(self) -> int: ...

    def close(self) -> None: ...


class QueuePair(Protocol):
    """A reliable connected queue pair. After any error it is of no use: close it and make another."""

    @property
    def number(self) -> int: ...

    def fileno(self) -> int:
        """Readable when there is a completion event."""
        ...

    def connect(self, peer: Peer, gid_index: int, hop_limit: int, psn: int, mtu: int, timing: Timing) -> None:
        """INIT, RTR, RTS. Blocks while the kernel resolves the peer: a second where a first request is lost."""
        ...

    def receive(self, wr_id: int, address: int, size_bytes: int, lkey: int) -> Any:
        """A request for `post_recv`, to be posted any number of times."""
        ...

    def post_recv(self, receive: Any) -> None: ...

    def post_send(
        self,
        opcode: Opcode,
        wr_id: int,
        address: int,
        size_bytes: int,
        lkey: int,
        remote: int = 0,
        rkey: int = 0,
        compare_add: int = 0,
        swap: int = 0,
        signalled: bool = True,
    ) -> None:
        """Unless it is `signalled`, it completes silently, with the next one that is; an error is told in any case."""
        ...

    def poll(self) -> list[Completion]:
        """What has completed, `POLLED` at most."""
        ...

    def arm(self) -> None:
        """Have the next completion make an event."""
        ...

    def take_event(self) -> bool:
        """Take one event; False when there is none."""
        ...

    def to_error(self) -> None:
        """Everything that is posted completes as flushed."""
        ...

    def close(self) -> None: ...


class OpenDevice(Protocol):
    """A device in use."""

    def mtu(self) -> int:
        """The active MTU of the port, as the number that libibverbs has for it."""
        ...

    def register(self, address: int, size_bytes: int) -> Region:
        """Pin memory for local and remote use. Raises: OSError."""
        ...

    def register_dmabuf(self, fd: int, offset: int, size_bytes: int, address: int) -> Region:
        """A part of a dma-buf, which others find at `address`. Raises: OSError, also where the binding cannot."""
        ...

    def queue_pair(self, depth: int) -> QueuePair:
        """One with room for `depth` sends and as many receives."""
        ...

    def close(self) -> None: ...


@define(frozen=True)
class Binding:
    """A way to libibverbs. `open_device(device, port)` raises OSError."""

    name: str
    open_device: Callable[[str, int], OpenDevice]


_BINDINGS: Final = {
    "ibverbs": ("monarch.verbs.with_ibverbs", "pip install 'monarch-actors[rdma]'"),
    "pyverbs": ("monarch.verbs.with_pyverbs", "the package python3-pyverbs of the distribution"),
}


def find_binding(wanted: str = "auto") -> Binding:
    """The one that is wanted; of all, the first that can be imported.

    Raises:
        NotViable: there is none that works, and why not.
    """
    refused = []
    for name in _BINDINGS if wanted == "auto" else [wanted]:
        module, source = _BINDINGS[name]
        try:
            binding: Binding = import_module(module).load()
        except ImportError as error:
            refused.append(f"{name} cannot be imported ({error}; it comes with {source})")
        else:
            return binding
    raise NotViable(f"no binding to libibverbs: {'; '.join(refused)}")
