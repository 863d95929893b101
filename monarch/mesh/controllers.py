"""Controllers: named singletons in the root client's process, that any actor of the job can ask for."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from monarch.core.future import Future
from monarch.mesh.actor import Actor, class_of
from monarch.mesh.actor_mesh import ActorMesh
from monarch.mesh.context import context
from monarch.mesh.endpoint import endpoint
from monarch.mesh.proc_mesh import spawnable
from monarch.mesh.shape import Region, Slice
from monarch.supervision.failure import MeshFailure

if TYPE_CHECKING:
    from monarch.mesh.client import RootClient

A = TypeVar("A", bound=Actor)

_NUMBER: Final = 2
_UNITY: Final = Region((), Slice(0, (), ()))


class Controllers(Actor):
    """Owns the controllers, and remembers which have failed: one failure does not touch the others."""

    def __init__(self) -> None:
        self._meshes: dict[str, Any] = {}
        self._classes: dict[str, type[Any]] = {}
        self._failures: dict[str, str] = {}

    @endpoint
    def get_or_spawn(self, name: str, cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = context().actor_instance
        found = self._meshes.get(name)
        if found is not None and name not in self._failures:
            # Whoever saw it fail may ask before `__supervise__` is told.
            down = here.proc_runtime.why_ending(found._number)
            if down is not None and not down.stopped:
                self._failures[name] = str(down)
        if name in self._failures:
            raise ValueError(f"Failure on {name}: {self._failures[name]}")
        if found is None:
            found = self._meshes[name] = here.proc.spawn(name, cls, *args, **kwargs)
            self._classes[name] = cls
        there, asked = self._classes[name], class_of(cls).name
        if not issubclass(there, cls) and class_of(there).name != asked:
            raise ValueError(f"controller {name!r} is a {class_of(there).name}, and not a {asked}")
        return found

    def __supervise__(self, failure: MeshFailure) -> bool:
        self._failures[failure.mesh_name] = failure.report()
        return True


def install(client: RootClient) -> None:
    """The first message to the controllers' actor makes it, in the client's process and owned by the client."""
    made = [False]

    def on_unborn(number: int) -> None:
        if number == _NUMBER and not made[0]:
            made[0] = True
            # In an empty context the client is the current actor, whoever's thread this is.
            here = client.proc_mesh
            contextvars.Context().run(here._spawn, "controllers", Controllers, (), {}, _NUMBER)

    client.proc_runtime.on_unborn = on_unborn


def get_or_spawn_controller(name: str, Class: type[A], *args: Any, **kwargs: Any) -> Future[A]:
    """The controller of that name, spawned by the first request anywhere in the job; it lives in the client's process.

    Raises (the future): ActorError around a ValueError, "Failure on NAME ..." when it has failed before; also when it
    is of another class.

    Raises:
        ValueError, TypeError: as `ProcMesh.spawn`.
    """
    cls = spawnable(name, Class, args, kwargs)
    root = context().actor_instance.proc_runtime.root
    mesh: ActorMesh[Controllers] = ActorMesh(
        _NUMBER, "controllers", Controllers, class_of(Controllers).name, [root], _UNITY, _UNITY
    )
    return cast(Future[A], mesh.get_or_spawn.call_one(name, cls, args, kwargs))
