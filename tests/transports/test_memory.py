"""Memory for large buffers, and that it is used again once nobody has it any more."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from monarch.transports import memory
from monarch.transports.memory import (
    KEPT_BYTES,
    LARGE_BYTES,
    _call,
    allocate,
    allocate_for_bytes,
    new_bytearray,
    new_bytes,
)

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="memory cannot be mapped here")


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    unused: list[mmap.mmap] = []
    monkeypatch.setattr(memory, "_unused", unused)
    yield
    assert sum(map(len, unused)) <= KEPT_BYTES


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.mark.parametrize("size_bytes", [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1])
def test_it_is_writable_and_of_the_size_that_was_asked_for(size_bytes: int) -> None:
    view = allocate(size_bytes)
    assert len(view) == view.nbytes == size_bytes
    view[:] = b"x" * size_bytes
    assert bytes(view) == b"x" * size_bytes


def test_it_is_used_again_when_the_last_view_of_it_is_gone_and_not_before() -> None:
    first = allocate(LARGE_BYTES)
    place, part = _address(first), first[10:20]
    del first
    second = allocate(LARGE_BYTES)
    assert _address(second) != place
    del part
    assert _address(allocate(LARGE_BYTES)) == place


def test_memory_in_a_cycle_is_used_again_behind_the_finalizers_of_the_others() -> None:
    seen = []

    class Last:
        def __del__(self) -> None:
            seen.append((bytes(self.view[:4]), len(memory._unused)))

    last = Last()
    last.view = allocate(LARGE_BYTES)  # type: ignore[attr-defined]
    last.view[:4] = b"kept"  # type: ignore[attr-defined]
    last.itself = last  # type: ignore[attr-defined]
    del last
    gc.collect()
    assert seen == [(b"kept", 0)] and len(memory._unused) == 1


def test_no_more_is_kept_than_the_limit() -> None:
    views = [allocate(KEPT_BYTES // 2) for _ in range(3)]
    del views
    assert len(memory._unused) == 2


def test_what_cannot_be_had_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        allocate(1 << 46)


@pytest.mark.parametrize("size_bytes", [100, LARGE_BYTES + 100])
def test_copies_are_what_they_say(size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    for part in (data, bytearray(data), memoryview(bytearray(data)), memoryview(data)):
        copies = new_bytes(part), new_bytearray(part)
        assert [type(each) for each in copies] == [bytes, bytearray]
        assert copies == (data, data) and hash(copies[0]) == hash(data)
    copy = new_bytearray(data)
    copy += b"more"
    assert copy == data + b"more"


@pytest.mark.parametrize("has_threads", [True, False])
def test_two_threads_copy_what_is_large_or_one_where_there_are_no_more(
    has_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    helped = []
    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(memory, "_call", lambda *far: (helped.append(far[2]), _call(*far)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(memory, "_TOGETHER_BYTES", LARGE_BYTES)
    data = os.urandom(LARGE_BYTES + 4321)
    room = allocate(len(data))
    memory.copy(room, data)
    assert bytes(room) == data
    assert all(LARGE_BYTES // 2 <= far < len(data) for far in helped) and len(helped) == has_threads


@pytest.mark.parametrize("made", [new_bytearray, new_bytes])
def test_what_is_copied_cannot_be_resized_meanwhile(
    made: Callable[[bytearray], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = bytearray(LARGE_BYTES)
    moved = []

    def move(to: int, start: int, size_bytes: int, *owners: object) -> None:
        with pytest.raises(BufferError):
            part.clear()
        moved.append(size_bytes)

    monkeypatch.setattr(memory, "move", move)
    made(part)
    assert moved == [LARGE_BYTES]


@pytest.mark.parametrize("size_bytes", [100, LARGE_BYTES + 100])
def test_bytes_are_made_of_memory_for_them_without_a_copy(size_bytes: int) -> None:
    view = allocate_for_bytes(size_bytes)
    data = os.urandom(size_bytes)
    view[:] = data
    made = new_bytes(view)
    assert type(made) is bytes and made == data and made is new_bytes(view)
    assert new_bytes(view[1:]) == data[1:]
    del view
    assert made == data
