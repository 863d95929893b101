"""Addresses as text. Decides what a transport URL may look like, and leaves what it means to the transports.

```
tcp://host:port         IPv6 hosts in brackets; port 0 asks a listener to pick one
ipc:///path/to/socket   a unix socket in the file system
ipc://@name             a unix socket in Linux' abstract namespace; `ipc://` lets the listener pick a name
shm:///path shm://@name as ipc: the socket that shared memory is agreed on over
tls+tcp://host:port     as tcp, with TLS
tcp://host:fd7          the listening socket that was inherited as descriptor 7; to listen only
ibverbs://host:port     as tcp: where the two sides tell each other their queue pairs
inproc://name           inside this process; `inproc://` lets the listener pick a name
ADVERTISE@BIND          two URLs: peers dial the first, the listener binds the second (behind a NAT, in a container)
```
"""

from __future__ import annotations

import functools
import ipaddress
import re

from attrs import define

from monarch.errors import NotViable

SCHEMES = ("inproc", "ipc", "shm", "tcp", "tls+tcp", "ibverbs")
_UNIX = ("ipc", "shm")
_HOST_PORT = ("tcp", "tls+tcp", "ibverbs")
_INHERITED = ("tcp", "tls+tcp")

_ALIAS = re.compile(r"@(?=[a-z][a-z0-9+-]*://)")
_SCHEME = re.compile(r"([a-z][a-z0-9+-]*)://(.*)", re.DOTALL)


@define(frozen=True)
class Url:
    """One parsed address. `host` and `port` are set for tcp, tls+tcp and ibverbs, `name` for the others."""

    scheme: str
    host: str = ""
    port: int = 0
    name: str = ""
    fd: int | None = None
    """The descriptor of an inherited socket, which knows its port."""
    bind: Url | None = None
    """Where the listener binds, if that is not where peers dial."""

    @property
    def local(self) -> Url:
        """The address to bind."""
        return self.bind if self.bind is not None else self

    @property
    def is_abstract(self) -> bool:
        """For unix sockets: the name is in the abstract namespace, no file belongs to it."""
        return self.scheme in _UNIX and self.name.startswith("@")

    def __str__(self) -> str:
        if self.scheme in _HOST_PORT:
            host = f"[{self.host}]" if ":" in self.host else self.host
            text = f"{self.scheme}://{host}:{self.port if self.fd is None else f'fd{self.fd}'}"
        else:
            text = f"{self.scheme}://{self.name}"
        return text if self.bind is None else f"{text}@{self.bind}"


@functools.lru_cache(maxsize=1024)
def parse(text: str, scheme: str | None = None) -> Url:
    """Read an address; with `scheme`, refuse one of another transport.

    Raises:
        ValueError: the text is no address; the message says what is wrong with it.
        NotViable: the address is of a kind that cannot work here.
    """
    advertise, *rest = _ALIAS.split(text, maxsplit=1)
    url = _parse_one(advertise, text)
    if rest:
        bind = _parse_one(rest[0], text)
        if bind.scheme != url.scheme:
            raise ValueError(f"{text!r}: both halves of an ADVERTISE@BIND address must have the same scheme")
        url = Url(url.scheme, url.host, url.port, url.name, url.fd, bind)
    if scheme is not None and url.scheme != scheme:
        raise ValueError(f"{text!r}: expected an address that starts with {scheme}://")
    return url


def stays_on_host(text: str) -> bool:
    """Whether a connection to that address cannot leave this host, where the kernel knows who is gone."""
    url = parse(text)
    if url.scheme not in _HOST_PORT:
        return True
    return _is_loopback(url.host)


@functools.lru_cache(maxsize=1024)
def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parse_one(text: str, whole: str) -> Url:
    match = _SCHEME.fullmatch(text)
    if match is None:
        raise ValueError(f"{whole!r} is no address: expected SCHEME://..., where SCHEME is one of {', '.join(SCHEMES)}")
    scheme, rest = match.groups()
    if scheme.startswith("metatls"):
        raise NotViable(
            f"{whole!r}: {scheme} needs certificates that only Meta's own machines have; use tcp://host:port, where "
            "every connection proves knowledge of the job's secret, or tls+tcp://host:port with certificates of yours"
        )
    if scheme in _HOST_PORT:
        return _parse_host_port(scheme, rest, whole)
    if scheme in _UNIX:
        if rest and not rest.startswith(("/", "@")):
            raise ValueError(f"{whole!r}: after {scheme}:// comes an absolute path ({scheme}:///tmp/x) or @name")
        if rest == "@":
            raise ValueError(f"{whole!r}: the name after @ is missing; {scheme}:// alone lets the listener pick one")
        if "\0" in rest:
            raise ValueError(f"{whole!r}: a NUL byte cannot be part of an address")
        return Url(scheme, name=rest)
    if scheme == "inproc":
        return Url("inproc", name=rest)
    raise ValueError(f"{whole!r}: unknown scheme {scheme!r}, expected one of {', '.join(SCHEMES)}")


def _parse_host_port(scheme: str, rest: str, whole: str) -> Url:
    host, colon, port_text = rest.rpartition(":")
    if host == "*":
        raise ValueError(f"{whole!r}: * is no host; to listen at all addresses of this host, {scheme}://0.0.0.0:PORT")
    fd_text = port_text.removeprefix("fd")
    if scheme in _INHERITED and fd_text != port_text and fd_text.isascii() and fd_text.isdigit():
        return Url(scheme, host.strip("[]"), 0, fd=int(fd_text))
    if not colon or not port_text.isascii() or not port_text.isdigit():
        raise ValueError(f"{whole!r}: expected {scheme}://HOST:PORT with a decimal port")
    port = int(port_text)
    if port > 65535:
        raise ValueError(f"{whole!r}: port {port} is above 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{whole!r}: an IPv6 host goes in brackets, as in {scheme}://[::1]:80")
    if not host or any(c.isspace() or c in "/[]" for c in host):
        raise ValueError(f"{whole!r}: {host!r} is no host name")
    return Url(scheme, host, port)
