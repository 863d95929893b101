"""The first lines that run in a new process, however it came to be: forked from the template or started by a command.

A `Job` is what the process is for: a function to call with a payload, and what the interpreter should look like before
any user code is imported (`sys.path`, `sys.argv`, the title in `ps`). A forked process has its job in memory. One that
was started by a `BootstrapCommand` runs `python -m monarch.launch.bootstrap`, which reads the job from the descriptor
that `MONARCH_BOOTSTRAP_FD` names: a payload may hold secrets, so it is never in argv, nor in the environment.

Directory, umask, limits, environment and process group are set before this module has its turn (`template`).
"""

from __future__ import annotations

import importlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, TextIO

from attrs import define, evolve, field

from monarch.launch import claim, linux

FD_VARIABLE: Final = "MONARCH_BOOTSTRAP_FD"
MODULE: Final = "monarch.launch.bootstrap"

_SIZE: Final = struct.Struct("!Q")

_START: Final = f"""\
import sys, os
sys.path[:] = [p for p in sys.path if p]
import json
fd = int(os.environ["{FD_VARIABLE}"])
sys.path[:] = json.loads(os.pread(fd, int.from_bytes(os.pread(fd, 8, 0), "big"), 8))["path"]
from {MODULE} import main
main()
"""


def _strings(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(items)


def _strings_or_none(items: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if items is None else tuple(items)


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    return dict(env)


@define(frozen=True, slots=True)
class BootstrapCommand:
    """How to start the interpreter of a new process.

    Attributes:
        program: path of the executable, or a name to look up in the PATH of the new process.
        arg0: what the program sees as its own name; `program` where None.
        args: its arguments. They must lead to `python -m monarch.launch.bootstrap`, directly or through a wrapper.
        env: variables on top of the environment the process gets anyway.
    """

    program: str
    arg0: str | None = None
    args: tuple[str, ...] = field(default=(), converter=_strings)
    env: Mapping[str, str] = field(factory=dict, converter=_variables, hash=False)

    def with_env(self, env: Mapping[str, str]) -> BootstrapCommand:
        """A copy that also sets the variables of `env`.

        Raises:
            TypeError: a name or a value is no string.
        """
        if wrong := {name: value for name, value in dict(env).items() if not (type(name) is type(value) is str)}:
            raise TypeError(f"environment variables are strings, and these are not: {wrong!r}")
        return evolve(self, env={**self.env, **env})

    @property
    def is_default(self) -> bool:
        """Whether it is `default_bootstrap_cmd()` but for its variables: then a fork of the template does as well."""
        return evolve(self, env={}) == default_bootstrap_cmd()

    def __str__(self) -> str:
        import shlex

        return shlex.join([self.program, *("..." if "\n" in arg else arg for arg in self.args)])


def default_bootstrap_cmd() -> BootstrapCommand:
    """The command for this interpreter, with the options it was started with.

    Raises:
        RuntimeError: Python is embedded in another program and does not know where its interpreter is.
    """
    if not sys.executable:
        raise RuntimeError("cannot start processes: sys.executable is empty, so the Python interpreter is not known")
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return BootstrapCommand(sys.executable, None, (*flags, "-m", MODULE))


def fresh_interpreter_cmd() -> BootstrapCommand:
    """The same for a process that the caller would rather fork: `sys.path` is the spawner's before the first import."""
    return evolve(default_bootstrap_cmd(), args=(*default_bootstrap_cmd().args[:-2], "-c", _START))


@define(frozen=True, slots=True)
class Job:
    """What a process is for. `entry` is `"package.module:function"` and gets `payload`, then what is inherited.

    Attributes:
        name: the title in `ps`.
        path: the `sys.path` of whoever spawned it, or None to leave the interpreter's own.
        argv: the `sys.argv` of whoever spawned it.
        python_path: PYTHONPATH as the process should see it; its directories are added to `path` where missing.
        claims: descriptor of the file where it claims to be itself (see `claim`), where it has not yet.
        inherited: descriptors, in a fork.
    """

    name: str
    entry: str
    payload: bytes = field(repr=False)
    path: tuple[str, ...] | None = field(default=None, converter=_strings_or_none)
    argv: tuple[str, ...] = field(default=(), converter=_strings)
    python_path: str | None = None
    claims: int | None = None
    inherited: tuple[int, ...] = ()

    def run(self) -> None:
        """Prepare the interpreter and call the entry. Call it on the main thread, last: the process ends as any Python
        program does (atexit functions run, threads are joined, output is flushed).

        Raises:
            SystemExit: with the status that the entry asked for, or 1 after an exception, which has been printed.
        """
        import faulthandler

        linux.set_process_title(self.name)
        if self.path is not None:
            sys.path[:] = self.path
        for at, directory in enumerate(d for d in (self.python_path or "").split(os.pathsep) if d):
            if directory not in sys.path:
                sys.path.insert(at + 1, directory)  # after the directory of the script, where Python itself has them
        sys.argv[:] = self.argv
        sys.stdout = _opened(1, sys.stdout)
        sys.stderr = _opened(2, sys.stderr)
        vars(sys).update(__stdout__=sys.stdout, __stderr__=sys.stderr)
        faulthandler.enable()  # a crash in native code says which Python line it came from
        try:
            module, _, name = self.entry.partition(":")
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            function(self.payload, *self.inherited)
        except Exception as e:
            trace = e.__traceback__.tb_next if e.__traceback__ else None  # the frame of `run` says nothing to anybody
            sys.excepthook(type(e), e.with_traceback(trace), trace)
            raise SystemExit(1) from None

    def encode(self) -> bytes:
        """As the bytes that `read_job` takes."""
        facts = {
            "name": self.name,
            "entry": self.entry,
            "path": self.path,
            "argv": self.argv,
            "python_path": self.python_path,
            "claims": self.claims,
            "python": _python(),
        }
        head = json.dumps(facts).encode()
        return b"".join([_SIZE.pack(len(head)), head, self.payload])


def _python() -> list[Any]:
    """What two interpreters must share to import from the same `sys.path`."""
    return [*sys.version_info[:2], sys.prefix, sys.base_prefix]


def _opened(fd: int, like: TextIO | None) -> TextIO:
    """A text file on `fd` that shows each line at once, with the encoding of the standard stream `like`."""
    stream = open(  # noqa: SIM115
        fd,
        "w",
        buffering=1,
        encoding=like.encoding if like else "utf-8",
        errors=like.errors if like else "backslashreplace",
        closefd=False,
    )
    if os.environ.get("PYTHONUNBUFFERED") or fd == 2:
        stream.reconfigure(write_through=True)
    return stream


def read_job(fd: int) -> Job:
    """Read what `Job.encode` made from the file `fd`, and close it.

    A `sys.path` of another interpreter would break this one: only directories outside its installation are added.
    """
    with open(fd, "rb") as f:
        (size,) = _SIZE.unpack(f.read(_SIZE.size))
        facts: dict[str, Any] = json.loads(f.read(size))
        payload = f.read()
    theirs = facts.pop("python")
    if theirs != _python():
        roots = tuple(os.path.join(str(p), "") for p in theirs[2:])
        extra = [p for p in facts["path"] if not p.endswith(".zip") and not os.path.join(p, "").startswith(roots)]
        facts["path"] = sys.path + [p for p in extra if p not in sys.path]
    return Job(payload=payload, **facts)


def main() -> None:
    """Entry of `python -m monarch.launch.bootstrap`."""
    number = os.environ.pop(FD_VARIABLE, "")
    if not number.isdecimal():
        raise SystemExit(
            f"{MODULE} is started by a running program, which sets {FD_VARIABLE}; it does nothing when started by hand"
        )
    job = read_job(int(number))
    if job.claims is not None:
        os.set_inheritable(job.claims, False)
        claim.claim(job.claims)
    if job.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = job.python_path
    job.run()


if __name__ == "__main__":
    main()
