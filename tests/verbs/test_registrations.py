"""Registrations of a device that only counts."""

from __future__ import annotations

import errno
import gc
from typing import Any

import pytest

from monarch.errors import TransferError
from monarch.verbs.registrations import Registrations


class Memory:
    """Something that can be watched."""


class Region:
    lkey, rkey = 1, 2

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.size = device, size
        device.registered += size

    def close(self) -> None:
        self.device.registered -= self.size


class Device:
    """Counts what is registered with it."""

    def __init__(self, most: int = 1 << 60) -> None:
        self.registered, self.calls, self.most = 0, 0, most

    def register(self, address: int, size: int) -> Any:
        self.calls += 1
        if self.registered + size > self.most:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return Region(self, size)

    def mtu(self) -> int: ...
    def queue_pair(self, depth: int) -> Any: ...
    def close(self) -> None: ...


def test_watched_memory_is_registered_once_and_released_with_its_owner():
    device, memory = Device(), Memory()
    cache = Registrations(device)
    for _ in range(3):
        with cache.of(4096, 100, memory):
            assert device.registered == 100
    assert (device.registered, device.calls, len(cache)) == (100, 1, 1)
    del memory
    gc.collect()

    assert (device.registered, len(cache)) == (0, 0)


def test_a_registration_outlives_its_owner_while_a_transfer_uses_it():
    device, memory = Device(), Memory()
    cache = Registrations(device)
    with cache.of(4096, 100, memory):
        del memory
        gc.collect()
        assert device.registered == 100

    assert device.registered == 0


def test_memory_that_nobody_can_watch_is_registered_for_one_transfer():
    device = Device()
    cache = Registrations(device)
    with cache.of(4096, 100, None):
        assert device.registered == 100

    assert (device.registered, len(cache)) == (0, 0)


def test_what_was_used_least_recently_makes_room(monkeypatch):
    monkeypatch.setattr("monarch.verbs.registrations.memlock_limit", lambda: 500)
    device, memory = Device(), Memory()
    cache = Registrations(device)
    for address in (0, 100, 0, 200):  # 250 bytes are the most, 100 each
        with cache.of(address, 100, memory):
            pass
    with cache.of(0, 100, memory):
        assert device.calls == 3
    with cache.of(100, 100, memory):
        assert device.calls == 4

    assert device.registered == 200


def test_a_limit_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr("monarch.verbs.registrations.memlock_limit", lambda: 8 << 20)
    cache = Registrations(Device(most=10))
    with (
        pytest.raises(TransferError, match=r"16000000 bytes .* may lock 8388608 bytes \(`ulimit -l`\). Raise"),
        cache.of(0, 16_000_000, None),
    ):
        pass
    assert len(cache) == 0


def test_another_error_of_the_device_is_told_as_it_is():
    class Broken(Device):
        def register(self, address: int, size: int) -> Any:
            raise OSError(errno.EFAULT, "Bad address")

    with pytest.raises(TransferError, match="Bad address"), Registrations(Broken()).of(0, 5, None):
        pass


def test_all_are_released_at_the_end():
    device, memory = Device(), Memory()
    cache = Registrations(device)
    with cache.of(0, 5, memory):
        pass
    cache.close()

    assert device.registered == 0
