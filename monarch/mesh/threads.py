"""Processes as groups of threads in this one: what `inproc` meshes consist of, for tests and debugging.

Everything is as with real processes (own gateway, own links, every message serialised) but what needs a real one: an
environment, a command, a signal.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from attrs import define

from monarch.launch.launcher import Exit
from monarch.mesh.child import start
from monarch.mesh.context import ActorInstance
from monarch.mesh.mesh_proc import MeshProc
from monarch.mesh.starting import Boot, LaunchRequest, Start


@define(eq=False)
class ThreadGroup:
    """A process of threads. `kill` cuts it off at once, as SIGKILL would; its threads end when they next look."""

    pid: int | None
    _runtime: MeshProc | None
    _report: Callable[[Exit], None]
    _over: bool = False

    def kill(self, signum: int) -> None:
        self._end(Exit(self.pid, signal=signum))

    def end_if_replaced(self, pid: int) -> None:
        pass

    def _end(self, exit: Exit) -> None:
        if self._over:
            return
        self._over = True
        runtime = self._runtime
        if runtime is not None:
            timeout_s = 0.0 if exit.signal is not None else 2.0
            threading.Thread(target=lambda: self._close(runtime, timeout_s, exit), daemon=True).start()
        else:
            self._report(exit)

    def _close(self, runtime: MeshProc, timeout_s: float, exit: Exit) -> None:
        runtime.close(timeout_s)
        if exit.signal is not None:
            for actor in list(runtime.actors.values()):
                if isinstance(actor, ActorInstance):
                    actor.post_control(actor.cut_off)
        self._report(exit)


class ThreadStarter:
    """Starts `ThreadGroup`s. Reports their ends on the driving thread of `keeper`."""

    def __init__(self, keeper: MeshProc) -> None:
        self._keeper = keeper
        self._groups: list[ThreadGroup] = []

    def start(self, starts: Sequence[Start]) -> list[ThreadGroup]:
        """What threads of this process print is printed by this process."""
        groups = [self._start(each.request, each.boot, each.on_exit) for each in starts]
        self._groups = [g for g in self._groups if not g._over] + groups
        return groups

    def _start(self, request: LaunchRequest, boot: Boot, on_exit: Callable[[Exit], None]) -> ThreadGroup:
        def report(exit: Exit) -> None:
            self._keeper.gateway.call_later(0.0, lambda: on_exit(exit))

        if request.env or request.command is not None:
            group = ThreadGroup(os.getpid(), None, report)
            error = "an environment or a command needs a real process, and over inproc processes are threads"
            group._end(Exit(None, error=error))
            return group
        runtime = start(boot)
        runtime.handlers["log_level"] = lambda *_: None  # the handlers of root loggers are the client's
        group = ThreadGroup(os.getpid(), runtime, report)
        runtime.agent.on_end = lambda: group._end(Exit(group.pid, code=0))
        assert boot.proc.keeper is not None
        runtime.gateway.peers.connect(boot.proc.keeper)
        return group

    def close(self, timeout_s: float) -> None:
        for group in self._groups:
            group.kill(9)
