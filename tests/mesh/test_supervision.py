"""Failures go to the owner, and up from there; the last to hear is the hook of the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

import monarch.actor
from monarch.actor import ActorMesh, Channel, MeshFailure, SupervisionError, this_host
from monarch.testing import Recorder, TestClient, fresh_client, wait_until_gone
from tests.mesh.actors import AsyncParent, LateParent, Parent, SlowParent, Unsupervised, Worker


def spawn_parent(port: Any, verdict: str) -> Any:
    return this_host().spawn_procs({"gpus": 2}).slice(gpus=0).spawn("parent", Parent, port, verdict)


def test_an_owner_that_handles_a_failure_ends_it(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    parent = spawn_parent(port, "handle")
    child = parent.spawn.call_one("child").get(10)

    child.leave.broadcast()
    name, ranks, report, on_thread = receiver.recv().get(10)

    assert (name, ranks, on_thread) == ("child", [0], True)
    assert "SystemExit" in report
    assert parent.ping.call_one().get(10) == "pong"
    with pytest.raises(SupervisionError, match="SystemExit"):
        child.echo.call_one(1).get(10)
    again = parent.spawn.call_one("child").get(10)
    assert again.echo.call_one(1).get(10) == 1


@pytest.mark.parametrize("verdict", ["refuse", "raise"])
def test_an_owner_that_does_not_handle_a_failure_fails_with_it(client: TestClient, channel: Any, verdict: str) -> None:
    port, receiver = channel
    parent = spawn_parent(port, verdict)
    child = parent.spawn.call_one("child").get(10)
    sibling = parent.spawn.call_one("sibling").get(10)

    child.leave.broadcast()
    receiver.recv().get(10)

    failure = client.expect_fault("parent")
    assert failure.mesh_name == "parent"
    assert "SystemExit" in failure.report()  # the child's own report is in it
    text = "supervise says no" if verdict == "raise" else "did not handle a supervision event from its child"
    assert text in failure.report()
    with pytest.raises(SupervisionError, match=text):
        parent.ping.call_one().get(10)
    with pytest.raises(SupervisionError):
        sibling.echo.call_one(1).get(10)


class Odd(Unsupervised):
    def __getattr__(self, name: str) -> Any:
        return {}[name]


@pytest.mark.parametrize("cls", [Unsupervised, Odd])
def test_an_owner_without_a_say_fails(client: TestClient, cls: type[Unsupervised]) -> None:
    owner = this_host().spawn_procs().spawn("owner", cls)
    owner.spawn.call_one("child").get(10).leave.broadcast()

    failure = client.expect_fault("did not handle a supervision event from its child")
    assert failure.mesh_name == "owner" and "__supervise__ is not defined" in failure.report()


def test_a_caller_that_is_also_the_owner_gets_both(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    parent = spawn_parent(port, "handle")
    parent.spawn.call_one("child").get(10)

    assert parent.call_fail.call_one("child").get(10).startswith("SupervisionError")
    assert receiver.recv().get(10)[0] == "child"


def test_a_holder_of_a_reference_gets_the_error_and_the_owner_the_failure(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    parent = spawn_parent(port, "handle")
    child = parent.spawn.call_one("child").get(10)

    with pytest.raises(SupervisionError, match="SystemExit"):
        child.leave.call_one().get(10)

    assert receiver.recv().get(10)[0] == "child"
    assert client.faults.values == []


def test_an_async_owner_hears_while_its_endpoint_awaits(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    parent = this_host().spawn_procs().spawn("parent", AsyncParent, port)

    assert parent.wait_for_failure.call_one().get(10) == "saw it"
    assert receiver.recv().get(10) is True


def test_each_failed_rank_is_an_event_of_its_own(client: TestClient) -> None:
    workers = this_host().spawn_procs({"gpus": 3}).spawn("workers", Worker)
    workers.leave.broadcast()

    ranks = sorted(client.expect_fault("workers").crashed_ranks[0] for _ in range(3))
    assert ranks == [0, 1, 2]
    failure = client.faults.values[0]
    assert str(failure).startswith("MeshFailure(mesh_name='workers', crashed_ranks=[")


def test_a_hook_hears_of_a_failure_once(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: Recorder[MeshFailure] = Recorder()
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", heard)
    workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)

    workers.slice(gpus=1).leave.broadcast()
    (failure,) = heard.wait()

    assert (failure.mesh_name, failure.crashed_ranks) == ("workers", [1])
    assert "Worker workers{'gpus': 1/2}" in failure.report()
    for _ in range(3):
        with pytest.raises(SupervisionError):
            workers.echo.call(1).get(10)
    assert len(heard) == 1
    assert workers.slice(gpus=0).echo.call_one(1).get(10) == 1


def test_a_graceful_stop_is_no_failure(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: Recorder[MeshFailure] = Recorder()
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", heard)
    procs = this_host().spawn_procs({"gpus": 2})
    workers = procs.spawn("workers", Worker)
    workers.note.broadcast(1)
    ActorMesh.stop(workers).get(10)
    workers.note.broadcast(2)
    procs.stop().get(10)

    assert len(heard) == 0


# ---- messages that come back


def spawn_pair(owner_of_gone: Any) -> tuple[Any, Any]:
    """A worker, and a reference to an actor that has failed, owned by `owner_of_gone` or by the client."""
    procs = this_host().spawn_procs({"gpus": 2})
    sender = procs.slice(gpus=0).spawn("sender", Worker)
    spawn = procs.slice(gpus=1).spawn if owner_of_gone is None else owner_of_gone.spawn.call_one
    gone = spawn("gone", Worker) if owner_of_gone is None else spawn("gone").get(10)
    with pytest.raises(SupervisionError):
        gone.leave.call_one().get(10)
    return sender, gone


@pytest.mark.parametrize("verdict", ["handle", "refuse", "raise"])
@pytest.mark.parametrize("kind", [Parent, SlowParent])
def test_what_fails_while_its_owner_is_being_stopped_is_heard(
    client: TestClient, channel: Any, verdict: str, kind: type[Parent]
) -> None:
    port, receiver = channel
    parent: Any = this_host().spawn_procs().spawn("parent", kind, port, verdict)
    child = parent.spawn_procs.call_one(1, "child").get(10)
    child.hold_and_fail.broadcast(port)
    go_on = receiver.recv().get(10)
    stopped = parent.stop()
    with pytest.raises(SupervisionError, match="stopped"):
        parent.ping.call_one().get(10)
    go_on.send("too late?")

    stopped.get(10)
    assert receiver.recv().get(10)[:2] == ("child", [0])
    if verdict != "handle":
        failure = client.expect_fault("caused by: .*child.* raised ValueError: too late")
        assert failure.mesh_name == "parent"


def test_what_is_spawned_in_a_cleanup_ends_too_and_its_failure_is_heard(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    this_host().spawn_procs().spawn("parent", LateParent, port).stop().get(10)

    assert receiver.recv().get(10)[0] == "late"  # its cleanup
    assert client.expect_fault("caused by: .*late.* raised ValueError: no").mesh_name == "parent"


def test_who_sends_to_a_failed_actor_of_others_and_does_not_care_fails(client: TestClient) -> None:
    sender, gone = spawn_pair(None)
    client.expect_fault("SystemExit")
    sender.broadcast_to.call_one(gone, [1]).get(10)

    failure = client.expect_fault("undeliverable message to")
    assert failure.mesh_name == "sender"
    assert "SystemExit" in failure.report()  # why it could not be delivered


def test_the_owner_of_a_failed_actor_may_send_to_it(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    """It hears of the failure anyway, once; a broadcast that comes too late is no second one."""
    _, gone = spawn_pair(None)
    client.expect_fault("SystemExit")
    gone.note.broadcast(1)
    with pytest.raises(SupervisionError):
        gone.echo.call_one(1).get(10)  # comes back after it

    client.settle()
    assert len(client.faults.values) == 1


def test_the_client_hears_of_what_it_sent_to_a_failed_actor_of_others(client: TestClient, channel: Any) -> None:
    port, receiver = channel
    _, gone = spawn_pair(spawn_parent(port, "handle"))
    receiver.recv().get(10)
    gone.note.broadcast(1)

    failure = client.expect_fault("undeliverable message to")
    assert "RootClientActor client" in failure.report()


@pytest.mark.parametrize("transport", ["inproc", pytest.param("ipc", marks=pytest.mark.slow)])
def test_undeliverable_messages_can_be_made_warnings(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    with fresh_client(transport, undeliverable_fails_sender=False) as client:
        sender, gone = spawn_pair(None)
        client.expect_fault("SystemExit")
        sender.broadcast_to.call_one(gone, [1]).get(10)
        assert sender.echo.call_one(1).get(10) == 1


def test_what_a_silent_port_does_not_take_is_dropped(client: TestClient) -> None:
    sender = this_host().spawn_procs().spawn("sender", Worker)
    port, receiver = Channel[Any].open()
    port.return_undeliverable = False
    del receiver
    sender.send_to.call_one(port, 1).get(10)
    assert sender.echo.call_one(1).get(10) == 1


PROGRAM = """
import atexit, sys
import monarch.actor
from monarch.actor import this_host
from tests.mesh.actors import Worker
atexit.register(print, "exit handler")
{before}
worker = this_host().spawn_procs().spawn("worker", Worker)
worker.leave.broadcast()
{after}
"""

KEPT = {name: value for name, value in os.environ.items() if name == "MONARCH_RING"}


def run(before: str = "", after: str = "", transport: str = "ipc") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(before=before, after=after)
    path = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))}
    environ = {"MONARCH_TRANSPORT": transport, **KEPT, **path}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, env=environ)


@pytest.mark.parametrize(
    "transport", ["inproc", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ipc", "tcp"))]
)
def test_an_unhandled_failure_ends_the_program_with_status_1(transport: str) -> None:
    done = run(after="import time; time.sleep(20); print('not reached')", transport=transport)

    assert done.returncode == 1
    assert "Unhandled monarch error on the root actor, hostname=" in done.stderr
    assert "SystemExit" in done.stderr
    assert "exit handler" in done.stdout
    assert "not reached" not in done.stdout


def test_each_exit_handler_of_a_program_that_ends_over_a_failure_runs_once() -> None:
    done = run(
        after="atexit.register(print, 'last'); worker.initialized.exception()\ntry: worker.echo.call_one(1).get()\n"
        "except Exception: sys.exit(7)",
        transport="ipc",
    )

    assert done.returncode == 1
    assert done.stdout == "last\nexit handler\n"


@pytest.mark.parametrize("before_it_is_fatal", [True, False])
def test_what_a_program_has_to_show_its_errors_is_asked_about_the_one_that_ends_it(before_it_is_fatal: bool) -> None:
    done = run(
        before="sys.excepthook = lambda kind, error, trace: print('shown', kind.__name__)",
        after="call = worker.echo.call_one(1)\ncall.exception()\n"
        + ("" if before_it_is_fatal else f"try: {WHEN_IT_HAS_COME}\nexcept KeyboardInterrupt: pass\n")
        + "call.get()",
        transport="ipc",
    )

    assert done.returncode == 1
    assert done.stdout == "shown SupervisionError\nexit handler\n"
    assert "The program ends over this." in done.stderr


def test_an_unhandled_failure_ends_a_program_without_standard_error() -> None:
    done = run(
        before="sys.stderr.close()", after="import time; time.sleep(20); print('not reached')", transport="inproc"
    )

    assert done.returncode == 1
    assert "exit handler" in done.stdout and "not reached" not in done.stdout


def test_an_unhandled_failure_at_the_very_end_counts() -> None:
    done = run(
        before="def hook(failure):\n    failures.put(failure)\n    held.acquire()\n    sys.exit(1)\n"
        "monarch.actor.unhandled_fault_hook = hook",
        after="""
