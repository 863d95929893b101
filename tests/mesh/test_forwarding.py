"""What processes print arrives at the driver: complete, with actor and rank, and before the news of their end."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.actor import Actor, SupervisionError, attach_to_workers, endpoint, this_host
from monarch.mesh import display, forwarding
from monarch.mesh.display import Display
from monarch.mesh.forwarding import Forwarder, Pipes
from monarch.mesh.lines import Line, Origin, Parcel
from monarch.mesh.outputs import Outputs
from monarch.testing import TestClient, fresh_client
from tests.mesh.workers import LIMIT_S, worker
from tests.until import until


class Output:
    """Stands in for the driver's output; may be stuck."""

    def __init__(self) -> None:
        self.text = ""
        self.moves = threading.Event()
        self.moves.set()
        self.changed = threading.Condition()

    def write(self, stream: int, data: bytes) -> None:
        if data:
            self.moves.wait(LIMIT_S)
        with self.changed:
            self.text += data.decode()
            self.changed.notify_all()

    def wait_for(self, met: Callable[[str], Any]) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: met(self.text), LIMIT_S), self.text[-500:]
        return self.text


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Output:
    found = Output()
    monkeypatch.setattr(display, "write", found.write)
    return found


@pytest.fixture
def forwarder() -> Iterator[Forwarder]:
    made = Forwarder(Display())
    yield made
    made.close(LIMIT_S)


def test_whoever_has_replaced_the_drivers_output_gets_the_lines(capsys):
    display.write(1, b"out \xff\n")
    display.write(2, b"err\n")

    assert capsys.readouterr() == ("out \ufffd\n", "err\n")


def opened(forwarder: Forwarder, rank: int = 0) -> tuple[Pipes, int]:
    pipes = forwarder.open(Origin("anon", rank))
    os.close(pipes.write_ends[1])
    return pipes, pipes.write_ends[0]


def finish(forwarder: Forwarder, pipes: Pipes) -> None:
    over = threading.Event()
    forwarder.finish(pipes, over.set)
    assert over.wait(LIMIT_S)


def test_what_was_written_before_the_end_is_shown_before_the_end_is_told(output, forwarder):
    pipes, fd = opened(forwarder)
    os.write(fd, b"one\ntwo, without an end")
    told = []
    over = threading.Event()
    forwarder.finish(pipes, lambda: (told.append(output.text), over.set()))
    assert over.wait(LIMIT_S)
    os.close(fd)

    assert told == ["anon[0] one\nanon[0] two, without an end\n"]


def test_a_line_without_an_end_is_shown_after_a_while(output, forwarder):
    _, fd = opened(forwarder)
    os.write(fd, b"well? ")

    assert output.wait_for(lambda text: text) == "anon[0] well? \n"
    os.close(fd)


def test_flush_shows_partial_lines_and_merged_ones(output, forwarder):
    pairs = [opened(forwarder, rank) for rank in range(2)]
    forwarder.display.configure([pipes.source for pipes, _ in pairs], show=True, window_s=3600)
    for _, fd in pairs:
        os.write(fd, b"same\n")
    os.write(pairs[0][1], b"part")

    assert forwarder.flush(LIMIT_S)
    assert output.text == "anon[0-1] [2 similar log lines] same\nanon[0] part\n"
    for _, fd in pairs:
        os.close(fd)


def test_processes_that_are_configured_apart_keep_their_windows(output, forwarder):
    """The others' window goes on, and ends in time."""
    pairs = [opened(forwarder, rank) for rank in range(2)]
    forwarder.display.configure([pipes.source for pipes, _ in pairs], show=True, window_s=0.05)
    forwarder.display.configure([pairs[0][0].source], show=True, window_s=None)
    for _, fd in pairs:
        os.write(fd, b"line\n")

    output.wait_for(lambda text: "anon[0] line\n" in text and "anon[1] line\n" in text)
    for _, fd in pairs:
        os.close(fd)


def test_output_that_is_not_wanted_is_kept_for_the_report_of_a_death(output):
    forwarder = Forwarder(Display(tail_lines=2))
    pipes, fd = opened(forwarder)
    forwarder.display.configure([pipes.source], show=False, window_s=None)
    os.write(fd, b"1\n2\n3\n")
    finish(forwarder, pipes)
    forwarder.close(LIMIT_S)
    os.close(fd)

    assert (output.text, pipes.source.tail.text()) == ("", "2\n3")


