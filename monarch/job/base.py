"""What a job is: an allocation of hosts with workers, that can be found again by a later program.

A job is *applied* when its workers have been asked for. `state` gives host meshes on them, and applies the job first
where neither this object nor the one in the cache has a live allocation of the same kind. The cache is a pickle of the
job, which only its owner can read: it may hold a secret. A client script that a job has been applied with finds a
pickle of the job around it in the same way (see `batch`).
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import pickle
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from monarch.errors import JobError, it_has
from monarch.log import get_logger
from monarch.mesh.host_mesh import HostMesh

log = get_logger("monarch.job")

DEFAULT_JOB_PATH: Final = ".monarch/job_state.pkl"
BATCH_VARIABLE: Final = "MONARCH_BATCH_JOB"
"""Names, to a client script, the pickle of the job that it runs in."""

_STOP_LIMIT_S: Final = 10.0


class JobState:
    """The hosts of a job, a mesh for each of its names: `job.state().trainers`."""

    query_engine_client: None = None
    telemetry_url: None = None
    dashboard_url: None = None
    admin_url: None = None

    def __init__(self, meshes: Mapping[str, HostMesh]) -> None:
        self._meshes = dict(meshes)

    def __getattr__(self, name: str) -> HostMesh:
        meshes: dict[str, HostMesh] = self.__dict__.get("_meshes", {})
        if name not in meshes:
            raise AttributeError(f"this job has no mesh {name!r}; {it_has(meshes, name)}")
        return meshes[name]

    @property
    def meshes(self) -> Mapping[str, HostMesh]:
        """All of them, by name."""
        return self._meshes

    def __repr__(self) -> str:
        return f"<JobState {', '.join(self._meshes)}>"


class JobTrait(ABC):
    """A job; a kind of job says how hosts are had."""

    _cache: str | None = None  # where it is remembered; jobs that an older version has remembered have it in `_files`

    def __init__(self) -> None:
        self._applied: str | None = None
        self._lasting = False
        self._reused: JobTrait | None = None
        self._files: list[str] = []  # that go with the allocation
        self._given: list[HostMesh] = []  # to this program

    # ---- for kinds of jobs

    @abstractmethod
    def _create(self, client_script: str | None) -> None:
        """Have the workers started; where `_lasting` says so, they go on when this program has ended without a `kill`.

        `client_script`: the path of a Python program that is to run there, also when this one has ended, with a pickle
        of the job around it (`BatchJob`) in the file that `MONARCH_BATCH_JOB` names. The workers end with it.
        """

    @abstractmethod
    def _state(self) -> JobState:
        """Host meshes on the workers; new ones at each call."""

    @abstractmethod
    def can_run(self, spec: JobTrait) -> bool:
        """Whether the allocation of this job is alive and good for what `spec` asks for."""

    @abstractmethod
    def _kill(self) -> None:
        """Give the allocation back; harmless where it is gone."""

    def _is_alive(self) -> bool:
        """Whether the allocation is still there."""
        return True

    # ---- for users

    @property
    def active(self) -> bool:
        """Whether this job has an allocation that is alive."""
        return self._applied is not None and self._is_alive()

    @property
    def apply_id(self) -> str | None:
        """A name of the allocation; None while there is none."""
        return self._applied

    def apply(self, client_script: str | None = None) -> None:
        """Ask for the hosts, unless this job has them. They are kept until `kill`, also when this program ends.

        Args:
            client_script: a Python program that runs on the first of the hosts, also when this program ends. There,
                `state` of a job like this one gives these hosts. They are given back when it has ended.

        Raises:
            FileNotFoundError: there is no such script.
            JobError: it has hosts whose workers end with this program, from `state` without a cache; or it is
                active, and a script needs hosts that end with it.
        """
        if client_script is not None:
            if not os.path.isfile(client_script):
                raise FileNotFoundError(errno.ENOENT, "there is no such client script", client_script)
            if self.active:
                raise JobError("this job is active, and its hosts do not end with a script: kill() it first")
            self._apply(lasting=True, client_script=os.path.abspath(client_script))
        elif not self.active:
            around = self._around()
            if around is None:
                self._apply(lasting=True)
            else:
                self._reused = around
        elif not self._lasting:
            raise JobError("this job is active, with workers that end with this program: kill() it first")

    def _apply(self, *, lasting: bool, client_script: str | None = None) -> None:
        self._lasting = lasting
        self._applied = uuid.uuid4().hex  # before a client script finds this job
        try:
            self._create(client_script)
        except BaseException:
            self._forget()
            raise
        log.info("job.applied", kind=type(self).__name__, id=self._applied)

    def _forget(self) -> None:
        applied, self._applied = self._applied, None
        files, self._files = self._files, []
        if self._cache is not None:
            cache, self._cache = os.path.realpath(self._cache), None  # it may have got a context meanwhile
            if _remembers(cache, applied):
                files.append(cache)
        for path in files:
            if not os.path.islink(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def state(self, cached_path: str | os.PathLike[str] | None = DEFAULT_JOB_PATH) -> JobState:
        """The hosts: of this job where it is applied, else of the job that this program is the client script of, or
        of the one in the cache, where that can do what this one asks for, else after `apply`. Each call gives new
        meshes on the same workers.

        Args:
            cached_path: the cache; with None there is none, and the workers end with this program.

        Raises:
            JobError: the job that this program is the client script of has lost hosts.
        """
        if self.active:
            return self._give(self)
        if cached_path is not None:  # whatever context is made the current one meanwhile
            cached_path = os.path.realpath(cached_path)
        self._reused = self._around() or self._reused
        if self._reused is None and cached_path is not None:
            self._reused = self._cached(Path(cached_path))
        if self._reused is not None and self._reused.can_run(self):
            return self._give(self._reused)
        self._reused = None
        self._apply(lasting=cached_path is not None)
        if cached_path is not None:
            self.remember(cached_path)
        return self._give(self)

    def remember(self, path: str | os.PathLike[str]) -> None:
        """Put this job into a cache, until it is killed; where `path` is a link, into the file that it leads to."""
        self._cache = os.path.realpath(path)
        self.dump(self._cache)

    def _give(self, job: JobTrait) -> JobState:
        state = job._state()
        self._given += state._meshes.values()
        return state

    def _around(self) -> JobTrait | None:
        """The job that this program is the client script of, where that can do what this one asks for."""
        path = os.environ.get(BATCH_VARIABLE)
        if path is None:
            return None
        found = job_load(path)
        if not found.active:
            raise JobError("the job that this script runs in has ended, or some of its hosts have")
        return found if found.can_run(self) else None

    def _cached(self, path: Path) -> JobTrait | None:
        try:
            found = job_load(path)
        except FileNotFoundError:
            return None
        except Exception as error:
            log.warning("job.cache_unreadable", path=str(path), error=f"{type(error).__name__}: {error}")
            return None
        return found if found.can_run(self) else None

    def kill(self) -> None:
        """Give the hosts back. What runs there ends; what this program has spawned there counts as stopped."""
        given, self._given = self._given, []
        stops = [mesh.stop() for mesh in given if mesh._attachments is not None and mesh._ended is None]
        limit_s = _STOP_LIMIT_S if stops and (self._reused or self).active else 0.0  # workers that are gone say nothing
        for stop in stops:
            try:
                stop.get(timeout=limit_s)
            except Exception as error:
                log.info("job.hosts_not_left", error=str(error))
        for job in (self._reused, self):
            if job is not None and job._applied is not None:
                job._kill()
                job._forget()
        self._reused = None

    def dumps(self) -> bytes:
        """This job as bytes, for `job_loads`."""
        return pickle.dumps(self)

    def dump(self, path: str | os.PathLike[str]) -> None:
        """This job as a file that only its owner can read, for `job_load`. A link at `path` stays, and leads to it."""
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(self.dumps())
        new.replace(target)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reused": None, "_given": []}

    def enable_telemetry(self, *args: Any, **kwargs: Any) -> Self:
        raise NotImplementedError("telemetry of jobs is planned, and not part of this version")

    def enable_admin(self, *args: Any, **kwargs: Any) -> Self:
        raise NotImplementedError("the admin server of jobs is planned, and not part of this version; see `monarch ps`")

    def remote_mount(self, *args: Any, **kwargs: Any) -> Self:
        raise NotImplementedError("mounts on hosts of a job are planned, and not part of this version")

    gather_mount = remote_mount


def job_loads(data: bytes) -> JobTrait:
    """The job that `dumps` made. A pickle: only load what you trust."""
    found = pickle.loads(data)
    if not isinstance(found, JobTrait):
        raise TypeError(f"this is no job, but {type(found).__name__}")
    return found


def job_load(path: str | os.PathLike[str]) -> JobTrait:
    """The job that `dump` made. A pickle: only load what you trust.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: others could have written it.
    """
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{os.fspath(path)} belongs to another user, or others can write to it")
        return job_loads(file.read())


def _remembers(cache: str, applied: str | None) -> bool:
    """Whether the job in that cache is the one with that id, and not one that has been applied since."""
    try:
        return job_load(cache)._applied == applied
    except Exception:
        return False


_current: str | None = None


def set_current_job(name: str) -> None:
    """Name the job that `load_current_job` gives: `module.attribute`.

    Raises:
        ImportError, AttributeError, TypeError: there is no such job.
    """
    global _current
    named_job(name)
    _current = name


def load_current_job() -> JobTrait:
    """The job that `set_current_job` has named, else the one that this program is the client script of, else the one in
    the cache.

    Raises:
        FileNotFoundError: there is none of them.
    """
    if _current is not None:
        return named_job(_current)
    return job_load(os.environ.get(BATCH_VARIABLE, DEFAULT_JOB_PATH))


def named_job(name: str) -> JobTrait:
    """The job that `module.attribute` names. Raises: ImportError, AttributeError, TypeError."""
    module, dot, attribute = name.rpartition(".")
    if not dot:
        raise ImportError(f"{name!r} names no job: expected MODULE.ATTRIBUTE")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, JobTrait):
        raise TypeError(f"{name} is no job, but {type(found).__name__}")
    return found
