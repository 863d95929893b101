"""Memory of a CUDA device, as a driver that only takes notes exports it."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from monarch.errors import TransferError
from monarch.verbs.registrations import register_cuda


class Driver:
    """Exports any memory as /dev/null."""

    def __init__(self, result: int = 0) -> None:
        self.result, self.asked = result, (0, 0)

    def cuMemGetHandleForAddressRange(self, fd: Any, start: Any, size: Any, kind: int, flags: Any) -> int:
        self.asked = start.value, size.value
        if not self.result:
            fd._obj.value = os.open(os.devnull, os.O_RDONLY)
        return self.result


class Device:
    """Refuses what is no open descriptor."""

    asked: tuple[int, ...] = ()

    def register_dmabuf(self, fd: int, offset: int, size_bytes: int, address: int) -> Any:
        os.fstat(fd)
        self.asked = offset, size_bytes, address
        return "region"


def test_whole_pages_are_exported_and_a_part_of_them_registered(monkeypatch):
    driver, device = Driver(), Device()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    before = len(os.listdir("/proc/self/fd"))

    assert register_cuda(device, 5 * 4096 + 100, 4096) == "region"  # type: ignore[arg-type]
    assert driver.asked == (5 * 4096, 2 * 4096)
    assert device.asked == (100, 4096, 5 * 4096 + 100)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_exported_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(801))
    with pytest.raises(
        TransferError, match=r"CUDA device cannot be registered .* does not export the memory \(error 801"
    ):
        register_cuda(Device(), 4096, 10)  # type: ignore[arg-type]

    def none(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", none)
    with pytest.raises(TransferError, match=r"libcuda\.so\.1: cannot open"):
        register_cuda(Device(), 4096, 10)  # type: ignore[arg-type]
