"""The template process: it forks the processes of one launcher, watches over them, and outlives its driver by a moment.

A fresh interpreter with its imports costs 20 to 300 times what a fork does. So the launcher's process (the *driver*)
execs one template, which imports what its children will need, never starts a thread, and then does three things in one
loop: it forks children on request, reports their ends, and sees to it that nothing outlives the driver.

**States.** `LOADING` imports the modules to preload; requests wait in the socket; a timer looks whether the driver is
still there. `SERVING` forks and reports. `ENDING` (asked by the driver) has sent SIGTERM to every child and forks no
more. `KILLING` sends SIGKILL to all that is left. From ENDING and KILLING the template exits once it has no child left.

    LOADING ──► SERVING ──"end"──► ENDING ──time is up──► KILLING
                   └──────── driver gone (also in ENDING) ────┘

Modules that a later launch needs besides are imported in SERVING, which takes no notice of anything else meanwhile;
when the driver is gone, the `guardian` ends it then.

**The driver is gone** when its pidfd is readable or the socket ends. Both are watched: a forked copy of the driver
keeps the socket open, and a driver that execs keeps its pid. The end of the template's own parent, the `guardian`,
counts the same.

**Who belongs to whom.** The guardian leads a session of its own, with the template in it, so that neither Ctrl-C nor
the hang-up of a terminal reaches anything but the driver, and no child has a controlling terminal to be stopped by.
Each child leads a process group in that session, and dies with the template (parent-death signal). The template and
each child are subreapers: what a child's descendants leave behind stays below the child while it lives (a process that
has made itself a daemon there is the child's zombie when it ends), and comes up here when the child is dead: see
`orphans`.

**Becoming another.** A child that replaces itself by another program, with `exec`, keeps its pid, so that nothing
tells of its end. Who has lost its connection asks, and then it is killed (see `claim`).

**Becoming a child.** All signals but SIGCHLD and faults are blocked in the template, so that a fork misses none before
it has its own handlers. The child's work is *returned* out of the loop, up to the last line of the interpreter's main
module, so that the process ends as every Python program does. A child with a command of its own execs it instead; its
standard error passes through a pipe, so that the last words of one that never came up can be told.

**Requests** are small (`wire`). What is large or secret (environment, payload) is in a memory file that travels as a
descriptor; the template itself never reads it, only the child that it is for does.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from attrs import define, field

from monarch.launch import claim, linux, written
from monarch.launch.bootstrap import Job
from monarch.launch.code_store import CodeStore, share_compiled_code
from monarch.launch.forked import Birth, become, close_all_but, replace_environment, unblock_signals
from monarch.launch.guardian import fork_template
from monarch.launch.heap import fill_holes
from monarch.launch.leaving import disown_finalizers, run_and_leave
from monarch.launch.library_threads import ONE, LibraryThreads
from monarch.launch.orphans import Orphans, kill
from monarch.launch.tee import Tee
from monarch.launch.wire import Lost, Message, Wire, close_all, explain, memory_file

SOCKET_FD: Final = 3
DRIVER_FD: Final = 4
SETUP_FD: Final = 5

# What a fresh interpreter runs first: it must not import a file of ours before `sys.path` is the driver's. It leaves
# the driver's directory, which may be removed or unmounted while the template lives. What `written` does in a fork
# comes before what other modules do there, who write to 250 pages.
START: Final = f"""\
import sys, os
sys.path[:] = [p for p in sys.path if p]
os.chdir("/")
import json
with open({SETUP_FD}) as f: setup = json.load(f)
sys.path[:] = setup["path"]
from monarch.launch import written
from monarch.launch.template import main
main(setup)
"""

_FORKS_PER_TURN: Final = 8  # what the template writes to between two forks is copied for each
_KILL_LIMIT_S: Final = 10.0  # then the template gives up on what SIGKILL does not end (stuck in the kernel)
_BECAME_ANOTHER: Final = "it had replaced itself by another program, with exec, and was killed for that"
_FAULTS: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}


@define(eq=False)
class _Batch:
    """Children asked for in one message. They share the descriptors, which are closed after the last fork."""

    fds: list[int]  # memory file, directory, shared standard output and error; then those that are for one child
    common: int  # size of the facts that all share, at the start of the memory file
    left: int

    def done_with_one(self) -> None:
        self.left -= 1
        if not self.left:
            close_all(self.fds)


@define(eq=False)
class _Child:
    id: int
    execs: bool
    at: int  # where in the memory of its batch: facts, then payload
    facts: int
    payload: int
    output: int  # where among the descriptors of its batch its standard output is
    inherits: tuple[int, int]  # from where to where those are that it inherits
    pid: int = 0
    tee: Tee | None = None
    became_another: bool = False


class _State(enum.Enum):
    SERVING = enum.auto()
    ENDING = enum.auto()
    KILLING = enum.auto()


@define(eq=False)
class Template:
    """The loop of the template process, from SERVING on."""

    wire: Wire
    driver: int | None  # pidfd
    lifeline: int  # readable when the guardian is gone
    library_fds: frozenset[int]
    wake: int  # readable after SIGCHLD
    reports: tuple[int, int]  # a pipe on which children say why they do not come up: see `excuse`
    claims: int  # see `claim`
    pid: int = field(factory=os.getpid)
    state: _State = _State.SERVING
    deadline_s: float = 0.0
    children: dict[int, _Child] = field(factory=dict)  # by pid
    todo: deque[tuple[_Batch, _Child]] = field(factory=deque)
    tees: list[Tee] = field(factory=list)
    started: list[tuple[int, int]] = field(factory=list)
    failures: dict[int, str] = field(factory=dict)  # by pid: why a child does not come up, as it has said itself
    threads: LibraryThreads = field(factory=LibraryThreads)
    newest: str = field(factory=lambda: next(reversed(sys.modules)))  # of its modules
    orphans: Orphans = field(factory=Orphans)
    orphaned: bool = False  # orphans are there that are to end

    def serve(self) -> Job | None:
        """Run until the end. Returns a Job in each child that was forked, None in the template when all is over."""
        while True:
            if self.started and (len(self.started) >= 16 or not self.todo):
                self.wire.send({"op": "started", "children": self.started})
                self.started = []
            self.wire.flush()
            if self._over():
                return None
            self._wait()
            self._reap()
            for message, fds in self.wire.receive():
                self._handle(message, fds)
            if self.wire.closed:
                self._kill_all()
            for _ in range(_FORKS_PER_TURN):
                if self.todo and self.state is _State.SERVING:
                    job = self._fork(*self.todo.popleft())
                    if job is not None:
                        return job

    def _over(self) -> bool:
        if self.state is _State.SERVING:
            return False
        if time.monotonic() >= self.deadline_s:
            if self.state is _State.KILLING:
                return True
            self._kill_all()
        if self.children or self.orphaned:
            return False
        last_words = self.state is _State.ENDING and any(t.waiting for t in self.tees)
        return self.wire.closed or not (self.wire.pending or last_words)

    def _wait(self) -> None:
        """Sleep until there is something to do."""
        poll = select.poll()
        if not self.wire.closed:
            poll.register(self.wire.fileno(), select.POLLIN | (select.POLLOUT if self.wire.pending else 0))
        if self.driver is not None:
            poll.register(self.driver, select.POLLIN)
        if self.state is not _State.KILLING:
            poll.register(self.lifeline, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        poll.register(self.reports[0], select.POLLIN)
        for tee in self.tees:
            if tee.waiting:
                poll.register(tee.sink, select.POLLOUT)
            elif tee.source is not None:
                poll.register(tee.source, select.POLLIN)
        if self.todo and self.state is _State.SERVING:
            timeout_ms = 0.0
        elif self.state is _State.SERVING:
            timeout_ms = 50.0 if self.orphaned else -1.0
        else:
            timeout_ms = min(50.0, max(0.0, (self.deadline_s - time.monotonic()) * 1000 + 1))
        ready = {fd for fd, _ in poll.poll(timeout_ms)}
        if self.driver in ready and self.driver is not None:
            os.close(self.driver)
            self.driver = None
            self._kill_all()
        if self.lifeline in ready and self.state is not _State.KILLING:
            self.wire.send({"op": "unguarded"})
            self._kill_all()
        if self.reports[0] in ready:
            self._read_reports()
        for tee in self.tees:
            if tee.source in ready:
                tee.read()
            tee.write()
        for tee in [t for t in self.tees if t.source is None and not t.waiting]:
            self.tees.remove(tee)
            os.close(tee.sink)

    # -- requests

    def _handle(self, message: Message, fds: list[int] | Lost) -> None:
        match message["op"]:
            case "launch":
                children = [_Child(*c) for c in message["children"]]
                if isinstance(fds, Lost) or self.state is not _State.SERVING:
                    close_all(fds if isinstance(fds, list) else ())
                    why = explain(fds, "cannot take over descriptors") if isinstance(fds, Lost) else "is ending"
                    for child in children:
                        self._report_end(child, error=f"the template process {why}")
                    return
                batch = _Batch(fds, message["common"], len(children))
                self.todo.extend((batch, c) for c in children)
            case "preload":
                self._preload(message["modules"], message["path"])
            case "kill":
                self._kill(message["id"], message["signal"])
            case "end_if_replaced":
                self._end_if_replaced(message["id"], message["pid"])
            case "end":
                self._abandon_todo()
                self.state, self.deadline_s = _State.ENDING, time.monotonic() + message["grace_s"]
                for pid in self.children:
                    kill(pid, signal.SIGTERM)
                self._reap()

    def _preload(self, modules: list[str], path: list[str]) -> None:
        before = _open_fds()
        sys.path[:] = path
        _import(modules)
        self.library_fds |= _open_fds() - before
        self.threads = LibraryThreads()
        written.ask_again()
        self.newest = next(reversed(sys.modules))
        self.wire.send({"op": "ready", "pid": self.pid, "threads": linux.thread_count()})

    def _kill(self, id: int, signum: int) -> None:
        for batch, child in self.todo:
            if child.id == id:
                self.todo.remove((batch, child))
                batch.done_with_one()
                self._report_end(child, signum=signum)
                return
        for child in self.children.values():
            if child.id == id:
                kill(child.pid, signum)

    def _end_if_replaced(self, id: int, pid: int) -> None:
        """Kill a child if `pid`, itself or what its command has started, is another program by now. One that is dying
        has given up its claim, too."""
        child = next((child for child in self.children.values() if child.id == id), None)
        if child is None or claim.is_claimed(self.claims, pid) or linux.is_dying(pid):
            return
        if linux.is_below(pid, child.pid):
            child.became_another = True
            kill(child.pid, signal.SIGKILL)

    def _abandon_todo(self) -> None:
        for batch, child in self.todo:
            batch.done_with_one()
            self._report_end(child, error="the launcher was closed before the process could be forked")
        self.todo.clear()

    # -- ends

    def _kill_all(self) -> None:
        """The last state. Everything that this process started, and everything below it, ends now."""
        if self.state is not _State.KILLING:
            self.state, self.deadline_s = _State.KILLING, time.monotonic() + _KILL_LIMIT_S
            self._abandon_todo()
        for pid in self.children:
            kill(pid, signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        """Collect whoever has ended: kill what it leaves behind, then report it."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)
        ended = self.orphaned or self.state is not _State.SERVING
        with contextlib.suppress(ChildProcessError):
            while pid := _next_dead():
                ended = True
                child = self.children.pop(pid, None)
                if child is not None and not linux.LINUX:
                    kill(-pid, signal.SIGKILL)  # before it is reaped: until then nobody else can have this number
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if child is not None:
                    self._read_reports()
                    tail = child.tee.finish() if child.tee is not None else ""
                    self._report_end(child, code=status, signum=-status, error=self.failures.pop(pid, None), tail=tail)
        if ended:
            self.orphaned = self.orphans.end(self.children)

    def _report_end(
        self, child: _Child, *, code: int = 0, signum: int = 0, error: str | None = None, tail: str = ""
    ) -> None:
        if self.started:
            self.wire.send({"op": "started", "children": self.started})
            self.started = []
        end = {"code": code if signum <= 0 else None, "signal": signum if signum > 0 else None}
        hint = _BECAME_ANOTHER if child.became_another and signum == signal.SIGKILL else ""
        told = {"error": error, "tail": tail, "hint": hint}
        self.wire.send({"op": "ended", "id": child.id, "pid": child.pid or None, **end, **told})

    def _read_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self.reports[0], 1 << 16).splitlines():
                pid, text = json.loads(line)
                if text:
                    self.failures[pid] = text
                else:
                    self.failures.pop(pid, None)

    # -- forks

    def _fork(self, batch: _Batch, child: _Child) -> Job | None:
        """Start one child. Returns its job in the child, None here."""
        pipe: tuple[int, ...] = ()
        sink = -1
        try:
            if child.execs:
                sink = fcntl.fcntl(batch.fds[child.output + 1], fcntl.F_DUPFD_CLOEXEC, 0)
                pipe = os.pipe()
                os.set_blocking(pipe[0], False)
            pid = os.fork() if child.execs else written.fork()
        except OSError as e:
            close_all([*pipe, *([sink] if sink >= 0 else [])])
            batch.done_with_one()
            self._report_end(child, error=explain(e, "the template process cannot fork"))
            return None
        if pid == 0:
            return become(
                Birth(
                    template=self.pid,
                    memory=batch.fds[0],
                    directory=batch.fds[1],
                    stdout=batch.fds[child.output],
                    stderr=pipe[1] if pipe else batch.fds[child.output + 1],
                    inherited=tuple(batch.fds[slice(*child.inherits)]),
                    reports=self.reports[1],
                    claims=self.claims,
                    library_fds=self.library_fds,
                    common=batch.common,
                    at=child.at,
                    facts=child.facts,
                    payload=child.payload,
                    threads=self.threads,
                )
            )
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the child does so too: whoever comes first
        if pipe:
            os.close(pipe[1])
            child.tee = Tee(pipe[0], sink)
            self.tees.append(child.tee)
        child.pid = pid
        self.children[pid] = child
        self.started.append((child.id, pid))
        batch.done_with_one()
        return None


