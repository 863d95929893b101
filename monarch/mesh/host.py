"""The agent of a host: launches its processes, watches them, and ends them.

It lives in the gateway's process of the host (for a single machine: the client's), so that requests to it are messages
like any other. It knows of each process who owns it, and reports its end, with the evidence, to the gateway here and to
the owner's process; everybody else asks (`core.locator`).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attrs import define, evolve

from monarch.core import settings
from monarch.core.envelope import Envelope
from monarch.core.ids import ActorId, ProcId
from monarch.core.monitor import Down
from monarch.core.peer import State
from monarch.launch.launcher import Exit
from monarch.launch.wire import explain
from monarch.log import get_logger
from monarch.mesh import actor_config
from monarch.mesh.lines import Origin, Parcel
from monarch.mesh.mesh_proc import MeshProc
from monarch.mesh.outputs import Outputs
from monarch.mesh.starting import Boot, LaunchRequest, Running, Start, Starter

log = get_logger("monarch.host")

_ORPHAN_GRACE_S = 1.0
_ASK_AGAIN_S = 0.1
_STARVED_S = 2.0  # so long processes try to reach an agent that has no descriptor left for links


@define(eq=False)
class _Launched:
    proc: ProcId  # with this process as its keeper
    request: LaunchRequest
    owner: ActorId
    dials: str  # where it is to connect to; "" where it inherits a connection
    running: Running | None = None
    stopping: str | None = None
    signalled: bool = False  # it was told to stop, and had not
    down: Down | None = None


@define(frozen=True)
class Resident:
    """A process that runs on a host, or is about to."""

    proc: ProcId
    name: str
    pid: int | None
    up: bool
    linked: bool  # what is asked reaches it
    stopping: bool


def _down_of(exit: Exit, stopping: str | None, signalled: bool) -> Down:
    """Why a process is gone. One that was told to stop has stopped, unless it crashed over that."""
    kind = "killed" if exit.signal is not None else "exited"
    colon = " failed:" if exit.signal is not None or exit.error is not None else ""
    text = f"the process this actor was running on{colon} {exit.describe()}"
    down = Down(kind, text, exit.pid or 0, socket.gethostname(), exit.code, exit.signal)
    if stopping is None:
        return down
    if signalled or exit.error is not None or not down.crashed:
        return evolve(down, kind="stopped", reason=stopping)
    return evolve(down, reason=f"{text}, while it was being stopped")


def _with_last_words(down: Down, exit: Exit) -> Down:
    """Why a process was given up, with what it has said of that itself."""
    words = exit.error or (exit.stderr_tail and f"its last words: {exit.stderr_tail}")
    return evolve(down, reason=f"{down.reason}; {words}") if words else down


class HostAgent:
    """See the module.

    Attributes:
        config: the settings of its client, for the processes that it launches; None: those of this process.
        path: what the `sys.path` of the client has, likewise.
    """

    def __init__(self, runtime: MeshProc, starter: Starter, listen: str, outputs: Outputs) -> None:
        self.config: dict[str, Any] | None = None
        self.path: tuple[str, ...] = ()
        self._runtime = runtime
        self._starter = starter
        self._outputs = outputs
        self._listen = listen
        self._lock = threading.Lock()
        self._procs: dict[int, _Launched] = {}
        self._on_down: dict[int, list[Callable[[], None]]] = {}
        runtime.handlers["launch"] = self._on_launch
        runtime.handlers["await_up"] = self._on_await_up
        runtime.handlers["stop_procs"] = self._on_stop_procs
        runtime.handlers["cut_procs_short"] = lambda envelope, reason, left_s: self.cut_short(reason, left_s)
        runtime.handlers["forwards"] = self._on_forwards
        runtime.handlers["show_output"] = self._on_show_output
        runtime.handlers["output"] = self._on_output
        runtime.on_proc_gone.append(self._on_owner_gone)
        runtime.on_proc_gone.append(self._on_lost_with_host)
        runtime.gateway.peers.on_lost_child = self._on_lost

    def _on_launch(self, envelope: Envelope, owner: ActorId, requests: list[LaunchRequest]) -> None:
        self.launch(owner, requests)

    def launch(self, owner: ActorId, requests: list[LaunchRequest]) -> None:
        """Start processes; returns at once. What goes wrong shows as the end of the process."""
        runtime = self._runtime
        config = settings.export() if self.config is None else self.config
        gateway = runtime.gateway
        ways, proxy = dict(gateway.ways.secrets), gateway.ways.proxy
        where = (runtime.root, gateway.transport.scheme, self._listen, runtime.secret, ways, proxy, self.path)
        starts: list[Start] = []
        launched: list[_Launched] = []
        for request in requests:
            proc = evolve(request.proc, keeper=runtime.proc_id)
            runtime.locator.launch(proc)
            link = tuple(gateway.hand_down()) if request.command is None else ()
            each = _Launched(proc, request, owner, "" if link else gateway.url)
            with self._lock:
                self._procs[proc.key] = each
            launched.append(each)
            output = None if request.origin is None else self._outputs.open(proc.key, request.origin)
            facts = (*where, config, request.has_setup, None if output is None else request.origin)
            boot = Boot(proc, *facts, actor_config.prefix_python_logs_with_actor)
            on_exit = partial(self._outputs.ended, proc.key, partial(self._on_exit, each))
            starts.append(Start(request, boot, on_exit, output, link))
        limit_s = settings.get("mesh_proc_spawn_max_idle")
        for each, running in zip(launched, self._starter.start(starts), strict=True):
            each.running = running
        gateway.call_later(limit_s, lambda: self._end_the_silent(launched, limit_s))
        gateway.call_later(_STARVED_S, lambda: self._end_the_unlinked(launched))

    def residents(self) -> list[Resident]:
        """The processes of this host, in the order of their launch."""
        found = []
        with self._lock:
            launched = list(self._procs.values())
        for each in launched:
            peer = self._runtime.gateway.peers.get(each.proc.key)
            pid = None if each.running is None else each.running.pid
            up = peer is not None and peer.state is not State.NEW
            name = each.request.title.removeprefix("monarch: ")
            linked = peer is not None and peer.state is State.UP
            found.append(Resident(each.proc, name, pid, up, linked, each.stopping is not None))
        return found

    def _not_up(self, launched: Sequence[_Launched]) -> list[_Launched]:
        peers = self._runtime.gateway.peers
        found = [(each, peers.get(each.proc.key)) for each in launched if each.down is None]
        return [each for each, peer in found if peer is not None and peer.state is State.NEW]

    def _end_the_silent(self, launched: Sequence[_Launched], limit_s: float) -> None:
        for each in self._not_up(launched):
            log.error("proc.silent", proc=each.request.title, limit_s=limit_s)
            to = f"; it was to connect to {each.dials}" if each.dials else ""
            self._give_up(each, f"process {each.request.title} did not come up within {limit_s:g} s{to}")

    def _end_the_unlinked(self, launched: Sequence[_Launched]) -> None:
        """They would try until they are silent for too long, and have no chance."""
        left, gateway = self._not_up(launched), self._runtime.gateway
        if not left:
            return
        starved = gateway.starved
        if starved is None:
            gateway.call_later(_STARVED_S, lambda: self._end_the_unlinked(left))
            return
        why = f"process {os.getpid()}, which starts it, has no descriptor left for a link to it"
        scheme, linked = gateway.transport.scheme, len(self._procs) - len(left)
        others = "" if scheme in ("ipc", "shm") else ", or take the transport shm, which needs fewer descriptors"
        text = (
            f"{explain(starved, why)}; {linked} other processes are linked over {scheme}. "
            f"Raise that limit before the program starts{others}"
        )
        for each in left:
            self._give_up(each, f"process {each.request.title} cannot come up: {text}")

    def _give_up(self, launched: _Launched, why: str) -> None:
        launched.down = Down("unreachable", why)
        if launched.running is not None:
            launched.running.kill(9)

    def _on_exit(self, launched: _Launched, exit: Exit) -> None:
        """On whatever thread closes or pumps the launcher; the driving thread alone reads the last words of a link."""
        self._runtime.gateway.call_later(0.0, lambda: self._exited(launched, exit))

    def _exited(self, launched: _Launched, exit: Exit) -> None:
        proc = launched.proc
        if launched.down is not None:
            down = _with_last_words(launched.down, exit)
        else:
            down = _down_of(exit, launched.stopping, launched.signalled)
        launched.down = down
        runtime = self._runtime

        def read() -> None:
            """What it sent last may have come through here, and comes before the news of its end."""
            if launched.owner.proc.key != runtime.key:
                runtime.tell(launched.owner.proc, "proc_gone", proc, down)
            self._forget(proc.key)

        runtime.gateway.peers.process_ended(proc, down, read)

    def _on_lost(self, key: int) -> None:
        """The link to a process broke, which may still run. Twice, for its connections do not close all at once."""
        launched, peer = self._procs.get(key), self._runtime.gateway.peers.get(key)
        if launched is not None and launched.running is not None and peer is not None:
            launched.running.end_if_replaced(peer.pid)
            self._runtime.gateway.call_later(_ASK_AGAIN_S, partial(launched.running.end_if_replaced, peer.pid))

    def _forget(self, key: int) -> None:
        with self._lock:
            self._procs.pop(key, None)
            waiting = self._on_down.pop(key, [])
        for notify in waiting:
            notify()

    # ---- waiting and stopping

    def _on_await_up(self, envelope: Envelope, keys: list[int]) -> None:
        """Answer ("up",) when all of them are, or ("down", reason, key) when one is gone."""
        left = set(keys)
        runtime = self._runtime
        answered = [False]

        def settled(key: int) -> None:
            peer = runtime.gateway.peers[key]
            left.discard(key)
            if answered[0]:
                return
            if peer.down is not None:
                answered[0] = True
                runtime.answer(envelope, "down", str(peer.down), key)
            elif not left:
                answered[0] = True
                runtime.answer(envelope, "up")

        def known(key: int) -> None:
            peer = runtime.gateway.peers.get(key)
            if peer is not None:
                runtime.gateway.peers.when_settled(peer, partial(settled, key))
            elif not answered[0]:
                answered[0] = True
                runtime.answer(envelope, "down", "its host does not know this process", key)

        for key in keys:
            if key == runtime.key:
                left.discard(key)
            else:
                runtime.locator.when_known(key, partial(known, key))
        if not left and not answered[0]:
            answered[0] = True
            runtime.answer(envelope, "up")

    def _on_stop_procs(self, envelope: Envelope, keys: list[int], reason: str, grace_s: float | None = None) -> None:
        limit_s = settings.get("process_exit_timeout") if grace_s is None else grace_s
        self.stop(keys, reason, limit_s, lambda: self._runtime.answer(envelope, "stopped"))

    def stop(self, keys: list[int], reason: str, grace_s: float, then: Callable[[], None]) -> None:
        """Ask processes to end, insist after `grace_s`, and call `then` when all are gone. Does not block.

        Of `grace_s`, `cleanup_timeout` is kept for the cleanups of actors that are in the middle of something else, but
        no more than half of it.
        """
        left = set()
        lock = threading.Lock()

        def one_down(key: int) -> None:
            with lock:
                left.discard(key)
                over = not left
            if over:
                then()

        stopping: list[_Launched] = []
        with self._lock:
            for key in keys:
                launched = self._procs.get(key)
                if launched is not None:
                    left.add(key)
                    stopping.append(launched)
                    self._on_down.setdefault(key, []).append(partial(one_down, key))
        if not stopping:
            then()
            return
        for launched in stopping:
            if launched.stopping is None:
                launched.stopping = reason
                self._runtime.tell(launched.proc, "stop_all", reason)
        left_s = min(settings.get("cleanup_timeout"), grace_s / 2)
        self._runtime.gateway.call_later(grace_s - left_s, lambda: self._cut_short(stopping, reason, left_s))
        self._runtime.gateway.call_later(grace_s, lambda: self._insist(stopping, 15))
        self._runtime.gateway.call_later(
            grace_s + settings.get("mesh_terminate_timeout"), lambda: self._insist(stopping, 9)
        )

    def signal(self, key: int, signum: int, then: Callable[[], None]) -> bool:
        """Send a signal to a process; `then` is called when its end is known here. False: it does not run here."""
        with self._lock:
            launched = self._procs.get(key)
            if launched is None or launched.running is None:
                return False
            self._on_down.setdefault(key, []).append(then)
        launched.running.kill(signum)
        return True

    def cut_short(self, reason: str, left_s: float) -> None:
        """All processes of this host end in `left_s`: see `ProcAgent.cut_short`."""
        self._cut_short(list(self._procs.values()), reason, left_s)

    def _cut_short(self, launched: Sequence[_Launched], reason: str, left_s: float) -> None:
        for each in launched:
            if each.down is None:
                self._runtime.tell(each.proc, "cut_short", reason, left_s)

    def _insist(self, stopping: list[_Launched], signum: int) -> None:
        for launched in stopping:
            if launched.down is None and launched.running is not None:
                late = "it is still starting" if self._not_up([launched]) else "an endpoint may still run"
                reason = f"it was told to stop, and has not: {late}"
                log.warning("proc.signalled", proc=launched.request.title, signal=signum, reason=reason)
                launched.signalled = True
                launched.running.kill(signum)

    def _on_owner_gone(self, key: int, down: Down) -> None:
        orphans = [k for k, launched in list(self._procs.items()) if launched.owner.proc.key == key]
        if orphans:
            reason = f"the process of its owner is gone: {down.reason}"
            self.stop(orphans, reason, _ORPHAN_GRACE_S, lambda: None)
            gateway = self._runtime.gateway
            procs = [self._procs[k] for k in orphans if k in self._procs]
            gateway.call_later(2 * _ORPHAN_GRACE_S, lambda: self._insist(procs, 9))

    def end(self, reason: str, grace_s: float, then: Callable[[], None]) -> None:
        """Stop every process of this host, and call `then` when all are gone. Does not block."""
        launched = list(self._procs.values())
        self.stop(list(self._procs), reason, grace_s, then)
        self._runtime.gateway.call_later(2 * grace_s, lambda: self._insist(launched, 9))

    def close(self, timeout_s: float) -> None:
        """End every process of this host that is left."""
        for launched in list(self._procs.values()):
            launched.signalled = True  # the starter does
            if launched.stopping is None:
                launched.stopping = "the client has ended"
        self._starter.close(timeout_s)
        self._outputs.close()

    # ---- output

    def _on_lost_with_host(self, key: int, down: Down) -> None:
        """No more lines come of a process whose host is gone; of others, the last one says so."""
        peer = self._runtime.gateway.peers.get(key)
        keeper = None if peer is None or peer.proc.keeper is None else peer.proc.keeper.key
        host = None if keeper is None else self._runtime.gateway.peers.get(keeper)
        if keeper != self._runtime.key and (host is None or host.down is not None):
            self._outputs.forget(key)

    def _on_forwards(self, envelope: Envelope, keys: list[int]) -> None:
        """Answer with those of these processes of this host whose output is forwarded."""
        self._outputs.forwarded(keys, lambda found: self._runtime.answer(envelope, found))

    def _on_show_output(
        self, envelope: Envelope, origins: dict[int, Origin], show: bool, window_s: float | None
    ) -> None:
        """Asked of the client: how to show the lines of processes of any host."""
        self._outputs.configure(origins, show, window_s)
        self._runtime.answer(envelope)

    def _on_output(self, envelope: Envelope, parcels: list[Parcel]) -> None:
        """Asked of the client by the agent of another host; answered when it has been shown."""
        self._outputs.receive(parcels, lambda: self._runtime.answer(envelope))