def test_files_have_all_that_each_process_printed(output, tmp_path):
    forwarder = Forwarder(Display(directory=str(tmp_path / "logs")))
    pipes, fd = opened(forwarder, rank=7)
    os.write(fd, b"1\n2\n")
    finish(forwarder, pipes)
    forwarder.close(LIMIT_S)
    os.close(fd)

    assert (tmp_path / "logs" / "anon[7].log").read_bytes() == b"1\n2\n"


def test_meshes_of_one_name_have_files_of_their_own(tmp_path):
    forwarder = Forwarder(Display(directory=str(tmp_path)))
    for pipes in [forwarder.open(Origin(name, 0)) for name in ("a/b", "a/b", "a")]:
        for fd in pipes.write_ends:
            os.close(fd)
        finish(forwarder, pipes)
    forwarder.close(LIMIT_S)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a[0].log", "a_b[0].2.log", "a_b[0].log"]


def test_a_notebook_shows_all_that_was_printed_at_the_end_of_each_cell(output, monkeypatch):
    hooks = []
    events = SimpleNamespace(register=lambda name, hook: hooks.append((name, hook)))
    shell = SimpleNamespace(events=events)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    forwarder = forwarding.make_forwarder()
    pipes, fd = opened(forwarder)
    forwarder.display.configure([pipes.source], show=True, window_s=3600)
    os.write(fd, b"line\n")
    ((name, after_cell),) = hooks
    after_cell(None)
    os.close(fd)
    forwarder.close(LIMIT_S)

    assert (name, output.text) == ("post_run_cell", "anon[0] line\n")


def test_a_closed_standard_output_gets_nothing(monkeypatch, tmp_path):
    """Its descriptor may be another file by now."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "__stdout__", None)
    written = []
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(fd))
    display.write(1, b"text\n")

    assert written == []


def test_a_flood_while_the_output_is_stuck_is_withheld_and_counted(output, forwarder):
    """The process goes on, and every line is either shown or counted."""
    forwarder.display._admission = type(forwarder.display._admission)(limit_bytes=1 << 16, patience_s=0.0)
    pipes, fd = opened(forwarder)
    output.moves.clear()
    os.write(fd, b"first\n")
    lines = 100_000
    data = b"".join(b"line %d\n" % number for number in range(lines))
    view = memoryview(data)
    while view:  # would block for ever if nobody read
        view = view[os.write(fd, view[:50_001]) :]
    over = threading.Event()
    forwarder.finish(pipes, over.set)
    assert over.wait(LIMIT_S)  # told, though nothing could be shown
    output.moves.set()
    text = output.wait_for(lambda text: "withheld" in text)
    os.close(fd)

    whole = [each for each in text.splitlines() if "withheld" not in each]
    counts = [int(each.split("[")[2].split()[0]) for each in text.splitlines() if "withheld" in each]
    assert sum(counts) >= 1
    # A line that was cut in two by the gap is shown in part, and counted.
    assert lines + 1 <= len(whole) + sum(counts) <= lines + 1 + len(counts)


def test_a_program_does_not_wait_for_stuck_output_at_its_end_and_says_how_much_is_lost(output, monkeypatch):
    said = []
    monkeypatch.setattr(display, "_say", said.append)
    forwarder = Forwarder(Display())
    pipes, fd = opened(forwarder)
    output.moves.clear()
    os.write(fd, b"line\n" * 1000)
    finish(forwarder, pipes)
    os.close(fd)
    forwarder.close(0.1)
    output.moves.set()

    assert said == ["monarch: about 1000 lines of output were not shown: the driver's output is stuck\n"]


def test_a_stream_that_was_closed_early_is_not_taken_for_another_that_got_its_descriptor(output, forwarder):
    pipes, fd = opened(forwarder)  # its standard error is closed
    settled = threading.Event()
    forwarder.settle(settled.set)
    assert settled.wait(LIMIT_S)
    others = [opened(forwarder, rank) for rank in (1, 2)]
    finish(forwarder, pipes)
    for _, other in others:
        os.write(other, b"line\n")
    assert forwarder.flush(LIMIT_S)
    for each in fd, *(other for _, other in others):
        os.close(each)

    assert sorted(output.text.splitlines()) == ["anon[1] line", "anon[2] line"]


class Elsewhere:
    """What another host has: a forwarder that sends to the driver's. May be cut off."""

    def __init__(self, driver: Forwarder, **options: Any) -> None:
        self.driver = driver
        self.batches: list[list[Parcel]] = []
        self.answers: list[threading.Event] = []
        self.silent = False
        self.forwarder = Forwarder(Display(send=self.send, **options))

    def send(self, parcels: list[Parcel]) -> threading.Event:
        shown = threading.Event()
        self.batches.append(parcels)
        self.answers.append(shown)
        if not self.silent:
            self.driver.display.receive(pickle.loads(pickle.dumps(parcels)), shown.set)
        return shown

    def open(self, rank: int, key: int) -> tuple[Pipes, int]:
        pipes = self.forwarder.open(Origin("anon", rank), key)
        os.close(pipes.write_ends[1])
        return pipes, pipes.write_ends[0]