def _next_dead() -> int:
    """The pid of a child that has ended and is not reaped, 0 if there is none.

    Raises:
        ChildProcessError: there are no children at all.
    """
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found.si_pid if found is not None else 0


def _load(modules: Sequence[str], driver: int | None, lifeline: int) -> None:
    """`_import`, which leaves when the driver is gone or has hung up, or the guardian is gone."""
    poll = select.poll()
    poll.register(SOCKET_FD, 0)
    poll.register(lifeline, 0)
    if driver is not None:
        poll.register(driver, select.POLLIN)

    loading = True

    def look(*_: object) -> None:
        if poll.poll(0):
            os._exit(0)
        if loading:
            signal.setitimer(signal.ITIMER_REAL, 0.1)  # not periodic: on a busy machine it would interrupt itself

    signal.signal(signal.SIGALRM, look)
    look()
    _import(modules)
    loading = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _import(modules: Sequence[str]) -> None:
    """Import what children will need, and call what `MODULE:FUNCTION` names. What fails is left to the child that wants
    it, to fail there."""
    gc.disable()
    environ = dict(os.environ)
    os.environ.update(ONE)
    for name in modules:
        with contextlib.suppress(BaseException):
            module, _, function = name.partition(":")
            found = importlib.import_module(module)
            if function:
                getattr(found, function)()
    replace_environment(environ)  # what the driver takes it for
    gc.collect()
    fill_holes()
    gc.freeze()
    disown_finalizers()


