"""A pseudo-terminal on a host of a job, with a shell on it: owned by an actor there, which ends the shell's session.

The actor is asked for what is printed, and told what is typed, a piece at a time: what it is not asked for waits in the
kernel, and whoever prints it waits, too. So nothing piles up, here or at the caller.

The shell leads a session of its own. At its end, or that of the actor, what is left of the session is sent SIGHUP, then
SIGTERM, then SIGKILL, with a moment after each. Where the actor's process is killed instead, the processes of the
session are orphans, and whoever looks after the processes of this host kills them (`launch.orphans`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from monarch.job.workers import members_of_session
from monarch.mesh.actor import Actor
from monarch.mesh.endpoint import concurrent_endpoint, endpoint

Size = tuple[int, int]
"""(rows, columns)"""

CHUNK_BYTES: Final = 64 << 10
GRACE_S: Final = 0.5
"""How long a session has to end after SIGHUP, and again after SIGTERM."""

_ENDINGS: Final = (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL)
_LOOK_S: Final = 0.01
_REST_S: Final = 1.0
_AGAIN_S: Final = 0.05, 1.0

# Between fork and exec of a process with threads no Python may run, so a new interpreter takes the terminal. A worker
# may have been started with signals ignored or blocked (by nohup, or in the background of a script), which are
# inherited: then Ctrl-C would do nothing to what the shell starts.
_TAKE_TERMINAL: Final = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    try:
        signal.signal(number, signal.SIG_DFL)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_SETMASK, ())
try:
    os.execv(sys.argv[1], sys.argv[1:2])
except OSError:
    os.execv("/bin/sh", ["/bin/sh"])
"""


class PseudoTerminal(Actor):
    """See the module. `open` comes first, and once."""

    def __init__(self) -> None:
        self._master = -1
        self._pidfd = -1
        self._shell: subprocess.Popen[bytes] | None = None
        self._has_ended = asyncio.Event()
        self._no_more: asyncio.Task[None] | None = None
        self._unfinished_line = False

    @endpoint
    async def open(self, env: Mapping[str, str], workdir: str | None, size: Size) -> None:
        """Start the shell of `$SHELL`, or else /bin/sh.

        Args:
            env: variables on top of those of this process.

        Raises:
            OSError: there is no such directory, or no pseudo-terminal to be had.
        """
        around = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        variables = {**around, **env}
        self._master, slave = os.openpty()
        try:
            os.set_blocking(self._master, False)
            self._set_size(size)
            shell = variables.get("SHELL") or "/bin/sh"
            self._shell = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, shell],
                env=variables,
                cwd=workdir,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
            )
        finally:
            os.close(slave)
        self._pidfd = os.pidfd_open(self._shell.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._note_end)

    @concurrent_endpoint
    async def read(self) -> bytes:
        """The next of what is printed, as soon as there is some; nothing at the end. One at a time."""
        while True:
            try:
                return os.read(self._master, CHUNK_BYTES)
            except BlockingIOError:
                if not await self._is_readable():
                    return b""
            except OSError:  # EIO: nobody has the terminal open any more
                await self._has_ended.wait()
                return b""

    @concurrent_endpoint
    async def write(self, data: bytes) -> None:
        """Type `data`; answered once the terminal has taken it. One at a time."""
        self._unfinished_line = not data.endswith((b"\n", b"\r"))
        await self._type(data)

    @endpoint
    async def no_more(self) -> None:
        """There is no more to type: whoever reads from the terminal finds the end of its input, from now on."""
        if self._no_more is None:
            self._no_more = asyncio.ensure_future(self._tell_of_end())

    @endpoint
    async def resize(self, size: Size) -> None:
        """The terminal has another size; the kernel tells the programs by SIGWINCH."""
        self._set_size(size)

    @endpoint
    async def close(self) -> int:
        """End the session; the exit status of the shell, 128 and the number of the signal that ended it."""
        status = await self._end_session()
        return status if status >= 0 else 128 - status

    async def __cleanup__(self, exc: Exception | None) -> None:
        await self._end_session()

    async def _type(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        left = memoryview(data)
        while left and not self._has_ended.is_set():
            try:
                left = left[os.write(self._master, left) :]
            except BlockingIOError:
                room = loop.create_future()
                loop.add_writer(self._master, _complete, room)
                try:
                    await self._until_done_or_end(room)
                finally:
                    if self._master >= 0:
                        loop.remove_writer(self._master)
            except OSError:
                return  # nobody has the terminal open any more

    def _set_size(self, size: Size) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._has_ended.set()

    async def _is_readable(self) -> bool:
        """Wait until there is something to read, or the end of it. False: the shell has ended, and something that
        holds the terminal open all the same prints nothing."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._master, _complete, readable)
        try:
            await self._until_done_or_end(readable)
            if not readable.done():
                await asyncio.wait((readable,), timeout=_REST_S)
            return readable.done()
        finally:
            if self._master >= 0:
                loop.remove_reader(self._master)

    async def _until_done_or_end(self, future: asyncio.Future[None]) -> None:
        ended = asyncio.ensure_future(self._has_ended.wait())
        try:
            await asyncio.wait((future, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()

    async def _tell_of_end(self) -> None:
        """Finish the last line, and type what stands for the end of input, again and again: it counts for one read, and
        not at all where the terminal has another mode when it is typed than when it is read."""
        pause_s, longest_s = _AGAIN_S
        if self._unfinished_line:
            await self._type(b"\n")
        while not self._has_ended.is_set():
            with contextlib.suppress(OSError):
                mark: Any = termios.tcgetattr(self._master)[6][termios.VEOF]
                os.write(self._master, mark)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def _end_session(self) -> int:
        """The shell's exit status, negative for a signal. It is reaped last: until then its number, by which the
        session is known, is nobody else's."""
        shell = self._shell
        if shell is None:
            return 0
        if shell.returncode is None:
            for signum in _ENDINGS:
                if not members_of_session(shell.pid):
                    break
                _signal_all(shell.pid, signum)
                await _wait_while(lambda: members_of_session(shell.pid), GRACE_S)
            shell.wait()
            self._close_all()
        return shell.returncode

    def _close_all(self) -> None:
        if self._no_more is not None:
            self._no_more.cancel()
        loop = asyncio.get_running_loop()
        descriptors = self._master, self._pidfd
        self._master = self._pidfd = -1  # their numbers may soon be those of others
        for fd in descriptors:
            loop.remove_reader(fd)
            loop.remove_writer(fd)
            os.close(fd)
        self._has_ended.set()


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _signal_all(leader: int, signum: int) -> None:
    for pid in members_of_session(leader):
        for number in (signum, signal.SIGCONT):  # one that is stopped hears of it, too
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


async def _wait_while(condition: Callable[[], object], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while condition() and time.monotonic() < deadline_s:
        await asyncio.sleep(_LOOK_S)
