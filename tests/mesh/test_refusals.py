"""Bad input is refused where it is given, before anything changes, by an error that names what is wrong with it."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch.actor import (
    Accumulator,
    Actor,
    ActorMesh,
    Channel,
    ProcMesh,
    concurrent_endpoint,
    default_bootstrap_cmd,
    endpoint,
    get_or_spawn_controller,
    send,
    shutdown_context,
    this_host,
    this_proc,
)
from monarch.errors import MeshError
from monarch.mesh.endpoint import _Room
from monarch.testing import fresh_client


class Plain:
    pass


class Abstract(Actor, abc.ABC):
    @endpoint
    @abc.abstractmethod
    def step(self) -> None: ...


class Echo(Actor):
    def __init__(self, times: int = 1) -> None:
        self.times = times

    @endpoint
    def echo(self, x: Any) -> Any:
        return x

    def undecorated(self) -> None:
        pass


@pytest.fixture(scope="module")
def meshes() -> Iterator[tuple[ProcMesh, Any]]:
    with fresh_client():
        procs = this_host().spawn_procs({"hosts": 2, "gpus": 2})
        yield procs, procs.spawn("echo", Echo)


def spawn_procs(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda procs, actors: this_host().spawn_procs(*args, **kwargs)


ONE = {"gpus": 1}

REFUSED: list[tuple[Callable[[ProcMesh, Any], Any], type[Exception], str]] = [
    (spawn_procs(per_host=4), TypeError, r"per_host is 4; it must name its dimensions: \{'gpus': 4\}"),
    (spawn_procs("gpus"), TypeError, "per_host is 'gpus'; it must name its dimensions"),
    (spawn_procs({"gpus": -1}), ValueError, "size -1 for 'gpus'; it must be at least 1"),
    (spawn_procs({"a": 2, "gpus": 0}), ValueError, "size 0 for 'gpus'; it must be at least 1"),
    (spawn_procs({"gpus": 2.0}), TypeError, "size 2.0 for 'gpus'; it must be an int"),
    (spawn_procs({"gpus": True}), TypeError, "size True for 'gpus'; it must be an int"),
    (spawn_procs({3: 1}), TypeError, "label 3"),
    (spawn_procs({"a": 10**5, "b": 10**5}), ValueError, "more than 10000 processes on a host"),
    (spawn_procs(ONE, name=3), TypeError, "name is 3"),
    (spawn_procs(ONE, bootstrap=3), TypeError, "bootstrap is 3"),
    (spawn_procs(ONE, bootstrap_command="python"), TypeError, "bootstrap_command is 'python'"),
    (spawn_procs(ONE, bootstrap_command=lambda point: "python"), TypeError, "bootstrap_command gave 'python'"),
    (spawn_procs(ONE, proc_bind={"cpus": "0"}), TypeError, "it must be a list with a dict for each process"),
    (spawn_procs(ONE, proc_bind=[{"cpu": "0"}]), ValueError, "proc_bind has cpu; it can have"),
    (lambda p, a: this_host().with_python_executable(None), TypeError, "None"),
    (lambda p, a: default_bootstrap_cmd().with_env({"N": 1}), TypeError, "not: {'N': 1}"),
    (lambda p, a: p.spawn("x", Plain), ValueError, "needs a subclass of Actor"),
    (lambda p, a: p.spawn("x", Echo()), ValueError, "needs a subclass of Actor"),
    (lambda p, a: p.spawn("x", Abstract), TypeError, "Abstract is abstract and cannot be spawned: it has no step"),
    (lambda p, a: p.spawn(None, Echo), TypeError, "the name of a mesh is a str, not None"),
    (lambda p, a: p.spawn("x", Echo, 1, 2), TypeError, "Echo.*too many positional arguments"),
    (lambda p, a: get_or_spawn_controller("x", Plain), ValueError, "needs a subclass of Actor"),
    (lambda p, a: get_or_spawn_controller("x", Echo, 1, 2), TypeError, "Echo.*too many positional arguments"),
    (lambda p, a: p.slice(gpu=0), TypeError, "no dimension 'gpu'"),
    (lambda p, a: a.slice(gpus=2), IndexError, "gpus=2 out of range"),
    (lambda p, a: a.slice(gpus=slice(0, 2, 0)), ValueError, "gpus=.*step cannot be zero"),
    (lambda p, a: a.slice(gpus=slice("a", None)), TypeError, "gpus=.*indices must be integers"),
    (lambda p, a: p.split(gpus=("a", 3), a=2), ValueError, "must be a string that is not empty, not 3"),
    (lambda p, a: p.split(gpus=("a", "b"), a=True), ValueError, "a=True"),
    (lambda p, a: p.flatten(3), ValueError, "must be a string that is not empty, not 3"),
    (lambda p, a: p.rename(gpus=""), ValueError, "gpus=''"),
    (lambda p, a: p.size(3), KeyError, "no dimension 3"),
    (lambda p, a: a.echo.call_one(1), ValueError, "'echo' requires exactly 1 actor, but mesh has 4"),
    (lambda p, a: a.slice(gpus=slice(2, 2)).echo.choose(1), ValueError, "'echo' needs an actor"),
    (lambda p, a: a.echo(1), TypeError, r"called by an adverb: echo\.call"),
    (lambda p, a: Echo().echo.call_one(1), TypeError, r"'echo' is of an object that was not spawned: procs\.spawn"),
    (lambda p, a: a.undecorated(), RuntimeError, "'undecorated' .* is no endpoint: decorate it with @endpoint"),
    (lambda p, a: a.undecorated.call(), AttributeError, "'undecorated' .* is no endpoint: decorate it"),
    (lambda p, a: a.ecko.call(1), AttributeError, "no endpoint 'ecko'; it has echo"),
    (lambda p, a: send(a, (1,), {}), TypeError, "send needs an endpoint"),
    (lambda p, a: send(a.echo, 1, {}), TypeError, "a tuple and a dict"),
    (lambda p, a: send(a.echo, (1,), {}, port=3), TypeError, "port is 3"),
    (lambda p, a: send(a.echo, (1,), {}, selection="some"), ValueError, "Invalid selection 'some'"),
    (lambda p, a: Accumulator(3, 0, max), TypeError, "needs an endpoint of a mesh, not 3"),
    (lambda p, a: Accumulator(a.echo, 0, 3), TypeError, "combine is 3"),
    (lambda p, a: Channel.open("name"), TypeError, "once is 'name'"),
    (lambda p, a: Channel.open()[0].exception("text"), TypeError, "not 'text'; values go by send"),
    (lambda p, a: Channel.open()[1].recv().get("1"), TypeError, "timeout is '1'"),
    (lambda p, a: Channel.open()[1].recv().exception(-1), ValueError, "timeout is -1"),
    (lambda p, a: ActorMesh.stop(a.slice(gpus=0)), NotImplementedError, "is a view"),
]


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_bad_input_is_refused_by_name(
    meshes: tuple[ProcMesh, Any], call: Callable[[ProcMesh, Any], Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        call(*meshes)


@pytest.mark.parametrize(
    "method",
    [
        lambda: 1,
        lambda self: 1,
        lambda self, a, b=1: 1,
        lambda self=None, a=1, /: 1,
        lambda *args: 1,
        lambda self, *args, a, b=1: 1,
        lambda self, *, a: 1,
        lambda self, **kwargs: 1,
    ],
)
def test_what_a_function_takes_is_known_without_its_signature(method: Callable[..., Any]) -> None:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any: ...

    assert _Room.of(wrapper) == _Room.of(method)


def test_what_can_be_no_endpoint_is_refused_at_its_definition() -> None:
    with pytest.raises(TypeError, match="needs a parameter for self"):
        endpoint(lambda: 1)
    with pytest.raises(TypeError, match="needs a parameter for the reply port"):
        endpoint(explicit_response_port=True)(lambda self: 1)
    with pytest.raises(TypeError, match="staticmethod"):
        endpoint(staticmethod(print))
    with pytest.raises(TypeError, match="propagate is 3"):
        endpoint(propagate=3)(lambda self: 1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="can only wrap async endpoints"):
        concurrent_endpoint(lambda self: 1)


def test_a_client_that_was_shut_down_spawns_nothing_more() -> None:
    with fresh_client():
        here = this_proc()
        shutdown_context().get(10)

        with pytest.raises(MeshError, match="already been shut down"):
            this_host().spawn_procs()
        with pytest.raises(MeshError, match="already been shut down"):
            here.spawn("echo", Echo)