def test_last_lines_of_another_host_are_shown_before_the_end_is_told_there(output, tmp_path):
    driver = Forwarder(Display(directory=str(tmp_path)))
    host = Elsewhere(driver, tail_lines=1)
    pipes, fd = host.open(rank=3, key=1)
    os.write(fd, b"one\n" + Origin("trainer", 0).mark().encode() + b"two\nthree, without an end")
    told = []
    over = threading.Event()
    host.forwarder.finish(pipes, lambda: (told.append(output.text), over.set()))
    assert over.wait(LIMIT_S)
    os.close(fd)
    host.forwarder.close(LIMIT_S)
    driver.close(LIMIT_S)

    assert told == ["anon[3] one\ntrainer[0] two\nanon[3] three, without an end\n"]
    assert pipes.source.tail.text() == "three, without an end"
    assert (tmp_path / "anon[3].log").read_bytes() == b"one\ntwo\nthree, without an end\n"
    assert driver.display._guests == {}  # nothing is kept of a process that has ended


@pytest.mark.slow
def test_the_end_of_the_driver_waits_for_lines_that_another_host_still_has(output):
    driver = Forwarder(Display())
    host = Elsewhere(driver)
    host.silent = True
    pipes, fd = host.open(rank=0, key=1)
    os.write(fd, b"first\n")
    settled = threading.Event()
    host.forwarder.settle(settled.set)
    assert settled.wait(LIMIT_S)  # for a second
    os.write(fd, b"last\n")
    finish(host.forwarder, pipes)
    os.close(fd)
    driver.display.guest(1, Origin("anon", 0))
    closing = threading.Thread(target=driver.close, args=(LIMIT_S,))
    closing.start()
    host.silent = False
    driver.display.receive(host.batches[0], host.answers[0].set)
    closing.join(LIMIT_S)
    host.forwarder.close(LIMIT_S)

    assert output.text == "anon[0] first\nanon[0] last\n"


def test_equal_lines_of_several_hosts_are_merged_and_unwanted_ones_not_shown(output, forwarder):
    hosts = [Elsewhere(forwarder) for _ in range(2)]
    fds = [host.open(rank, key=rank)[1] for rank, host in enumerate(hosts)]
    sources = [forwarder.display.guest(rank, Origin("anon", rank)) for rank in range(2)]
    forwarder.display.configure(sources, show=True, window_s=3600)
    for fd in fds:
        os.write(fd, b"same\n")
    for host in hosts:
        settled = threading.Event()
        host.forwarder.settle(settled.set)
        assert settled.wait(LIMIT_S)
    forwarder.display.configure(sources, show=False, window_s=None)
    os.write(fds[0], b"unwanted\n")
    for host in hosts:
        host.forwarder.close(LIMIT_S)
    assert forwarder.flush(LIMIT_S)
    for rank, fd in enumerate(fds):
        os.close(fd)
        forwarder.display.forget(rank)

    assert output.text == "anon[0-1] [2 similar log lines] same\n"


