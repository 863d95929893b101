"""Slots are filled once, and nobody waits for one for ever."""

from __future__ import annotations

import threading

import pytest

from monarch.mesh.tensor.slots import Slots, SlotsClosed


def test_a_slot_is_seen_until_it_is_taken():
    slots = Slots()
    slots.put(1, "a")
    assert slots.has(1) and slots.see(1, 0) == "a"
    assert slots.take(1) == "a"
    assert not slots.has(1)
    with pytest.raises(TimeoutError, match="nobody has filled 1"):
        slots.take(1, 0)


def test_who_comes_late_fills_no_slot_that_was_emptied():
    slots = Slots()
    slots.put(1, "a")
    slots.put(1, "b", if_empty=True)
    assert slots.take(1) == "a"
    slots.put(1, "b", if_empty=True)
    assert not slots.has(1)


def test_who_waits_hears_of_the_end():
    slots, heard = Slots(), []
    slots.on_close(lambda: heard.append("early"))

    def wait() -> None:
        with pytest.raises(SlotsClosed):
            slots.take(1, 20)
        heard.append("waiter")

    waiter = threading.Thread(target=wait)
    waiter.start()
    slots.close()
    waiter.join(20)
    slots.on_close(lambda: heard.append("late"))
    slots.put(1, "a")

    assert sorted(heard) == ["early", "late", "waiter"]
    assert not slots.has(1)
