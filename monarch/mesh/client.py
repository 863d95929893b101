"""The root client: the actor that the user's script is.

The first `context()` makes it, once per process, together with the agent of this host, so that `this_host()` and
`this_proc()` work anywhere. What it owns and nobody handles the failure of, ends the program: see `faults`.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from functools import partial

from monarch.core import setting_table, settings
from monarch.core.envelope import Envelope
from monarch.core.future import Future, tell_all_unseen
from monarch.core.ids import ActorId, ProcId, Uid, new_number
from monarch.core.monitor import Down
from monarch.errors import MeshError
from monarch.launch import stack_signal
from monarch.log import get_logger
from monarch.mesh import context as context_module
from monarch.mesh import controllers, debug_service, program_end
from monarch.mesh.console import Console
from monarch.mesh.context import NOWHERE, Context, set_client_context
from monarch.mesh.faults import Faults, end_as_interrupted, was_interrupted
from monarch.mesh.forwarding import make_forwarder
from monarch.mesh.host import HostAgent
from monarch.mesh.inspector import Collector
from monarch.mesh.mesh_proc import MeshProc
from monarch.mesh.network import through
from monarch.mesh.outputs import Outputs
from monarch.mesh.ownership import release_owned, stop_owned
from monarch.mesh.proc_client import ProcClient
from monarch.mesh.program_start import tell_at_start
from monarch.mesh.starting import ProcessStarter, Starter
from monarch.mesh.threads import ThreadStarter
from monarch.mesh.trust import own_secret, show_certificates
from monarch.mesh.undeliverable import Undeliverable
from monarch.supervision.failure import Member, MeshFailure
from monarch.transports import registry
from monarch.transports.url import parse

log = get_logger("monarch.client")

_EXIT_BUDGET_S = 1.0
_CLEANUP_BUDGET_S = 0.4  # of that, for the cleanup of actors that were in the middle of something else
_START_BUDGET_S = 3.0  # for processes that were sent something and are not up yet


class RootClient(ProcClient):
    """The client of a user's script."""

    def __init__(self, runtime: MeshProc, agent: HostAgent) -> None:
        super().__init__(runtime, ActorId(runtime.proc_id, new_number(), "client"))
        self.agent = agent
        self.collector = Collector(runtime, agent)
        self.desk = debug_service.serve(runtime)
        self.console = Console(runtime.gateway, self.collector.take, partial(debug_service.attend, self.desk))
        self._pid = os.getpid()
        self._faults = Faults()
        self._at_exit = False
        self._last_faults: list[MeshFailure] = []
        self._cut_off: list[str] = []
        self._shutdown: Future[None] | None = None
        self._shutdown_lock = threading.Lock()
        runtime.handlers["unowned"] = lambda _, failure: self.supervise(failure)
        runtime.handlers["cut_off"] = lambda _, actors: self._on_cut_off(actors)

    def refuse_closed(self) -> None:
        if self._shutdown is not None:
            raise MeshError("the client has already been shut down (shutdown_context, or the end of the program)")

    def supervise(self, failure: MeshFailure) -> None:
        """While all is being stopped, what crashes over its last messages still counts; other ends do not."""
        if self._at_exit:
            self._last_faults.append(failure)
        elif self._shutdown is None or failure.down.crashed:
            self._faults.put(failure)

    def undeliverable(self, envelope: Envelope, down: Down) -> None:
        message = Undeliverable.of(self, envelope, down)
        returned = self.proc_runtime.returned

        def fail(count: int) -> None:
            failed = self.proc_runtime.failed(message.what(count)).because(down)
            self._faults.put(MeshFailure(self.name, [0], Member(self.class_name, self.name), failed))

        if not self.must_hear_of(envelope):
            message.warn("the client", down, returned, self._faults.told)
        elif self._shutdown is None:
            returned.tell((message.dest(), str(down)), fail)

    def _on_cut_off(self, actors: list[str]) -> None:
        """Actors of one process: at the end of the program, all that are cut off are told of together."""
        if self._at_exit:
            self._cut_off += actors
        else:
            program_end.tell_cut_off(actors, "the setting process_exit_timeout is how long a process may take to stop")

    def shutdown(self) -> Future[None]:
        """Stop everything that this client owns; idempotent."""
        with self._shutdown_lock:
            if self._shutdown is None:
                self._shutdown = Future._pending(self.proc_runtime.driver, lambda: "the shutdown of the client")
                threading.Thread(target=self._shut_down, args=(self._shutdown,), daemon=True).start()
            return self._shutdown

    def _shut_down(self, future: Future[None]) -> None:
        try:
            self.console.close()
            release_owned(self, Down("stopped", "the client shuts down"))
            self.agent.close(settings.get("process_exit_timeout"))
            self.proc_runtime.close()
        except BaseException as error:
            future._fail(error)
        else:
            future._complete(lambda: None)

    def at_exit(self) -> None:
        """The program ends: what is owned gets `_EXIT_BUDGET_S` to stop gracefully."""
        if os.getpid() != self._pid:
            return  # a fork of the client owns nothing
        self._faults.take_over()
        is_interrupted = was_interrupted()
        try:
            self._let_go()
        except (KeyboardInterrupt, SystemExit) as error:
            # The user cannot wait; who cannot wait even for this leaves the rest to the guardian. Or it is one of ours,
            # which comes too late to end the program in its middle.
            is_interrupted = is_interrupted or (
                isinstance(error, KeyboardInterrupt) and not self._faults.fatal.is_set()
            )
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self.agent.close(0.0)
        self._faults.take_last([failure for failure in self._last_faults if failure.down.crashed])
        tell_all_unseen()
        atexit.unregister(self.at_exit)
        self._faults.end_program_if_due()
        if is_interrupted:
            end_as_interrupted()

    def _let_go(self) -> None:
        if self._shutdown is None:
            self._at_exit = True
            self._shutdown = Future._pending(None)
            program_end.attend_no_more(self.proc_runtime)
            if not self._faults.fatal.is_set():
                program_end.await_starts(self.proc_runtime, _START_BUDGET_S)
            down = Down("stopped", "the client has ended")
            stops = list(stop_owned(self, down).values())
            if not program_end.all_over(stops, _EXIT_BUDGET_S - _CLEANUP_BUDGET_S):
                program_end.cut_short(self.proc_runtime, self.agent, down.reason, _CLEANUP_BUDGET_S)
                program_end.all_over(stops, _CLEANUP_BUDGET_S)
            program_end.tell_unserved(self)
            program_end.tell_cut_off(self._cut_off)
            self.agent.close(0.2)
            self.proc_runtime.close(0.5)
            self._shutdown._complete(lambda: None)
        else:
            try:
                self._shutdown.get(timeout=2 * _EXIT_BUDGET_S)
            except Exception as error:
                log.warning("shutdown.unfinished", error=str(error))
                self.agent.close(0.2)


