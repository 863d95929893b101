"""What an owner says of a failure decides; what an actor does to itself has the fate that it asked for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from monarch.actor import Actor, Port, SupervisionError, context, endpoint, this_host, this_proc
from monarch.testing import TestClient, fresh_client
from tests.mesh.actors import Worker


class Judge(Actor):
    def __init__(self, verdict: Any, heard: Port[str]) -> None:
        self.verdict, self.heard = verdict, heard

    @endpoint
    def spawn(self) -> Any:
        self.child = this_proc().spawn("child", Worker)
        return self.child

    def __supervise__(self, failure: Any) -> Any:
        self.heard.send(failure.actor_name)
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


class AsyncJudge(Judge):
    async def __supervise__(self, failure: Any) -> Any:
        await asyncio.sleep(0)
        return super().__supervise__(failure)


VERDICTS = [
    (True, ""),
    (1, ""),
    ("seen", ""),
    (False, "__supervise__ did not return True"),
    (None, "__supervise__ did not return True"),
    (0, "__supervise__ did not return True"),
    ("", "__supervise__ did not return True"),
    (LookupError("no opinion"), "__supervise__ raised LookupError: no opinion"),
]


@pytest.mark.parametrize("judge", [Judge, AsyncJudge])
@pytest.mark.parametrize(("verdict", "report"), VERDICTS, ids=[repr(verdict) for verdict, _ in VERDICTS])
def test_what_the_owner_returns_decides(
    monarch_client: TestClient, channel: Any, judge: type[Judge], verdict: Any, report: str
) -> None:
    port, receiver = channel
    owner = this_host().spawn_procs().spawn("owner", judge, verdict, port)
    child = owner.spawn.call_one().get(10)
    with pytest.raises(SupervisionError, match="SystemExit"):
        child.leave.call_one().get(10)
    assert receiver.recv().get(10) == "child"

    if not report:
        assert owner.spawn.call_one().get(10).echo.call_one(1).get(10) == 1
        monarch_client.settle()
        assert monarch_client.faults.values == []
        return
    failure = monarch_client.expect_fault("owner")
    assert report in failure.report()
    assert [cause.kind for cause in failure.causes] == ["failed"]
    assert "SystemExit" in failure.causes[0].reason
    with pytest.raises(SupervisionError) as caught:
        owner.spawn.call_one().get(10)
    assert caught.value.failure.crashed_ranks == [0]
    with pytest.raises(TimeoutError):
        receiver.recv().get(0.02)  # nobody is asked about its own end, nor twice


class Leaver(Actor):
    """Ends itself in the way it is told."""

    @endpoint
    def end(self, how: str, reason: str | None) -> None:
        getattr(context().actor_instance, how)(reason)

    @endpoint
    def ping(self) -> str:
        return "pong"


@pytest.mark.parametrize(
    ("how", "reason", "told"),
    [
        ("stop", "enough", None),
        ("abort", "enough", "actor explicitly aborted due to: enough"),
        ("abort", None, "actor explicitly aborted due to: no reason provided"),
        ("kill", "enough", "actor explicitly aborted due to: enough"),
    ],
)
def test_an_actor_ends_itself(monarch_client: TestClient, how: str, reason: str | None, told: str | None) -> None:
    procs = this_host().spawn_procs()
    leaver = procs.spawn("leaver", Leaver)
    leaver.end.call_one(how, reason).exception(10)  # its own reply may come or not

    with pytest.raises(SupervisionError, match=told or r"stopped \(enough\)"):
        leaver.ping.call_one().get(10)
    if told is not None:
        assert monarch_client.expect_fault(told).kind == "failed"
    assert procs.spawn("next", Leaver).ping.call_one().get(10) == "pong"  # the process is none the worse
    monarch_client.settle()


def test_a_slice_made_later_has_the_health_of_its_members(monarch_client: TestClient) -> None:
    workers = this_host().spawn_procs({"gpus": 3}).spawn("workers", Worker)
    with pytest.raises(SupervisionError):
        workers.slice(gpus=1).leave.call_one().get(10)
    monarch_client.expect_fault("workers")

    assert list(workers.slice(gpus=slice(0, 3, 2)).echo.call(1).get(10).values()) == [1, 1]
    for view in (workers, workers.slice(gpus=slice(0, 2)), workers.flatten("all").slice(all=1)):
        with pytest.raises(SupervisionError) as caught:
            view.echo.call(1).get(10)
        assert caught.value.failure.coordinates == [{"gpus": 1}]


@pytest.mark.parametrize("poisons", [False, True])
def test_a_failed_actor_poisons_its_process_only_where_that_is_wanted(poisons: bool) -> None:
    with fresh_client("inproc", poison_failed_procs=poisons) as client:
        procs = this_host().spawn_procs()
        with pytest.raises(SupervisionError):
            procs.spawn("first", Worker).leave.call_one().get(10)
        client.expect_fault("first")
        second = procs.spawn("second", Worker)
        if not poisons:
            assert second.echo.call_one(1).get(10) == 1
            return
        with pytest.raises(SupervisionError, match="error spawning actor mesh"):
            second.initialized.get(10)
        assert "SystemExit" in client.expect_fault("second").causes[0].reason


class Lingering(Actor):
    """It fails, and takes its time to end. For processes of the same interpreter."""

    may_end = threading.Event()

    @endpoint
    def fail(self) -> None:
        raise SystemExit

    def __cleanup__(self, exc: Exception | None) -> None:
        Lingering.may_end.wait(10)


def test_a_process_is_poisoned_as_soon_as_a_caller_knows_of_the_failure() -> None:
    with fresh_client("inproc", poison_failed_procs=True, cleanup_timeout="10s") as client:
        procs = this_host().spawn_procs()
        with pytest.raises(SupervisionError):
            procs.spawn("first", Lingering).fail.call_one().get(10)

        with pytest.raises(RuntimeError, match="poison_failed_procs"):
            procs.spawn("second", Worker).initialized.get(10)

        Lingering.may_end.set()
        client.expect_fault("second")
        client.expect_fault("first")
