"""The guardian: the template's parent, which has one thing to do when the template is gone, whatever ended it.

The template ends what belongs to it when its driver is gone; nobody would, if it were killed itself: its children die
with it (parent-death signal), but not what those have started. So the process that the driver execs forks once, before
it imports anything heavy: the copy becomes the template, and the original waits here, a subreaper, for its end. Then
it tells the driver how it ended, kills the orphans, and exits. A guardian that is killed takes the template along: that
watches the other end of the *lifeline*, a pipe.

Where the driver is gone, or has hung up, the template has a moment to see to everything. After that it is stuck, and is
killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import Final, NoReturn

from monarch.launch.orphans import Orphans, kill
from monarch.launch.wire import Wire

_TEMPLATE_LIMIT_S: Final = 2.0  # for the template to end after its driver
_ORPHANS_LIMIT_S: Final = 10.0  # then the guardian gives up on what SIGKILL does not end (stuck in the kernel)


def fork_template(socket_fd: int, driver: int | None) -> int:
    """Fork. Returns in the template only, the lifeline: it is readable once the guardian is gone.

    Args:
        socket_fd: the template's end of its wire.
        driver: pidfd of the driver, if there is one.
    """
    lifeline, held = os.pipe()
    wake, wake_by = os.pipe()
    for fd in (wake, wake_by):
        os.set_blocking(fd, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    template = os.fork()
    if not template:
        for fd in (held, wake, wake_by):
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        return lifeline
    os.close(lifeline)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_by, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    _guard(template, Wire(socket_fd), driver, wake)


def _guard(template: int, wire: Wire, driver: int | None, wake: int) -> NoReturn:
    watched = {wake: select.POLLIN, wire.fileno(): 0}  # 0: only the hang-up; what arrives is for the template
    if driver is not None:
        watched[driver] = select.POLLIN
    deadline_s: float | None = None
    while (status := _reaped(template)) is None:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        ready = _wait(watched, wake, left_s)
        if ready - {wake} and deadline_s is None:
            deadline_s = time.monotonic() + _TEMPLATE_LIMIT_S
        for fd in ready - {wake}:
            del watched[fd]
        if deadline_s is not None and time.monotonic() >= deadline_s:
            kill(template, signal.SIGKILL)
    wire.send({"op": "over", "code": status if status >= 0 else None, "signal": -status if status < 0 else None})
    wire.flush()
    wire.close()
    orphans = Orphans()
    deadline_s = time.monotonic() + _ORPHANS_LIMIT_S
    while orphans.end(()) and time.monotonic() < deadline_s:
        _wait({wake: select.POLLIN}, wake, 0.05)
        _reaped(-1)
    os._exit(0)


def _wait(watched: dict[int, int], wake: int, timeout_s: float | None) -> set[int]:
    poll = select.poll()
    for fd, events in watched.items():
        poll.register(fd, events)
    ready = {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000 + 1)}
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)
    return ready


def _reaped(template: int) -> int | None:
    """Collect whoever has ended; the exit code of the template, negative for a signal, if it was among them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == template:
                return os.waitstatus_to_exitcode(status)
            if not pid:
                break
    return None
