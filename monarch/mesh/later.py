"""Names of the API that are planned: meters and spans, which do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])


class _Instrument:
    """A counter or histogram that counts nothing."""

    def add(self, amount: float, attributes: Any = None) -> None:
        pass

    def record(self, amount: float, attributes: Any = None) -> None:
        pass


class _Meter:
    def create_counter(self, name: str, *args: Any, **kwargs: Any) -> _Instrument:
        return _Instrument()

    create_up_down_counter = create_counter
    create_histogram = create_counter

    def create_gauge(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("gauges are not supported")


def get_meter(name: str) -> _Meter:
    """A meter whose instruments do nothing: telemetry is planned."""
    return _Meter()


@contextlib.contextmanager
def span(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """A tracing span that records nothing: telemetry is planned."""
    yield


@overload
def traced(function: F) -> F: ...
@overload
def traced(name: str | None = None, /, **attributes: Any) -> Callable[[F], F]: ...
def traced(function: Any = None, **attributes: Any) -> Any:
    """A tracing decorator, with arguments or without, that records nothing: telemetry is planned."""
    return function if callable(function) else lambda function: function
