"""Endpoints: methods that others may call, and the adverbs that say how the replies come back.

`@endpoint` makes a method an `EndpointProperty` of its class. On a mesh, the attribute of that name is an `Endpoint`,
whose adverbs bind the arguments to the method's signature here, at the caller (a mistake is a TypeError at the call),
encode them once, and send one message to each member of the view.
"""

from __future__ import annotations

import inspect
import pickle
import random
import types
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property, partial
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
)

from attrs import define

from monarch.core import codec
from monarch.core.future import Future
from monarch.mesh.context import Context, context
from monarch.mesh.members import Members
from monarch.mesh.port import Port
from monarch.mesh.replies import CallSink, FailFastReply, MeshReply, OneReply, SettledReply, StreamReply
from monarch.mesh.value_mesh import ValueMesh

if TYPE_CHECKING:
    from monarch.mesh.actor_mesh import ActorMesh
    from monarch.mesh.context import Spawner

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
S = TypeVar("S", bound=CallSink)

Propagator = Callable[..., Any] | Literal["cached", "inspect", "mocked"] | None

around_encoding: Callable[[Sequence[int]], AbstractContextManager[None]] | None = None
"""Around the encoding of arguments for processes of these keys; set by distributed tensors, which must know them."""


@define(frozen=True)
class _Room:
    """What a callable has room for.

    Attributes:
        positional: arguments, of which the last `optional` have defaults.
        more: whether it takes more of them, as `*args`.
        others: whether it has parameters that are passed by name only.
    """

    positional: int
    optional: int
    more: bool
    others: bool

    @classmethod
    def of(cls, method: Callable[..., Any]) -> _Room:
        """Of a function as most are, without a look at its parameters: every process that imports the class asks.

        Raises:
            TypeError, ValueError: it does not say, being in C, perhaps.
        """
        if type(method) is types.FunctionType and not {"__wrapped__", "__signature__"} & vars(method).keys():
            code, flags = method.__code__, method.__code__.co_flags
            more, others = flags & inspect.CO_VARARGS, code.co_kwonlyargcount or flags & inspect.CO_VARKEYWORDS
            return cls(code.co_argcount, len(method.__defaults__ or ()), bool(more), bool(others))
        kinds = [(p.kind, p.default is p.empty) for p in inspect.signature(method).parameters.values()]
        positional = [required for kind, required in kinds if kind in _POSITIONAL]
        rest = {kind for kind, _ in kinds if kind not in _POSITIONAL}
        more = inspect.Parameter.VAR_POSITIONAL in rest
        return cls(len(positional), positional.count(False), more, bool(rest - {inspect.Parameter.VAR_POSITIONAL}))


_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _check_takes(method: Callable[..., Any], hidden: list[str]) -> None:
    """Raises: TypeError, where the method has no room for what it is given beside the caller's arguments."""
    try:
        room = _Room.of(method)
    except (TypeError, ValueError):
        return
    if room.positional < len(hidden) and not room.more:
        missing = hidden[room.positional]
        raise TypeError(f"endpoint {getattr(method, '__qualname__', method)} needs a parameter for {missing}")


def _refuse_object(name: str, /, *_: object, **__: object) -> NoReturn:
    text = "is of an object that was not spawned: procs.spawn(name, Class, ...) gives a mesh, which has adverbs"
    raise TypeError(f"{name!r} {text}; an actor calls its own method, self.{name}(...)")


_ADVERBS: Final = ("call", "call_fail_fast", "call_settled", "call_one", "choose", "stream", "broadcast", "rref")