def make() -> Context:
    """Make the client of this process. Called once, by `context()`."""
    tell_at_start()
    for variable, meant in setting_table.unknown_variables().items():
        log.warning("setting.unknown", variable=variable, **({"meant": f"{meant}?"} if meant else {}))
    show_certificates()
    wanted = settings.get("default_transport")
    if "://" in wanted:
        scheme, listen = parse(wanted).scheme, wanted
        transport = registry.for_url(wanted)
        reason = f"{wanted} was asked for"
    else:
        choice = registry.choose(wanted)
        transport, reason = choice.transport, choice.reason
        scheme = transport.scheme
        listen = registry.any_address(scheme)
    runtime = MeshProc(ProcId(Uid.instance("client")), transport, own_secret(listen))
    runtime.gateway.ways.proxy = through()
    runtime.gateway.listen(listen)
    log.info("transport.chosen", transport=scheme, reason=reason, address=runtime.gateway.url)
    inproc = scheme == "inproc"
    starter: Starter = ThreadStarter(runtime) if inproc else ProcessStarter(runtime.gateway, [scheme])
    client = RootClient(runtime, HostAgent(runtime, starter, registry.any_address(scheme), Outputs(make_forwarder)))
    stack_signal.answer(runtime.driver.thread)
    client.console.open()
    atexit.register(client.at_exit)
    made = Context(client, NOWHERE)
    set_client_context(made)
    controllers.install(client)
    return made


context_module.client_is_made_by(make)


def shutdown_context() -> Future[None]:
    """Stop everything that this client owns. Idempotent; the client cannot be started again in this process."""
    found = context_module.client_context()
    if found is None:
        return Future._completed(None)
    client = found.actor_instance
    if not isinstance(client, RootClient):
        raise RuntimeError("shutdown_context belongs to the client; an actor ends with context().actor_instance.stop()")
    return client.shutdown()


def _in_forked_child() -> None:
    found = context_module.client_context()
    if found is not None:
        context_module.mark_forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
