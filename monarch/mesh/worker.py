"""The worker of a host: serves any number of clients, one after the other or at once, until it is told to end.

Each client names the agents that work for it (`HostAgent`), and the worker makes them: a link whose hello asks for an
agent that is not there makes it, and is handed to it with all that follows, as is every later link that names it. So a
host has one port, and what a client does there is its own: its settings, its processes, and their end when it is gone.
Agents are `MeshProc`s in the worker's process. No code of users runs here, so a worker is never busy with it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from attrs import define, field

from monarch.core import settings
from monarch.core.address import EVERYWHERE, Place, domain_of
from monarch.core.envelope import Envelope
from monarch.core.ids import ProcId, Uid
from monarch.core.links import Links
from monarch.core.monitor import Down
from monarch.core.poller import Poller
from monarch.core.protocol import Hello
from monarch.log import get_logger
from monarch.mesh.display import Display
from monarch.mesh.forwarding import Forwarder
from monarch.mesh.host import HostAgent
from monarch.mesh.inspector import Collector
from monarch.mesh.lines import Parcel
from monarch.mesh.mesh_proc import MeshProc
from monarch.mesh.network import advertised, beside
from monarch.mesh.outputs import Outputs
from monarch.mesh.program_start import tell_at_start
from monarch.mesh.starting import ProcessStarter, Running, Start
from monarch.mesh.trust import good, shared_secret, show_certificates
from monarch.transports import registry
from monarch.transports.base import Frame, Link
from monarch.transports.url import parse

log = get_logger("monarch.worker")

TRUST_ALL: Final = "trust_all_connections"
_HELLO_S: Final = 10.0
_ORPHAN_GRACE_S: Final = 1.0
_GOODBYE_S: Final = 2.0


def check_ca(ca: object, private_key: object) -> None:
    """Raises: NotImplementedError, for certificates that are named here and not in the settings."""
    if private_key is not None or ca not in (None, TRUST_ALL):
        raise NotImplementedError(
            "certificates are not named by ca and private_key, but by HYPERACTOR_TLS_CERT, HYPERACTOR_TLS_KEY and "
            f"HYPERACTOR_TLS_CA, for addresses tls+tcp://HOST:PORT: leave private_key out, and ca={TRUST_ALL!r}; "
            "connections prove the secret of MONARCH_SECRET_FILE in any case"
        )


class _Shared:
    """The worker's starter, as one of its agents uses it."""

    def __init__(self, starter: ProcessStarter) -> None:
        self._starter = starter

    def start(self, starts: Sequence[Start]) -> Sequence[Running]:
        return self._starter.start(starts)

    def close(self, timeout_s: float) -> None:
        """It is the worker's."""


@define(eq=False)
class _Tenant:
    """The agent of a client's host mesh, and where it lives."""

    runtime: MeshProc
    agent: HostAgent
    outputs: Outputs
    client: ProcId
    leaving: bool = False
    closing: threading.Thread | None = None
    when_gone: list[Callable[[], None]] = field(factory=list)


