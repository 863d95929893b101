"""Atomic words, as their process carries them out."""

from __future__ import annotations

import ctypes
import threading

from monarch.onesided.words import compare_and_swap, fetch_add


def word(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def test_fetch_add_gives_the_value_before_and_wraps():
    number = word((1 << 64) - 1)
    address = ctypes.addressof(number)

    assert fetch_add(address, 3) == (1 << 64) - 1
    assert (number.value, fetch_add(address, -3)) == (2, 2)
    assert number.value == (1 << 64) - 1


def test_compare_and_swap():
    number = word(5)
    address = ctypes.addressof(number)

    assert compare_and_swap(address, 4, 9) == 5
    assert number.value == 5
    assert compare_and_swap(address, 5, 9) == 5
    assert number.value == 9


def test_no_addition_is_lost():
    number = word(0)
    threads = [
        threading.Thread(target=lambda: [fetch_add(ctypes.addressof(number), 1) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert number.value == 8000
