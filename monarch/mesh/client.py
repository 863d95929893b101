"""The root client: the actor that the user's script is.

The first `context()` makes it, once per process, together with the agent of this host, so that `this_host()` and
`this_proc()` work anywhere. What it owns and nobody handles the failure of, ends the program: see `_Faults`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType

from monarch.core import settings
from monarch.core.envelope import Envelope
from monarch.core.future import Future
from monarch.core.ids import ActorId, ProcId, Uid, new_number
from monarch.core.monitor import Down
from monarch.launch import stack_signal
from monarch.log import get_logger, show_what_was_asked_for
from monarch.mesh import context as context_module
from monarch.mesh import controllers, debug_service
from monarch.mesh.agent import release_owned
from monarch.mesh.console import Console
from monarch.mesh.context import NOWHERE, Context, set_client_context
from monarch.mesh.forwarding import make_forwarder
from monarch.mesh.host import HostAgent, ProcessStarter, Starter
from monarch.mesh.inspector import Collector
from monarch.mesh.mesh_proc import MeshProc
from monarch.mesh.network import through
from monarch.mesh.outputs import Outputs
from monarch.mesh.proc_client import ProcClient
from monarch.mesh.threads import ThreadStarter
from monarch.mesh.undeliverable import Undeliverable
from monarch.supervision.failure import Member, MeshFailure
from monarch.transports import registry
from monarch.transports.url import parse

log = get_logger("monarch.client")

_EXIT_BUDGET_S = 1.0


class RootClient(ProcClient):
    """The client of a user's script."""

    def __init__(self, runtime: MeshProc, agent: HostAgent) -> None:
        super().__init__(runtime, ActorId(runtime.proc_id, new_number(), "client"))
        self.agent = agent
        self.collector = Collector(runtime, agent)
        self.desk = debug_service.serve(runtime)
        self.console = Console(runtime.gateway, self.collector.take, partial(debug_service.attend, self.desk))
        self._pid = os.getpid()
        self._faults = _Faults()
        self._at_exit = False
        self._last_faults: list[MeshFailure] = []
        self._shutdown: Future[None] | None = None
        self._shutdown_lock = threading.Lock()
        runtime.handlers["unowned"] = lambda _, failure: self.supervise(failure)

    def refuse_closed(self) -> None:
        if self._shutdown is not None:
            raise RuntimeError("the client has already been shut down (shutdown_context, or the end of the program)")

    def supervise(self, failure: MeshFailure) -> None:
        """While all is being stopped, what crashes over its last messages still counts; other ends do not."""
        if self._at_exit:
            self._last_faults.append(failure)
        elif self._shutdown is None or failure.down.crashed:
            self._faults.put(failure)

    def undeliverable(self, envelope: Envelope, down: Down) -> None:
        message = Undeliverable.of(self, envelope, down)
        if not self.must_hear_of(envelope):
            message.warn("the client", down)
        elif self._shutdown is None:
            failed = self.proc_runtime.failed(message.what()).because(down)
            self._faults.put(MeshFailure(self.name, [0], Member(self.class_name, self.name), failed))

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
        try:
            self._let_go()
        except KeyboardInterrupt:
            if not self._faults.fatal:  # else it is ours, and comes too late to end the program in its middle
                raise
        if self._faults.ends_program() and sys.excepthook is _exit_with_1 and not _leaving:
            # The program came to its end in spite of the KeyboardInterrupt, or before it: the status tells the truth.
            atexit.unregister(self.at_exit)
            _leave_with_1()

    def _let_go(self) -> None:
        if self._shutdown is None:
            self._at_exit = True
            self._shutdown = Future._pending(None)
            self.proc_runtime.ports.clear()  # daemon threads that wait for an answer end with the program, silently
            release_owned(self, Down("stopped", "the client has ended"), _EXIT_BUDGET_S)
            self.agent.close(0.2)
            self.proc_runtime.close(0.5)
            self._shutdown._complete(lambda: None)
        else:
            try:
                self._shutdown.get(timeout=2 * _EXIT_BUDGET_S)
            except Exception as error:
                log.warning("shutdown.unfinished", error=str(error))
                self.agent.close(0.2)
        self._faults.take_last([failure for failure in self._last_faults if failure.down.crashed])