import queue, threading
from monarch.mesh import client
failures, held = queue.Queue(), threading.Semaphore(0)
worker.initialized.exception()
failures.get(timeout=10)
client.stop_owned = lambda root, *_: (held.release(), root._faults.fatal.wait(10)) and {}
""",
    )

    assert done.returncode == 1
    assert "Unhandled monarch error" in done.stderr
    assert "ignored" not in done.stderr


def test_a_program_that_waits_for_a_call_ends_too() -> None:
    done = run(after="worker.echo.call_one(1).get()")

    assert done.returncode == 1


WHEN_IT_HAS_COME = "monarch.actor.context().actor_instance._faults.fatal.wait(20)"


@pytest.mark.parametrize("wait", ["call.get()", "asyncio.run(settle(call))"], ids=["get", "await"])
def test_the_error_of_a_call_and_its_handler_come_before_the_end(wait: str) -> None:
    done = run(
        before=f"""
import asyncio
from monarch.mesh import faults
faults._HANDLER_S = 0.05, 60.0
async def settle(call):
    await call
call = this_host().spawn_procs().spawn("w", Worker).leave.call_one()
try:
    {wait}
except monarch.actor.SupervisionError:
    {WHEN_IT_HAS_COME}
    print("handled", sum(range(5_000_000)) > 0)
