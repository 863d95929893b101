"""A client of one's own for a block of code: made, used and taken down, whatever client the process had before."""

from __future__ import annotations

import atexit
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from monarch import config
from monarch.core import settings
from monarch.core.future import Future
from monarch.core.proc import Proc
from monarch.mesh import client as client_module
from monarch.mesh import context as context_module
from monarch.mesh.actor_mesh import ActorMesh
from monarch.mesh.client import RootClient
from monarch.mesh.context import Context
from monarch.mesh.faults import Faults
from monarch.mesh.ownership import OwnedActors
from monarch.mesh.proc_mesh import ProcMesh
from monarch.mesh.shape import Region, Slice
from monarch.mesh.threads import ThreadStarter
from monarch.supervision.failure import MeshFailure
from monarch.testing.events import LIMIT_S, Recorder
from monarch.testing.links import LinkFaults, faults_between

_TEARDOWN_LIMIT_S: Final = 30.0
_SETTLE_LIMIT_S: Final = 2.0


class UnexpectedFaults(AssertionError):
    """Failures reached the client that the test neither expected nor gave a hook for."""

    def __init__(self, failures: list[MeshFailure]) -> None:
        reports = "\n\n".join(failure.report() for failure in failures)
        super().__init__(
            f"{len(failures)} failure(s) reached the client and would have ended the program:\n{reports}\n"
            "Take them with expect_fault(), or assign monarch.actor.unhandled_fault_hook."
        )
        self.failures = failures


class _Faults(Faults):
    """Failures that nobody handled, recorded instead of ending the program. A hook of the test's own is called."""

    def __init__(self, default_hook: object) -> None:
        super().__init__()
        self.all: Recorder[MeshFailure] = Recorder()
        self.unexpected: list[MeshFailure] = []
        self.lock = threading.Lock()
        self._default_hook = default_hook

    def put(self, failure: MeshFailure) -> None:
        if sys.modules["monarch.actor"].unhandled_fault_hook is self._default_hook:
            with self.lock:
                self.unexpected.append(failure)
        else:
            super().put(failure)
        self.all(failure)

    def _unhandled(self, failure: MeshFailure) -> bool:
        try:
            sys.modules["monarch.actor"].unhandled_fault_hook(failure)
        except BaseException:
            with self.lock:
                self.unexpected.append(failure)
        return False