def main(setup: Message) -> None:
    """Be the template that `setup` describes, or, in a child, do its work and end with it."""
    close_all_but({SOCKET_FD, *([DRIVER_FD] if setup["pidfd"] else [])})
    with contextlib.suppress(OSError):
        os.setsid()
    linux.set_child_subreaper()
    linux.set_process_title(_title("guardian", setup["driver"]))
    driver = DRIVER_FD if setup["pidfd"] else None
    lifeline = fork_template(SOCKET_FD, driver)
    linux.set_child_subreaper()
    linux.set_process_title(_title("template", setup["driver"]))
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    replace_environment(setup["env"])
    before = _open_fds()
    _load(setup["preload"], driver, lifeline)
    store = CodeStore(memory_file())  # its descriptor stays open in the children, like those of libraries
    claims = memory_file()
    written.ask(memory_file())
    library_fds = frozenset(_open_fds() - before)

    wake, wake_by = os.pipe()
    reports = os.pipe()
    for fd in (wake, wake_by, *reports):
        os.set_blocking(fd, False)
    # Those that have names: the others come back from the mask as exceptions inside, 0.1 ms for each child.
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - _FAULTS - {signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_by, warn_on_full_buffer=False)

    wire = Wire(SOCKET_FD)
    wire.send({"op": "ready", "pid": os.getpid(), "threads": linux.thread_count()})
    for fd in (SOCKET_FD, *([driver] if driver is not None else [])):
        os.set_inheritable(fd, False)
    template = Template(wire, driver, lifeline, library_fds, wake, reports, claims)
    share_compiled_code(store)
    for name in [n for n in vars(sys.modules["__main__"]) if not n.startswith("__")]:
        delattr(sys.modules["__main__"], name)
    job = template.serve()
    if job is None:
        os._exit(0)
    unblock_signals()  # out of the loop: an interrupt now ends this process as any other
    run_and_leave(job.run, template.newest)


def _title(kind: str, driver: int) -> str:
    return f"monarch: {kind} of {driver}"


def launched_by(driver: int) -> dict[int, str]:
    """The titles of the processes that a driver has launched, by pid, for one who cannot ask the driver itself."""
    parents = [driver]
    for kind in ("guardian", "template"):
        children = [child for parent in parents for child in linux.children_of(parent)]
        parents = [child for child in children if linux.title(child) == _title(kind, driver)]
    titles = {child: linux.title(child) for parent in parents for child in linux.children_of(parent)}
    return {child: title for child, title in titles.items() if title.startswith("monarch: ")}


def _open_fds() -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # the one that listed them is closed by now
                os.fstat(fd)
                found.add(fd)
    return found
