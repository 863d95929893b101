"""The base class of actors, and what is known of an actor's class."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from attrs import define

from monarch.core import settings
from monarch.mesh.endpoint import EndpointProperty, EndpointSpec

if TYPE_CHECKING:
    from monarch.core.future import Future
    from monarch.mesh.shape import Extent

F = TypeVar("F", bound=Callable[..., Any])

_CHECK: Final = "_check_of_arguments"


class _MeshOnly:
    """An attribute that a mesh of actors has and the actor itself has not."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        raise NotImplementedError(
            f"{self._name!r} belongs to meshes of actors; inside the actor, use context().actor_instance"
        )


class MeshMethod:
    """A method that also works on a mesh of the class, where it runs at the caller: `self` is the mesh then."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def bound(self, target: Any) -> Any:
        return types.MethodType(self._function, target)

    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else self.bound(instance)


class Actor:
    """Subclass it and decorate methods with `@endpoint`.

    Hooks that a subclass may define: `__supervise__(self, failure) -> bool`, sync or async, hears that something which
    this actor owns has failed, and says whether that is dealt with; `__cleanup__(self, exc)`, sync or async, runs once
    at the end, with None after a stop and an exception after a failure; `_handle_undeliverable_message(self, message)
    -> bool`, sync or async, hears of messages that came back.

    `procs.spawn("name", Class)` is annotated as returning `Class`, so that its endpoints are checked; it really returns
    an `ActorMesh`. Therefore the mesh methods are declared here too.
    """

    if TYPE_CHECKING:

        def slice(self, /, **dims: int | Any) -> Self: ...
        def split(self, /, **dims: Any) -> Self: ...
        def flatten(self, name: str) -> Self: ...
        def rename(self, /, **names: str) -> Self: ...
        def size(self, dim: Any = None) -> int: ...
        def stop(self, reason: str = ...) -> Future[None]: ...
        def __len__(self) -> int: ...
        @property
        def initialized(self) -> Future[None]: ...
        @property
        def extent(self) -> Extent: ...
        @property
        def sizes(self) -> dict[str, int]: ...
    else:
        slice, split, flatten, rename, size, stop, initialized, extent, sizes = (_MeshOnly() for _ in range(9))

    @functools.cached_property
    def logger(self) -> logging.Logger:
        """A logger of the class, at level DEBUG."""
        logger = logging.getLogger(type(self).__module__ + "." + type(self).__qualname__)
        logger.setLevel(logging.DEBUG)
        return logger

    def _handle_undeliverable_message(self, message: Any) -> bool:
        """A message came back that this actor had sent and expects no answer to: a broadcast, or a value for a port.
        True: dealt with. Otherwise the actor fails, unless it owns the receiver, and so hears of its end anyway, or the
        message may have been delivered after all; then a warning is logged."""
        return False


@define(frozen=True)
class ActorClass:
    """What a class of actors offers, worked out once.

    Attributes:
        name: `module.Qualname`.
        is_async: whether the constructor may not block: unless every endpoint is sync.
    """

    cls: type
    name: str
    endpoints: dict[str, EndpointSpec]
    is_async: bool

    @functools.cached_property
    def signature(self) -> inspect.Signature | None:
        """Of the constructor; None where it does not say, as in C. Only who spawns asks."""
        with contextlib.suppress(ValueError, TypeError):
            return inspect.signature(self.cls)
        return None

    def check_kinds(self) -> None:
        """Raises: ValueError when sync and async endpoints are mixed and the setting `mixed_endpoints` forbids that."""
        kinds = {spec.is_async for spec in self.endpoints.values()}
        if len(kinds) > 1 and not settings.get("mixed_endpoints"):
            names = [sorted(s.name for s in self.endpoints.values() if s.is_async is kind) for kind in (False, True)]
            raise ValueError(f"{self.name} mixes both async and sync endpoints: sync {names[0]}, async {names[1]}")

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """
        Raises:
            TypeError: the constructor cannot be called with these.
            Exception: what the constructor's own check raises.
        """
        if self.signature is None:
            return  # it will be tried
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.cls.__qualname__}.__init__(): {error}") from None
        check = getattr(inspect.getattr_static(self.cls, "__init__"), _CHECK, None)
        if check is not None:
            check(*args, **kwargs)


def checked_by(check: Callable[..., object]) -> Callable[[F], F]:
    """For the constructor of an actor: `check` is called with its arguments where it is spawned, and raises what is
    against them."""

    def mark(init: F) -> F:
        setattr(init, _CHECK, check)
        return init

    return mark


def class_of(cls: type) -> ActorClass:
    """What is known of `cls`; worked out once."""
    return _class_of(cls)


@functools.lru_cache(maxsize=1024)
def _class_of(cls: Any) -> ActorClass:
    attributes = {name: found for base in reversed(cls.__mro__) for name, found in vars(base).items()}
    endpoints = {
        name: EndpointSpec.of(name, found)
        for name, found in sorted(attributes.items(), key=lambda item: item[0])
        if isinstance(found, EndpointProperty)
    }
    is_async = not endpoints or any(spec.is_async for spec in endpoints.values())
    return ActorClass(cls, f"{cls.__module__}.{cls.__qualname__}", endpoints, is_async)
