"""The virtual cable between the two devices of the guest, `rxe0` and `rxe1`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from monarch.verbs import devices
from tests.until import until


def _set(state: str) -> None:
    subprocess.run(["ip", "link", "set", "rdma1", state], check=True)


@contextmanager
def pulled() -> Iterator[None]:
    """For the block; afterwards it is in again, and the device has its address back."""
    _set("down")
    try:
        yield
    finally:
        _set("up")
        until(lambda: any(gid.gid.endswith("0a4d:0002") for port in devices.ports() for gid in port.gids))
