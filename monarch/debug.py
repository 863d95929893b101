"""What a running program does: its processes and actors, and where each of them stands.

```python no-run
from monarch import debug

print(debug.ps())  # the tree: endpoints that run, and since when; queues, restarts, memory
print(debug.stacks(trainers))  # the Python stacks of the processes of a mesh
```

Both work while endpoints block, and in any process of the program. `monarch ps` and `monarch stack` ask the same in
another terminal.
"""

from __future__ import annotations

from typing import Any

from monarch.mesh.actor_mesh import ActorMesh
from monarch.mesh.context import context
from monarch.mesh.inspector import LIMIT_S
from monarch.mesh.proc_mesh import ProcMesh
from monarch.mesh.snapshot import Actor, Host, Process, ProcessState, Snapshot

__all__ = ["Actor", "Host", "Process", "ProcessState", "Snapshot", "ps", "stacks"]


def ps() -> Snapshot:
    """The program as a tree of hosts, processes and actors. Blocks: for milliseconds, and 5 s at most.

    A process that does not answer within a second is shown as `held`.

    Raises:
        TimeoutError: the process of the client does not answer; `monarch ps` can look at it from outside.
    """
    return _take(False, None)


def stacks(mesh: Any = None) -> Snapshot:
    """The same with the Python stacks of all processes, or of those of a mesh of actors or processes.

    Frames of the library are left out where they tell nothing; `Actor.stacks` and `Process.threads` have all. Stacks of
    a process that does not answer come from its reserved signal (setting `stack_signal`).

    Raises:
        TypeError: `mesh` is none, or is the child of a supervisor, whose processes change.
        TimeoutError: as for `ps`.
    """
    if mesh is not None and not isinstance(mesh, ActorMesh | ProcMesh):
        raise TypeError(f"stacks takes a mesh of actors or processes, not {mesh!r}")
    if mesh is not None and not mesh._procs:
        raise TypeError(f"the processes of {mesh!r} change with its restarts: use stacks().matching({mesh._name!r})")
    return _take(True, None if mesh is None else [proc.key for proc in mesh._procs])


def _take(with_stacks: bool, only: list[int] | None) -> Snapshot:
    runtime = context().actor_instance.proc_runtime
    (snapshot,) = runtime.request(runtime.root, "snapshot", with_stacks, only).get(2 * LIMIT_S)
    found: Snapshot = snapshot
    return found