class _Faults:
    """Failures that nobody handled: each goes to `monarch.actor.unhandled_fault_hook`, on a thread of its own.

    Where the hook raises (the default one does), the program ends: a report on stderr, KeyboardInterrupt in the main
    thread, atexit functions, status 1. Once.
    """

    def __init__(self) -> None:
        self.fatal = False  # the hook has raised: once is enough
        self._told = threading.Event()
        self._queue: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, failure: MeshFailure) -> None:
        self._queue.put(failure)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-faults", daemon=True)
                self._thread.start()

    def ends_program(self) -> bool:
        """Whether there was a fatal one; its report has been written then."""
        return self.fatal and self._told.wait(_EXIT_BUDGET_S)

    def take_last(self, failures: Sequence[MeshFailure]) -> None:
        """Those of a program that ends anyway, on the thread that ends it."""
        for failure in failures:
            error = self._unhandled(failure)
            if error is not None:
                self._report(failure, error)

    def _run(self) -> None:
        while True:
            failure = self._queue.get()
            error = self._unhandled(failure)
            if error is not None:
                self._end_program(failure, error)

    def _unhandled(self, failure: MeshFailure) -> BaseException | None:
        """What the hook raises, the first time that it does."""
        if self.fatal:
            return None
        hook: Callable[[MeshFailure], object] = sys.modules["monarch.actor"].unhandled_fault_hook
        try:
            hook(failure)
        except BaseException as error:
            self.fatal = True
            return error
        return None

    def _report(self, failure: MeshFailure, error: BaseException) -> None:
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        text = f"Unhandled monarch error on the root actor, hostname={socket.gethostname()}, PID={os.getpid()} at time "
        because = "" if isinstance(error, SystemExit) else f"\nunhandled_fault_hook raised {error!r}"
        try:
            sys.stderr.write(f"{text}{now}: {failure.report()}{because}\n")
            sys.stderr.flush()
        finally:
            sys.excepthook = _exit_with_1
            self._told.set()

    def _end_program(self, failure: MeshFailure, error: BaseException) -> None:
        self._report(failure, error)
        main = threading.main_thread().ident or 0
        if callable(signal.getsignal(signal.SIGINT)):
            signal.pthread_kill(main, signal.SIGINT)
            _end_calls_of_the_system(main)
            return
        # Nobody handles SIGINT, as in a script that a shell runs in the background: raise it in the main thread, which
        # may be in a call of the system for ever.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(KeyboardInterrupt))
        time.sleep(2 * _EXIT_BUDGET_S)
        if not _leaving:
            _leave_with_1()


def _end_calls_of_the_system(thread: int) -> None:
    """A SIGINT that comes just before the main thread begins a `time.sleep` does not end it: Python looks at signals
    only when a call is interrupted. So interrupt it, by a signal that does nothing else."""
    if signal.getsignal(signal.SIGURG) is not signal.SIG_DFL:
        return  # the program has its own use for it
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGURG, ctypes.cast(libc.getppid, ctypes.c_void_p))  # any function without effect
    libc.siginterrupt(signal.SIGURG, 1)
    for pause_s in (0.02, 0.2, 1.0):
        time.sleep(pause_s)
        signal.pthread_kill(thread, signal.SIGURG)


_leaving = False


def _exit_with_1(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook` of a program that ends by a fault. An uncaught KeyboardInterrupt would end it by SIGINT, and
    would skip nothing on its way but the status: so run the rest of a normal end here, and leave with 1."""
    if not isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    _leave_with_1()


def _leave_with_1() -> None:
    global _leaving
    _leaving = True
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def make() -> Context:
    """Make the client of this process. Called once, by `context()`."""
    show_what_was_asked_for()
    for variable in settings.unknown_variables():
        log.warning("setting.unknown", variable=variable)
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
    runtime = MeshProc(ProcId(Uid.instance("client")), transport, secrets.token_bytes(32))
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
