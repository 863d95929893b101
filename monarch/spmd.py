"""Programs in the style of torchrun on a mesh of processes: one script, run in each, with its rank in the environment.

```python
procs = this_host().spawn_procs({"gpus": 4})
spmd = procs.spawn("spmd", SPMDActor)
host, port = spmd.slice(gpus=0).get_host_port.call_one().get()
spmd.main.call(host, port, ["train.py", "--epochs", "3"]).get()
```
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Sequence
from typing import Any

from monarch.core.future import Future
from monarch.mesh.actor import Actor
from monarch.mesh.context import current_rank
from monarch.mesh.endpoint import endpoint
from monarch.mesh.network import address_for_all
from monarch.mesh.proc_mesh import ProcMesh
from monarch.mesh.shape import Point

__all__ = ["SPMDActor", "setup_torch_elastic_env", "setup_torch_elastic_env_async"]


def environment(point: Point, master_addr: str, master_port: int) -> dict[str, str]:
    """What torchrun would set for the process at `point`: the last dimension counts as the processes of a node."""
    extent = point.extent
    world, local = extent.nelements, extent.sizes[-1] if extent.sizes else 1
    return {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "RANK": str(point.rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(point.rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(point.rank // local),
        "GROUP_WORLD_SIZE": str(world // local),
        "ROLE_RANK": str(point.rank),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "rank",
    }


def _host_port(use_ipaddr: bool | None) -> tuple[str, int]:
    """This host as others call it, and a port that is free now."""
    host = address_for_all() if use_ipaddr is not False else socket.getfqdn()
    with socket.create_server(("::" if ":" in host else "", 0), family=_family(host)) as sock:
        port: int = sock.getsockname()[1]
    return host, port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class SPMDActor(Actor):
    """Runs a program in its process, as torchrun would."""

    def __init__(self) -> None:
        self._point = current_rank()

    @endpoint
    def get_host_port(self, use_ipaddr: bool | None = None) -> tuple[str, int]:
        """Where rank 0 can gather the others: its host, by address (or by name, where `use_ipaddr` is False), and a
        free port."""
        return _host_port(use_ipaddr)

    @endpoint
    def setup_env(self, master_addr: str, master_port: int) -> None:
        """Set the variables of torchrun in this process."""
        os.environ.update(environment(self._point, master_addr, master_port))

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: Sequence[str]) -> bool:
        """Run `["script.py", ARG, ...]` or `["-m", "module", ARG, ...]` as the main program of this process; True once
        it is through.

        Raises:
            ValueError: there is nothing to run.
            RuntimeError: the program has ended itself with a status other than 0.
        """
        program = list(script_args)
        is_module = program[:1] == ["-m"]
        program = program[1:] if is_module else program
        if not program:
            raise ValueError("script_args names nothing to run: expected [SCRIPT, ...] or ['-m', MODULE, ...]")
        os.environ.update(environment(self._point, master_addr, master_port))
        before = sys.argv, sys.path[:]
        sys.argv = program
        try:
            if is_module:
                runpy.run_module(program[0], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
                runpy.run_path(program[0], run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"{program[0]} ended itself with status {end.code}") from end
        finally:
            sys.argv, sys.path[:] = before
        return True


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: bool | None = None,
) -> None:
    """Set the variables of torchrun in each process of the mesh, so that `torch.distributed.init_process_group` works.

    Args:
        master_addr, master_port: where rank 0 gathers the others; without them its host and a free port there.
        use_ipaddr: whether the host is named by its address.

    Raises:
        AssertionError: only one of `master_addr` and `master_port` is given.
    """
    assert (master_addr is None) == (master_port is None), "give both of master_addr and master_port, or neither"
    actors = proc_mesh.spawn("torch_elastic_env", SPMDActor)
    try:
        if master_addr is None or master_port is None:
            first = actors.flatten("rank").slice(rank=0)
            master_addr, master_port = await first.get_host_port.call_one(use_ipaddr)
        await actors.setup_env.call(master_addr, master_port)
    finally:
        await actors.stop()


def setup_torch_elastic_env(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: bool | None = None,
) -> None:
    """As `setup_torch_elastic_env_async`, blocking."""
    assert (master_addr is None) == (master_port is None), "give both of master_addr and master_port, or neither"
    actors: Any = proc_mesh.spawn("torch_elastic_env", SPMDActor)
    try:
        if master_addr is None or master_port is None:
            first = actors.flatten("rank").slice(rank=0)
            master_addr, master_port = first.get_host_port.call_one(use_ipaddr).get()
        actors.setup_env.call(master_addr, master_port).get()
    finally:
        stopped: Future[None] = actors.stop()
        stopped.get()
