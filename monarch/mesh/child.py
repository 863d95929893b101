"""A process of a mesh, from its first line to its end.

The main thread runs the first actor: libraries that want the main thread, and signals with timers, work in it. Further
actors have threads of their own.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import socket
import sys
import threading
import time

from monarch.core import address, settings
from monarch.core.actor_threads import Failed, Run, run_on_thread
from monarch.core.future import tell_all_unseen
from monarch.core.ids import ActorId, ProcId, new_number
from monarch.core.monitor import Down
from monarch.core.peer import Peer
from monarch.launch import excuse, linux, stack_signal
from monarch.log import show_what_was_asked_for
from monarch.mesh import actor_config
from monarch.mesh.attribution import Attribution, set_log_level
from monarch.mesh.context import NOWHERE, Context, set_client_context
from monarch.mesh.mesh_proc import MeshProc
from monarch.mesh.proc_client import ProcClient
from monarch.mesh.starting import Boot
from monarch.transports import registry
from monarch.transports import url as urls

_LAST_WORDS_S = 2.0
_FIRST_WORDS_S = 2.0  # so long a process tries to reach its keeper before its standard error tells of that
_WITHOUT_MAIN_THREAD = 70  # exit status: EX_SOFTWARE of sysexits.h


class MainThread:
    """Runs actors on the main thread, one after the other; those that come meanwhile get threads of their own."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._free = True
        self._lock = threading.Lock()

    def run_actor(self, name: str, run: Run, failed: Failed) -> None:
        with self._lock:
            mine, self._free = self._free, False
        if mine:
            self._jobs.put(run)
        else:
            run_on_thread(name, run, failed)

    def end(self) -> None:
        self._jobs.put(None)

    def serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._free = True


def rehearse() -> None:
    """Work out what is the same in every process, for the template that they are forked from: it stays in caches."""
    settings.merged()
    address.domain_of(registry.any_address("ipc"), b"secret")  # loads OpenSSL
    urls.stays_on_host(registry.any_address("tcp"))
    socket.getaddrinfo("127.0.0.1", 0)  # finds the codec for names of hosts
    asyncio.get_event_loop_policy()


def start(boot: Boot) -> MeshProc:
    """The runtime of a new process: listening, and on its way to its keeper."""
    assert boot.proc.keeper is not None
    runtime = MeshProc(boot.proc, registry.get(boot.scheme), boot.secret, root=boot.root)
    if boot.has_setup:
        runtime.agent.await_setup()
    runtime.gateway.ways.secrets.update(boot.ways)
    runtime.gateway.ways.proxy = boot.proxy
    runtime.gateway.listen(boot.listen)
    return runtime


def explain_delay(runtime: MeshProc, keeper: ProcId) -> None:
    """Until this process has reached its keeper, tell why not, so that the failure to come up has its reason: as its
    `excuse`, or, in one that a command has started, on standard error, of which the last lines are kept."""
    late_s = time.monotonic() + _FIRST_WORDS_S
    untold = threading.Semaphore(1)

    def failed(peer: Peer, why: str) -> None:
        if peer.key != keeper.key or peer.pid or excuse.say(f"it cannot reach its launcher: {why}"):
            return
        if time.monotonic() >= late_s and untold.acquire(blocking=False):
            sys.stderr.write(f"process {runtime.proc_id.uid} cannot reach its launcher, and goes on trying: {why}\n")

    runtime.gateway.peers.on_failed_try = failed


def _why_it_ends(runtime: MeshProc, keeper: ProcId, down: Down) -> Down:
    """For the actors of this process, whose keeper is gone as `down` says."""
    if keeper.key == runtime.root.key:
        return Down("stopped", f"the client's process is gone: {down.reason}")
    return down.loss_of(runtime.proc_id.uid)


def main(payload: bytes, *link: int) -> None:
    """Entry point of a launched process. `link`: what its keeper has handed down."""
    boot: Boot = pickle.loads(payload)
    sys.path += [folder for folder in boot.path if folder not in sys.path]
    settings.install(boot.config)
    show_what_was_asked_for(tell=False)
    linux.end_with_this_thread(_WITHOUT_MAIN_THREAD)
    runtime = start(boot)
    stack_signal.answer(runtime.driver.thread)
    if boot.origin is not None:
        Attribution(runtime, boot.origin)
    actor_config.prefix_python_logs_with_actor = boot.prefix_logs
    runtime.handlers["log_level"] = lambda _, level: set_log_level(level)
    main_thread = MainThread()
    runtime.run_actor = main_thread.run_actor
    runtime.agent.on_end = main_thread.end
    keeper = boot.proc.keeper
    cut_off: list[Down] = []
    assert keeper is not None

    def on_gone(key: int, down: Down) -> None:
        if key == keeper.key:
            # The guardian of the host ends this process anyway. The client, if that is left, shall not hear of a stop.
            if not down.pid and not excuse.say(down.reason):
                sys.stderr.write(f"process {boot.proc.uid} could not come up: {down.reason}\n")
            cut_off.append(down)
            runtime.gateway.call_later(_LAST_WORDS_S, lambda: os._exit(1))
            runtime.agent.stop_all(_why_it_ends(runtime, keeper, down))

    runtime.on_proc_gone.append(on_gone)
    client = ProcClient(runtime, ActorId(runtime.proc_id, new_number(), "client"))
    set_client_context(Context(client, NOWHERE))
    explain_delay(runtime, keeper)
    peer = runtime.gateway.inherit(keeper, link)
    runtime.gateway.peers.when_settled(peer, lambda: excuse.up() if peer.down is None else None)
    main_thread.serve()
    sys.stdout.flush()
    runtime.close()
    tell_all_unseen()
    if cut_off:
        raise SystemExit(1)
