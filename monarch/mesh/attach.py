"""Attaching to workers: the client's side of `worker`.

The client names the agent that each worker makes for it, so that the mesh can be used at once; whether the workers
answer shows on `initialized`, or when what is spawned there fails. A client listens for other hosts from its first
attach on, at an address that the worker's host can reach.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from attrs import evolve

from monarch.core import settings
from monarch.core.address import EVERYWHERE, Place, domain_of, joined
from monarch.core.future import Future
from monarch.core.ids import ProcId, Uid
from monarch.core.monitor import Down, PeerGone
from monarch.core.peer import State
from monarch.errors import MeshError
from monarch.log import get_logger
from monarch.mesh.context import context
from monarch.mesh.host_mesh import HostMesh
from monarch.mesh.mesh_proc import MeshProc
from monarch.mesh.network import address_towards
from monarch.mesh.shape import Region, Slice
from monarch.mesh.trust import NoSecret, shared_secret, show_certificates
from monarch.mesh.worker import TRUST_ALL, check_ca
from monarch.transports import registry
from monarch.transports.url import Url, parse

log = get_logger("monarch.attach")

_OWN_HOST = (
    "advertise_host",
    "default_transport",
    "hyperactor_tls_ca",
    "hyperactor_tls_cert",
    "hyperactor_tls_key",
)  # settings that mean the client's host alone


_AGAIN_S: Final = 0.1


class Attachment:
    """One worker, from when it was named until this client leaves it."""

    def __init__(self, runtime: MeshProc, label: str, worker: str | Future[str], secret: bytes | None) -> None:
        self._runtime = runtime
        self._secret = secret
        self.url = worker if isinstance(worker, str) else ""
        self._limit_s = limit_s = settings.get("mesh_attach_config_timeout")
        address = "" if isinstance(worker, Future) else _place(worker, secret)
        self.host = ProcId(Uid.instance(label), address)
        self._peer = runtime.gateway.peers.attach(self.host, limit_s)
        config = {name: value for name, value in settings.export().items() if name not in _OWN_HOST}
        path = tuple(os.path.abspath(folder) for folder in sys.path)
        self.answer = runtime.request(self.host, "attach", config, path)
        if isinstance(worker, Future):
            worker._on_done(lambda: self._start(worker))
            runtime.gateway.call_later(limit_s, lambda: self._give_up(f"its address was not known in {limit_s:g} s"))
        else:
            self._start(worker)

    def _start(self, worker: str | Future[str]) -> None:
        """Names may be looked up, and modules loaded: not on the caller's thread."""
        threading.Thread(target=self._find, args=(worker,), name="monarch-attach", daemon=True).start()

    def _find(self, worker: str | Future[str]) -> None:
        try:
            self.url = worker if isinstance(worker, str) else worker.get(0)
            self._peer.known_as = f"the worker at {self.url}"
            address = _place(self.url, self._secret)
            self._wait_until_reachable()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._runtime.gateway.call_later(0.0, lambda: self._give_up(why))  # ends are told on the driving thread
        else:
            self._runtime.gateway.peers.release(self._peer, address)

    def _wait_until_reachable(self) -> None:
        """Raises: as `_be_reachable`."""
        deadline_s = time.monotonic() + self._limit_s
        while True:
            try:
                _be_reachable(self._runtime, self.url, self._secret)
                return
            except ConnectionRefusedError:  # by the worker of `network.attach`, which may be on its way up, too
                if time.monotonic() >= deadline_s or not self._peer.is_on_hold:
                    raise
            time.sleep(_AGAIN_S)

    def _give_up(self, why: str) -> None:
        if self._peer.state is State.NEW and self._peer.is_on_hold:
            self._runtime.gateway.peers.declare_gone(self.host, Down("unreachable", why))

    def depend_on(self, fd: int, why: Callable[[], str]) -> None:
        """Wait for an answer until `fd` is readable, and no longer: `why` says what that means. Owns `fd`."""
        gateway = self._runtime.gateway

        def end() -> None:
            if self._peer.state is State.NEW:
                gateway.peers.declare_gone(self.host, Down("unreachable", why()))

        def forget() -> None:
            gateway.remove_pollable(fd)
            os.close(fd)

        gateway.add_pollable(fd, end)
        self.answer._on_done(lambda: gateway.call_later(0.0, forget))  # where nobody polls it meanwhile

    def failure(self) -> Exception | None:
        """Why attaching has failed; None: it has not. Call it once `answer` is there."""
        error = self.answer.exception(0)
        if isinstance(error, PeerGone):
            where = self.url or "an address that is not known yet"
            return MeshError(f"attach failed: config push failed during attach to {where}: {error.down.reason}")
        return error if isinstance(error, Exception) else None

    def leave(self, reason: str, *, shut_down: bool) -> Future[tuple[Any, ...]]:
        return self._runtime.request(self.host, "leave", reason, shut_down)