class EndpointProperty(Generic[P, R]):
    """A decorated method. On the class it is itself; on an instance the plain method; on a mesh see `Endpoint`."""

    def __init__(
        self,
        method: Callable[..., Any],
        propagate: Propagator = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
        concurrent: bool = False,
    ) -> None:
        if not callable(method) or isinstance(method, staticmethod):
            raise TypeError(f"@endpoint decorates methods, not {method!r}")
        if not (propagate is None or callable(propagate) or propagate in ("cached", "inspect", "mocked")):
            raise TypeError(f'propagate is {propagate!r}; it can be a function, "cached", "inspect" or "mocked"')
        _check_takes(method, ["self", "the reply port"] if explicit_response_port else ["self"])
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            raise TypeError(
                f"endpoint {method.__qualname__} is a generator; send its items to a Port given as an argument, "
                "or return a list"
            )
        self._method = method
        self._propagator = propagate
        self._explicit_response_port = explicit_response_port or concurrent
        self._sends_itself = explicit_response_port
        self._instrument = instrument
        self._concurrent = concurrent
        self.__wrapped__ = method
        # Decorators that make the class anew, as attrs does for slots, look here for the cell behind `super()`.
        self.__closure__ = getattr(method, "__closure__", None)
        self.__name__ = getattr(method, "__name__", "endpoint")
        self.__doc__ = method.__doc__
        self.__isabstractmethod__ = getattr(method, "__isabstractmethod__", False)
        with suppress(AttributeError):  # it has no attributes
            for adverb in _ADVERBS:  # of the bound method, which an object that was not spawned has
                setattr(method, adverb, partial(_refuse_object, self.__name__))

    @overload
    def __get__(self, instance: None, owner: type) -> EndpointProperty[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Endpoint[P, R]: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        # On an instance it is the method itself, so that `self.step()` and `super().step()` work in the actor.
        return self if instance is None else types.MethodType(self._method, instance)


class _Decorator(Protocol):
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> EndpointProperty[P, R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> EndpointProperty[P, R]: ...


class _PortDecorator(Protocol):
    def __call__(self, method: Callable[Concatenate[Any, Port[R], P], Any], /) -> EndpointProperty[P, R]: ...


@overload
def endpoint(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> EndpointProperty[P, R]: ...
@overload
def endpoint(method: Callable[Concatenate[Any, P], R], /) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    *, propagate: Propagator = None, explicit_response_port: Literal[False] = False, instrument: bool = True
) -> _Decorator: ...
@overload
def endpoint(
    *, propagate: Propagator = None, explicit_response_port: Literal[True], instrument: bool = True
) -> _PortDecorator: ...
def endpoint(
    method: Callable[..., Any] | None = None,
    *,
    propagate: Propagator = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Make a method callable by others.

    Args:
        propagate: how `rref` works out the shape of the result: a callable, "cached", "inspect" or "mocked".
        explicit_response_port: the method gets the reply `Port` first, and must send to it exactly once, now or later.
        instrument: whether a tracing span is made for it.
    """

    def decorate(method: Callable[..., Any]) -> EndpointProperty[Any, Any]:
        return EndpointProperty(method, propagate, explicit_response_port, instrument)

    return decorate if method is None else decorate(method)


@overload
def concurrent_endpoint(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> EndpointProperty[P, R]: ...
@overload
def concurrent_endpoint(
    *, propagate: Propagator = None, explicit_response_port: Literal[False] = False, instrument: bool = True
) -> _Decorator: ...
@overload
def concurrent_endpoint(
    *, propagate: Propagator = None, explicit_response_port: Literal[True], instrument: bool = True
) -> _PortDecorator: ...
def concurrent_endpoint(
    method: Callable[..., Any] | None = None,
    *,
    propagate: Propagator = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """As `endpoint`, for `async def` methods: each message becomes its own task, and the next is taken at once.

    Raises:
        ValueError: the method is not `async def`, or is an endpoint already.
    """

    def decorate(method: Callable[..., Any]) -> EndpointProperty[Any, Any]:
        if isinstance(method, EndpointProperty):
            raise ValueError("@concurrent_endpoint does not wrap @endpoint: use one of them")
        if not inspect.iscoroutinefunction(method):
            raise ValueError(f"@concurrent_endpoint can only wrap async endpoints, and {method!r} is not `async def`")
        return EndpointProperty(method, propagate, explicit_response_port, instrument, concurrent=True)

    return decorate if method is None else decorate(method)


@define(frozen=True)
class EndpointSpec:
    """What a caller and the dispatcher must know of an endpoint."""

    name: str
    method: Callable[..., Any]
    sends_itself: bool  # the method gets the reply port
    concurrent: bool
    propagator: Propagator
    is_async: bool
    arities: frozenset[int]  # so many positional arguments fit, and need no look at the signature

    @classmethod
    def of(cls, name: str, prop: EndpointProperty[Any, Any]) -> EndpointSpec:
        return cls.make(name, prop._method, prop._sends_itself, prop._concurrent, prop._propagator)

    @classmethod
    def make(
        cls,
        name: str,
        method: Callable[..., Any],
        sends_itself: bool = False,
        concurrent: bool = False,
        propagator: Propagator = None,
    ) -> EndpointSpec:
        room = _Room.of(method)
        most = room.positional - (2 if sends_itself else 1)
        simple = most >= 0 and not room.more and not room.others
        arities = frozenset(range(most - room.optional, most + 1) if simple else ())
        is_async = inspect.iscoroutinefunction(method)
        return cls(name, method, sends_itself, concurrent, propagator, is_async, arities)

    @cached_property
    def signature(self) -> inspect.Signature:
        """Only callers ask for it, of a call that is none of the `arities`."""
        return inspect.signature(self.method)

    @property
    def visible_signature(self) -> inspect.Signature:
        """As callers see it: without `self` and the reply port."""
        parameters = list(self.signature.parameters.values())
        if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            del parameters[: 2 if self.sends_itself else 1]
        return self.signature.replace(parameters=parameters)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises: TypeError when the method cannot be called with these."""
        hidden = (None, None) if self.sends_itself else (None,)
        try:
            self.signature.bind(*hidden, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.method.__qualname__}(): {error}") from None


def describe_call(name: str, labels: tuple[str, ...], sizes: tuple[int, ...], extra: Any = None) -> bytes:
    """The first part of a CALL message: which method, and the extent of the view that was called."""
    return pickle.dumps((name, labels, sizes, extra), 5)


class _OfMethod:
    """An attribute of an endpoint that is its method's, for `help`, `inspect.signature` and editors."""

    def __init__(self, get: Callable[[EndpointSpec], Any], of_class: Any = None) -> None:
        self._get, self._of_class = get, of_class

    def __get__(self, instance: Endpoint[Any, Any] | None, owner: type) -> Any:
        if instance is not None:
            return self._get(instance._spec)
        if self._of_class is None:
            raise AttributeError("only an instance has it")
        return self._of_class


class Endpoint(Generic[P, R]):
    """An endpoint of a mesh. One message goes to every member of the view (with `choose` to one).

    A TypeError at the call says that the arguments do not fit the method; a pickling error is raised unchanged.
    """

    __doc__ = _OfMethod(lambda spec: spec.method.__doc__, __doc__)
    __name__ = _OfMethod(lambda spec: spec.name)
    __signature__ = _OfMethod(lambda spec: spec.visible_signature)

    __slots__ = ("_description", "_members", "_mesh", "_plain", "_spec")

    def __init__(self, mesh: ActorMesh[Any], spec: EndpointSpec, plain: bool = False) -> None:
        self._mesh = mesh
        self._members = type(mesh)._members(mesh, spec.name)
        self._spec = spec
        self._plain = plain  # an undecorated method, by `as_endpoint`
        extent = mesh._region.extent
        extra = {"plain": True, "port": spec.sends_itself} if plain else None
        self._description = describe_call(spec.name, extent._labels, extent._sizes, extra)

    def _encode(
        self, sender: Spawner, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int | None = None
    ) -> list[Any]:
        """The parts of a call to all members, or to the one of that rank in the view."""
        if kwargs or len(args) not in self._spec.arities:
            self._spec.check(args, kwargs)
        keys = self._members.keys if rank is None else (self._members.keys[rank],)
        memory_for = sender.proc_runtime.memory_for
        if around_encoding is not None:
            with around_encoding(keys):
                return [self._description, *codec.encode_call(args, kwargs, memory_for, keys)]
        return [self._description, *codec.encode_call(args, kwargs, memory_for, keys)]

    def _ask(self, make: Callable[[Context, Members], S], args: Any, kwargs: Any, only: int | None = None) -> S:
        """Send to all members, or to `only` one, and return what collects their replies."""
        here = context()
        sender = here.actor_instance
        parts = self._encode(sender, args, kwargs, only)
        reply = make(here, self._members)
        self._mesh._cast(sender, parts, reply.number, only, reply.chain)
        return reply

    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Call all members; the result has the view's shape.

        Resolves when all have replied; if any replied with an exception, raises that of the lowest-numbered one, as
        ActorError. A member that is gone fails it at once, with SupervisionError.
        """
        reply: MeshReply[R] = self._ask(MeshReply, args, kwargs)
        return reply

    def call_fail_fast(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """As `call`, and raises the first exception as soon as it arrives, without waiting for the other members. Those
        go on, and their replies are dropped."""
        reply: FailFastReply[R] = self._ask(FailFastReply, args, kwargs)
        return reply

    def call_settled(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R | BaseException]]:
        """As `call`, and loses no result: resolves when each member has replied or is gone. The value of a member that
        failed is its error, an ActorError or a SupervisionError."""
        reply: SettledReply[R] = self._ask(SettledReply, args, kwargs)
        return reply

    def call_one(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call the only member.

        Raises:
            ValueError: the view has not exactly one member.
        """
        size = len(self._members.keys)
        if size != 1:
            raise ValueError(
                f"call_one of {self._spec.name!r} requires exactly 1 actor, but mesh has {size}; "
                "take a slice, or use call()"
            )
        reply: OneReply[R] = self._ask(OneReply, args, kwargs, 0)
        return reply

    def choose(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call one member, drawn at random for each call."""
        rank = _drawn(self._mesh, self._spec.name)
        reply: OneReply[R] = self._ask(partial(OneReply, rank=rank), args, kwargs, rank)
        return reply

    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Call all members, at once; the i-th future of the iterator is the i-th reply to arrive."""
        reply: StreamReply[R] = self._ask(StreamReply, args, kwargs)
        return iter(reply.futures)

    def broadcast(self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send to all members, and expect no reply: an exception in the endpoint ends its actor, whose owner hears."""
        sender = context().actor_instance
        self._mesh._cast(sender, self._encode(sender, args, kwargs), 0)

    def rref(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call all members, with distributed tensors among the arguments, and get distributed tensors, at once.

        The shapes come from the endpoint's `propagate`. Needs torch, and actors on all processes of the active mesh.
        """
        result: R = self._mesh._call_for_tensors(self, args, kwargs)
        return result

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        name = self._spec.name
        raise TypeError(f"an endpoint is called by an adverb: {name}.call(...), .call_one(...), .broadcast(...), ...")

    def __reduce__(self) -> tuple[Any, ...]:
        if self._plain:
            return _plain_endpoint, (self._mesh, self._spec.name, self._spec.sends_itself)
        return getattr, (self._mesh, self._spec.name)

    def __repr__(self) -> str:
        return f"<Endpoint {self._spec.name} of {self._mesh!r}>"


def _drawn(mesh: ActorMesh[Any], name: str) -> int:
    size = mesh._region._slice._len
    if not size:
        raise ValueError(f"choose of {name!r} needs an actor, and the mesh is empty")
    return random.randrange(size)


class PlainMethod:
    """An undecorated method, as an attribute of a mesh: only good for `as_endpoint`."""

    def __init__(self, mesh: ActorMesh[Any], name: str, method: Callable[..., Any]) -> None:
        self._mesh, self._name, self._method = mesh, name, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(self._advice())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no {name!r} here: {self._advice()}")

    def _advice(self) -> str:
        return (
            f"method {self._name!r} of {self._mesh._class_name} is no endpoint: decorate it with @endpoint, "
            f"or wrap it: as_endpoint(mesh.{self._name})"
        )


def as_endpoint(
    method: Callable[P, R], *, propagate: Propagator = None, explicit_response_port: bool = False
) -> Endpoint[P, R]:
    """An endpoint out of an undecorated method of a spawned mesh: `as_endpoint(mesh.method).call(...)`.

    Raises:
        ValueError: it is no such method.
    """
    if not isinstance(method, PlainMethod):
        raise ValueError(f"expected an method of a spawned actor, not {method!r}")
    spec = EndpointSpec.make(method._name, method._method, explicit_response_port, False, propagate)
    return Endpoint(method._mesh, spec, plain=True)


def _plain_endpoint(mesh: ActorMesh[Any], name: str, sends_itself: bool) -> Endpoint[Any, Any]:
    return as_endpoint(getattr(mesh, name), explicit_response_port=sends_itself)


def send(
    endpoint: Endpoint[P, R],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[R] | None = None,
    selection: str = "all",
) -> None:
    """Call with a reply port of one's own: every member (selection "all") or one at random ("choose") replies to it.

    Raises:
        ValueError: another selection.
        TypeError: `endpoint` is none, `port` is none, or the arguments do not fit.
    """
    if not isinstance(endpoint, Endpoint):
        raise TypeError(f"send needs an endpoint of a mesh, not {endpoint!r}")
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise TypeError(f"send takes the arguments as a tuple and a dict, not as {args!r} and {kwargs!r}")
    if port is not None and not isinstance(port, Port):
        raise TypeError(f"port is {port!r}; it must be a Port, as Channel.open() gives")
    if selection not in ("all", "choose"):
        raise ValueError(f"Invalid selection {selection!r}: it can be 'all' or 'choose'")
    mesh, spec = endpoint._mesh, endpoint._spec
    only = None if selection == "all" else _drawn(mesh, spec.name)
    sender = context().actor_instance
    parts = endpoint._encode(sender, args, kwargs, only)
    reply_port = 0
    if port is not None and mesh._replies_to_any_port and port._is_of(sender.proc_runtime):
        reply_port = port.number  # as with any call, it hears of a member's end, too
    elif port is not None:
        extent = mesh._region.extent
        extra = {"plain": endpoint._plain, "port": spec.sends_itself, "reply": codec.encode(port)}
        parts[0] = describe_call(spec.name, extent._labels, extent._sizes, extra)
    mesh._cast(sender, parts, reply_port, only)


class Accumulator(Generic[A, R]):
    """Folds the replies of a mesh in the order in which they arrive.

    Args:
        endpoint: of the mesh to call.
        identity: what the fold starts from, and the result for an empty mesh.
        combine: `combine(so_far, reply) -> so_far`.
    """

    def __init__(self, endpoint: Endpoint[..., R], identity: A, combine: Callable[[A, R], A]) -> None:
        if not hasattr(endpoint, "stream"):
            raise TypeError(f"an Accumulator needs an endpoint of a mesh, not {endpoint!r}")
        if not callable(combine):
            raise TypeError(f"combine is {combine!r}; it must be a function of the value so far and a reply")
        self._endpoint, self._identity, self._combine = endpoint, identity, combine

    def accumulate(self, *args: Any, **kwargs: Any) -> Future[A]:
        """Call all members, and fold their replies."""
        futures = list(self._endpoint.stream(*args, **kwargs))
        call = futures[-1]._call if futures else None
        result: Future[A] = Future._pending(context().actor_instance.proc_runtime.driver, call=call)

        def fold() -> A:
            value = self._identity
            for future in futures:
                future.exception(0)  # whoever looks at the first that failed has seen them all
            for future in futures:
                value = self._combine(value, future.get())
            return value

        if futures:
            futures[-1]._on_done(lambda: result._complete(fold))
        else:
            result._complete(fold)
        return result
