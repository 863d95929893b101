"""Actors that get stuck, in their own module so that processes which have them import no pytest."""

from __future__ import annotations

import asyncio
import ctypes
import threading

from monarch import debug
from monarch.actor import Actor, current_rank, endpoint


class Stuck(Actor):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    @endpoint
    def ready(self) -> int:
        return current_rank().rank

    @endpoint
    def wait_for_lock(self) -> None:
        self.lock.acquire()
        self.lock.acquire(timeout=60)

    @endpoint
    async def wait_at_await(self) -> None:
        self.event = asyncio.Event()
        await self.event.wait()

    @endpoint
    def hold(self, seconds: int) -> int:
        left: int = ctypes.PyDLL(None).sleep(seconds)
        return left

    @endpoint
    def look(self) -> debug.Snapshot:
        return debug.ps()

    @endpoint
    def fail(self) -> None:
        raise SystemExit("as asked")


class Unborn(Actor):
    def __init__(self) -> None:
        threading.Event().wait()
