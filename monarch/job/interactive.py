"""A shell on a host of a job, in the terminal of this process: `shell`.

Two threads. The one that called waits for keys, for changes of the window's size and for the end; another asks for what
is printed, and writes it. Each has one call on its way to the pseudo-terminal (`pseudo_terminal`), and goes on with the
answer, so that whoever is slower has the others wait.

The processes there belong to a keeper, an actor in this process: their death is an error of `shell`, and not a failure
that ends the program.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import select
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

from monarch.core.future import Future
from monarch.errors import ActorError, MonarchError, SupervisionError
from monarch.job.pseudo_terminal import CHUNK_BYTES, GRACE_S, PseudoTerminal
from monarch.job.terminal import Ended, Terminal
from monarch.mesh.actor import Actor
from monarch.mesh.actor_mesh import ActorMesh
from monarch.mesh.endpoint import endpoint
from monarch.mesh.host_mesh import HostMesh, this_proc
from monarch.wake import Wake

_KEYBOARD: Final = 0
_SCREEN: Final = 1
_CLOSE_LIMIT_S: Final = 2 * GRACE_S + 5.0


class _Keeper(Actor):
    """Owns the process on the other host. Its failure is dealt with by who waits for an answer of the terminal."""

    @endpoint
    def spawn(self, hosts: HostMesh) -> Any:
        """The actor mesh of one `PseudoTerminal`."""
        self._procs = hosts.spawn_procs(name="shell")
        return self._procs.spawn("terminal", PseudoTerminal)

    @endpoint
    def end(self) -> None:
        self._procs.stop().get()

    def __supervise__(self, failure: object) -> bool:
        return True


def shell(host_mesh: HostMesh, *, env: Mapping[str, str] | None = None, workdir: str | None = None) -> int:
    """Work with a shell on a host: what is typed here, or comes through the standard input, goes there, and what is
    printed there comes here. Returns its exit status, that of a signal with 128 on top.

    The shell is that of `$SHELL` there, or /bin/sh, with the `TERM` of here. It has a terminal also where the standard
    input is none; of that all is typed, until its end. A terminal here is in raw mode meanwhile, and restored at the
    end. What the shell has started, and leaves behind, ends with it: SIGHUP, then SIGTERM, then SIGKILL.

    Args:
        host_mesh: of one host.
        env: variables on top of those of the worker.
        workdir: where it starts; the worker's directory by default.

    Raises:
        ValueError: there are several hosts; nothing has been started.
        OSError: there is no such directory.
        SupervisionError: the worker, or the process there that has the terminal, is gone, and the shell with it.
    """
    if len(host_mesh) != 1:
        raise ValueError(f"shell requires a singleton HostMesh; this one has {len(host_mesh)} hosts: slice it")
    sys.stdout.flush()
    variables = {"TERM": os.environ.get("TERM", "dumb"), **(env or {})}
    try:
        with _kept(host_mesh) as remote:
            return _Session(remote).run(variables, workdir)
    except Ended as ended:
        ended.again()
        raise
    except ActorError as error:
        if isinstance(error.exception, OSError | MonarchError):
            raise error.exception from None
        raise
    except SupervisionError as error:
        why = error.message if error.failure is None else error.failure.down
        raise SupervisionError(f"the shell is over, its worker is gone: {why}", failure=error.failure) from None


@contextlib.contextmanager
def _kept(host_mesh: HostMesh) -> Iterator[Any]:
    """A pseudo-terminal on that host, until the end of the block."""
    keeper: Any = this_proc().spawn("shell_keeper", _Keeper)
    try:
        remote = keeper.spawn.call_one(host_mesh).get()
        yield remote
        keeper.end.call_one().get()
    finally:
        ActorMesh.stop(keeper)


class _Session:
    """One shell, from its start to its end."""

    def __init__(self, remote: Any) -> None:
        self._remote = remote
        self._wake = Wake()
        self._terminal = Terminal(_KEYBOARD, _SCREEN, self._note_size)
        self._is_resized = False
        self._is_over = False  # all that is printed has been written, or nothing more can be
        self._error: BaseException | None = None

    def run(self, env: Mapping[str, str], workdir: str | None) -> int:
        self._remote.open.call_one(env, workdir, self._terminal.size).get()
        with contextlib.closing(self._wake), self._terminal:
            self._note_size()  # it may have changed meanwhile
            try:
                around = contextvars.copy_context()
                threading.Thread(target=around.run, args=(self._show,), name="monarch-shell", daemon=True).start()
                self._type()
            finally:
                status: int = self._remote.close.call_one().get(_CLOSE_LIMIT_S)
            if self._error is not None:
                raise self._error
            return status

    def _show(self) -> None:
        """Write what is printed, in a thread: whoever is to take it may be slow."""
        try:
            while data := self._remote.read.call_one().get():
                left = memoryview(data)
                while left:
                    left = left[os.write(_SCREEN, left) :]
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._wake.set()

    def _note_size(self) -> None:
        self._is_resized = True
        self._wake.set()

    def _type(self) -> None:
        """Pass on what is typed, until all is over."""
        typing: Future[None] | None = None
        resizing: Future[None] | None = None
        has_more = True
        while True:
            self._wake.clear()
            if self._is_over:
                return
            if typing is not None and typing.done():
                typing.get()
                typing = None
            if resizing is not None and resizing.done():
                resizing.get()
                resizing = None
            if self._is_resized and resizing is None:
                self._is_resized = False
                resizing = self._call(self._remote.resize, self._terminal.size)
            if self._wait(for_keys=has_more and typing is None):
                data = _read()
                if data:
                    typing = self._call(self._remote.write, data)
                elif self._terminal.is_typed:
                    return  # the terminal is gone
                else:
                    has_more = False
                    typing = self._call(self._remote.no_more)

    def _call(self, endpoint: Any, *args: object) -> Future[None]:
        future: Future[None] = endpoint.call_one(*args)
        future._on_done(self._wake.set)
        return future

    def _wait(self, for_keys: bool) -> bool:
        """Wait until there is something to do; whether that is to read what is typed."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if for_keys:
            poll.register(_KEYBOARD, select.POLLIN)
        return any(fd == _KEYBOARD for fd, _ in poll.poll())


def _read() -> bytes:
    try:
        return os.read(_KEYBOARD, CHUNK_BYTES)
    except OSError:  # the terminal has been hung up, or the descriptor is closed
        return b""
