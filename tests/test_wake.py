"""Wake-ups, also of what others close meanwhile."""

from __future__ import annotations

import os
import select

import pytest

from monarch.wake import Wake


def test_it_is_readable_from_the_first_set_to_the_clear() -> None:
    wake = Wake()
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    assert not poll.poll(0)
    wake.set()
    wake.set()
    assert poll.poll(0)
    wake.clear()
    wake.clear()
    assert not poll.poll(0)


def test_a_wake_after_the_close_touches_no_descriptor() -> None:
    wake = Wake()
    number = wake.fileno()
    wake.close()
    wake.close()
    wake.set()
    wake.clear()

    assert wake.fileno() == -1
    with pytest.raises(OSError):
        os.fstat(number)


def test_a_descriptor_in_use_is_not_closed_under_the_thread_that_wakes() -> None:
    wake = Wake()
    held = wake._owned  # what a thread inside `set` holds
    assert held is not None
    wake.close()
    os.fstat(held.fd)
    os.eventfd_write(held.fd, 1)
