"""Memory registered with a device: pinned, and known to it by keys. Registering 64 MiB takes from 1.5 to 20 ms.

Memory that stays where it is until the end of an object, which can be watched, stays registered until then, or until
others need the room. Any other is registered for one transfer: an address is no key, as the allocator gives it out
again, and what a device has of it are the pages that were there before.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from attrs import define

from monarch.errors import TransferError
from monarch.verbs.adapter import OpenDevice, Region
from monarch.verbs.dmabuf import exported
from monarch.verbs.pins import Pin, pin

_MOST_BYTES: Final = 4 << 30


def memlock_limit() -> int | None:
    """How many bytes this process may lock; None for any number, as for root."""
    if os.geteuid() == 0:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


class _Pinned:
    """Registered memory of this process, whose pages stay."""

    def __init__(self, region: Region, pin: Pin) -> None:
        self._region, self._pin = region, pin
        self.lkey, self.rkey = region.lkey, region.rkey

    def close(self) -> None:
        self._region.close()
        self._pin.release()


def register(device: OpenDevice, address: int, size_bytes: int) -> Region:
    """Raises: TransferError, that names the limit where it is one."""
    pinned = pin(address, size_bytes)  # before the device looks where the pages are
    try:
        return _Pinned(device.register(address, size_bytes), pinned)
    except BaseException as error:
        pinned.release()
        if not isinstance(error, OSError):
            raise
        if error.errno not in (errno.ENOMEM, errno.EAGAIN, errno.EPERM) and "ocate memory" not in str(error):
            raise TransferError(f"{size_bytes} bytes could not be registered with the RDMA device: {error}") from error
        limit = memlock_limit()
        allowed = "any amount of memory" if limit is None else f"{limit} bytes"
        raise TransferError(
            f"{size_bytes} bytes could not be registered with the RDMA device: this process may lock {allowed} "
            "(`ulimit -l`). Raise the limit (memlock in /etc/security/limits.conf, LimitMEMLOCK of a systemd unit, "
            "--ulimit memlock=-1 of a container)"
        ) from error


def register_cuda(device: OpenDevice, address: int, size_bytes: int) -> Region:
    """Register memory of a CUDA device. Raises: TransferError: its driver, the RDMA device or the binding cannot."""
    try:
        with exported(address, size_bytes) as (fd, offset):
            return device.register_dmabuf(fd, offset, size_bytes, address)
    except OSError as error:
        raise TransferError(f"memory of a CUDA device cannot be registered with the RDMA device: {error}") from error


@define(eq=False)
class _Entry:
    region: Region
    size_bytes: int
    users: int = 0
    forgotten: bool = False


class Registrations:
    """Those of a device. Thread-safe."""

    def __init__(self, device: OpenDevice) -> None:
        self._device = device
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._bytes = 0
        limit = memlock_limit()
        self._most_bytes = _MOST_BYTES if limit is None else limit // 2
        self._lock = threading.RLock()  # finalizers run anywhere

    @contextmanager
    def of(self, address: int, size_bytes: int, anchor: Any) -> Iterator[Region]:
        """The registration of some memory, for the block.

        Args:
            anchor: see `onesided.local`; None for memory that may go before any object does.

        Raises:
            TransferError: the memory cannot be registered.
        """
        if anchor is None or size_bytes > self._most_bytes:
            region = register(self._device, address, size_bytes)
            try:
                yield region
            finally:
                region.close()
            return
        entry = self._enter(address, size_bytes, anchor)
        try:
            yield entry.region
        finally:
            with self._lock:
                entry.users -= 1
                if entry.forgotten and not entry.users:
                    entry.region.close()

    def _enter(self, address: int, size_bytes: int, anchor: Any) -> _Entry:
        key = address, size_bytes
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._make_room(size_bytes)
                entry = self._entries[key] = _Entry(register(self._device, address, size_bytes), size_bytes)
                self._bytes += size_bytes
                weakref.finalize(anchor, self._forget, key, entry).atexit = False
            self._entries.move_to_end(key)
            entry.users += 1
        return entry

    def _make_room(self, size_bytes: int) -> None:
        for key, entry in list(self._entries.items()):
            if self._bytes + size_bytes <= self._most_bytes:
                return
            if not entry.users:
                self._forget(key, entry)

    def _forget(self, key: tuple[int, int], entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]
                self._bytes -= entry.size_bytes
                entry.forgotten = True
                if not entry.users:
                    entry.region.close()

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        with self._lock:
            for key, entry in list(self._entries.items()):
                self._forget(key, entry)
