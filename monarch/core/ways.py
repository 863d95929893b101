"""How this process reaches others: the domains that it is in, with the secret that links in each of them prove.

A process is in the domain of whatever it listens at, and in that of the network once it has been told the secret that
hosts share, whether it listens there or not.
"""

from __future__ import annotations

from attrs import define, field

from monarch.core.address import Place, best, domain_of
from monarch.transports import registry
from monarch.transports.base import Link, Transport
from monarch.transports.url import parse, stays_on_host


@define(eq=False)
class Ways:
    """See the module."""

    _own: Transport  # instead of the registry's for its scheme
    secrets: dict[str, bytes] = field(factory=dict)
    proxy: str = ""
    """Where another process listens through which this one, which nobody can dial, reaches the network."""

    def transport(self, url: str) -> Transport:
        if self.proxy and not stays_on_host(url):
            return registry.through(self.proxy)
        return self._own if parse(url).scheme == self._own.scheme else registry.for_url(url)

    def join(self, url: str, secret: bytes) -> Place:
        """Be in the domain of an address of ours."""
        place = Place(domain_of(url, secret), url)
        self.secrets[place.domain] = secret
        return place

    def find(self, *addresses: str) -> Place | None:
        """How to reach a process from here that has these addresses; None: not at all."""
        return next((place for address in addresses if (place := best(address, self.secrets))), None)

    def dial(self, place: Place, timeout_s: float) -> Link:
        """As `Transport.dial`."""
        return self.transport(place.url).dial(place.url, self.secrets[place.domain], timeout_s)
