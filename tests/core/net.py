"""Processes in one process, for tests of gateways, instances and procs: made with links, cut, and seen to the end."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.ids import ProcId, Uid
from monarch.core.limits import Limits
from monarch.core.mailbox import Mailbox
from monarch.core.monitor import Down
from monarch.core.peer import Peer
from monarch.core.proc import Proc
from monarch.transports import registry
from monarch.transports.faults import Faults
from monarch.transports.inproc import InprocLink
from tests.until import LIMIT_S as LIMIT_S
from tests.until import until as until

SECRET = b"s" * 32


def take(mailbox: Mailbox) -> Envelope | None:
    """As an actor does; None where nothing can be taken."""
    return mailbox.calls.popleft() if mailbox.calls else None


class Collector:
    """What arrives at a port."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.bounces: list[tuple[bytes, Down]] = []
        self.gone: list[tuple[int, Down]] = []
        self.gate = threading.Event()  # cleared: `deliver` blocks, and with it whoever pumps
        self.gate.set()

    def deliver(self, envelope: Envelope) -> None:
        self.gate.wait(LIMIT_S)
        self.got.append(bytes(envelope.parts[0]))

    def bounced(self, envelope: Envelope, down: Down) -> None:
        self.bounces.append((bytes(envelope.parts[0]) if envelope.parts else b"", down))

    def proc_gone(self, key: int, down: Down) -> None:
        self.gone.append((key, down))


class Net:
    """Makes procs over one transport, and closes them."""

    def __init__(self, scheme: str = "inproc", driver: str = "caller") -> None:
        self.scheme, self.driver = scheme, driver
        self.transport = registry.get(scheme)
        self.procs: list[Proc] = []

    def proc(self, label: str = "p", keeper: ProcId | None = None, transport: Any = None, **limits: Any) -> Proc:
        proc = Proc(
            ProcId(Uid.instance(label), "", keeper),
            transport if transport is not None else self.transport,
            SECRET,
            driver=self.driver,
            limits=Limits(**limits),
        )
        proc.gateway.listen(f"{self.scheme}://")
        self.procs.append(proc)
        return proc

    def close(self) -> None:
        for proc in self.procs:
            proc.close(0.5)

    def port(self, proc: Proc) -> tuple[int, Collector]:
        number, collector = proc.new_port(), Collector()
        proc.ports[number] = collector
        return number, collector


def value(src: Proc, dst: Proc, port: int, data: bytes, reply_port: int = 0) -> Envelope:
    return Envelope(Kind.PORT, dst.key, 0, port, src.key, 0, [data], Flag.SILENT, reply_port=reply_port)


def send(src: Proc, dst: Proc, port: int, data: bytes, reply_port: int = 0, may_wait: bool = False) -> None:
    src.send(value(src, dst, port, data, reply_port), dst.proc_id, may_wait=may_wait)


def peer(proc: Proc, other: Proc) -> Peer:
    return proc.gateway.peers[other.key]


def cut(proc: Proc, other: Proc) -> bool:
    """Break the link between two processes, if there is one."""
    found = proc.gateway.peers.get(other.key)
    link: Any = found.link if found is not None else None
    if link is None:
        return False
    if isinstance(link, InprocLink):
        Faults(link).cut()
    else:
        try:
            getattr(link, "_stream", link)._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