class TestClient:
    """The client of a `fresh_client` block.

    Attributes:
        faults: the failures that reached the client, as they come; `faults.wait(2)` waits for the second.
    """

    __test__ = False  # for pytest, which collects classes by this name

    def __init__(self, context: Context, faults: _Faults) -> None:
        self.context = context
        self._root = context.actor_instance
        self._faults = faults
        self._any_allowed = False
        self.faults = faults.all

    # ---- failures

    def expect_fault(self, match: str = "", timeout_s: float = LIMIT_S) -> MeshFailure:
        """The first failure whose report matches the regular expression; waits for it, and takes it.

        Raises:
            TimeoutError: none came within `timeout_s`; says which did.
        """
        found: list[MeshFailure] = []

        def take(failures: list[MeshFailure]) -> bool:
            for failure in failures:
                if re.search(match, f"{failure}\n{failure.report()}") and self._take(failure):
                    found.append(failure)
                    return True
            return False

        self.faults.wait_for(take, timeout_s)
        return found[0]

    def _take(self, failure: MeshFailure) -> bool:
        with self._faults.lock:
            for at, each in enumerate(self._faults.unexpected):
                if each is failure:
                    del self._faults.unexpected[at]
                    return True
        return False

    def allow_faults(self) -> None:
        """From now on no failure makes the block fail."""
        self._any_allowed = True

    def settle(self, timeout_s: float = _SETTLE_LIMIT_S) -> None:
        """Wait until the actors that the client spawned have served what it sent them, and until the failures among
        them are known. An actor that is busy for longer is left alone, and what others sent is not waited for: the stop
        at the end of the block waits for all of it."""
        deadline_s = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(0.0, deadline_s - time.monotonic())

        meshes = [owned for owned in list(self._root.owned.values()) if isinstance(owned, OwnedActors)]
        answers = [(owned, rank, answer) for owned in meshes for rank, answer in _asked(owned)]
        for owned, rank, answer in answers:
            error = answer.exception(left_s())
            if error is not None and not isinstance(error, TimeoutError):
                told = threading.Event()
                owned.when_told(rank, told.set)
                told.wait(left_s())

    def check_faults(self) -> None:
        """Raises: UnexpectedFaults, when failures came, or still come of what was sent, that were not taken."""
        if not self._any_allowed:
            self.settle(_SETTLE_LIMIT_S)
        with self._faults.lock:
            left, self._faults.unexpected = self._faults.unexpected, []
        if left and not self._any_allowed:
            raise UnexpectedFaults(left)

    # ---- disturbing

    def kill(self, procs: ProcMesh, signum: int = signal.SIGKILL) -> None:
        """Send a signal to processes of this client's; over `inproc`, cut their threads off. After SIGKILL it returns
        when they are dead and the client knows; any other signal is only sent.

        Raises:
            LookupError: a process is not one that this client's host has started, or has ended.
            TimeoutError: one is not dead within 10 seconds.
        """
        agent = self._root_client.agent
        dead = [(proc, threading.Event()) for proc in procs._procs]
        for proc, event in dead:
            if not agent.signal(proc.key, signum, event.set):
                raise LookupError(f"process {proc.uid} does not run on this client's host")
        for proc, event in dead:
            if signum == signal.SIGKILL and not event.wait(LIMIT_S):
                raise TimeoutError(f"process {proc.uid} is not dead {LIMIT_S:g} s after SIGKILL")

    def faults_between(self, sender: ProcMesh, receiver: ProcMesh, seed: int = 0) -> LinkFaults:
        """Faults on what one process sends to another, over `inproc`. `this_proc()` of the client is a process too.

        Waits until there is a link between them: two members of a mesh make theirs when the first message is sent.
        """
        return faults_between(self._runtime(sender), self._runtime(receiver), seed)

    def _runtime(self, proc: ProcMesh) -> Proc:
        if len(proc._procs) != 1:
            raise ValueError(f"a link is between two single processes, and {proc!r} has {len(proc._procs)}")
        (wanted,) = proc._procs
        if wanted.key == self._root.proc_runtime.key:
            return self._root.proc_runtime
        starter = self._root_client.agent._starter
        if not isinstance(starter, ThreadStarter):
            raise TypeError("faults on links need processes that are threads of this one: transport='inproc'")
        for group in starter._groups:
            if group._runtime is not None and group._runtime.key == wanted.key:
                return group._runtime
        raise LookupError(f"process {wanted.uid} does not run on this client's host")

    @property
    def _root_client(self) -> RootClient:
        assert isinstance(self._root, RootClient)
        return self._root

    # ---- the end

    def close(self, timeout_s: float = _TEARDOWN_LIMIT_S) -> None:
        """Stop everything that the client owns; returns when it is gone."""
        self._root_client.shutdown().get(timeout_s)


def _asked(owned: OwnedActors) -> list[tuple[int, Future[None]]]:
    """Each member that lives is asked whether it is there, behind all that it was sent before: (rank, answer)."""
    asked = []
    for rank, proc in enumerate(owned.procs):
        if rank not in owned.downs:
            alone = Region((), Slice(rank, (), ()))
            asked.append((rank, ActorMesh(owned.number, owned.name, b"", "", [proc], alone, alone).initialized))
    return asked


@contextmanager
def fresh_client(transport: str = "inproc", driver: str | None = None, **values: Any) -> Iterator[TestClient]:
    """The client of this process, for a block: `context()`, `this_host()` and all the rest use it.

    At the end everything that it owns is stopped, down to what actors own, and what was there before is there again,
    the settings included.

    Args:
        transport: "inproc" (processes are groups of threads here), "shm", "ipc" or "tcp" (processes are real).
        driver: who moves frames, "thread" or "caller"; None for what is set.
        values: settings, for this process and the ones it starts.

    Raises:
        UnexpectedFaults: at the end of the block, when failures have reached the client that would have ended the
            program; failures over the stop count.
    """
    import monarch.actor

    values["default_transport"] = transport
    if driver is not None:
        values["link_driver"] = driver
    before = context_module.client_context()
    hook = monarch.actor.unhandled_fault_hook
    # `configured` reaches the processes that are started; `overridden` also wins over the environment here.
    with config.configured(**values), settings.overridden(**values):
        context_module.set_client_context(None)
        outer = context_module.current_context.get()
        context_module.current_context.set(None)
        client: TestClient | None = None
        try:
            made = client_module.make()
            root = made.actor_instance
            assert isinstance(root, RootClient)
            atexit.unregister(root.at_exit)
            root._faults = faults = _Faults(hook)
            client = TestClient(made, faults)
            yield client
            client.check_faults()
        except BaseException as error:
            if client is not None and client._faults.unexpected:
                error.add_note(str(UnexpectedFaults(client._faults.unexpected)))
            raise
        finally:
            try:
                if client is not None:
                    client.close()
            finally:
                monarch.actor.unhandled_fault_hook = hook
                context_module.set_client_context(before)
                context_module.current_context.set(outer)
        client.check_faults()  # also what failed over its last messages, or its cleanup