def _place(url: str, secret: bytes | None) -> str:
    """A worker's address as processes of all hosts understand it. Raises: ValueError, NotViable, NoSecret."""
    dialed = str(evolve(parse(url), bind=None))
    return joined([Place(domain_of(dialed, secret if secret is not None else shared_secret(url)), dialed)])


_opening = threading.Lock()


def _be_reachable(runtime: MeshProc, url: str, secret: bytes | None) -> None:
    """Listen where the processes of a worker's host reach this one. Raises: OSError, NotViable, NoSecret."""
    secret = secret if secret is not None else shared_secret(url)
    domain = domain_of(url, secret)
    with _opening:
        if runtime.gateway.ways.secrets.get(domain, secret) != secret:
            raise NoSecret(f"{url}: this program has attached to other hosts with another secret; there can be one")
        show_certificates()
        dialed = parse(url)
        opened = [place for place in runtime.gateway.places if place.domain == domain]
        if opened:
            if domain == EVERYWHERE and parse(opened[0].url).scheme != dialed.scheme:
                raise ValueError(
                    f"{url}: this program has attached to other hosts by {parse(opened[0].url).scheme}, and their "
                    "processes would talk to those of this one in the clear: use one of tcp and tls+tcp for all"
                )
            return
        if domain == EVERYWHERE and runtime.gateway.ways.proxy:
            opening = runtime.gateway.ways.proxy
        elif domain == EVERYWHERE:
            host = address_towards(dialed.host, dialed.port)
            opening = str(Url(dialed.scheme, host))
        else:
            opening = registry.any_address(runtime.gateway.transport.scheme)
            if opening == "inproc://":
                opening = registry.any_address(registry.choose().transport.scheme)
        place = runtime.gateway.open(opening, secret)
        runtime.gateway.ways.secrets[domain] = secret
        runtime.locator.openings.append((opening, secret))
        for peer in runtime.gateway.peers:
            if runtime.gateway.peers.keeps(peer.proc):
                runtime.tell(peer.proc, "join", dict(runtime.gateway.ways.secrets))
    log.info("client.reachable", address=place.url, by=url)


def attach_to_workers(
    *,
    private_key: Any = None,
    ca: Any = TRUST_ALL,
    workers: Sequence[str | Future[str]],
    name: str | None = None,
) -> HostMesh:
    """The hosts of some workers, in this order, as a mesh of one dimension, `hosts`. Returns at once.

    Args:
        private_key: None; certificates are named by HYPERACTOR_TLS_*, with tls+tcp://.
        ca: "trust_all_connections"; connections prove the secret nevertheless, where it counts.
        workers: the addresses that the workers advertise, or futures of them.
        name: of the hosts, for people.

    Raises:
        ValueError, NotViable: an address is none.
        NotImplementedError: this is not the client's process.
        NoSecret: a worker is on another host, and there is no secret to prove.
    """
    check_ca(ca, private_key)
    return attach_with(None, workers, name)


def attach_with(secret: bytes | None, workers: Sequence[str | Future[str]], name: str | None) -> HostMesh:
    """As `attach_to_workers`, to workers that were told this secret; None: that of `trust`."""
    if isinstance(workers, str) or not all(isinstance(each, str | Future) for each in workers):
        raise TypeError(f"workers is {workers!r}; it must be a list of addresses, or of futures of them")
    if not workers:
        raise ValueError("workers is empty: there is nothing to attach to")
    for each in workers:
        if isinstance(each, str):
            _place(each, secret)
    owner = context().actor_instance
    owner.refuse_closed()
    runtime: Any = owner.proc_runtime
    if runtime.proc_id.keeper is not None:
        raise NotImplementedError(
            "attaching in a process of a mesh is planned, and not part of this version: attach in the client, and pass "
            "the host mesh to the actor"
        )
    attachments = [Attachment(runtime, name or "host", worker, secret) for worker in workers]
    region = Region(("hosts",), Slice.new_row_major([len(attachments)]))
    return HostMesh([each.host for each in attachments], region, attachments=attachments)
