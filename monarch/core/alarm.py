"""What wakes a thread after a time, unless that is taken back before: for the threads of `driver` that stand by."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import sys
import threading
import time
from struct import Struct
from typing import Final, Protocol

from monarch.wake import OwnedFd, Wake

_libc: Final = ctypes.PyDLL(None) if sys.platform == "linux" else None

_TIMES: Final = Struct("@4l")  # the period, then when: seconds and nanoseconds each
_LONGEST_WAIT_S: Final = 3600.0  # poll counts milliseconds in an int


class Alarm(Protocol):
    """Wakes one thread after a time."""

    def set(self, after_s: float | None) -> None:
        """Ring after so long, and not when it was to ring before; None: never."""
        ...

    def wait(self) -> None:
        """Until it rings, which may have been before."""
        ...


class TimerAlarm:
    """By the kernel: to set it wakes nobody, and takes 1 us."""

    def __init__(self, libc: ctypes.CDLL, fd: int) -> None:
        self._owned = OwnedFd(fd)
        self._set = libc.timerfd_settime

    def fileno(self) -> int:
        return self._owned.fd

    def set(self, after_s: float | None) -> None:
        after_ns = 0 if after_s is None else max(1, int(after_s * 1e9))  # 0 sets it to never
        self._set(self._owned.fd, 0, _TIMES.pack(0, 0, *divmod(after_ns, 1_000_000_000)), None)

    def wait(self) -> None:
        os.read(self._owned.fd, 8)


class ImmediateAlarm:
    """Where there are no such timers it rings at once."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def set(self, after_s: float | None) -> None:
        if after_s is not None:
            self._rung.set()

    def wait(self) -> None:
        self._rung.wait()
        self._rung.clear()


class Watch:
    """Where one thread waits until its alarm rings, or somebody nudges it. An alarm that is taken back takes no nudge
    along."""

    def __init__(self, alarm: TimerAlarm) -> None:
        """Raises: OSError."""
        self.waker = Wake()  # nudges
        self.call = alarm.set
        self._poll = select.poll()
        for each in (alarm, self.waker):
            self._poll.register(each, select.POLLIN)

    def wait(self, timeout_s: float | None) -> None:
        """May return early."""
        wait_ms = None if timeout_s is None else math.ceil(min(max(timeout_s, 0.0), _LONGEST_WAIT_S) * 1e3)
        if self._poll.poll(wait_ms):
            self.call(None)
            self.waker.clear()


def make_alarm() -> Alarm:
    if _libc is not None:
        fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if fd >= 0:
            return TimerAlarm(_libc, fd)
    return ImmediateAlarm()


def make_watch(alarm: Alarm) -> Watch | None:
    """None where `alarm` is no timer, or no descriptor is left: then nobody can be called in time."""
    with contextlib.suppress(OSError):
        return Watch(alarm) if isinstance(alarm, TimerAlarm) else None
    return None
