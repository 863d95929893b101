"""Which device, port and GID: read from sysfs, chosen by a pure function that says why.

Of ports that are up, the first whose best GID ranks highest. A GID that routers forward goes before a link-local one,
RoCE v2 before v1, and an IPv4 address before IPv6. An InfiniBand port is addressed by its LID.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from attrs import define

from monarch.errors import NotViable

SYSFS: Final = Path("/sys/class/infiniband")
_EMPTY: Final = "0000:0000:0000:0000:0000:0000:0000:0000"
_IPV4: Final = "0000:0000:0000:0000:0000:ffff:"
_TARGET: Final = re.compile(r"nic:(?P<device>[^/]+)(?:/(?P<port>\d+)(?:/(?P<gid>\d+))?)?")


@define(frozen=True)
class Gid:
    """One entry of a port's table of addresses."""

    index: int
    gid: str
    kind: str  # "RoCE v2", "IB/RoCE v1"
    interface: str = ""

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        is_local = self.gid.startswith("fe80:")
        return not is_local, self.kind == "RoCE v2", self.gid.startswith(_IPV4)

    def __str__(self) -> str:
        text = self.gid
        if text.startswith(_IPV4):
            high, low = (int(part, 16) for part in text[len(_IPV4) :].split(":"))
            text = f"{high >> 8}.{high & 255}.{low >> 8}.{low & 255}"
        return f"{text} ({self.kind}{', ' + self.interface if self.interface else ''})"


@define(frozen=True)
class Port:
    """One port of a device."""

    device: str
    number: int
    state: str  # "ACTIVE", "DOWN"
    link_layer: str  # "Ethernet", "InfiniBand"
    lid: int = 0
    gids: tuple[Gid, ...] = ()

    def __str__(self) -> str:
        return f"{self.device} port {self.number}"


@define(frozen=True)
class Choice:
    """What to use, and in words why. `gid` is None on an InfiniBand port that is reached by its LID."""

    port: Port
    gid: Gid | None
    reason: str


def ports(root: Path = SYSFS) -> list[Port]:
    """All ports of all devices of this machine."""
    found = []
    for device in sorted(_entries(root)):
        for port in sorted(_entries(device / "ports"), key=lambda p: int(p.name)):
            state = _text(port / "state").rpartition(":")[2].strip()
            lid = int(_text(port / "lid") or "0", 16)
            found.append(Port(device.name, int(port.name), state, _text(port / "link_layer"), lid, tuple(_gids(port))))
    return found


def _gids(port: Path) -> list[Gid]:
    """The table has holes, and each address stands in it once for each version of RoCE."""
    gids = []
    for entry in sorted(_entries(port / "gids"), key=lambda p: int(p.name)):
        gid = _text(entry)
        if gid and gid != _EMPTY:
            kind = _text(port / "gid_attrs" / "types" / entry.name)
            gids.append(Gid(int(entry.name), gid, kind, _text(port / "gid_attrs" / "ndevs" / entry.name)))
    return gids


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # an empty place in the table answers EINVAL
        return ""


def choose(found: Sequence[Port], target: str = "") -> Choice:
    """The port and GID to use.

    Args:
        target: "" for any, or `nic:DEVICE`, `nic:DEVICE/PORT`, `nic:DEVICE/PORT/GID`, with the index of a GID.

    Raises:
        NotViable: there is none, or not the one that was asked for; says what there is.
    """
    device, number, index = _parse(target)
    if not found:
        raise NotViable(f"no RDMA device: {SYSFS} is empty")
    refused: list[str] = []
    best: tuple[tuple[bool, ...], Choice] | None = None
    for port in found:
        if (device and port.device != device) or (number is not None and port.number != number):
            refused.append(f"{port} is not what {target!r} asks for")
        elif port.state != "ACTIVE":
            refused.append(f"{port} is {port.state or 'in no state'}: is its cable in, or its network interface up?")
        else:
            gids = [gid for gid in port.gids if index is None or gid.index == index]
            gid = max(gids, key=lambda g: g.rank, default=None)
            if gid is None and port.link_layer != "InfiniBand":
                which = "no GID" if index is None else f"no GID {index}"
                refused.append(f"{port} has {which}: has its network interface an address?")
                continue
            rank = gid.rank if gid is not None else (True, True, True)
            if best is None or rank > best[0]:
                best = rank, Choice(port, gid, _reason(port, gid, target, len(gids)))
    if best is None:
        raise NotViable("; ".join(refused))
    return best[1]


def _parse(target: str) -> tuple[str, int | None, int | None]:
    if not target:
        return "", None, None
    match = _TARGET.fullmatch(target)
    if match is None:
        raise NotViable(
            f"rdma_ibverbs_target is {target!r}; it can be nic:DEVICE, nic:DEVICE/PORT or nic:DEVICE/PORT/GID"
        )
    port, gid = match["port"], match["gid"]
    return match["device"], int(port) if port else None, int(gid) if gid else None


def _reason(port: Port, gid: Gid | None, target: str, gids: int) -> str:
    why = f"{target!r} asks for it" if target else "it is active"
    if gid is None:
        return f"{port}, LID {port.lid}: {why}"
    return f"{port}, GID {gid.index} {gid}, the best of {gids}: {why}"
