"""Actors in process meshes: the public names.

```python
from monarch.actor import Actor, endpoint, this_host

class Greeter(Actor):
    @endpoint
    def greet(self, name: str) -> str:
        return f"hello, {name}"

procs = this_host().spawn_procs({"gpus": 2})
print(procs.spawn("greeter", Greeter).greet.call("you").get())
```
"""

from __future__ import annotations

import sys
from typing import Any

from monarch.core.future import Future
from monarch.core.ids import ProcId, Uid
from monarch.core.setting_kinds import ChannelTransport
from monarch.errors import ActorError, CallCancelled, DeadlockError, MonarchError, SupervisionError
from monarch.launch.bootstrap import BootstrapCommand, default_bootstrap_cmd
from monarch.mesh import actor_config as config
from monarch.mesh.actor import Actor
from monarch.mesh.actor_mesh import ActorMesh
from monarch.mesh.attach import attach_to_workers
from monarch.mesh.client import shutdown_context
from monarch.mesh.context import Context, context, current_actor_name, current_rank, current_size
from monarch.mesh.controllers import get_or_spawn_controller
from monarch.mesh.debug_service import debug_controller
from monarch.mesh.endpoint import Accumulator, Endpoint, as_endpoint, concurrent_endpoint, endpoint, send
from monarch.mesh.host_mesh import HostMesh, this_host, this_proc
from monarch.mesh.later import (
    get_meter,
    span,
    traced,
)
from monarch.mesh.network import attach
from monarch.mesh.port import Channel, Port, PortReceiver
from monarch.mesh.proc_mesh import ProcMesh
from monarch.mesh.shape import Extent, Point, Region, Shape, Slice
from monarch.mesh.transport_choice import enable_transport
from monarch.mesh.value_mesh import ValueMesh
from monarch.mesh.worker import run_worker_loop_forever
from monarch.supervision.failure import MeshFailure

sys.modules[__name__ + ".config"] = config


_demos: list[Any] = []  # the jobs behind `hosts_from_config`, whose workers end with this program


def hosts_from_config(name: str) -> HostMesh:
    """For demonstrations: two workers on this machine, as if they were two hosts. See `monarch.job` for others."""
    from monarch.job import ProcessJob

    job = ProcessJob({name: 2})
    _demos.append(job)
    hosts: HostMesh = getattr(job.state(cached_path=None), name)
    return hosts


def unhandled_fault_hook(failure: MeshFailure) -> Any:
    """What happens to a failure that nobody handled. Assign another function: `monarch.actor.unhandled_fault_hook = f`.

    A normal return drops the failure. This one ends the program, with status 1. It runs on the thread `monarch-faults`,
    for one failure after the other; at the end of the program, on the main thread.
    """
    sys.exit(1)


__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "BootstrapCommand",
    "CallCancelled",
    "Channel",
    "ChannelTransport",
    "Context",
    "DeadlockError",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "MonarchError",
    "Point",
    "Port",
    "PortReceiver",
    "ProcId",
    "ProcMesh",
    "Region",
    "Shape",
    "Slice",
    "SupervisionError",
    "Uid",
    "ValueMesh",
    "as_endpoint",
    "attach",
    "attach_to_workers",
    "concurrent_endpoint",
    "config",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "debug_controller",
    "default_bootstrap_cmd",
    "enable_transport",
    "endpoint",
    "get_meter",
    "get_or_spawn_controller",
    "hosts_from_config",
    "run_worker_loop_forever",
    "send",
    "shutdown_context",
    "span",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",
]
