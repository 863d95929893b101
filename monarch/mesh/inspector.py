"""Who answers when somebody asks what a program does, and who collects the answers.

Each process answers for itself, on whatever thread drives its links, so that a blocked endpoint delays nothing. The
client's process collects: it knows all processes, and asks them at once. Those that stay silent for `_ANSWER_S`, also
to the question whether they are alive, are asked by a signal (`launch.stack_signal`). So there is an answer within
`LIMIT_S`, whatever the processes do.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import define, evolve

from monarch.core.envelope import Envelope
from monarch.core.future import Future
from monarch.core.monitor import Down, PeerGone
from monarch.core.stacks import Stack, running_threads
from monarch.launch import linux, stack_signal
from monarch.launch.template import launched_by
from monarch.mesh.context import ActorInstance
from monarch.mesh.snapshot import Actor, Host, Process, ProcessState, Snapshot

if TYPE_CHECKING:
    from monarch.mesh.host import HostAgent, Resident
    from monarch.mesh.mesh_proc import MeshProc

_ANSWER_S: Final = 1.0
_SIGNAL_S: Final = 2.5
LIMIT_S: Final = 5.0


@define(frozen=True)
class Answer:
    """What a process says of itself. `actors` are by number, and so are `restarts`: of supervised children, wherever
    they are."""

    actors: dict[int, Actor]
    threads: tuple[Stack, ...]
    restarts: dict[int, int]


class Respondent:
    """Answers for one process."""

    def __init__(self, runtime: MeshProc) -> None:
        self._runtime = runtime
        runtime.handlers["inspect"] = self._on_inspect
        runtime.handlers["alive"] = lambda envelope: runtime.answer(envelope)

    def _on_inspect(self, envelope: Envelope, with_stacks: bool) -> None:
        self._runtime.answer(envelope, self.answer(with_stacks))

    def answer(self, with_stacks: bool, but: int = 0) -> Answer:
        """`but` is the identity of a thread to leave out: the one that asks."""
        runtime = self._runtime
        instances = [actor for actor in list(runtime.actors.values()) if isinstance(actor, ActorInstance)]
        threads = running_threads() if with_stacks else {}
        threads.pop(but, None)
        actors = {each.actor_id.number: _actor(each, threads if with_stacks else None) for each in instances}
        if runtime.proc_id.keeper is not None and runtime.gateway.transport.scheme == "inproc":
            threads.clear()  # they are the client's
        others = tuple(each for each in threads.values() if not each.name.startswith(ACTOR_THREAD))
        return Answer(actors, others, runtime.children.restarts())


ACTOR_THREAD: Final = "monarch "
"""How the names of threads begin that run an actor."""


def _actor(instance: ActorInstance, threads: dict[int, Stack] | None) -> Actor:
    """`threads`: those of the process, of which the actor's is taken away; None where no stacks are wanted."""
    state = instance.snapshot()
    breakpoint = instance.proc_runtime.breakpoints.where(instance.actor_id.number)
    doing = (state.phase, state.running, state.queued)
    actor = Actor(instance.place, instance.class_name, *doing, breakpoint=breakpoint)
    if threads is None or instance.thread_id not in threads:
        return actor
    return evolve(actor, stacks=(threads.pop(instance.thread_id), *instance.waiting()))


class Collector:
    """Asks all processes of a program on one host, and the collectors of the hosts that the client has attached to.
    Lives where the agent of the host does; `name` is that process, for people."""

    def __init__(self, runtime: MeshProc, agent: HostAgent, name: str = "client") -> None:
        self._runtime, self._agent, self._name = runtime, agent, name
        runtime.handlers["snapshot"] = self._on_snapshot

    def _on_snapshot(self, envelope: Envelope, with_stacks: bool, only: Collection[int] | None) -> None:
        def run() -> None:
            try:
                self._runtime.answer(envelope, self.take(with_stacks, only))
            except Exception as error:
                self._runtime.bounce(envelope, Down("failed", f"the program cannot be inspected: {error!r}"))

        threading.Thread(target=run, name="monarch-inspector", daemon=True).start()

    def take(self, with_stacks: bool, only: Collection[int] | None = None) -> Snapshot:
        """Ask, and wait; `LIMIT_S` at most. Never on the driving thread.

        Args:
            only: keys of the processes that are wanted; None for all. The others say only whom they have restarted.
        """
        runtime = self._runtime
        key = runtime.key
        deadline_s = time.monotonic() + LIMIT_S
        elsewhere = self._ask_elsewhere(with_stacks, only)
        residents = self._agent.residents()
        wanted = {key, *(each.proc.key for each in residents)} if only is None else set(only)
        alive = {each.proc.key: runtime.request(each.proc, "alive") for each in residents}
        asked = {
            each.proc.key: runtime.request(each.proc, "inspect", with_stacks and each.proc.key in wanted)
            for each in residents
        }
        own = runtime.respondent.answer(with_stacks and key in wanted, threading.get_ident())
        answers, gone = _collected(asked, time.monotonic() + _ANSWER_S)
        left = [each for each in residents if each.proc.key in wanted - gone]
        silent = {
            each.pid: partial(_is_silent, alive[each.proc.key])
            for each in left
            if each.pid not in (None, os.getpid()) and each.linked and not alive[each.proc.key].done()
        }
        dumps = stack_signal.ask(silent, _SIGNAL_S) if with_stacks else {}
        restarts = {number: n for answer in (own, *answers.values()) for number, n in answer.restarts.items()}

        processes: list[Process] = []
        if key in wanted:
            client = Process(self._name, os.getpid(), ProcessState.UP, "", linux.memory_bytes(os.getpid()))
            processes.append(_answered(client, own, restarts))
        for each in left:
            process, answer = _resident(each), answers.get(each.proc.key)
            if answer is not None:
                processes.append(_answered(process, answer, restarts))
            elif alive[each.proc.key].done():
                processes.append(evolve(process, note="it is too busy to say more"))
            else:
                processes.append(_unanswered(process, dumps))
        hosts = [Host(socket.gethostname(), tuple(processes)), *_hosts_of(elsewhere, deadline_s)]
        return Snapshot(_program(), os.getpid(), tuple(hosts), with_stacks)

    def _ask_elsewhere(self, with_stacks: bool, only: Collection[int] | None) -> list[Future[tuple[Any, ...]]]:
        hosts = self._runtime.gateway.peers.attached()
        return [self._runtime.request(host, "snapshot", with_stacks, only) for host in hosts]


