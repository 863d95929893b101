"""What `monarch apply`, `exec`, `shell` and `kill` do with the job of the current context, or of another."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from monarch.errors import it_has
from monarch.job import contexts, interactive
from monarch.job.base import DEFAULT_JOB_PATH, JobTrait, job_load, named_job
from monarch.job.execute import Command, exec_command
from monarch.mesh.host_mesh import HostMesh

_NONE: Final = f"there is no current job ({DEFAULT_JOB_PATH}): `monarch apply MODULE.ATTRIBUTE` makes one"


class NoJob(Exception):
    """A command cannot be done; the text says why, and what to do."""


def apply(name: str | None = None) -> tuple[str, JobTrait]:
    """Ask for the hosts of the job that `module.attribute` names, and remember it as that of the current context.

    Args:
        name: by default, that of the last time in this context, or with which the context was made.

    Returns: (its name, the job)

    Raises:
        NoJob: there is no such job, or another one is current.
    """
    context = contexts.current()
    name = name or (contexts.spec_of(context) if context is not None else "")
    if not name:
        raise NoJob("which job? `monarch apply MODULE.ATTRIBUTE`")
    job = _described(name)
    with contexts.locked():
        path = contexts.state_path(context)
        if path.exists() and _load(context, path).active:
            raise NoJob(f"{_whose(context)} is active; `monarch kill` ends it")
        job.apply()
        job.remember(path)
        if context is not None:
            contexts.set_spec(context, name)
    return name, job


def check_spec(name: str) -> None:
    """Raises: NoJob, where `module.attribute` names none."""
    _described(name)


def find_modules_here() -> None:
    """Jobs, and classes of jobs, may be in modules of the current directory."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _described(name: str) -> JobTrait:
    find_modules_here()
    try:
        return named_job(name)
    except (ImportError, AttributeError, TypeError) as error:
        raise NoJob(str(error)) from error


def kill(name: str | None = None) -> None:
    """End the job of that context, of the current one by default.

    Raises:
        NoJob: it has none.
        ValueError, JobError: there is no such context.
    """
    if not contexts.state_path(name).exists():
        raise _no_job(contexts.current() if name is None else name)
    with contexts.locked():
        context = contexts.current() if name is None else name
        path = contexts.state_path(context)
        _load(context, path).kill()
        path.unlink(missing_ok=True)  # it may have been moved here, with the directory


def _load(context: str | None, path: Path) -> JobTrait:
    """The job of that context. Raises: NoJob."""
    find_modules_here()
    try:
        return job_load(path)
    except FileNotFoundError:
        raise _no_job(context) from None
    except Exception as error:
        raise NoJob(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def _no_job(context: str | None) -> NoJob:
    if context is None:
        return NoJob(_NONE)
    spec = contexts.spec_of(context)
    return NoJob(f"{_whose(context)} is not there: `monarch apply{'' if spec else ' MODULE.ATTRIBUTE'}` starts it")


def _whose(context: str | None) -> str:
    return "the current job" if context is None else f"the job of context {context}"


def execute(
    command: Command,
    *,
    mesh: str | None = None,
    everywhere: bool = False,
    one: bool = False,
    point: Mapping[str, int] | None = None,
    per_host: Mapping[str, int] | None = None,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    kill: bool = False,
) -> int:
    """Run a command on hosts of the current job; returns the largest status.

    Args:
        mesh: run it in all processes of this mesh, with a file for what each prints.
        everywhere: likewise, of all meshes, one after the other.
        one, point: run it in the first process, or in this one, of `mesh` alone. Without any of these, in the first of
            the first mesh.
        kill: end the job afterwards; that one, also where another has become the current one.

    Raises:
        NoJob: there is no active job, or it has no such mesh.
    """
    job, meshes = _job_and_meshes(mesh)
    if everywhere or (mesh is not None and point is None and not one):
        folder = Path(".monarch") / "exec" / time.strftime("%Y%m%d-%H%M%S")
        status = 0
        for name in meshes if mesh is None else [mesh]:
            output = folder / name
            done = exec_command(meshes[name], command, env, workdir, output, per_host=per_host).get()
            print(f"{name}: status {done}, output in {output}/", file=sys.stderr)
            status = max(status, done)
    else:
        chosen = meshes[mesh] if mesh is not None else next(iter(meshes.values()))
        rank = 0 if point is None else None
        status = exec_command(chosen, command, env, workdir, rank=rank, point=point, per_host=per_host).get()
    if kill:
        job.kill()
    return status


def shell(
    *,
    mesh: str | None = None,
    point: Mapping[str, int] | None = None,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    kill: bool = False,
) -> int:
    """Work with a shell on a host of the current job, in this terminal; returns its exit status.

    Args:
        mesh: of this mesh; the first by default.
        point: that host of the mesh; the first by default.
        kill: as for `execute`.

    Raises:
        NoJob: there is no active job, or it has no such mesh or host.
        ValueError, OSError, SupervisionError: as `monarch.job.shell`.
    """
    job, meshes = _job_and_meshes(mesh)
    chosen = meshes[mesh] if mesh is not None else next(iter(meshes.values()))
    where = dict.fromkeys(chosen.extent, 0) if point is None else point
    try:
        host = chosen.slice(**where)
    except LookupError as error:
        raise NoJob(str(error)) from error
    status = interactive.shell(host, env=env, workdir=workdir)
    if kill:
        job.kill()
    return status


def _job_and_meshes(named: str | None) -> tuple[JobTrait, Mapping[str, HostMesh]]:
    """The job of the current context, and its meshes, `named` among them. Raises: NoJob."""
    context = contexts.current()
    job = _load(context, contexts.state_path(context))
    if not job.active:
        raise NoJob(f"{_whose(context)} has ended; `monarch kill` forgets it")
    meshes = job.state(None).meshes
    if named is not None and named not in meshes:
        raise NoJob(f"{_whose(context)} has no mesh {named!r}; {it_has(meshes, named)}")
    return job, meshes


def command_of(words: Sequence[str], script: str | None, module: str | None) -> Command:
    """What is to be run: a script's text (`-` for the standard input) by bash, a module by Python, or the words.

    Raises:
        NoJob: there is nothing to run, or the script cannot be read.
    """
    if script is not None:
        try:
            text = sys.stdin.read() if script == "-" else Path(script).read_text()
        except OSError as error:
            raise NoJob(str(error)) from error
        return ["bash", "-c", text, script, *words]
    if module is not None:
        return [sys.executable, "-m", module, *words]
    if not words:
        raise NoJob("there is nothing to run: monarch exec [OPTIONS] COMMAND ...")
    return list(words)
