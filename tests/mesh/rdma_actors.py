"""Actors with memory, and actors that use it. No torch: it takes seconds to import."""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from typing import Any

from monarch.actor import Actor, endpoint
from monarch.rdma import RDMAAction, RDMABuffer, empty


def pattern(seed: int, size: int) -> bytes:
    """Bytes that differ from those of another seed, and at another place."""
    block = bytes((seed * 31 + i * 7 + (i >> 8)) % 256 for i in range(4099))
    return (block * (size // 4099 + 1))[:size]


class Holder(Actor):
    """Has memory."""

    def __init__(self) -> None:
        self.memory: list[memoryview] = []
        self.buffers: list[RDMABuffer] = []

    @endpoint
    def offer(self, size: int, seed: int = 0, kind: str = "heap") -> RDMABuffer:
        view = memoryview(bytearray(size)) if kind == "heap" else empty(size)
        view[:] = pattern(seed, size)
        self.memory.append(view)
        self.buffers.append(RDMABuffer(view))
        return self.buffers[-1]

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def offer_read_only(self) -> RDMABuffer:
        return RDMABuffer(memoryview(b"constant"))

    @endpoint
    def content(self, at: int = -1) -> bytes:
        return bytes(self.memory[at])

    @endpoint
    def drop(self, at: int = -1) -> None:
        self.buffers[at].drop().get(10)

    @endpoint
    def compute(self, started: Any) -> int:
        """Compute in pure Python until another process writes a 0 to the first byte of the memory."""
        memory, rounds = self.memory[-1], 0
        started.send(None)
        while memory[0]:
            rounds += 1
        return rounds

    @endpoint
    def overlapping(self) -> list[str]:
        """Uses of one's own memory that are refused."""
        data = bytearray(100)
        buffer = RDMABuffer(data)
        refused = []
        for use in (
            lambda: buffer.read_into(data),
            lambda: buffer.slice(0, 50).read_into(memoryview(data)[49:]),
            lambda: buffer.slice(50, 50).write_from(memoryview(data)[:51]),
        ):
            try:
                use().get(5)
            except ValueError as error:
                refused.append(str(error))
        buffer.slice(0, 50).read_into(memoryview(data)[50:]).get(5)
        return refused


class User(Actor):
    """Reads and writes memory of others."""

    @endpoint
    def read(self, buffer: RDMABuffer, timeout: float = 30) -> bytes:
        mine = bytearray(buffer.size())
        buffer.read_into(mine, timeout=timeout).get()
        return bytes(mine)

    @endpoint
    def checksum(self, buffer: RDMABuffer) -> int:
        mine = bytearray(buffer.size())
        buffer.read_into(mine).get()
        return zlib.crc32(mine)

    @endpoint
    def read_into_size(self, buffer: RDMABuffer, size: int) -> bytes:
        mine = bytearray(size)
        buffer.read_into(mine).get()
        return bytes(mine)

    @endpoint
    def write(self, buffer: RDMABuffer, data: bytes) -> None:
        buffer.write_from(data).get()

    @endpoint
    async def read_many(self, buffers: list[RDMABuffer]) -> list[bytes]:
        mine = [bytearray(buffer.size()) for buffer in buffers]
        action = RDMAAction()
        for target, buffer in zip(mine, buffers, strict=True):
            action.read_remote(target, buffer)
        await action.submit()
        return [bytes(each) for each in mine]

    @endpoint
    def count(self, buffer: RDMABuffer, times: int) -> list[int]:
        before = bytearray(8)
        action = RDMAAction().fetch_add(before, buffer, 1)
        seen = []
        for _ in range(times):
            action.submit().get()
            seen.append(int.from_bytes(before, "little"))
        return seen

    @endpoint
    def swap(self, buffer: RDMABuffer, expected: int, desired: int) -> int:
        before = bytearray(8)
        RDMAAction().compare_and_swap(before, buffer, expected, desired).submit().get()
        return int.from_bytes(before, "little")

    @endpoint
    def drop(self, buffer: RDMABuffer) -> None:
        buffer.drop().get(10)

    @endpoint
    def read_until_it_fails(self, buffer: RDMABuffer, started: Any) -> str:
        """Read again and again, and tell this process's pid after the first time; the failure."""
        mine = bytearray(buffer.size())
        buffer.read_into(mine).get()
        started.send(os.getpid())
        while True:
            try:
                buffer.read_into(mine).get()
            except Exception as error:
                return f"{type(error).__name__}: {error}"

    @endpoint
    def read_into_maps(self, buffers: list[RDMABuffer]) -> list[bytes]:
        """Read each into a mapping that is closed then, while its object lives on: the next gets its place."""
        maps, found = [], []
        for buffer in buffers:
            maps.append(mmap.mmap(-1, buffer.size()))
            buffer.read_into(maps[-1]).get()
            found.append(maps[-1][:])
            maps[-1].close()
        return found

    @endpoint
    def read_and_grow(self, buffer: RDMABuffer, times: int) -> int:
        """Memory that somebody else holds refuses to be resized."""
        grown = 0
        for _ in range(times):
            mine = bytearray(buffer.size())
            buffer.read_into(mine).get()
            mine.extend(b"more")
            grown += 1
        return grown

    @endpoint
    def read_past(self, stuck: RDMABuffer, times: int, buffer: RDMABuffer) -> bytes:
        """Read a buffer while transfers with another owner have begun."""
        self.begun = [stuck.read_into(bytearray(stuck.size())) for _ in range(times)]
        mine = bytearray(buffer.size())
        buffer.read_into(mine).get()
        return bytes(mine)

    @endpoint
    def await_begun(self) -> int:
        for each in self.begun:
            each.get()
        return len(self.begun)

    @endpoint
    def files_of_exports(self) -> int:
        """How many files of exports are open here, the own included."""
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:monarch-exports")
        return found

    @endpoint
    def backend(self, buffer: RDMABuffer) -> tuple[Any, str]:
        return buffer.backend, buffer.backend.reason
