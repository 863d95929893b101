"""What a supervisor is told of a child, and what it tells."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, ParamSpec, TypeVar

from attrs import define

from monarch.core import duration
from monarch.mesh.actor import Actor, class_of
from monarch.mesh.actor_mesh import ActorMesh
from monarch.mesh.host_mesh import HostMesh
from monarch.mesh.proc_mesh import ProcMesh, spawnable
from monarch.mesh.shape import Extent, Region, Slice
from monarch.supervision.policy import Restart, Rule, Strategy

A = TypeVar("A", bound=Actor)
E = TypeVar("E", Restart, Strategy)
P = ParamSpec("P")

SHUTDOWN_S: Final = 5.0


def one_of(kind: type[E], value: E | str) -> E:
    """Raises: ValueError that lists the members of the enumeration."""
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{value!r} is none of {', '.join(repr(each.value) for each in kind)}") from None


class Child(Generic[A]):
    """What a supervisor must know to start a child, again and again.

    `Child("store", Store, "/data")` is a `Store("/data")` on a process that the supervisor starts for it, so that its
    crash takes nothing else along, and that is replaced when it dies. `options` says otherwise.

    Args:
        name: what it is called by; unique in its supervisor.
        Class, args, kwargs: as for `procs.spawn`. They are sent once, with the supervisor, and each incarnation is
            constructed from a copy.

    Raises:
        ValueError, TypeError: as `ProcMesh.spawn`.
    """

    def __init__(self, name: str, Class: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.name = name
        self.Class: type[A] = spawnable(name, Class, args, kwargs)
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs
        self.restart = Restart.PERMANENT
        self.shutdown_s = SHUTDOWN_S
        self.per_host: dict[str, int] = {}
        self.on: ProcMesh | HostMesh | None = None

    def options(
        self,
        *,
        restart: Restart | str | None = None,
        shutdown_s: float | None = None,
        per_host: Mapping[str, int] | None = None,
        on: ProcMesh | HostMesh | None = None,
    ) -> Child[A]:
        """The same child with other options; what is not given stays.

        Args:
            restart: "permanent" (the default) restarts it after any end, "transient" after a failure only,
                "temporary" never.
            shutdown_s: seconds it has to serve what is queued and clean up, when it is stopped. Then its processes are
                killed. On processes that are not the supervisor's it is left behind: its thread ends when it can, and
                nobody reaches it any more.
            per_host: an actor on each of so many processes of its own, by named dimensions, as for `spawn_procs`.
            on: processes that exist, where it is spawned each time; they are not replaced. Or hosts, for processes
                of its own there; the default is the supervisor's host.

        Raises:
            ValueError, TypeError: a value makes no sense, or `per_host` is given together with processes.
        """
        self = copy.copy(self)
        if restart is not None:
            self.restart = one_of(Restart, restart)
        if shutdown_s is not None:
            duration.check("shutdown_s", shutdown_s)
            self.shutdown_s = shutdown_s
        if per_host is not None:
            self.per_host = dict(per_host)
        if on is not None:
            self.on = on
        if isinstance(self.on, ProcMesh) and self.per_host:
            raise ValueError(f"child {self.name!r}: per_host is for processes of its own, and `on` gives it processes")
        if any(size < 1 for size in self.per_host.values()):
            raise ValueError(f"per_host is {self.per_host}; every size must be at least 1")
        return self

    @property
    def _rule(self) -> Rule:
        return Rule(self.name, self.restart)

    @property
    def _region(self) -> Region:
        on = Extent((), ()) if self.on is None else self.on._region.extent
        labels = [*on.labels, *self.per_host]
        return Region(labels, Slice.new_row_major([*on.sizes, *self.per_host.values()]))

    def _prototype(self) -> ActorMesh[Any]:
        region = self._region
        return ActorMesh(0, self.name, self.Class, class_of(self.Class).name, (), region, region)

    def __repr__(self) -> str:
        return f"<Child {self.name!r} of {class_of(self.Class).name}, {self.restart.value}>"


@define(frozen=True)
class ChildStatus:
    """How a child is.

    Attributes:
        state: "up", "starting", "stopping" or "waits to be started".
        restarts: how often it was restarted, for itself or along with others.
        last_failure: why it ended last, or "".
    """

    name: str
    state: str
    restarts: int
    last_failure: str = ""
