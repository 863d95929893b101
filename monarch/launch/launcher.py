"""Starting, watching and ending the OS processes of this host.

A `Launcher` belongs to one process, the driver, and knows nothing of actors: a child is a name, an entry point and an
opaque payload. It sends a `request` to its template process, which forks the children and is their parent (`template`,
where the states and the rules of belonging are described), and has a `guardian` for a parent itself; here is only the
driver's side: which children there are, who wants to know of their ends, and what a template's own death means to them.

A child execs a fresh interpreter, rather than being forked, if it has a command of its own, or if its environment needs
one (`process.must_exec`).

Nothing blocks but `close`, and nothing runs on a thread of this module: the owner waits for `fileno()` and calls
`pump()`, which runs the callbacks. A process that the user forked off the driver holds a launcher that refuses to work.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from attrs import define, evolve, field

from monarch.launch import linux
from monarch.launch.bootstrap import default_bootstrap_cmd
from monarch.launch.library_threads import ONE
from monarch.launch.orphans import kill
from monarch.launch.process import Exit, LaunchSpec
from monarch.launch.request import MOST, is_open, request_for
from monarch.launch.template import DRIVER_FD, SETUP_FD, SOCKET_FD, START
from monarch.launch.wire import Message, Wire, close_all, explain, memory_file
from monarch.log import get_logger

__all__ = ["DEFAULT_PRELOAD", "Child", "Exit", "LaunchSpec", "Launcher"]

log = get_logger("monarch.launcher")

DEFAULT_PRELOAD: Final = ("asyncio", "attrs", "cloudpickle", "faulthandler", "pickle", "socket", "threading")

_FIRST_FD: Final = 10  # above the numbers that descriptors get in the template
_KILL_MARGIN_S: Final = 2.0  # what `close` adds for SIGKILL to work, and again where the template is stuck


@define(eq=False)
class Child:
    """A process that was asked for.

    Attributes:
        pid: known once the template has forked it.
        exit: how it ended; set just before the callback runs.
    """

    name: str
    pid: int | None = None
    exit: Exit | None = None
    _id: int = 0
    _launcher: Launcher = field(kw_only=True, repr=False)
    _on_exit: Callable[[Exit], None] = field(kw_only=True, repr=False)
    _command: str | None = field(default=None, repr=False)
    _killed: bool = field(default=False, repr=False)

    @property
    def alive(self) -> bool:
        """Whether nothing is known of its end."""
        return self.exit is None

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal, through the template, which knows whether the pid is still this child's."""
        self._launcher._kill(self, signum)

    def end_if_replaced(self, pid: int) -> None:
        """End it if `pid`, as the process calls itself, has replaced itself by another program."""
        self._launcher._end_if_replaced(self, pid)


@define(eq=False)
class _Template:
    guardian: int  # pid
    wire: Wire
    env: dict[str, str]
    loaded: list[str]  # modules that it has been told to import
    pid: int = 0  # once it is ready
    status: tuple[int | None, int | None] = (None, None)  # exit code and signal, once it is over
    trouble: str = ""  # why it is ending without having been asked
    children: dict[int, Child] = field(factory=dict)


