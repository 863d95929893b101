"""What `monarch apply`, `exec`, `shell` and `kill` do with the job in the cache."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from monarch.errors import it_has
from monarch.job import interactive
from monarch.job.base import DEFAULT_JOB_PATH, JobTrait, job_load, named_job
from monarch.job.execute import Command, exec_command
from monarch.mesh.host_mesh import HostMesh

_NONE: Final = f"there is no current job ({DEFAULT_JOB_PATH}): `monarch apply MODULE.ATTRIBUTE` makes one"


class NoJob(Exception):
    """A command cannot be done; the text says why, and what to do."""


def apply(name: str) -> JobTrait:
    """Ask for the hosts of the job that `module.attribute` names, and remember it as the current one.

    Raises:
        NoJob: there is no such job, or another one is current.
    """
    if _is_active():
        raise NoJob("a job is current and active; `monarch kill` ends it")
    sys.path.insert(0, os.getcwd())
    try:
        job = named_job(name)
    except (ImportError, AttributeError, TypeError) as error:
        raise NoJob(str(error)) from error
    job.apply()
    job.remember(DEFAULT_JOB_PATH)
    return job


def _is_active() -> bool:
    try:
        return job_load(DEFAULT_JOB_PATH).active
    except FileNotFoundError:
        return False


def kill() -> None:
    """End the current job. Raises: NoJob."""
    try:
        job_load(DEFAULT_JOB_PATH).kill()
    except FileNotFoundError:
        raise NoJob(_NONE) from None


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
) -> int:
    """Run a command on hosts of the current job; returns the largest status.

    Args:
        mesh: run it in all processes of this mesh, with a file for what each prints.
        everywhere: likewise, of all meshes, one after the other.
        one, point: run it in the first process, or in this one, of `mesh` alone. Without any of these, in the first of
            the first mesh.

    Raises:
        NoJob: there is no active job, or it has no such mesh.
    """
    meshes = _meshes(mesh)
    if everywhere or (mesh is not None and point is None and not one):
        folder = Path(".monarch") / "exec" / time.strftime("%Y%m%d-%H%M%S")
        status = 0
        for name in meshes if mesh is None else [mesh]:
            output = folder / name
            done = exec_command(meshes[name], command, env, workdir, output, per_host=per_host).get()
            print(f"{name}: status {done}, output in {output}/", file=sys.stderr)
            status = max(status, done)
        return status
    chosen = meshes[mesh] if mesh is not None else next(iter(meshes.values()))
    rank = 0 if point is None else None
    return exec_command(chosen, command, env, workdir, rank=rank, point=point, per_host=per_host).get()


def shell(
    *,
    mesh: str | None = None,
    point: Mapping[str, int] | None = None,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
) -> int:
    """Work with a shell on a host of the current job, in this terminal; returns its exit status.

    Args:
        mesh: of this mesh; the first by default.
        point: that host of the mesh; the first by default.

    Raises:
        NoJob: there is no active job, or it has no such mesh or host.
        ValueError, OSError, SupervisionError: as `monarch.job.shell`.
    """
    meshes = _meshes(mesh)
    chosen = meshes[mesh] if mesh is not None else next(iter(meshes.values()))
    where = dict.fromkeys(chosen.extent, 0) if point is None else point
    try:
        host = chosen.slice(**where)
    except LookupError as error:
        raise NoJob(str(error)) from error
    return interactive.shell(host, env=env, workdir=workdir)


def _meshes(named: str | None) -> Mapping[str, HostMesh]:
    """Those of the current job, `named` among them."""
    try:
        job = job_load(DEFAULT_JOB_PATH)
    except FileNotFoundError:
        raise NoJob(_NONE) from None
    if not job.active:
        raise NoJob("the current job has ended; `monarch kill` forgets it")
    meshes = job.state(None).meshes
    if named is not None and named not in meshes:
        raise NoJob(f"the current job has no mesh {named!r}; {it_has(meshes, named)}")
    return meshes


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
