"""Which task waits for which, and how a cycle is told. What is refused, and what is not, is tested with meshes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from monarch.core.deadlock import _depends, describe

Way = Callable[["asyncio.Task[None]"], Awaitable[object]]


async def _awaits(task: asyncio.Task[None]) -> None:
    await task


async def _in_a_group(task: asyncio.Task[None]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_awaits(task))


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (_awaits, True),
        (lambda task: asyncio.create_task(_awaits(task)), True),
        (lambda task: asyncio.gather(asyncio.sleep(60), task), True),
        (lambda task: asyncio.gather(asyncio.gather(_awaits(task))), True),
        (lambda task: asyncio.sleep(60), False),
        (lambda task: asyncio.wait({task, asyncio.create_task(asyncio.sleep(60))}), False),  # which one is not known
        (_in_a_group, False),
    ],
    ids=["await", "task", "gather", "nested", "something else", "wait", "group"],
)
def test_a_task_depends_on_those_that_it_surely_awaits(way: Way, expected: bool) -> None:
    async def endpoint(task: asyncio.Task[None]) -> None:
        await way(task)

    async def look() -> bool:
        never = asyncio.create_task(asyncio.sleep(60))
        own = asyncio.create_task(endpoint(never))
        for _ in range(5):
            await asyncio.sleep(0)
        found = _depends(own, never)
        assert _depends(never, never) and not _depends(never, own) and not _depends(None, own)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for each in left:
            each.cancel()
        await asyncio.wait(left)
        assert not _depends(own, never)  # it is over
        return found

    assert asyncio.run(look()) is expected


def test_a_cycle_is_told_in_order_with_a_way_out() -> None:
    own = describe(["M a.x"], "M a.y", "M a.x")
    assert own.startswith("deadlock: M a.x calls M a.y and waits for it") and "self.method()" in own

    longer = describe(["M a.x", "M b.y"], "M a.z", "M a.x")
    assert "M a.x -> M b.y -> M a.z" in longer and "before M a.x is through" in longer and "concurrent" in longer

    left_to_another = describe(["M a.x"], "M a.y", "M a.later")
    assert "M a.x -> M a.y" in left_to_another and "before M a.later is through" in left_to_another