def _hosts_of(asked: list[Future[tuple[Any, ...]]], deadline_s: float) -> list[Host]:
    """What is there in time; hosts of which nothing was wanted are left out."""
    found: list[Host] = []
    for future in asked:
        try:
            (snapshot,) = future.get(max(deadline_s - time.monotonic(), 0.0))
        except (PeerGone, TimeoutError):
            continue
        found += [host for host in snapshot.hosts if host.processes]
    return found


def _is_silent(alive: Future[Any]) -> bool:
    return not alive.done()


def _collected(asked: Mapping[int, Future[tuple[Any, ...]]], deadline_s: float) -> tuple[dict[int, Answer], set[int]]:
    """The answers that are there in time, and who is gone."""
    answers: dict[int, Answer] = {}
    gone: set[int] = set()
    for key, future in asked.items():
        try:
            (answers[key],) = future.get(max(deadline_s - time.monotonic(), 0.0))
        except PeerGone:
            gone.add(key)
        except TimeoutError:
            pass
    return answers, gone


def _resident(resident: Resident) -> Process:
    if not resident.up:
        state = ProcessState.STARTING
    else:
        state = ProcessState.STOPPING if resident.stopping else ProcessState.UP
    memory = None if resident.pid is None else linux.memory_bytes(resident.pid)
    return Process(resident.name, resident.pid, state, "", memory)


def _answered(process: Process, answer: Answer, restarts: dict[int, int]) -> Process:
    actors = (evolve(actor, restarts=restarts.get(number, 0)) for number, actor in answer.actors.items())
    return evolve(process, actors=tuple(actors), threads=answer.threads)


def _unanswered(process: Process, dumps: dict[int, tuple[Stack, ...] | stack_signal.Silence]) -> Process:
    pid = process.pid
    if pid is None:
        return process
    if linux.kernel_state(pid) in ("T", "t"):
        return evolve(process, state=ProcessState.STOPPED, note="SIGCONT lets it go on")
    state, note = process.state, ""
    if state is ProcessState.UP:
        state, note = ProcessState.HELD, "it does not answer: native code holds its interpreter, or the machine is busy"
    dump = dumps.get(pid, ())
    if isinstance(dump, stack_signal.Silence):
        return evolve(process, state=state, note=f"no stacks: {dump.reason}")
    return evolve(process, state=state, note=note, threads=dump)


def from_outside(pid: int, with_stacks: bool, is_silent: Callable[[], bool]) -> Snapshot:
    """What can be told of a driver that does not answer, by evidence of the kernel and the reserved signal. Nobody can
    ask its processes, which most likely run, so that they are sent no signal."""
    names = {pid: "client"} | {each: title.removeprefix("monarch: ") for each, title in launched_by(pid).items()}
    dumps = stack_signal.ask({pid: is_silent}, _SIGNAL_S) if with_stacks else {}
    processes = []
    for each, name in names.items():
        process = Process(name, each, ProcessState.UP, "", linux.memory_bytes(each))
        process = _unanswered(process, dumps)
        if each != pid and process.state is ProcessState.HELD:
            process = evolve(process, state=ProcessState.UNKNOWN, note="its driver does not answer")
        processes.append(process)
    return Snapshot(linux.title(pid), pid, (Host(socket.gethostname(), tuple(processes)),), with_stacks)


def _program() -> str:
    interpreter, *arguments = sys.orig_argv or [""]
    return shlex.join([Path(interpreter).name, *arguments])
