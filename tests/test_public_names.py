"""The public names are all there, with the parameters of Meta's Monarch; what is planned says so when it is used."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import monarch.actor
from monarch.actor import (
    Actor,
    ActorMesh,
    Context,
    Endpoint,
    Extent,
    Future,
    HostMesh,
    Point,
    Port,
    PortReceiver,
    ProcMesh,
    Region,
    Shape,
    Slice,
    Uid,
    ValueMesh,
    context,
    this_host,
)
from monarch.testing.plugin import monarch_client, monarch_settings

__all__ = ["monarch_client", "monarch_settings"]

ACTOR = """
Accumulator Actor ActorError current_actor_name as_endpoint current_rank current_size concurrent_endpoint endpoint
Future Point ProcMesh ProcId Channel send shutdown_context ValueMesh debug_controller get_or_spawn_controller this_host
this_proc default_bootstrap_cmd HostMesh context hosts_from_config Port PortReceiver Endpoint Extent
run_worker_loop_forever attach_to_workers attach enable_transport Context ChannelTransport unhandled_fault_hook
MeshFailure config get_meter span traced Uid SupervisionError ActorMesh Shape Slice Region BootstrapCommand
""".split()

CONFIG = """
configure configured get_global_config get_runtime_config clear_runtime_config Encoding parametrize_config
parametrize_config_pointwise
""".split()

TRAIT = "slice split flatten rename size sizes extent"

MEMBERS = {
    Actor: "slice flatten split rename size stop initialized logger _handle_undeliverable_message",
    ActorMesh: f"{TRAIT} stop initialized",
    Context: "actor_instance message_rank",
    Endpoint: "call call_one choose stream broadcast rref",
    Extent: "labels sizes nelements region keys items values get",
    Future: "get result exception as_asyncio __await__",
    HostMesh: f"{TRAIT} spawn_procs with_python_executable shutdown stop initialized sync_workspace region stream_logs "
    "is_fake_in_process __aenter__ __aexit__",
    Point: "rank extent size keys items values get",
    Port: "send exception return_undeliverable",
    PortReceiver: "recv ranked",
    ProcMesh: f"{TRAIT} spawn initialized stop host_mesh activate rank_tensor rank_tensors logging_option to_table "
    "sync_workspace __aenter__ __aexit__",
    Region: "as_shape slice labels point_of_base_rank",
    Shape: "at select index ranks coordinates extent region labels ndslice unity",
    Slice: "offset sizes strides ndim get index coordinates nditem new_row_major from_list",
    Uid: "anonymous instance from_string label is_instance is_singleton",
    ValueMesh: f"{TRAIT} item get values items from_indexed",
}

INSTANCE = """
actor_id proc_id rank proc_mesh proc name class_name creator abort kill stop spawn_tensor_engine
""".split()

PARAMETERS = {
    "endpoint": "method propagate explicit_response_port instrument",
    "concurrent_endpoint": "method propagate explicit_response_port instrument",
    "as_endpoint": "method propagate explicit_response_port",
    "send": "endpoint args kwargs port selection",
    "Accumulator": "endpoint identity combine",
    "Channel.open": "once",
    "HostMesh.spawn_procs": "self per_host bootstrap name proc_bind bootstrap_command",
    "ProcMesh.spawn": "self name Class args kwargs",
    "ProcMesh.stop": "self reason",
    "ProcMesh.logging_option": "self stream_to_client aggregate_window_sec level",
    "ActorMesh.stop": "self reason",
    "Future.get": "self timeout",
    "get_or_spawn_controller": "name Class args kwargs",
    "run_worker_loop_forever": "private_key ca address",
    "attach_to_workers": "private_key ca workers name",
    "attach": "addr",
}


@pytest.mark.parametrize(("module", "names"), [("monarch.actor", ACTOR), ("monarch.config", CONFIG)])
def test_every_name_is_there_and_exported(module: str, names: list[str]) -> None:
    loaded = importlib.import_module(module)

    assert [name for name in names if not hasattr(loaded, name)] == []
    assert [name for name in names if name not in loaded.__all__] == []


def test_the_package_loads_what_it_is_asked_for() -> None:
    program = "import monarch; monarch.actor.Actor, monarch.config.configure, monarch.configure, monarch.NDSlice"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)

    assert monarch.ActorFuture is Future
    assert monarch.get_global_config()["cleanup_timeout"]
    with pytest.raises(AttributeError, match=r"monarch\.Simulator .* planned"):
        _ = monarch.Simulator


@pytest.mark.parametrize("cls", MEMBERS, ids=lambda cls: cls.__name__)
def test_every_class_has_its_members(cls: type) -> None:
    fields = {*dir(cls), *getattr(cls, "__annotations__", {}), *getattr(cls, "__slots__", ())}

    assert [name for name in MEMBERS[cls].split() if name not in fields] == []


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_have_their_names(name: str) -> None:
    found: Any = monarch.actor
    for part in name.split("."):
        found = getattr(found, part)

    assert [p.strip("*") for p in inspect.signature(found).parameters] == PARAMETERS[name].split()


def test_the_running_instance_has_its_members(monarch_client: Any) -> None:
    assert [name for name in INSTANCE if not hasattr(context().actor_instance, name)] == []


def test_what_is_there_for_telemetry_does_nothing() -> None:
    meter = monarch.actor.get_meter("m")
    meter.create_counter("c").add(1)
    meter.create_histogram("h").record(0.5)
    with pytest.raises(NotImplementedError):
        meter.create_gauge("g")
    with monarch.actor.span("s"):
        for decorate in (monarch.actor.traced, monarch.actor.traced("t"), monarch.actor.traced(name="t")):
            assert decorate(abs) is abs


PLANNED: dict[str, Callable[[], Any]] = {
    "sync_workspace": lambda: this_host().sync_workspace("here").send(None),
}


@pytest.mark.parametrize("name", PLANNED)
def test_what_is_planned_says_so(name: str, monarch_client: Any) -> None:
    with pytest.raises(NotImplementedError, match="planned"):
        PLANNED[name]()


def test_names_that_load_when_asked_for_are_listed_before():
    listed = subprocess.run(
        [sys.executable, "-c", "import monarch; print(*dir(monarch))"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"actor", "config", "configure", "remote", "inspect", "Tensor"} <= set(listed)
