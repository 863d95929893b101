"""Files in memory that processes share, and that nobody can shorten.

Whoever has the descriptor of a file may cut it off, and who then touches what it had mapped behind the new end dies of
SIGBUS. So the kernel is told of each file that it never gets shorter (a seal, which nobody can take back), and a file
of another process is used only where the kernel says so. Its pages may still be given back: they read as zeros.
"""

from __future__ import annotations

import fcntl
import os


def create(name: str) -> int:
    """The descriptor of a new file, to be sealed.

    Raises: OSError.
    """
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(fd: int, *, may_grow: bool = False) -> None:
    """From now on the file gets no shorter, and no longer either, unless it may; and it stays so.

    Raises: OSError.
    """
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals if may_grow else seals | fcntl.F_SEAL_GROW)


def sealed_bytes(fd: int) -> int:
    """How long a file of another process is, and will be at the least.

    Raises:
        ValueError: it may get shorter.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # a file of another kind
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("the file can be cut off (it has no F_SEAL_SHRINK)")
    return os.fstat(fd).st_size
