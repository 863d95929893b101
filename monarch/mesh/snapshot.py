"""A program at one moment, as values: its hosts, their processes, the actors in these, and the stacks of all."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

from attrs import asdict, define, evolve

from monarch.core.serving import Running
from monarch.core.stacks import Frame, Owner, Stack


class ProcessState(StrEnum):
    """How a process answers."""

    UP = "up"
    STARTING = "starting"  # it has not come up yet
    STOPPING = "stopping"
    HELD = "held"  # it did not answer: native code holds its interpreter, or the machine is very busy
    STOPPED = "stopped"  # by SIGSTOP or a debugger
    UNKNOWN = "not asked"  # only the driver can ask it, and does not answer


@define(frozen=True)
class Actor:
    """An actor.

    Attributes:
        name: as it was spawned, with its place in the mesh.
        phase: "born" (until it is constructed), "serving" or "ending".
        running: the endpoints that it runs, the oldest first; `__init__` while it is constructed.
        queued: calls that wait for their turn.
        restarts: how often its supervisor has restarted it.
        breakpoint: where it waits for `monarch debug`; empty where it does not.
        stacks: of its thread and its waiting tasks, where they were asked for.
    """

    name: str
    class_name: str
    phase: str
    running: tuple[Running, ...] = ()
    queued: int = 0
    restarts: int = 0
    stacks: tuple[Stack, ...] = ()
    breakpoint: str = ""

    @property
    def _names(self) -> str:
        return " ".join([self.class_name, self.name, *(each.endpoint for each in self.running)])


@define(frozen=True)
class Process:
    """A process.

    Attributes:
        name: of its mesh, with its place there; "client" for the driver itself.
        pid: None before it is forked.
        note: why something is missing; empty otherwise.
        memory_bytes: what is resident; None where the kernel does not tell.
        threads: those that are no actor's; all of them where the process could not say which are.
    """

    name: str
    pid: int | None
    state: ProcessState
    note: str = ""
    memory_bytes: int | None = None
    actors: tuple[Actor, ...] = ()
    threads: tuple[Stack, ...] = ()


@define(frozen=True)
class Host:
    """A host, by its name, with the processes that the program has there."""

    name: str
    processes: tuple[Process, ...]


@define(frozen=True)
class Snapshot:
    """All that belongs to one driver. Printed, it is the tree, or the stacks where these were asked for.

    Attributes:
        program: the driver's command line.
        pid: the driver's.
        shows_stacks: whether stacks were asked for.
    """

    program: str
    pid: int
    hosts: tuple[Host, ...]
    shows_stacks: bool = False

    @property
    def processes(self) -> tuple[Process, ...]:
        """Those of all hosts."""
        return tuple(process for host in self.hosts for process in host.processes)

    def matching(self, pattern: str) -> Snapshot:
        """What has `pattern` in its name, whatever the case: whole processes (by their pid, too), actors (by what they
        run, too), or threads."""
        wanted = pattern.casefold()

        def narrowed(process: Process) -> Process | None:
            if wanted in process.name.casefold() or pattern == str(process.pid):
                return process
            actors = tuple(actor for actor in process.actors if wanted in actor._names.casefold())
            threads = tuple(thread for thread in process.threads if wanted in thread.name.casefold())
            return evolve(process, actors=actors, threads=threads) if actors or threads else None

        found = (evolve(h, processes=tuple(filter(None, map(narrowed, h.processes)))) for h in self.hosts)
        return evolve(self, hosts=tuple(host for host in found if host.processes))

    def to_json(self) -> dict[str, Any]:
        """As what `json` takes; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """Raises: TypeError, LookupError, ValueError, where these are the facts of another version."""
        return cls(**{**facts, "hosts": tuple(map(_host, facts["hosts"]))})

    def __str__(self) -> str:
        from monarch.mesh.rendering import plain

        return plain(self)


def _host(facts: Mapping[str, Any]) -> Host:
    return Host(facts["name"], tuple(map(_process, facts["processes"])))


def _process(facts: Mapping[str, Any]) -> Process:
    own = {
        "state": ProcessState(facts["state"]),
        "actors": tuple(map(_actor, facts["actors"])),
        "threads": tuple(map(_stack, facts["threads"])),
    }
    return Process(**{**facts, **own})


def _actor(facts: Mapping[str, Any]) -> Actor:
    own = {
        "running": tuple(Running(**each) for each in facts["running"]),
        "stacks": tuple(map(_stack, facts["stacks"])),
    }
    return Actor(**{**facts, **own})


def _stack(facts: Mapping[str, Any]) -> Stack:
    return Stack(
        **{**facts, "frames": tuple(Frame(**{**each, "owner": Owner(each["owner"])}) for each in facts["frames"])}
    )
