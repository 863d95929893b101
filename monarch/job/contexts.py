"""Contexts: several jobs side by side in one directory, each by its name, one of them the current one.

```text
.monarch/
├── job_state.pkl -> training/state.pkl   the current context: what `state`, `load_current_job` and the commands look at
├── training/
│   ├── spec                              MODULE.ATTRIBUTE of its job; empty where nobody has said it
│   └── state.pkl                         its job, from `apply` to `kill`
├── evaluation/ ...
└── exec/  logs/  lock                    no contexts
```

A context appears, goes, and becomes the current one in one step each, a rename: who looks meanwhile sees it before or
after. What changes contexts, or starts or ends their jobs, holds the lock, so that two programs take turns.

Where nobody has used a context, `job_state.pkl` is a plain file with the only job. The first `use` makes that the
context `default`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from attrs import define

from monarch.errors import JobError, it_has
from monarch.job.base import DEFAULT_JOB_PATH, JobTrait, job_load

DEFAULT: Final = "default"

_CURRENT: Final = Path(DEFAULT_JOB_PATH)
_FOLDER: Final = _CURRENT.parent
_STATE: Final = "state.pkl"
_SPEC: Final = "spec"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LONGEST: Final = 100
_RESERVED: Final = ("exec", "logs", "lock", _CURRENT.name)


@define(frozen=True)
class Context:
    """A context as it is now.

    Attributes:
        name: "" for a job from before there were contexts.
        spec: `module.attribute` of its job; "" where nobody has said it.
        state: "active", "ended", "unreadable", or "no job".
    """

    name: str
    is_current: bool
    spec: str
    state: str


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Nobody else changes contexts, or starts or ends a job of theirs by a command, until the end of the block."""
    _FOLDER.mkdir(exist_ok=True)
    with open(_FOLDER / "lock", "w") as file:  # closing it gives the lock back, as the end of the process does
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_name(name: str) -> str:
    """
    Raises:
        ValueError: no context can have that name; says why.
    """
    if name in _RESERVED:
        raise ValueError(f"a context cannot be named {name!r}: {_FOLDER}/{name} is something else")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise ValueError(
            f"a context cannot be named {name!r}: it is the name of a directory, of letters, digits, '.', '_' and '-', "
            f"{_LONGEST} at most, and begins with a letter or digit"
        )
    return name


