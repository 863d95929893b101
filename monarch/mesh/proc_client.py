"""The client of a process: who its code is that runs in no actor, in a thread that the user started for example."""

from __future__ import annotations

from monarch.core.ids import ActorId
from monarch.mesh.context import NOWHERE, Spawner
from monarch.mesh.mesh_proc import MeshProc
from monarch.mesh.proc_mesh import ProcMesh
from monarch.mesh.shape import Region, Slice
from monarch.supervision.failure import MeshFailure


class ProcClient(Spawner):
    """See the module. It owns what that code spawns."""

    def __init__(self, runtime: MeshProc, actor_id: ActorId) -> None:
        super().__init__(runtime, actor_id)
        here = ProcMesh("local", [runtime.proc_id], Region((), Slice(0, (), ())))
        self._init_spawner("client", "monarch.RootClientActor", NOWHERE, here, None)
        runtime.books.owners[actor_id.number] = self
        runtime.adopt(self)

    def supervise(self, failure: MeshFailure) -> None:
        self.proc_runtime.unowned(failure)

    def stop(self, reason: str | None = None) -> None:
        raise RuntimeError("the client cannot be stopped like an actor: use shutdown_context()")

    def abort(self, reason: str | None = None) -> None:
        raise RuntimeError("the client cannot be aborted like an actor: use shutdown_context()")
