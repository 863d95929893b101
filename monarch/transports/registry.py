"""Which transport serves an address, and which one the processes of a host use among themselves.

Decides by viability; leaves to the transports whether they are viable. A transport's module loads at its first use.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Final, cast

from attrs import define

from monarch.errors import NotViable
from monarch.transports import ending  # noqa: F401  # before anybody registers exit handlers
from monarch.transports.base import Transport
from monarch.transports.url import parse

_MODULES: Final = {
    "inproc": "monarch.transports.inproc",
    "ipc": "monarch.transports.ipc",
    "shm": "monarch.transports.shm",
    "tcp": "monarch.transports.tcp",
    "tls+tcp": "monarch.transports.tls",
    "ibverbs": "monarch.transports.ibverbs",
}

_PREFERRED: Final = ("shm", "ipc", "tcp")
"""What `auto` tries, fastest first."""

CHOICES: Final = ("auto", *_MODULES)
"""The values of `MONARCH_TRANSPORT`."""

_cache: dict[str, Transport] = {}


@define(frozen=True)
class Choice:
    """A transport, and in words why it was taken: log it once."""

    transport: Transport
    reason: str


def get(scheme: str) -> Transport:
    """The transport of a scheme: always the same object.

    Raises:
        ValueError: there is no such scheme.
    """
    transport = _cache.get(scheme)
    if transport is None:
        if scheme not in _MODULES:
            raise ValueError(f"unknown transport {scheme!r}, expected one of {', '.join(_MODULES)}")
        transport = _cache.setdefault(scheme, cast(Transport, import_module(_MODULES[scheme]).TRANSPORT))
    return transport


def module(scheme: str) -> str:
    """Which module has the transport of a scheme, for those who load it early."""
    return _MODULES[scheme]


@functools.cache
def through(proxy: str) -> Transport:
    """TCP of a process that nobody can dial, through another that listens at `proxy`. Raises: NotViable, ValueError."""
    return cast(Transport, import_module("monarch.transports.tunnel").Tunnel(proxy))


def for_url(url: str) -> Transport:
    """The transport that serves an address. Raises what `get` and `url.parse` raise."""
    return get(parse(url).scheme)


def any_address(scheme: str) -> str:
    """Where a process listens that others of its host are to reach: it picks a name or a port itself."""
    return f"{scheme}://127.0.0.1:0" if scheme in ("tcp", "tls+tcp", "ibverbs") else f"{scheme}://"


def choose(name: str = "auto") -> Choice:
    """The transport between processes of one host, for a value of `MONARCH_TRANSPORT`.

    Raises:
        NotViable: the transport that was asked for cannot work here; says why.
        ValueError: there is no such choice.
    """
    if name not in CHOICES:
        raise ValueError(f"unknown transport {name!r}, expected one of {', '.join(CHOICES)}")
    if name != "auto":
        transport = get(name)
        viability = transport.viability()
        if not viability.ok:
            raise NotViable(f"transport {name!r} was asked for and cannot work here: {viability.reason}")
        return Choice(transport, f"{name} was asked for")
    refused: list[str] = []
    for scheme in _PREFERRED:
        transport = get(scheme)
        viability = transport.viability()
        if viability.ok:
            why = "is the fastest one that works on this host"
            return Choice(transport, "; ".join([f"{scheme} {why}", *refused]))
        refused.append(f"{scheme} does not work here: {viability.reason}")
    raise NotViable("no transport works on this host: " + "; ".join(refused))
