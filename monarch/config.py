"""Settings for users: change them for a program, a block, or a test. `monarch.core.setting_table` has all.

Layers, strongest first: a test's override, the environment, what a client handed to this process, `configure`, the
default. Durations are strings and print in a normal form: "90s" reads back as "1m 30s".
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from monarch.core import settings
from monarch.core.setting_kinds import ChannelTransport, Encoding

__all__ = [
    "ChannelTransport",
    "Encoding",
    "clear_runtime_config",
    "configure",
    "configured",
    "get_global_config",
    "get_runtime_config",
    "parametrize_config",
    "parametrize_config_pointwise",
]

F = TypeVar("F", bound=Callable[..., Any])


def configure(**values: object) -> None:
    """Set values in the runtime layer. Where one is refused, none is set.

    Raises:
        ValueError: there is no such setting, or it cannot have this value.
        TypeError: a value has the wrong type; "Invalid duration format" for a duration that cannot be read.
    """
    settings.configure(values)


@contextmanager
def configured(**values: object) -> Iterator[dict[str, Any]]:
    """`configure` for a block, which gets the merged settings as a dict; afterwards the runtime layer is as before.

    The layer is that of the process: other threads see the values too.
    """
    before = settings.runtime()
    settings.configure(values)
    try:
        yield settings.merged()
    finally:
        settings.replace_runtime(before)


def get_global_config() -> dict[str, Any]:
    """All settings, with the values that count."""
    return settings.merged()


def get_runtime_config() -> dict[str, Any]:
    """Only what `configure` has set."""
    return settings.runtime()


def clear_runtime_config() -> None:
    """Forget what `configure` has set."""
    settings.replace_runtime({})


def parametrize_config(**values: Collection[object]) -> Callable[[F], F]:
    """For pytest: run a test under every combination of the values of each setting.

    `@parametrize_config(link_driver=["thread", "caller"], mixed_endpoints={True, False})` makes four tests. A test that
    has a parameter of a setting's name gets its value; fixtures and other parameters stay as they are.
    """
    return _parametrized(tuple(values), itertools.product(*(_ordered(each) for each in values.values())))


def parametrize_config_pointwise(**values: Collection[object]) -> Callable[[F], F]:
    """As `parametrize_config`, with the first values of all settings together, then the second, and so on.

    Raises:
        ValueError: the settings have different numbers of values.
    """
    lengths = {name: len(each) for name, each in values.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"each setting needs the same number of values: {lengths}")
    return _parametrized(tuple(values), zip(*(_ordered(each) for each in values.values()), strict=True))


def _ordered(values: Collection[object]) -> Iterable[object]:
    """Sets come in another order in each process; test ids must not."""
    return sorted(values, key=repr) if isinstance(values, set | frozenset) else values


def _parametrized(names: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Callable[[F], F]:
    import pytest

    cases = [settings.checked(dict(zip(names, row, strict=True))) for row in rows]
    argument = "config_" + "_".join(names)

    def decorate(test: F) -> F:
        signature = inspect.signature(test)
        wanted = [name for name in names if name in signature.parameters]

        @functools.wraps(test)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            case = kwargs.pop(argument)
            with configured(**case):
                return test(*args, **{name: case[name] for name in wanted}, **kwargs)

        @functools.wraps(test)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            case = kwargs.pop(argument)
            with configured(**case):
                return await test(*args, **{name: case[name] for name in wanted}, **kwargs)

        wrapped: Any = async_wrapper if inspect.iscoroutinefunction(test) else wrapper
        kept = [parameter for name, parameter in signature.parameters.items() if name not in wanted]
        # Keyword-only, behind what is there: pytest passes all but `self` by name.
        kept.append(inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY))
        wrapped.__signature__ = signature.replace(parameters=kept)
        ids = ["-".join(f"{name}={value}" for name, value in case.items()) for case in cases]
        marked: F = pytest.mark.parametrize(argument, cases, ids=ids)(wrapped)
        return marked

    return decorate
