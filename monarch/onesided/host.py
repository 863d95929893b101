"""Which processes share a host, so that the kernel can copy between them: those with the same `host_id`."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final

_NAMESPACES: Final = ("pid", "ipc", "net")


@functools.cache
def _of_kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    except OSError:
        return ""
    return ":".join([boot, *spaces, str(os.geteuid())])


def host_id() -> str:
    """A name of this host; "" where the kernel gives none. `MONARCH_HOST_ID` overrides it."""
    return os.environ.get("MONARCH_HOST_ID") or _of_kernel()
