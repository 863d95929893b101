"""What a process does between its fork from the template and its first line of other code.

It starts as a copy of the template, with all signals blocked, and must keep nothing of it but the imported modules: no
descriptor, no signal handler, no state of random generators, no environment. What it becomes is in the memory file of
its request, which it reads here. Then it either execs its command, or returns its `Job`; after the template's frames
have been left, `template.main` lets signals in and runs it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes an enum of each number, 0.1 ms for each child
import contextlib
import errno
import gc
import marshal
import os
import resource
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import define, evolve

from monarch.launch import claim, excuse, linux
from monarch.launch.bootstrap import FD_VARIABLE, Job
from monarch.launch.library_threads import NAMES, LibraryThreads
from monarch.launch.wire import Message, explain, memory_file


@define(frozen=True)
class Birth:
    """What a child needs to know of the template and of its request.

    Attributes:
        template: pid of the parent that must be alive.
        memory: file with the facts that all processes of the request share (`common` bytes), and, from `at` on, `facts`
            bytes about this one and `payload` bytes for its entry.
        directory: descriptor of the working directory.
        inherited: descriptors for its entry.
        reports: pipe on which to say why it does not come up: see `excuse`.
        claims: see `claim`.
        library_fds: descriptors that belong to imported libraries and stay open.
        threads: of imported libraries.
    """

    template: int
    memory: int
    directory: int
    stdout: int
    stderr: int
    inherited: tuple[int, ...]
    reports: int
    claims: int
    library_fds: frozenset[int]
    common: int
    at: int
    facts: int
    payload: int
    threads: LibraryThreads


def become(birth: Birth) -> Job:
    """Turn this fresh copy of the template into the process that was asked for; never raises, never returns when it
    cannot or when the process execs."""
    try:
        return _become(birth)
    except BaseException as e:
        text = explain(e, "cannot prepare the process") if isinstance(e, OSError) else repr(e)
        excuse.write(birth.reports, text)
        os._exit(127)


def _become(birth: Birth) -> Job:
    linux.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != birth.template:
        os._exit(1)
    linux.set_child_subreaper()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    os.dup2(birth.stdout, 1)
    os.dup2(birth.stderr, 2)
    common: Message = marshal.loads(_read_at(birth.memory, 0, birth.common))
    facts: Message = marshal.loads(_read_at(birth.memory, birth.at, birth.facts))
    payload = _read_at(birth.memory, birth.at + birth.facts, birth.payload)
    try:
        os.fchdir(birth.directory)
    except OSError as e:
        raise OSError(e.errno, f"cannot change to the directory of the spawner: {e.strerror}") from None
    change_environment(facts["env"])
    given = facts["name"], facts["entry"], payload, common["path"], common["argv"], os.environ.get("PYTHONPATH")
    job = Job(*given, inherited=birth.inherited)
    close_all_but({*birth.library_fds, *birth.inherited, birth.reports})
    os.umask(common["umask"])
    if facts["command"] is not None:
        _exec(birth, job, facts["command"], common["limits"])
    claim.claim(birth.claims)
    _set_limits(common["limits"])
    _reseed(birth, facts["env"])
    gc.enable()  # what the template made stays frozen: collections neither visit nor unshare it
    if facts["excuses"]:
        excuse.keep(birth.reports)
    else:
        os.close(birth.reports)
    return job


def _reseed(birth: Birth, changed: Collection[str]) -> None:
    """Give this copy of the template its own state where libraries keep one from their import. (`random` seeds
    itself after a fork; torch starts from a fixed seed in every process.)"""
    time.tzset()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if not NAMES.isdisjoint(changed):
        birth.threads.apply(os.environ)


def _exec(birth: Birth, job: Job, command: list[Any], limits: list[list[int]]) -> None:
    program, arg0, args = command
    env = dict(os.environ)
    memory = memory_file(evolve(job, claims=birth.claims).encode())
    for fd in (memory, birth.claims):
        os.set_inheritable(fd, True)
    env[FD_VARIABLE] = str(memory)
    root = Path(__file__).parents[2]
    if root.name not in ("site-packages", "dist-packages"):  # a checkout: the interpreter would not find us there
        env["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [job.python_path])])
    _set_limits(limits)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # Python changes these three at its start
        signal.signal(signum, signal.SIG_DFL)
    unblock_signals()
    try:
        os.execvpe(program, [arg0 or program, *args], env)
    except OSError as e:
        text = explain(OSError(e.errno, e.strerror, program), f"cannot execute {program}")
        excuse.write(birth.reports, text)
        os._exit(127)


def unblock_signals() -> None:
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _read_at(fd: int, at: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.pread(fd, size - len(parts), at + len(parts))
        if not part:
            raise OSError(errno.EIO, "the launch request is cut short")
        parts += part
    return bytes(parts)


def close_all_but(keep: Iterable[int]) -> None:
    """Close every descriptor above the standard three that is not in `keep`."""
    first = 3
    for fd in sorted(keep):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def change_environment(changed: Mapping[str, str | None]) -> None:
    """Set each variable to its text, or take it away where that is None."""
    for name, text in changed.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def replace_environment(env: Mapping[str, str]) -> None:
    """Have these variables and no others, whoever has set them: the interpreter at its start, or native code, of which
    `os.environ` does not know."""
    os.environ.clear()
    linux.clear_environment()
    os.environ.update(env)


def _set_limits(limits: list[list[int]]) -> None:
    for number, soft, hard in limits:
        if resource.getrlimit(number) != (soft, hard):
            with contextlib.suppress(OSError, ValueError):  # a hard limit that was lowered cannot be raised again
                resource.setrlimit(number, (soft, hard))