def test_one_batch_is_on_the_way_and_processes_go_on_when_the_driver_is_stuck(output, forwarder):
    host = Elsewhere(forwarder)
    host.silent = True
    host.forwarder.display._admission = type(host.forwarder.display._admission)(limit_bytes=1 << 16, patience_s=0.0)
    pipes, fd = host.open(rank=0, key=1)
    lines = 100_000
    view = memoryview(b"".join(b"line %d\n" % number for number in range(lines)))
    while view:  # would block for ever if nobody read
        view = view[os.write(fd, view[:50_001]) :]
    finish(host.forwarder, pipes)  # told, though nothing could be shown
    assert len(host.batches) == 1
    host.silent = False
    forwarder.display.receive(host.batches[0], host.answers[0].set)
    text = output.wait_for(lambda text: "withheld" in text)
    os.close(fd)
    host.forwarder.close(LIMIT_S)

    assert text.startswith("anon[0] line 0\nanon[0] line 1\n")


def test_a_process_whose_host_is_lost_is_forgotten_with_what_waits_for_its_window(output, forwarder):
    guest = forwarder.display.guest(1, Origin("anon", 0))
    forwarder.display.configure([guest], show=True, window_s=3600)
    received = threading.Event()
    line = Line(1, Origin("anon", 0), b"last")
    forwarder.display.receive([Parcel(1, Origin("anon", 0), line)], received.set)
    assert received.wait(LIMIT_S)
    forwarder.display.forget(1)

    assert output.wait_for(lambda text: text) == "anon[0] last\n"
    assert forwarder.flush(LIMIT_S) and forwarder.display._guests == {}


class Talker(Actor):
    @endpoint
    def talk(self) -> None:
        print("said")
        subprocess.run(["echo", "by a subprocess"], check=True)
        os.write(2, b"natively\n")
        thread = threading.Thread(target=print, args=("in a thread",))
        thread.start()
        thread.join()

    @endpoint
    def log(self) -> None:
        logging.getLogger("anything").warning("%s at %d%%", "done", 5)
        logging.getLogger("anything").warning("")
        self.logger.error({"a": 1})

    @endpoint
    def die(self) -> None:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with fresh_client("ipc", enable_log_forwarding=True, tail_log_lines=1) as client:
        yield client


@pytest.fixture
def procs(output: Output, client: TestClient) -> Iterator[Any]:
    """Two processes whose output goes to `output`."""
    procs = this_host().spawn_procs({"gpus": 2})
    yield procs
    procs.stop().get(LIMIT_S)


def test_lines_say_which_actor_and_rank_printed_them(output, procs):
    procs.spawn("talker", Talker).talk.call().get(LIMIT_S)
    procs.stop().get(LIMIT_S)

    said = ("said", "by a subprocess", "natively", "in a thread")
    assert sorted(output.text.splitlines()) == sorted(f"talker[{rank}] {text}" for rank in range(2) for text in said)


