"""The settings of this process: which of several values of each counts. Which settings there are is in `setting_table`.

Layers, strongest first: a test's override, the environment, what a client handed down to this process, what this
process set by `configure`, the default. A process that starts another hands on `export()`, and the other calls
`install` with it; there the environment still wins.

A layer keeps values as users see them (durations as "1m 30s"). `get` reads from one dict that is filled anew at every
change, with durations in seconds and the transport as a name: a look-up, fit for hot paths. All functions may be called
from any thread. The environment is read at first use and by `install`, never at import: a bad variable then meets
somebody who can report it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol, overload

from monarch.core.setting_kinds import ChannelTransport
from monarch.core.setting_table import SETTINGS, BoolName, DurationName, IntName, StrName, setting_of


def checked(values: Mapping[str, object]) -> dict[str, Any]:
    """`values` in the form that users see.

    Raises:
        ValueError: there is no such setting, or a value that it cannot have.
        TypeError: the type of a value is wrong; "Invalid duration format".
    """
    return {name: _about(name, setting_of(name).kind.accept, value) for name, value in values.items()}


def _about(subject: str, convert: Callable[[Any], Any], value: object) -> Any:
    """`convert(value)`, whose errors name the subject."""
    try:
        return convert(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{subject}: {error}") from None


class Get(Protocol):
    """The value that counts, for use: durations in seconds, the transport as a name or an address.

    Raises:
        ValueError, TypeError: no such setting; the first time also for a bad environment variable.
    """

    @overload
    def __call__(self, name: DurationName, /) -> float: ...
    @overload
    def __call__(self, name: IntName, /) -> int: ...
    @overload
    def __call__(self, name: BoolName, /) -> bool: ...
    @overload
    def __call__(self, name: StrName, /) -> str: ...


class _Values(dict[str, Any]):
    """Empty until the environment was read. Looking one up calls no function of Python's, once they are there."""

    def __init__(self, load: Callable[[], None]) -> None:
        self._load = load

    def __missing__(self, name: str) -> Any:
        setting_of(name)
        self._load()
        return self[name]


class Settings:
    """The layers of one process; `environ` is read at first use and by `install`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.RLock()
        self._test: dict[str, Any] = {}
        self._environment: dict[str, Any] = {}
        self._client: dict[str, Any] = {}
        self._runtime: dict[str, Any] = {}
        self._merged: dict[str, Any] = {}
        self._values = _Values(self._load)
        self.get: Get = self._values.__getitem__

    def merged(self) -> dict[str, Any]:
        """All settings with the values that count, as users see them."""
        self._load()
        return dict(self._merged)

    def runtime(self) -> dict[str, Any]:
        """Only what `configure` set."""
        with self._lock:
            return dict(self._runtime)

    def configure(self, values: Mapping[str, object]) -> None:
        """Set values in the runtime layer: all of them, or none where one is refused. Errors as for `checked`."""
        accepted = checked(values)
        with self._lock:
            self._load()
            self._runtime = {**self._runtime, **accepted}
            self._merge()

    def replace_runtime(self, values: Mapping[str, object]) -> None:
        """Make `values` the runtime layer."""
        accepted = checked(values)
        with self._lock:
            self._runtime = accepted
            if self._values:  # else it is the first use that merges, with the environment
                self._merge()

    @contextmanager
    def overridden(self, **values: object) -> Iterator[dict[str, Any]]:
        """For tests: these values count, whatever the other layers say, until the block ends."""
        accepted = checked(values)
        with self._lock:
            self._load()
            before, self._test = self._test, {**self._test, **accepted}
            self._merge()
        try:
            yield self.merged()
        finally:
            with self._lock:
                self._test = before
                self._merge()

    def export(self) -> dict[str, Any]:
        """What a process started from here is to `install`: strings, numbers and booleans only."""
        with self._lock:
            handed = {**self._runtime, **self._client}
            return {k: v.transport() if isinstance(v, ChannelTransport) else v for k, v in handed.items()}

    def install(self, client_override: Mapping[str, object]) -> None:
        """Take what the starting process exported, and read the environment again."""
        accepted = checked(client_override)
        with self._lock:
            environment = self._read_environment()
            if not self._values or (accepted, environment) != (self._client, self._environment):
                self._client, self._environment = accepted, environment
                self._merge()

    def _load(self) -> None:
        with self._lock:
            if not self._values:
                self._environment = self._read_environment()
                self._merge()

    def _read_environment(self) -> dict[str, Any]:
        found = {}
        names = set(self._environ)
        for setting in SETTINGS.values():
            for variable in reversed(setting.variables):
                if variable in names and (text := self._environ[variable]):  # empty is as good as not set
                    found[setting.name] = _about(f"environment variable {variable}", setting.kind.parse, text)
        return found

    def _merge(self) -> None:
        defaults = {setting.name: setting.default for setting in SETTINGS.values()}
        self._merged = {**defaults, **self._runtime, **self._client, **self._environment, **self._test}
        self._values.update({name: SETTINGS[name].kind.use(value) for name, value in self._merged.items()})


_process: Final = Settings(os.environ)

get = _process.get
merged = _process.merged
runtime = _process.runtime
configure = _process.configure
replace_runtime = _process.replace_runtime
overridden = _process.overridden
export = _process.export
install = _process.install
