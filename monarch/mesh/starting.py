"""How the processes of a host are started: what is asked for, what each is told, and what they find imported.

Which there are, and what becomes of them, is for the agent of the host (`host`).
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field

from monarch.core import settings
from monarch.core.ids import ProcId
from monarch.launch.bootstrap import BootstrapCommand
from monarch.launch.launcher import Exit, Launcher, LaunchSpec
from monarch.mesh.lines import Origin
from monarch.transports import registry

# What children import anyway is imported once, by the template: 18 ms less for each child. Loading pynng does not yet
# touch nng, which must not be used before a fork; `idna` is what `connect` loads for a host's name.
_PRELOAD = ("asyncio", "cloudpickle", "faulthandler", "socket", "monarch.actor", "monarch.mesh.child:rehearse")
_PRELOAD_AS_HERE = ("numpy", "torch")  # imported by each, they cost 0.1 s of CPU, and 1 s
_PRELOAD_FOR = {"tcp": ("pynng",), "tls+tcp": ("pynng",)}


@define(frozen=True)
class LaunchRequest:
    """One process to start, as its creator asks for it.

    Attributes:
        proc: its name, which the creator has chosen.
        title: for people.
        env: variables on top of the host's environment.
        command: exec this; None forks the template.
        has_setup: a bootstrap function, before which it makes no actors.
        origin: who it is in forwarded output; None: it writes to the output of its host's agent itself.
    """

    proc: ProcId
    title: str
    env: Mapping[str, str] = field(factory=dict)
    command: BootstrapCommand | None = None
    has_setup: bool = False
    origin: Origin | None = None


@define(frozen=True)
class Boot:
    """What a new process is told, by descriptor."""

    proc: ProcId
    root: ProcId
    scheme: str
    listen: str
    secret: bytes = field(repr=False)
    ways: dict[str, bytes] = field(factory=dict, repr=False)
    proxy: str = ""
    path: tuple[str, ...] = ()
    config: dict[str, Any] = field(factory=dict)
    has_setup: bool = False
    origin: Origin | None = None
    prefix_logs: bool = True

    def encode(self) -> bytes:
        return pickle.dumps(self, 5)


@define(frozen=True)
class Start:
    """A process, for whoever starts it.

    Attributes:
        on_exit: hears once of its end.
        output: descriptors that are its standard output and error; None: those of this process.
        link: descriptors of its link to this process (`Gateway.hand_down`); empty: it dials.
    """

    request: LaunchRequest
    boot: Boot
    on_exit: Callable[[Exit], None]
    output: tuple[int, int] | None = None
    link: tuple[int, ...] = ()


class Running(Protocol):
    """A process that was started."""

    pid: int | None

    def kill(self, signum: int) -> None: ...

    def end_if_replaced(self, pid: int) -> None:
        """End it if `pid`, as it calls itself, is not what was started any more."""
        ...


class Starter(Protocol):
    """How processes are started: real ones by a `Launcher`, or as threads of this one."""

    def start(self, starts: Sequence[Start]) -> Sequence[Running]: ...

    def close(self, timeout_s: float) -> None: ...


class Loop(Protocol):
    """Who waits for descriptors: a gateway, or a worker."""

    def add_pollable(self, fd: int, action: Callable[[], None]) -> None: ...

    def remove_pollable(self, fd: int) -> None: ...


class ProcessStarter:
    """Real processes."""

    def __init__(self, loop: Loop, schemes: Sequence[str]) -> None:
        """
        Args:
            loop: pumps the launcher.
            schemes: the transports that processes will use.
        """
        self._loop = loop
        modules = [registry.module(scheme) for scheme in schemes]
        self.launcher = Launcher(preload=[*_PRELOAD, *modules, *(m for s in schemes for m in _PRELOAD_FOR.get(s, ()))])
        self._loop.add_pollable(self.launcher.fileno(), self.launcher.pump)

    def start(self, starts: Sequence[Start]) -> Sequence[Running]:
        specs = []
        environ = dict(os.environ)
        for each in starts:
            request, env = each.request, {**environ, **each.request.env}
            given = (each.boot.encode(), env, request.command, each.output, each.link)
            specs.append(LaunchSpec(request.title, "monarch.mesh.child:main", *given, excuses=not each.link))
        return self.launcher.launch_all(specs, [each.on_exit for each in starts], self._preload())

    def _preload(self) -> tuple[str, ...]:
        """The setting, as of now. A template that is up is not made to load more unless that is asked for: programs
        import such libraries before they spawn, and forks are quicker without."""
        wanted = settings.get("preload")
        if wanted == "auto":
            return () if self.launcher.is_warm else tuple(name for name in _PRELOAD_AS_HERE if name in sys.modules)
        return () if wanted == "none" else tuple(wanted.split(", "))

    def close(self, timeout_s: float) -> None:
        self._loop.remove_pollable(self.launcher.fileno())
        self.launcher.close(timeout_s)