class Launcher:
    """Starts processes and tells how each one ended, exactly once. Thread-safe."""

    def __init__(self, preload: Sequence[str] = DEFAULT_PRELOAD) -> None:
        """Take `preload`, the modules that the template imports before it forks, and `MODULE:FUNCTION`s that it calls.
        Starts nothing.

        Neither may start threads or open connections: a fork copies neither.
        """
        self._preload = tuple(preload)
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._template: _Template | None = None
        self._guardians: dict[int, int] = {}  # pidfd: pid, of those that run
        self._over: deque[tuple[Child, Exit]] = deque()
        self._closed = self._forked = False
        self._oom_kills = linux.oom_kills()
        try:
            self._ready = linux.Readiness()
            self._bell = os.pipe()
        except OSError as e:
            raise OSError(e.errno, explain(e, "cannot watch processes")) from None
        for fd in self._bell:
            os.set_blocking(fd, False)
        self._ready.watch(self._bell[0])
        _launchers.add(self)

    # -- starting

    def warm(self) -> None:
        """Start the template now, if there is none, so that the first launch is quick. Returns at once.

        Raises:
            OSError: it cannot be started.
        """
        with self._lock:
            self._check()
            if self._template is None:
                self._template = self._start_template()

    @property
    def is_warm(self) -> bool:
        """Whether there is a template."""
        return self._template is not None

    def launch(self, spec: LaunchSpec, on_exit: Callable[[Exit], None]) -> Child:
        """Ask for one process and return at once. `on_exit` is called by `pump`, exactly once, also when the process
        could not be started.

        Raises:
            RuntimeError: the launcher is closed, or this process is a fork of its owner.
        """
        return self.launch_all([spec], [on_exit])[0]

    def launch_all(
        self,
        specs: Sequence[LaunchSpec],
        on_exit: Sequence[Callable[[Exit], None]],
        preload: Collection[str] = (),
    ) -> list[Child]:
        """Ask for several at once. They share one request, and get the standard output and error, the directory,
        `sys.path`, `sys.argv`, umask and resource limits that this process has now. Those that are forked have the
        modules of `preload` imported, and so will those of later launches."""
        with self._lock:
            self._check()
            children = [
                Child(s.name, id=next(self._ids), launcher=self, on_exit=f) for s, f in zip(specs, on_exit, strict=True)
            ]
            for at in range(0, len(specs), MOST):
                self._launch_some(specs[at : at + MOST], children[at : at + MOST], preload)
            return children

    def _launch_some(self, specs: Sequence[LaunchSpec], children: Sequence[Child], preload: Collection[str]) -> None:
        try:
            template = self._template_with(preload, {spec.entry.partition(":")[0] for spec in specs})
            request = request_for(specs, [child._id for child in children], template.env, template.loaded)
        except (OSError, RuntimeError) as e:
            close_all([fd for spec in specs for fd in (*(spec.output or ()), *spec.inherits)])
            error = explain(e, "the launcher cannot ask for it") if isinstance(e, OSError) else str(e)
            for child in children:
                self._end(child, Exit(None, error=error))
            return
        for child, command in zip(children, request.commands, strict=True):
            child._command = command
            template.children[child._id] = child
        self._post(template, request.message, request.fds)

    def _template_with(self, preload: Collection[str], entries: Collection[str]) -> _Template:
        """The template, started where there is none, and told to import what it lacks of `preload`; a new one imports
        the modules of `entries`, too."""
        if self._template is not None:
            self._drain(self._template)  # it may have ended meanwhile
        if self._template is None:
            self._template = self._start_template([*preload, *sorted(entries)])
        template = self._template
        missing = [name for name in preload if name not in template.loaded]
        if missing:
            template.loaded += missing
            self._post(template, {"op": "preload", "modules": missing, "path": _absolute(sys.path)})
        return template

    def _start_template(self, preload: Sequence[str] = ()) -> _Template:
        """Exec a template. Any thread may do so: the template watches this process, not the thread."""
        command = default_bootstrap_cmd()
        argv = [command.program, *command.args[:-2], "-c", START]
        loaded = [*self._preload, *preload]
        fds: dict[int, int] = {}  # number in the template: number here
        near, far = socket.socketpair()
        try:
            pidfd = linux.open_pidfd(os.getpid())
            if pidfd is not None:
                fds[DRIVER_FD] = pidfd
            env = dict(os.environ)
            facts = {
                "env": env,
                "path": _absolute(sys.path),
                "preload": loaded,
                "driver": os.getpid(),
                "pidfd": pidfd is not None,
            }
            fds[SETUP_FD] = memory_file(json.dumps(facts).encode())
            fds[SOCKET_FD] = far.detach()
            for number, fd in fds.items():
                fds[number] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
                os.close(fd)
            actions: list[Any] = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in fds.items()]
            actions += [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
            if not is_open(2):
                actions.append((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_RDWR, 0))
            signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
            options: dict[str, Any] = {"file_actions": actions, "setsigmask": [], "setsigdef": signals}
            try:
                pid = os.posix_spawn(argv[0], argv, {**env, **ONE}, setsid=True, **options)
            except NotImplementedError:
                pid = os.posix_spawn(argv[0], argv, {**env, **ONE}, setpgroup=0, **options)
        except BaseException:
            near.close()
            raise
        finally:
            far.close()
            close_all(fds.values())
        template = _Template(pid, Wire(near.detach()), env, loaded)
        log.debug("guardian.started", pid=pid)
        self._ready.watch(template.wire.fileno())
        pidfd = linux.open_pidfd(pid)
        if pidfd is not None:
            self._guardians[pidfd] = pid
            self._ready.watch(pidfd)
        return template

    def _post(self, template: _Template, message: Message, fds: Sequence[int] = ()) -> None:
        template.wire.send(message, fds)
        self._flush(template)

    def _flush(self, template: _Template) -> None:
        template.wire.flush()
        self._ready.watch(template.wire.fileno(), writable=template.wire.pending)

    def _kill(self, child: Child, signum: int) -> None:
        with self._lock:
            if self._forked:
                return
            template = self._template
            if template is not None and child._id in template.children:
                child._killed = child._killed or signum == signal.SIGKILL
                self._post(template, {"op": "kill", "id": child._id, "signal": int(signum)})

    def _end_if_replaced(self, child: Child, pid: int) -> None:
        with self._lock:
            template = self._template
            if not self._forked and template is not None and child._id in template.children:
                self._post(template, {"op": "end_if_replaced", "id": child._id, "pid": pid})

    # -- watching

    def fileno(self) -> int:
        """Readable when `pump` has work. The same for the whole life of the launcher."""
        return self._ready.fileno()

    def pump(self) -> None:
        """Take in what has happened and run the callbacks that are due, without blocking.

        A callback that raises does not keep the others from running; the first exception is raised at the end.
        """
        with self._lock:
            if self._forked or (self._closed and self._template is None and not self._guardians and not self._over):
                return
            template = self._template
            if template is not None:
                self._flush(template)
                self._drain(template)
            self._reap_guardians()
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell[0], 4096)  # whatever it rang for is taken below
        problem: BaseException | None = None
        while True:
            try:
                child, end = self._over.popleft()
            except IndexError:
                break
            child.exit = end
            try:
                child._on_exit(end)
            except Exception as e:
                problem = problem or e
        if problem is not None:
            raise problem

    def _drain(self, template: _Template) -> None:
        for message, _ in template.wire.receive():
            self._take(template, message)
        if template.wire.closed:
            self._bury()

    def _take(self, template: _Template, message: Message) -> None:
        match message["op"]:
            case "ready":
                template.pid = message["pid"]
                if (message["threads"] or 1) > 1:
                    log.warning("template.has_threads", threads=message["threads"], preload=template.loaded)
            case "over":
                template.status = message["code"], message["signal"]
            case "unguarded":
                template.trouble = f"the guardian process {template.guardian} of the template was killed"
            case "started":
                for id, pid in message["children"]:
                    if id in template.children:
                        template.children[id].pid = pid
            case "ended" if template.trouble:
                pass  # told when the template is gone: who hears may launch at once, and shall get a new one
            case "ended":
                child = template.children.pop(message["id"])
                child.pid = message["pid"]
                hint = message["hint"]
                if message["signal"] == signal.SIGKILL and not (hint or child._killed or message["error"]):
                    hint = self._reason_for_sigkill()
                end = Exit(child.pid, message["code"], message["signal"], message["error"], message["tail"], hint=hint)
                self._end(child, end)

    def _reason_for_sigkill(self) -> str:
        usual = "often the kernel's out-of-memory killer"
        before, now = self._oom_kills, linux.oom_kills()
        self._oom_kills = now
        if before is None or now is None:
            return usual
        if now > before:
            return "the kernel's out-of-memory killer has struck in this control group just now"
        return f"{usual}, though it has not struck in this control group"

    def _end(self, child: Child, end: Exit) -> None:
        self._over.append((child, evolve(end, command=child._command)))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._bell[1], b"!")

    def _bury(self) -> None:
        """The template is gone, and with it, by their parent-death signal, every child it had."""
        template, self._template = self._template, None
        if template is None:
            return
        self._ready.forget(template.wire.fileno())
        template.wire.close()
        code, signum = template.status
        end = "has ended" if code is signum is None else Exit(template.pid, code, signum).describe()
        which = f"the template process {template.pid}, its parent," if template.pid else "the template process"
        how = template.trouble or f"{which} {end}"
        log.debug("template.ended", pid=template.pid, code=code, signal=signum)
        if not self._guardians:  # no pidfds here
            with contextlib.suppress(ChildProcessError):
                os.waitpid(template.guardian, 0)
        for child in list(template.children.values()):
            if child.pid is None:
                self._end(child, Exit(None, error=how if template.pid else f"{how} before it was ready"))
                continue
            if not linux.LINUX:
                with contextlib.suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)
            self._end(child, Exit(child.pid, signal=int(signal.SIGKILL), hint=how))

    def _reap_guardians(self) -> None:
        for pidfd, pid in list(self._guardians.items()):
            with contextlib.suppress(ChildProcessError):  # somebody else has collected it
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            self._ready.forget(pidfd)
            os.close(pidfd)
            del self._guardians[pidfd]

    # -- ending

    def close(self, timeout_s: float = 5.0) -> None:
        """End every child that is left: SIGTERM, and after `timeout_s` SIGKILL; then end the template and its guardian.
        Blocks no longer than `timeout_s` and two seconds (six where the template is stuck). Runs the callbacks of those
        that end.

        `fileno()` is closed afterwards: nobody else may be waiting on it by then.
        """
        with self._lock:
            if self._closed or self._forked:
                return
            self._closed = True
        problem: BaseException | None = None

        def pump() -> None:
            nonlocal problem
            try:
                self.pump()
            except Exception as e:  # a callback's: it must not keep the processes alive
                problem = problem or e

        pump()
        with self._lock:
            template = self._template
            if template is not None and not template.pid:
                template.wire.hang_up()  # it has not forked anything yet
            elif template is not None:
                for child in template.children.values():
                    child._killed = True
                self._post(template, {"op": "end", "grace_s": timeout_s})
        hang_up_s = time.monotonic() + timeout_s + _KILL_MARGIN_S
        deadline_s = hang_up_s + 2 * _KILL_MARGIN_S
        while self._template is not None or self._guardians:
            now_s = time.monotonic()
            if template is not None and now_s >= hang_up_s:
                template.wire.hang_up()
            if now_s >= deadline_s:
                for pid in self._guardians.values():
                    kill(pid, signal.SIGKILL)
            poll = select.poll()
            poll.register(self._ready.fileno(), select.POLLIN)
            events = poll.poll(100)  # another thread that pumps may have taken the event meanwhile
            if now_s >= deadline_s + _KILL_MARGIN_S or any(event & select.POLLNVAL for _, event in events):
                break  # the program has closed our descriptors: the guardian sees that and ends, and we cannot see it
            pump()
        pump()
        with self._lock:
            self._ready.close()
            close_all(self._bell)
            _launchers.discard(self)
        if problem is not None:
            raise problem

    def _check(self) -> None:
        if self._forked:
            raise RuntimeError(
                "this process was forked (os.fork, or multiprocessing's fork method) from the one that starts the "
                "processes; it cannot start any. Start them from the original process, or use a fresh interpreter "
                "(subprocess, or multiprocessing's spawn method)"
            )
        if self._closed:
            raise RuntimeError("the launcher is closed: this process starts no more processes")

    def _disown(self) -> None:
        """In a fork of the owner: let go of everything without touching what the owner still uses."""
        self._forked = True
        self._lock = threading.RLock()  # the thread that held the old one may not exist here
        self._over.clear()
        template, self._template = self._template, None
        if template is not None:
            template.wire.close()
        close_all(self._guardians)
        self._guardians.clear()
        if not self._closed:
            self._ready.close()
            close_all(self._bell)


_launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()


def _disown_all() -> None:
    for launcher in list(_launchers):
        launcher._disown()


os.register_at_fork(after_in_child=_disown_all)


def _absolute(path: Sequence[str]) -> list[str]:
    """`path` for a process in another directory."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was removed: nothing can be imported from there
        return [str(p) for p in path if os.path.isabs(p)]
    return [os.path.join(here, p) for p in path]
