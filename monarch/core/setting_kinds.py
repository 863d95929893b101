"""The types of settings: what a value may be, in code and in the environment, and what the library makes of it."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, Final, Protocol

from attrs import define

from monarch.core import duration
from monarch.errors import NotViable


class UnsupportedTransport(NotViable, ValueError):
    """A transport was named that this library does not have."""


class ChannelTransport(Enum):
    """Transports by the names that Monarch gives them."""

    TcpWithLocalhost = "TcpWithLocalhost"
    TcpWithHostname = "TcpWithHostname"
    MetaTlsWithHostname = "MetaTlsWithHostname"
    MetaTlsWithIpV6 = "MetaTlsWithIpV6"
    Tls = "Tls"
    Local = "Local"
    Unix = "Unix"

    def transport(self) -> str:
        """Our transport that does this: "tcp", "tls+tcp", "ipc" or "inproc".

        Raises:
            UnsupportedTransport: there is none.
        """
        if self not in _CHANNELS:
            raise UnsupportedTransport(f"{self}: {_NOT_METAS}")
        return _CHANNELS[self]


_CHANNELS: Final = {
    ChannelTransport.TcpWithLocalhost: "tcp",
    ChannelTransport.TcpWithHostname: "tcp",
    ChannelTransport.Tls: "tls+tcp",
    ChannelTransport.Unix: "ipc",
    ChannelTransport.Local: "inproc",
}
_NOT_METAS: Final = "Meta's certificates exist only at Meta; use tcp, or tls+tcp with certificates of your own"
TRANSPORTS: Final = ("auto", "inproc", "ipc", "tcp", "tls+tcp", "shm", "ibverbs")


class Encoding(Enum):
    """How messages are encoded. Kept for programs that name it; there is one encoding, and it is multipart."""

    Bincode = "serde_bincode"
    Json = "serde_json"
    Multipart = "serde_multipart"


class Kind(Protocol):
    """The type of a setting."""

    @property
    def name(self) -> str:
        """For people and documentation."""

    def accept(self, value: object) -> Any:
        """`value` in the form that users see. TypeError for a wrong type, ValueError for a wrong value."""

    def parse(self, text: str) -> Any:
        """The same, from the environment."""

    def use(self, value: Any) -> Any:
        """From the form that users see to the one `get` returns."""


@define(frozen=True)
class Duration:
    name: str = "duration"

    def accept(self, value: object) -> str:
        if not isinstance(value, str):
            raise TypeError(f"expected a duration as a string, such as '30s', not {value!r}")
        return duration.normalised(value)

    parse = accept

    def use(self, value: str) -> float:
        return duration.parse(value)


@define(frozen=True)
class Int:
    minimum: int = 0
    name: str = "int"

    def accept(self, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"expected an int, not {value!r}")
        if value < self.minimum:
            raise ValueError(f"must be at least {self.minimum}, not {value}")
        return int(value)

    def parse(self, text: str) -> int:
        if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", text):
            raise ValueError(f"expected an int, not {text!r}")
        return self.accept(int(text))

    def use(self, value: int) -> int:
        return value


@define(frozen=True)
class Bool:
    name: str = "bool"

    def accept(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise TypeError(f"expected True or False, not {value!r}")
        return value

    def parse(self, text: str) -> bool:
        known = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if text.strip().lower() not in known:
            raise ValueError(f"expected one of {', '.join(known)}, not {text!r}")
        return known[text.strip().lower()]

    def use(self, value: bool) -> bool:
        return value


@define(frozen=True)
class Text:
    name: str = "text"

    def accept(self, value: object) -> str:
        if not isinstance(value, str):
            raise TypeError(f"expected a string, not {value!r}")
        return value

    parse = accept

    def use(self, value: str) -> str:
        return value


@define(frozen=True)
class Choice:
    choices: tuple[str, ...]
    name: str = "choice"

    def accept(self, value: object) -> str:
        if not isinstance(value, str):
            raise TypeError(f"expected one of {', '.join(self.choices)}, not {value!r}")
        if value not in self.choices:
            raise ValueError(f"expected one of {', '.join(self.choices)}, not {value!r}")
        return value

    parse = accept

    def use(self, value: str) -> str:
        return value


@define(frozen=True)
class TransportChoice:
    """A `ChannelTransport`, a name in `TRANSPORTS`, or an address: `scheme://rest`."""

    name: str = "transport"

    def accept(self, value: object) -> str | ChannelTransport:
        if isinstance(value, ChannelTransport):
            value.transport()
            return value
        if not isinstance(value, str):
            raise TypeError(f"expected a ChannelTransport or a string, not {value!r}")
        scheme, separator, rest = value.partition("://")
        if scheme.lower() in ("metatls", "metatls-hostname"):
            raise UnsupportedTransport(f"{value!r}: {_NOT_METAS}")
        if value.lower() == "tls":
            return "tls+tcp"
        if value in TRANSPORTS or (separator and rest and scheme in TRANSPORTS and scheme != "auto"):
            return value
        raise ValueError(f"unknown transport {value!r}: expected one of {', '.join(TRANSPORTS)}, or scheme://address")

    parse = accept

    def use(self, value: str | ChannelTransport) -> str:
        return value.transport() if isinstance(value, ChannelTransport) else value


@define(frozen=True)
class Modules:
    """Names of modules, separated by commas, or "auto", or "none" (an empty variable is as good as not set)."""

    name: str = "modules"

    def accept(self, value: object) -> str:
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            value = ",".join(value) or "none"
        if not isinstance(value, str):
            raise TypeError(f"expected names of modules, in a list or separated by commas, not {value!r}")
        names = [each.strip() for each in value.split(",")]
        wrong = [each for each in names if not all(map(str.isidentifier, each.split(".")))]
        if wrong:
            raise ValueError(
                f"{wrong[0]!r} is no name of a module: expected 'auto', 'none', or a list such as 'a, b.c'"
            )
        return ", ".join(names)

    parse = accept

    def use(self, value: str) -> str:
        return value