import time; time.sleep(20); print("not reached")
""",
    )

    assert done.returncode == 1
    assert "handled True" in done.stdout and "not reached" not in done.stdout
    assert "assign a function to\nmonarch.actor.unhandled_fault_hook" in done.stderr


@pytest.mark.parametrize("wait", ["call.get()", "asyncio.run(settle(call))"], ids=["get", "await"])
def test_a_failure_that_a_call_meets_and_nobody_handles_is_read_once(wait: str) -> None:
    done = run(
        before=f"""
import asyncio
async def settle(call):
    await call
w = this_host().spawn_procs().spawn("w", Worker)
call = w.leave.call_one()
w.echo.broadcast(1)
{wait}
"""
    )

    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.count("w at rank 0 failed at ") == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Unhandled monarch error on the root actor, ")
    assert ": the failure of w, above; " in last and "monarch.actor.unhandled_fault_hook" in last


def test_what_the_traceback_at_the_end_shows_is_not_told_again() -> None:
    done = run(
        before="w = this_host().spawn_procs({'gpus': 2}).spawn('w', Worker)\n"
        "known, news = w.fail.call('known'), w.fail.call('news'); w.fail.call('known').get()"
    )

    assert done.returncode == 1
    (told,) = [line for line in done.stderr.splitlines() if "call.failure_unseen" in line]
    assert "ValueError: news" in told


def test_a_program_that_handles_the_error_of_a_call_for_ever_ends_too() -> None:
    done = run(
        before="try:\n    this_host().spawn_procs().spawn('w', Worker).leave.call_one().get()\n"
        "except monarch.actor.SupervisionError:\n    import time; time.sleep(20); print('not reached')"
    )

    assert done.returncode == 1
    assert "not reached" not in done.stdout


@pytest.mark.parametrize("end", ["", pytest.param("monarch.actor.shutdown_context().get()", marks=pytest.mark.slow)])
def test_a_failure_over_the_last_messages_of_a_program_is_no_success(end: str) -> None:
    done = run(
        before="w = this_host().spawn_procs().spawn('w', Worker); w.pid.call_one().get(); w.fail.broadcast('late')\n"
        f"{end}\nsys.exit()"
    )

    assert done.returncode == 1
    assert done.stderr.count("ValueError: late") == 2  # in the first line, and in the traceback
    assert "exit handler" in done.stdout


def test_a_call_that_fails_after_the_last_line_is_told_of() -> None:
    done = run(
        before="w = this_host().spawn_procs().spawn('w', Worker); w.fail.call('dropped'); kept = w.fail.call('kept')\n"
        "sys.exit()"
    )

    assert done.returncode == 0
    assert done.stderr.count("call.failure_unseen") == 2
    assert "Worker w.fail raised ValueError: dropped" in done.stderr and "ValueError: kept" in done.stderr


@pytest.mark.slow
def test_an_actor_whose_cleanup_is_cut_off_by_the_end_of_the_program_is_told_of() -> None:
    done = run(
        before="from tests.mesh.actors import HangingCleaner\n"
        "h = this_host().spawn_procs({'gpus': 2}).spawn('h', HangingCleaner, True); h.ping.call().get()\nsys.exit()"
    )

    assert done.returncode == 0
    line = next(line for line in done.stderr.splitlines() if "cleanup.cut_off" in line)
    assert line.count("tests.mesh.actors.HangingCleaner h{'gpus': ") == 2 and "(in its __cleanup__" in line


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["inproc", "ipc"])
def test_actors_at_work_when_the_program_ends_clean_up_where_they_can(transport: str) -> None:
    done = run(
        before="""
