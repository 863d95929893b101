"""What the driver asks its template for: several processes, in one message with a file in memory and descriptors.

The file has what all of them share, and then of each its facts and its payload, as `forked` reads them. The descriptors
are that file, the working directory, and the standard output and error that they share; then those that are for one of
them, its own output first. `template` has the other end.
"""

from __future__ import annotations

import fcntl
import json
import marshal
import os
import resource
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from attrs import define

from monarch.launch import linux
from monarch.launch.bootstrap import BootstrapCommand, fresh_interpreter_cmd
from monarch.launch.process import LaunchSpec, changes, must_exec
from monarch.launch.wire import MAX_FDS, Message, close_all, memory_file

_SHARED_OUTPUT: Final = 2  # where among the descriptors the standard output is; the error is behind it
_OWN: Final = 4  # where those begin that are for one process
MOST: Final = (MAX_FDS - _OWN) // 4
"""Processes in one request: each has its output, and inherits two descriptors."""

_LIMITS: Final = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


@define(frozen=True)
class Request:
    """A message for the template.

    Attributes:
        fds: go along; whoever sends it owns them.
        commands: of each process the command line, None where it is forked.
    """

    message: Message
    fds: list[int]
    commands: list[str | None]


def request_for(
    specs: Sequence[LaunchSpec], ids: Sequence[int], environment: Mapping[str, str], loaded: Collection[str]
) -> Request:
    """With what this process has now: directory, `sys.path`, `sys.argv`, umask, limits, standard output and error.

    Args:
        ids: by which the template will speak of them.
        environment: the template's.
        loaded: the modules that it has imported.

    Raises:
        OSError: there is no memory, or no descriptor; those of `specs` are left to the caller.
    """
    common = _common()
    parts, at, rows = [common], len(common), []
    commands: list[str | None] = []
    own: list[int] = []
    for spec, id in zip(specs, ids, strict=True):
        changed = changes({**spec.env, **(spec.command.env if spec.command is not None else {})}, environment)
        command = _command(spec, changed, loaded)
        commands.append(None if command is None else str(command))
        line = None if command is None else [command.program, command.arg0, command.args]
        described = {"name": spec.name, "entry": spec.entry, "env": changed, "command": line, "excuses": spec.excuses}
        facts = _encoded(described)
        output = _SHARED_OUTPUT if spec.output is None else _OWN + len(own)
        own += spec.output or ()
        inherits = [_OWN + len(own), _OWN + len(own) + len(spec.inherits)]
        own += spec.inherits
        rows.append([id, command is not None, at, len(facts), len(spec.payload), output, inherits])
        parts += [facts, spec.payload]
        at += len(facts) + len(spec.payload)
    message = {"op": "launch", "common": len(common), "children": rows}
    return Request(message, [*_shared_fds(parts), *own], commands)


def _common() -> bytes:
    facts = {
        "path": [str(p) for p in sys.path],
        "argv": sys.argv,
        "umask": linux.current_umask(),
        "limits": [[number, *resource.getrlimit(number)] for number in _LIMITS],
    }
    return _encoded(facts)


def _encoded(facts: Message) -> bytes:
    """As `marshal` reads them, which runs no Python in the child; by way of JSON, to which subclasses of `str` are
    strings."""
    return marshal.dumps(json.loads(json.dumps(facts)))


def _command(spec: LaunchSpec, changed: Collection[str], loaded: Collection[str]) -> BootstrapCommand | None:
    """What the process execs; None: it is forked."""
    if spec.command is not None and not spec.command.is_default:
        return spec.command
    return fresh_interpreter_cmd() if must_exec(changed, loaded) else None


def _shared_fds(parts: Sequence[bytes]) -> list[int]:
    fds: list[int] = []
    try:
        fds.append(memory_file(*parts))
        fds.append(os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC))
        fds += [_duplicate(1), _duplicate(2)]
    except OSError:
        close_all(fds)
        raise
    return fds


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _duplicate(fd: int) -> int:
    """A copy of a standard stream's descriptor, or of /dev/null where it is closed."""
    if not is_open(fd):
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
