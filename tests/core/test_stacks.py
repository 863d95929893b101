"""Stacks as values: of threads, of what waits, of a dump of faulthandler's; and what of them is worth showing."""

from __future__ import annotations

import asyncio
import threading
import types
from pathlib import Path

import pytest

import monarch
from monarch.core.stacks import (
    Frame,
    Owner,
    Shown,
    Stack,
    condensed,
    owned,
    owner_of,
    parse_dump,
    running_threads,
    waiting_tasks,
)

PACKAGE = str(Path(monarch.__file__).parent)
PYTHON = str(Path(threading.__file__).parent)


def users(function):
    return Frame("/home/me/train.py", 1, function, Owner.USER)


def ours(function):
    return Frame(f"{PACKAGE}/core/{function}.py", 1, function, Owner.LIBRARY)


def pythons(function):
    return Frame(f"{PYTHON}/asyncio/{function}.py", 1, function, Owner.PYTHON)


DEBUGGER = [
    Frame(f"{PYTHON}/bdb.py", 1, "trace_dispatch", Owner.PYTHON),
    Frame(f"{PYTHON}/pdb.py", 1, "user_line", Owner.PYTHON),
    Frame(f"{PACKAGE}/mesh/remote_pdb.py", 1, "interaction", Owner.LIBRARY),
    pythons("get"),
]


def functions(stack):
    return [frame.function for frame in stack.frames]


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        ("/home/me/train.py", Owner.USER),
        (f"{PACKAGE}/core/loop.py", Owner.LIBRARY),
        (f"{PACKAGE}/examples/search.py", Owner.USER),
        (f"{PYTHON}/threading.py", Owner.PYTHON),
        (f"{PYTHON}/site-packages/torch/nn.py", Owner.USER),
        ("<frozen runpy>", Owner.PYTHON),
        ("<string>", Owner.USER),
    ],
)
def test_whose_a_frame_is(file, owner):
    assert owner_of(file) is owner


@pytest.mark.parametrize(
    ("then", "owner"),
    [(f"{PACKAGE}/launch/template.py", Owner.LIBRARY), (f"{PACKAGE}/debug.py", Owner.USER), ("x.py", Owner.USER)],
)
def test_what_starts_a_process_of_ours_is_no_code_of_the_users(then, owner):
    assert owned([("<string>", 8, "<module>"), (then, 1, "main")])[0].owner is owner


def test_a_thread_that_waits_for_a_lock_is_seen_there():
    lock, inside = threading.Lock(), threading.Event()

    def wait_for_lock():
        inside.set()
        with lock:
            pass

    with lock:
        thread = threading.Thread(target=wait_for_lock, name="the one that waits")
        thread.start()
        assert inside.wait(10)
        stack = running_threads()[thread.ident]
    thread.join(10)

    assert (stack.name, functions(stack)[-1], stack.waits) == ("the one that waits", "wait_for_lock", False)
    assert stack.frames[-1].file == __file__


@types.coroutine
def old_style():
    yield from asyncio.sleep(60).__await__()


async def generate():
    await old_style()
    yield


async def outer():
    async for _ in generate():
        pass


def test_what_a_task_awaits_is_followed_to_the_innermost_frame():
    async def main():
        task = asyncio.create_task(outer(), name="the task")
        await asyncio.sleep(0)
        found = {stack.name: stack for stack in waiting_tasks(asyncio.get_running_loop())}
        task.cancel()
        return found

    found = asyncio.run(main())

    assert list(found) == ["the task"]  # the one that runs is in its thread's stack
    assert found["the task"].waits
    assert functions(found["the task"]) == ["outer", "generate", "old_style", "sleep"]


DUMP = """\
Thread 0x00007f0c191986c0 (most recent call first):
  File "/home/me/my train.py", line 7 in <lambda>
  File "/usr/lib/python3.11/threading.py", line ??? in run
  ...

Current thread 0x00007f0c19e1bb80 [main one] (most recent call first):
  File "/home/me/my train.py", line 9 in <module>

Thread 0x000000000000000a (most recent call first):
  <no Python frame>
"""


def test_a_dump_is_read_with_the_most_recent_call_last():
    assert parse_dump(DUMP) == (
        Stack(
            "0x7f0c191986c0",
            owned([("/usr/lib/python3.11/threading.py", 0, "run"), ("/home/me/my train.py", 7, "<lambda>")]),
        ),
        Stack("main one", owned([("/home/me/my train.py", 9, "<module>")])),
        Stack("0xa", ()),
    )


@pytest.mark.parametrize(
    ("frames", "shown"),
    [
        ([], []),
        ([users("a"), users("b")], [Shown(users("a")), Shown(users("b"))]),
        ([ours("run"), pythons("loop"), ours("turn"), users("step")], [Shown(None, 3), Shown(users("step"))]),
        ([users("step"), pythons("sleep")], [Shown(users("step")), Shown(pythons("sleep"))]),
        ([users("step"), ours("get"), ours("wait"), pythons("poll")], [Shown(users("step")), Shown(ours("get"), 2)]),
        (
            [users("a"), ours("call"), ours("do"), users("b")],
            [Shown(users("a")), Shown(ours("call"), 1), Shown(users("b"))],
        ),
        ([ours("run"), pythons("wait")], [Shown(None, 2)]),
        ([users("step"), *DEBUGGER], [Shown(users("step")), Shown(None, 4)]),
        ([users("step"), *DEBUGGER, users("asked")], [Shown(users("step")), Shown(None, 4), Shown(users("asked"))]),
    ],
)
def test_frames_that_tell_little_are_left_out(frames, shown):
    assert condensed(frames) == shown
    assert sum(1 if each.frame else 0 for each in shown) + sum(each.inside for each in shown) == len(frames)


def test_a_stack_without_code_of_the_users_is_idle():
    assert Stack("t", (ours("run"), pythons("wait"))).is_idle
    assert not Stack("t", (ours("run"), users("step"), ours("get"))).is_idle
