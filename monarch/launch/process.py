"""What process to start, whether it can be forked, and how one ended. Values and rules only, nothing runs here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from attrs import define, field

from monarch.launch.bootstrap import BootstrapCommand

# Read by the dynamic loader, the C library or the interpreter at exec, and never again.
EXEC_PREFIXES: Final = ("LD_", "DYLD_", "GLIBC_", "MALLOC_", "PYTHON", "LANG", "LC_")
# Read when the library is imported; they count where the template imports it.
_NUMPY: Final = ("NPY_", "NUMPY_", "OPENBLAS_", "GOTO_")
_TORCH: Final = ("GOMP_", "KMP_", "MKL_", "OMP_", "PYTORCH_", "TORCH_LOGS", "TORCHDYNAMO_", "TORCHINDUCTOR_")
# ... but for these, which are looked at when used, or which a forked child applies by itself (`library_threads`).
_NOT_AT_EXEC: Final = {
    *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONBREAKPOINT", "PYTHONASYNCIODEBUG", "PYTHONFAULTHANDLER"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
}
LIBRARY_PREFIXES: Final = {"numpy": _NUMPY, "torch": (*_NUMPY, *_TORCH)}


@define(frozen=True, slots=True)
class LaunchSpec:
    """What to start.

    Attributes:
        name: for people, and the title in `ps`.
        entry: `"package.module:function"`, called with `payload` on the main thread. Its return ends the process with
            0, an exception is printed and ends it with 1, SystemExit is honoured.
        payload: handed over by descriptor; it may hold secrets and may be large.
        env: the complete environment, in place before any import of the user's.
        command: exec this instead of forking from the template.
        output: descriptors for its standard output and error; None: it shares those of the driver.
        inherits: at most two more. `entry` gets their numbers after the payload; one that execs does not have them.

        excuses: whether `entry` says by `excuse` why it does not come up, until that does; in a fork.

    The launcher owns the descriptors from the launch on, and closes them.
    """

    name: str
    entry: str
    payload: bytes = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    command: BootstrapCommand | None = None
    output: tuple[int, int] | None = None
    inherits: tuple[int, ...] = ()
    excuses: bool = False


@define(frozen=True, slots=True)
class Exit:
    """How a process ended, or why there never was one.

    Attributes:
        pid: None if it was never forked.
        code: the exit status, if it exited by itself.
        signal: the number of the signal that ended it.
        error: why it could not be started at all, or did not come up (`excuse`); `code` and `signal` then say nothing.
        stderr_tail: the last lines of standard error; of exec'd children, and where the last lines are kept.
        command: the command line; of exec'd children only.
        hint: what else is known about the reason.
    """

    pid: int | None
    code: int | None = None
    signal: int | None = None
    error: str | None = None
    stderr_tail: str = ""
    command: str | None = None
    hint: str = ""

    @property
    def started(self) -> bool:
        """Whether the process came to run its entry or its command, as far as is known."""
        return self.error is None

    def describe(self) -> str:
        """A phrase that completes "the process ...:", for errors and logs."""
        if self.error is not None:
            text = f"could not be started: {self.error}"
        elif self.signal is not None:
            text = f"Killed(sig={self.signal})"
        elif self.code == 0:
            text = "exited with code 0"
        else:
            text = f"exited with non-zero code {self.code}"
        if self.hint:
            text += f" ({self.hint})"
        if self.command is not None and self.code != 0:
            text += f"; its command was: {self.command}"
        if self.stderr_tail and self.code != 0:
            text += f"; its last words: {self.stderr_tail}"
        return text


def changes(env: Mapping[str, str], templates: Mapping[str, str]) -> dict[str, str | None]:
    """The variables in which `env` differs from the environment of the template; None: it has no such variable."""
    return {name: env.get(name) for name in env.keys() | templates.keys() if env.get(name) != templates.get(name)}


def must_exec(changed: Iterable[str], loaded: Collection[str]) -> bool:
    """Whether a process for which these variables change needs a fresh interpreter, because one of them was read for
    good, by the interpreter or by one of the `loaded` modules."""
    at_import = tuple(p for name, all_p in LIBRARY_PREFIXES.items() if name in loaded for p in all_p)
    for name in changed:
        if name in _NOT_AT_EXEC:
            continue
        if name.startswith((*EXEC_PREFIXES, *at_import)):
            return True
    return False