def test_the_report_of_a_death_comes_after_the_last_words_and_has_them(output, client, procs):
    talker = procs.spawn("talker", Talker)
    with pytest.raises(SupervisionError, match="its last words: last words"):
        talker.slice(gpus=1).die.call_one().get(LIMIT_S)

    assert "talker[1] last words\n" in output.text
    client.expect_fault("talker")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a worker."""
    folder = tmp_path_factory.mktemp("worker")
    with worker(f"ipc://{folder}/socket") as made:
        yield made.url


def test_what_processes_of_other_hosts_print_is_shown_too(output, client, address):
    procs = attach_to_workers(workers=[address]).spawn_procs({"gpus": 2})
    talker = procs.spawn("talker", Talker)
    asyncio.run(procs.logging_option(stream_to_client=True, aggregate_window_sec=3600))
    talker.talk.call().get(LIMIT_S)
    asyncio.run(procs.logging_option(stream_to_client=True))
    with pytest.raises(SupervisionError, match="last words"):
        talker.slice(gpus=1).die.call_one().get(LIMIT_S)
    assert "talker[1] last words\n" in output.text
    client.expect_fault("talker")
    procs.stop().get(LIMIT_S)

    said = ("said", "by a subprocess", "natively", "in a thread")
    merged = [f"talker[0-1] [2 similar log lines] {text}" for text in said]
    assert sorted(output.text.splitlines()) == sorted([*merged, "talker[1] last words"])


@pytest.mark.slow
def test_two_clients_of_one_worker_see_their_own_lines_only(output, client, address):
    procs = attach_to_workers(workers=[address]).spawn_procs({"gpus": 1})
    talker = procs.spawn("ours", Talker)
    talker.talk.call().get(LIMIT_S)
    script = f"""
        from monarch.actor import attach_to_workers
        from tests.mesh.test_forwarding import Talker
        from monarch.config import configure
        if __name__ == "__main__":
            configure(enable_log_forwarding=True)
            procs = attach_to_workers(workers=[{address!r}]).spawn_procs({{"gpus": 1}})
            procs.spawn("theirs", Talker).talk.call().get({LIMIT_S})
    """
    theirs = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], timeout=LIMIT_S, capture_output=True, text=True
    ).stdout
    talker.talk.call().get(LIMIT_S)
    procs.stop().get(LIMIT_S)

    assert {line.split()[0] for line in theirs.splitlines()} == {"theirs[0]"}  # though it never stopped them
    assert {line.split()[0] for line in output.text.splitlines()} == {"ours[0]"}
    assert len(output.text.splitlines()) == 2 * 4


def test_lines_are_awaited_until_the_last_one_or_the_end_of_their_host(output, client, tmp_path, monkeypatch):
    forgotten, forget = [], Outputs.forget
    monkeypatch.setattr(Outputs, "forget", lambda self, key: (forgotten.append(key), forget(self, key)))
    with worker(f"ipc://{tmp_path}/w") as served:
        hosts = attach_to_workers(workers=[served.url])
        ended, lost = hosts.spawn_procs(name="ended"), hosts.spawn_procs(name="lost")
        for procs in (ended, lost):
            procs.spawn("talker", Talker).talk.call().get(LIMIT_S)
        ended.stop().get(LIMIT_S)
        served.kill()
        client.expect_fault("talker")
        until(lambda: lost._procs[0].key in forgotten)
    assert ended._procs[0].key not in forgotten


def test_a_process_that_execs_is_forwarded_too(output, client):
    procs = this_host().with_python_executable(sys.executable).spawn_procs(name="fresh")
    procs.spawn("talker", Talker).talk.call_one().get(LIMIT_S)
    procs.stop().get(LIMIT_S)

    said = ("said", "by a subprocess", "natively", "in a thread")
    assert sorted(output.text.splitlines()) == sorted(f"talker[0] {text}" for text in said)


def test_log_records_of_actors_say_whose_they_are_and_are_merged(output, procs):
    talker = procs.spawn("talker", Talker)
    talker.slice(gpus=1).log.call_one().get(LIMIT_S)
    asyncio.run(procs.logging_option(stream_to_client=True, aggregate_window_sec=3600))
    talker.log.call().get(LIMIT_S)
    procs.stop().get(LIMIT_S)

    said = ("done at 5%", "", "{'a': 1}")
    actor = f"[actor=<root>.<{__name__}.Talker talker{{'gpus': 1/2}}>] "
    merged = [f"talker[0-1] [2 similar log lines] {text}" for text in said]
    assert output.text.splitlines() == [*(f"talker[1] {actor if text else ''}{text}" for text in said), *merged]


@pytest.mark.parametrize("finish", [asyncio.run, lambda it: it.close()], ids=["awaited", "not awaited"])
def test_logging_option_merges_equal_lines_and_sets_the_level(output, procs, finish):
    talker = procs.spawn("talker", Talker)
    finish(procs.logging_option(stream_to_client=True, aggregate_window_sec=3600, level=logging.CRITICAL))
    talker.log.call().get(LIMIT_S)
    talker.talk.call().get(LIMIT_S)
    procs.stop().get(LIMIT_S)

    said = ("said", "by a subprocess", "natively", "in a thread")
    merged = [f"talker[0-1] [2 similar log lines] {text}" for text in said]
    assert sorted(output.text.splitlines()) == sorted(merged)


def test_logging_option_warns_where_nothing_is_forwarded(caplog):
    with fresh_client("inproc"):
        procs = this_host().spawn_procs({"gpus": 2})
        with pytest.warns(UserWarning, match="enable_log_forwarding"):
            asyncio.run(procs.logging_option(stream_to_client=True))
        for options, error in (
            ({"level": 256}, ValueError),
            ({"level": -1}, ValueError),
            ({"level": "INFO"}, TypeError),
            ({"aggregate_window_sec": 0}, ValueError),
            ({"aggregate_window_sec": "3"}, TypeError),
        ):
            with pytest.raises(error, match=next(iter(options))):
                asyncio.run(procs.logging_option(**options))
    assert caplog.records == []