import asyncio, threading
from monarch.actor import Actor, Channel, endpoint

class Owner(Actor):
    @endpoint
    def make(self, kind):
        return this_host().spawn_procs().spawn(kind.__name__.lower(), kind)

class CanStop(Actor):
    @endpoint
    async def work(self, begun):
        begun.send(1)
        await asyncio.Event().wait()

    async def __cleanup__(self, exc):
        print("cleaned up", flush=True)

class CanNot(CanStop):
    @endpoint
    def hold(self, begun):
        begun.send(1)
        threading.Event().wait()

begun, receiver = Channel.open()
owner = this_host().spawn_procs().spawn("owner", Owner)
owner.make.call_one(CanStop).get().work.broadcast(begun)
owner.make.call_one(CanNot).get().hold.broadcast(begun)
receiver.recv().get(20), receiver.recv().get(20)
sys.exit()
""",
        transport=transport,
    )

    assert done.returncode == 0
    assert done.stdout.count("cleaned up") == 1
    (line,) = done.stderr.splitlines()
    assert "cleanup.cut_off actors='__main__.CanNot cannot (hold has been running for " in line


@pytest.mark.slow
def test_actors_whose_processes_come_up_too_late_are_told_of() -> None:
    done = run(
        before="from monarch.actor import BootstrapCommand\n"
        "slow = this_host().spawn_procs(bootstrap_command=BootstrapCommand('sleep', None, ('60',)))\n"
        "slow.spawn('slow', Worker).echo.broadcast(1)\nsys.exit()"
    )

    assert done.returncode == 0
    assert "exit.unserved actors='tests.mesh.actors.Worker slow'" in done.stderr


@pytest.mark.parametrize("told_of", ["", "w.fail.call(1)"])
def test_a_program_that_is_interrupted_ends_by_the_signal_whatever_is_logged_meanwhile(told_of: str) -> None:
    done = run(
        before="w = this_host().spawn_procs().spawn('w', Worker); w.echo.call_one(1).get()\n"
        f"{told_of}\nimport os, time; os.kill(os.getpid(), 2); time.sleep(20)",
        transport="inproc",
    )

    assert done.returncode == -signal.SIGINT
    assert ("call.failure_unseen" in done.stderr) == bool(told_of)


@pytest.mark.slow
def test_ctrl_c_twice_ends_a_program_at_once_and_quietly() -> None:
    program = (
        "import os, time\nfrom monarch.actor import Actor, endpoint, this_host\n"
        "class Slow(Actor):\n"
        "    @endpoint\n    def pid(self): return os.getpid()\n"
        "    def __cleanup__(self, exc): print('cleaning', flush=True); time.sleep(60)\n"
        "pid = this_host().spawn_procs().spawn('slow', Slow).pid.call_one().get()\n"
        "print(pid, flush=True)\ntime.sleep(60)\n"
    )
    environ = {**KEPT, "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    assert done.stdout is not None
    pid = int(done.stdout.readline())
    done.send_signal(signal.SIGINT)
    assert done.stdout.readline() == "cleaning\n"
    done.send_signal(signal.SIGINT)
    _, err = done.communicate(timeout=20)

    assert done.returncode == -signal.SIGINT
    assert "ignored" not in err and "monarch" not in err
    wait_until_gone(pid)


@pytest.mark.slow
def test_a_hook_that_returns_lets_the_program_go_on() -> None:
    done = run(
        before="import threading; heard = threading.Event()\n"
        "monarch.actor.unhandled_fault_hook = lambda failure: (print('hook:', failure.mesh_name), heard.set())",
        after="assert heard.wait(10); print('goes on')",
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "hook: worker\ngoes on\nexit handler\n"


@pytest.mark.slow
def test_a_hook_that_raises_ends_the_program_and_is_called_once() -> None:
    done = run(
        before="def hook(failure):\n    print('hook', flush=True)\n    raise LookupError('in the hook')\n"
        "monarch.actor.unhandled_fault_hook = hook",
        after="import time; time.sleep(20)",
    )

    assert done.returncode == 1
    assert done.stdout.count("hook\n") == 1
    assert "in the hook" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["inproc", "ipc", "tcp"])
@pytest.mark.parametrize("driver", ["caller", "thread"])
def test_ctrl_c_interrupts_a_get_and_ends_everything(transport: str, driver: str) -> None:
    program = (
        "from monarch.actor import Channel, this_host\nfrom tests.mesh.actors import Worker\n"
        "worker = this_host().spawn_procs().spawn('worker', Worker)\n"
        "port, receiver = Channel.open()\n"
        "pid = worker.pid.call_one().get(10)\n"
        "pending = worker.hold.call_one(port)\nrelease = receiver.recv().get(10)\n"
        "try:\n    print(pid, flush=True)\n    pending.get()\n"
        "except KeyboardInterrupt:\n    release.send('go'); print('interrupted', pending.get(10), flush=True)\n"
    )
    environ = {
        "MONARCH_TRANSPORT": transport,
        "MONARCH_LINK_DRIVER": driver,
        **KEPT,
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(filter(None, sys.path)),
    }
    done = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    assert done.stdout is not None
    pid = int(done.stdout.readline())
    done.send_signal(signal.SIGINT)
    out, err = done.communicate(timeout=20)

    assert (done.returncode, out, err) == (0, "interrupted go\n", "")
    if pid != done.pid:
        wait_until_gone(pid)
