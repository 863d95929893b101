"""Which address of this host others can reach.

The setting `advertise_host` has the last word. Else it is the address from which the kernel sends to the one who asks,
and where nobody in particular asks, the one from which it would send to the world. Never loopback or link-local.

A client that nobody can dial reaches others, and is reached, through a worker: `attach`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

from attrs import evolve

from monarch.core import settings
from monarch.core.address import EVERYWHERE, Place
from monarch.mesh.context import client_context
from monarch.mesh.trust import shared_secret
from monarch.transports import registry
from monarch.transports.url import Url, parse, stays_on_host

_WORLD: Final = "192.0.2.1"  # an address for documentation, which is never sent to


def address_towards(host: str, port: int) -> str:
    """The address of this host that is to be told to those at `host`.

    Raises:
        OSError: there is no way to `host`.
    """
    named: str = settings.get("advertise_host")
    if named:
        return named
    family, kind, _, _, target = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(target)  # picks the source, sends nothing
        found: str = sock.getsockname()[0]
    return found


def address_for_all() -> str:
    """The address of this host that others are most likely to reach; that of loopback where there is no network."""
    try:
        return address_towards(_WORLD, 0)
    except OSError:
        return "127.0.0.1"


def address_of(places: Sequence[Place]) -> str:
    """The address at which other hosts reach a process of this one that listens at `places`, as far as is known."""
    urls = (parse(place.url) for place in places if place.domain == EVERYWHERE)
    return next((url.host for url in urls if url.scheme in ("tcp", "tls+tcp")), None) or address_for_all()


def advertised(url: str) -> str:
    """`url`, which a worker listens at, with a host that others can dial: a wildcard to bind is no address.

    Raises:
        ValueError: no address of this host can be reached by others.
    """
    parsed = parse(url)
    if parsed.scheme not in ("tcp", "tls+tcp") or parsed.bind is not None or not _is_wildcard(parsed.host):
        return url
    try:
        host = address_towards(_WORLD, 0)
    except OSError as error:
        raise ValueError(
            f"{url}: no address of this host is known that others could reach ({error}); name one: set "
            "MONARCH_ADVERTISE_HOST, or listen at tcp://HOST:PORT"
        ) from error
    return str(evolve(parsed, host=host, bind=parsed))


def beside(url: Url) -> str:
    """Where the other processes of a worker's host listen, for other hosts: at its addresses, on ports of their own."""
    own = evolve(url, port=0, fd=None, bind=None)
    return str(own if url.bind is None else evolve(own, bind=evolve(url.bind, port=0, fd=None)))


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


_proxy = ""


def attach(addr: str) -> None:
    """Let this client, which hosts cannot dial (behind a firewall, or NAT), join through the worker at `addr`: every
    connection is opened by this program and its processes, to that address alone. Before the first `context()`.

    Raises:
        RuntimeError: the client is there already.
        ValueError, NotViable: nobody can be dialed at `addr`, or not over TCP.
        NoSecret: it is on another host, and there is no secret to prove.
    """
    global _proxy
    if client_context() is not None:
        raise RuntimeError(f"attach({addr!r}) comes too late: this program has a client, which was made without it")
    if not stays_on_host(addr):
        shared_secret(addr)
        registry.through(addr)
    _proxy = addr


def through() -> str:
    """The address of `attach`; "" where hosts are reached, and reach this one, directly."""
    return "" if not _proxy or stays_on_host(_proxy) else _proxy