class Worker:
    """See the module. `serve` runs on the thread that calls it; the address is listened at from the beginning.

    Args:
        secret: what clients prove; None: that of `trust`.

    Raises (the constructor): NoSecret, ValueError, NotViable, OSError.
    """

    def __init__(self, address: str, secret: bytes | None = None) -> None:
        show_certificates()
        url = parse(advertised(address))
        secret = secret if secret is not None else shared_secret(str(url))
        self._secret = secret
        self._listener = registry.for_url(address).listen(str(url), secret)
        self.url = self._listener.url
        self._place = Place(domain_of(self.url, secret), self.url)
        self._openings = [(beside(url), secret)] if self._place.domain == EVERYWHERE else []
        choice = registry.choose()
        self._transport = choice.transport
        self._poller = Poller()
        scheme = choice.transport.scheme
        schemes = dict.fromkeys([scheme, url.scheme] if self._openings else [scheme])
        self._starter = ProcessStarter(self, [*schemes])
        self._tenants: dict[str, _Tenant] = {}
        self._links = Links(self._poller, _HELLO_S)
        self._over = False
        self._lock = threading.Lock()
        self.add_pollable(self._listener.fileno(), lambda: self._links.accept(self._listener, self._on_hello))
        log.info("worker.listening", address=self.url, processes=scheme, reason=choice.reason)

    # ---- the loop

    def add_pollable(self, fd: int, action: Callable[[], None]) -> None:
        self._poller.register(fd, lambda _: action())

    def remove_pollable(self, fd: int) -> None:
        self._poller.unregister(fd)

    def serve(self) -> None:
        """Until a client shuts the worker down; an exception such as KeyboardInterrupt ends everything here first."""
        try:
            while not self._over:
                self._poller.poll(None)
        finally:
            self.close()

    def end(self) -> None:
        """Let `serve` return. From any thread."""
        self._over = True
        self._poller.wake()

    def stop_listening(self) -> None:
        self._listener.close()

    def close(self) -> None:
        self.stop_listening()
        self._starter.close(_ORPHAN_GRACE_S)
        for thread in [self._close(tenant) for tenant in list(self._tenants.values())]:
            thread.join(2 * _GOODBYE_S)
        self._links.abort()

    # ---- newcomers

    def _on_hello(self, link: Link, frames: list[Frame]) -> None:
        """Hand a new link to the agent that it is for, which is made for a client that attaches."""
        hello = Hello.decode(frames[0])
        client = ProcId.from_string(hello.proc)
        wanted = Uid.from_string(hello.to)
        tenant = self._tenants.get(hello.to)
        if tenant is None and hello.attaches:
            tenant = self._make(client, wanted)
        if tenant is None or tenant.leaving:
            reason = f"this worker knows no agent {hello.to}: its client is gone, or the worker was restarted"
            self._links.refuse(link, reason)
            return
        self._links.release(link)
        tenant.runtime.gateway.peers.adopt(link, frames)

    # ---- agents

    def _make(self, client: ProcId, uid: Uid) -> _Tenant:
        scheme = self._transport.scheme
        runtime = MeshProc(ProcId(uid), self._transport, self._secret, root=client)
        runtime.gateway.is_steady = True
        runtime.locator.openings = self._openings
        gateway = runtime.gateway
        gateway.listen(registry.any_address(scheme))
        gateway.ways.secrets[self._place.domain] = self._secret
        gateway.answer_at(self._place)

        def make_forwarder() -> Forwarder:
            """The rest of what the client wants to see, or to keep, is done there."""
            tail_lines = (agent.config or {}).get("tail_log_lines", settings.get("tail_log_lines"))
            return Forwarder(Display(tail_lines=tail_lines, send=send))

        def send(parcels: list[Parcel]) -> threading.Event:
            shown = threading.Event()
            runtime.request(client, "output", parcels)._on_done(shown.set)
            return shown

        outputs = Outputs(make_forwarder)
        agent = HostAgent(runtime, _Shared(self._starter), registry.any_address(scheme), outputs)
        Collector(runtime, agent, "worker")
        tenant = self._tenants[str(uid)] = _Tenant(runtime, agent, outputs, client)

        def on_gone(key: int, down: Down) -> None:
            if key == client.key:
                self._leave(tenant, f"its client is gone: {down.reason}", lambda: None)

        def on_attach(envelope: Envelope, config: dict[str, Any], path: tuple[str, ...]) -> None:
            agent.config, agent.path = config, path
            log.info("client.attached", client=str(client.uid), agent=str(uid))
            runtime.answer(envelope, "attached", self.url, os.getpid(), socket.gethostname())

        def on_leave(envelope: Envelope, reason: str, shut_down: bool) -> None:
            def gone() -> None:
                runtime.answer(envelope, "left")
                if shut_down:
                    self._poller.call_later(0.0, self.end)

            self._leave(tenant, reason, gone)

        runtime.on_proc_gone.append(on_gone)
        runtime.handlers["attach"] = on_attach
        runtime.handlers["leave"] = on_leave
        return tenant

    def _leave(self, tenant: _Tenant, reason: str, then: Callable[[], None]) -> None:
        """End a client's processes here, then its agent. On the agent's driving thread."""
        tenant.when_gone.append(then)
        if tenant.leaving:
            return
        tenant.leaving = True

        def gone() -> None:
            self._close(tenant)

        tenant.agent.end(reason, _ORPHAN_GRACE_S, gone)

    def _close(self, tenant: _Tenant) -> threading.Thread:
        """Take leave of a client, behind its last lines, once; on a thread, because its driving thread cannot wait for
        its own end."""

        def close() -> None:
            tenant.outputs.close()
            for each in tenant.when_gone:
                each()
            tenant.runtime.close(_GOODBYE_S)
            self._tenants.pop(str(tenant.runtime.proc_id.uid), None)
            log.info("client.left", client=str(tenant.client.uid))

        with self._lock:
            if tenant.closing is None:
                tenant.closing = threading.Thread(target=close, name="monarch-leave", daemon=True)
                tenant.closing.start()
            return tenant.closing


def serve(address: str, *, until_eof: bool = False, secret_from_stdin: bool = False, tell: bool = False) -> None:
    """Serve a host until a client shuts the worker down.

    Args:
        until_eof: or until the standard input ends, as it does when whoever started the worker is gone.
        secret_from_stdin: the first line there is the secret.
        tell: print where it listens, once it does.

    Raises:
        NoSecret, ValueError, NotViable, OSError: nobody can listen at `address`.
    """
    tell_at_start(is_first=not until_eof)
    secret = good(_first_line(), "the first line of the standard input") if secret_from_stdin else None
    worker = Worker(address, secret)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, partial(_end_by_signal, worker))
    if tell:
        print(f"monarch worker: listening at {worker.url}", flush=True)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        worker.end()

    if until_eof:
        threading.Thread(target=watch, name="monarch-until-eof", daemon=True).start()
    worker.serve()


def _end_by_signal(worker: Worker, signum: int, frame: object) -> None:
    """Leave no socket behind, and end as by any signal: what was launched here ends with this process."""
    worker.stop_listening()
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)


def _first_line() -> bytes:
    """Of the standard input, of which no more is read."""
    line = b""
    while (more := os.read(0, 1)) not in (b"", b"\n"):
        line += more
    return line.strip()


def run_worker_loop_forever(*, private_key: Any = None, ca: Any = TRUST_ALL, address: str) -> NoReturn:
    """Make this process the worker of its host. Ends with status 0 when a client shuts it down.

    Args:
        private_key: None; certificates are named by HYPERACTOR_TLS_*, with tls+tcp://.
        ca: "trust_all_connections"; connections prove the secret nevertheless, where they can come from elsewhere.
        address: where to listen: `tcp://HOST:PORT`, `tls+tcp://HOST:PORT`, `ipc:///PATH`, `ADVERTISE@BIND`, or
            `tcp://HOST:fd7` for an inherited socket.

    Raises:
        NoSecret: the address can be reached from other hosts, and there is no secret.
        ValueError, NotViable, OSError: nobody can listen there.
    """
    check_ca(ca, private_key)
    serve(address)
    sys.exit(0)