def names() -> list[str]:
    """All contexts there are, sorted."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(_FOLDER) if _is_context(name))
    return []


def current() -> str | None:
    """The name of the current context; None where there is none."""
    with contextlib.suppress(OSError):
        name, _, rest = os.readlink(_CURRENT).partition("/")
        if rest == _STATE:
            return name
    return None


def state_path(name: str | None = None) -> Path:
    """The file for the job of that context, of the current one by default. It stays the same when another context
    becomes the current one.

    Raises:
        ValueError, JobError: there is no such context.
    """
    if name is None:
        name = current()
        return _CURRENT if name is None else _FOLDER / name / _STATE
    _must_be(name)
    return _FOLDER / name / _STATE


def spec_of(name: str) -> str:
    """The `module.attribute` of its job; "" where nobody has said it."""
    with contextlib.suppress(FileNotFoundError):
        return (_FOLDER / name / _SPEC).read_text().strip()
    return ""


def set_spec(name: str, spec: str) -> None:
    """Note what the job of a context is described by."""
    new = _FOLDER / name / f".{uuid.uuid4().hex}"
    new.write_text(f"{spec}\n")
    new.replace(_FOLDER / name / _SPEC)


def create(name: str, spec: str = "") -> None:
    """Make a context, without a job. It does not become the current one.

    Raises:
        ValueError: it cannot have that name.
        JobError: there is such a context already.
    """
    check_name(name)
    with locked():
        _create(name, spec)


def use(name: str) -> None:
    """Make that context the current one.

    Raises:
        ValueError, JobError: there is no such context; or the current job is of no context, and cannot become that of
            `default`, as there is such a context already.
    """
    if name != DEFAULT or not _is_plain():
        _must_be(name)
    with locked():
        if _is_plain():
            _adopt()
        _must_be(name)
        new = _FOLDER / f".{uuid.uuid4().hex}"
        new.symlink_to(Path(name) / _STATE)
        new.replace(_CURRENT)


def remove(name: str, *, force: bool = False) -> str:
    """Remove a context. What is left of a job of it that has ended is given back.

    Args:
        force: also the current context, and one with a job that is active, which is killed.

    Returns: a complaint, of a forced removal of a context whose job cannot be killed; "" elsewhere.

    Raises:
        ValueError, JobError: there is no such context; or it is not to be removed without `force`.
    """
    _must_be(name)
    with locked():
        _must_be(name)
        if name == current() and not force:
            raise JobError(
                f"{name} is the current context: `monarch context use` another one first, or remove it with --force"
            )
        complaint = _end_job(name, force)
        if name == current():
            _CURRENT.unlink()
        old = _FOLDER / f".{uuid.uuid4().hex}"
        (_FOLDER / name).rename(old)
        shutil.rmtree(old)
    return complaint


def listed() -> list[Context]:
    """All contexts, by name, after a job from before there were contexts."""
    now = current()
    found = [Context(name, name == now, spec_of(name), _state_in(_FOLDER / name / _STATE)) for name in names()]
    return [Context("", True, "", _state_in(_CURRENT)), *found] if _is_plain() else found


def _is_context(name: str) -> bool:
    if name in _RESERVED or not _NAME.fullmatch(name):
        return False
    return any((_FOLDER / name / each).is_file() for each in (_SPEC, _STATE))


def _must_be(name: str) -> None:
    if not _is_context(check_name(name)):
        there = names()
        raise JobError(f"there is no context {name!r}; {it_has(there, name) if there else 'there is none'}")


def _is_plain() -> bool:
    """Whether the current job is one from before there were contexts."""
    return _CURRENT.is_file() and not _CURRENT.is_symlink()


def _create(name: str, spec: str) -> None:
    """With the lock held."""
    new = _FOLDER / f".{uuid.uuid4().hex}"
    new.mkdir()
    (new / _SPEC).write_text(f"{spec}\n" if spec else "")
    try:
        new.rename(_FOLDER / name)
    except OSError:
        shutil.rmtree(new)
        what = f"a context {name!r}" if _is_context(name) else f"something else at {_FOLDER / name}"
        raise JobError(f"there is {what} already") from None


def _adopt() -> None:
    """Make the job of the plain file that of the context `default`; the file is left to be replaced. Lock held."""
    if _is_context(DEFAULT):
        raise JobError(
            f"the current job is of no context, and would become that of {DEFAULT!r}, which is there already: "
            f"`monarch kill` ends the job, `monarch context rm {DEFAULT}` removes the context"
        )
    job = _load(_CURRENT)
    _create(DEFAULT, "")
    if job is None:
        shutil.copy2(_CURRENT, _FOLDER / DEFAULT / _STATE)
    else:
        plain = os.path.abspath(_CURRENT)
        job._files = [path for path in job._files if path != plain]
        job.remember(_FOLDER / DEFAULT / _STATE)


def _end_job(name: str, force: bool) -> str:
    """See `remove`. With the lock held."""
    path = _FOLDER / name / _STATE
    if not path.exists():
        return ""
    try:
        job = job_load(path)
        may_be_killed = force or not job.active
        if may_be_killed:
            job.kill()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if force:
            return f"the job of {name} could not be ended, and may still have its hosts ({why})"
        raise JobError(f"the job of {name} cannot be ended ({why}); --force removes the context all the same") from None
    if not may_be_killed:
        raise JobError(f"the job of {name} is active: `monarch kill {name}` ends it, and so does --force")
    return ""


def _load(path: Path) -> JobTrait | None:
    """None where it cannot be read."""
    try:
        return job_load(path)
    except Exception:
        return None


def _state_in(path: Path) -> str:
    if not path.exists():
        return "no job"
    job = _load(path)
    if job is None:
        return "unreadable"
    return "active" if job.active else "ended"
