"""Where a process can be reached, and from where.

A *place* is a URL and the domain in which it counts: those processes that can dial it and know the secret that its
links prove. What stays on a host counts among the processes of that host that share a secret; an address of the network
counts everywhere, and its secret is the one that the hosts of a job share. A process that is reached in several ways
has several places, the best first, and its address is their text.

Two processes are on one host when boot, user, and the namespaces for processes, memory and network are the same;
`MONARCH_HOST_ID` says otherwise, so that namespaces of one machine can count as hosts.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import socket
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Final

from attrs import define

from monarch.transports import url as urls

EVERYWHERE: Final = ""
"""The domain of what is reached over the network."""

_DIGITS: Final = 16


@define(frozen=True)
class Place:
    """One way to a process. Text forms: `URL` where it counts everywhere, else `DOMAIN=URL`."""

    domain: str
    url: str

    def __str__(self) -> str:
        url = self.url.replace("%", "%25").replace(" ", "%20")
        return f"{self.domain}={url}" if self.domain else url

    @classmethod
    def from_string(cls, text: str) -> Place:
        domain, equals, url = text.partition("=")
        if not equals or "://" in domain:
            domain, url = EVERYWHERE, text
        return cls(domain, url.replace("%20", " ").replace("%25", "%"))


def joined(places: Sequence[Place]) -> str:
    return " ".join(map(str, places))


def split(address: str) -> list[Place]:
    return [Place.from_string(text) for text in address.split(" ") if text]


def best(address: str, domains: Container[str]) -> Place | None:
    """The first place of `address` that counts in one of `domains`; None: there is no way from there."""
    return next((place for place in split(address) if place.domain in domains), None)


def domain_of(url: str, secret: bytes) -> str:
    """The domain in which an address counts whose links prove `secret`."""
    if not urls.stays_on_host(url):
        return EVERYWHERE
    if url.startswith("inproc://"):
        return f"{host_identity()}.{os.getpid()}"
    return f"{host_identity()}.{hmac.digest(secret, b'domain', 'sha256').hex()[:_DIGITS]}"


def host_identity() -> str:
    """What the processes of a host have in common, and no others."""
    return _digest(os.environ.get("MONARCH_HOST_ID", ""))


@functools.cache
def _digest(given: str) -> str:
    facts = given or "\n".join(_facts())
    return hashlib.sha256(facts.encode()).hexdigest()[:_DIGITS]


def _facts() -> list[str]:
    facts = [socket.gethostname(), str(os.getuid())]
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        try:
            facts.append(Path(path).read_text().strip())
            break
        except OSError:
            continue
    for namespace in ("pid", "ipc", "net"):
        try:
            facts.append(os.readlink(f"/proc/self/ns/{namespace}"))
        except OSError:
            facts.append("")
    return facts
