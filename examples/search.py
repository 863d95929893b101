"""A search engine over the files of this Python installation, on a mesh of processes. `monarch demo` runs it.

It reads from top to bottom. Two kinds of actors do the work:

- `Index` holds one shard of the files. There is one in every process of the mesh.
- `Ranker` turns a question into a ranked answer. It asks all the indexes, and is given the *reference* to their mesh
  when it is spawned: a mesh can be sent anywhere, and used there.

`main` spawns them, follows the build, asks, provokes an error, kills a process that is at work, and stops everything.
"""

from __future__ import annotations

import heapq
import io
import math
import os
import platform
import re
import signal
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    Future,
    Port,
    SupervisionError,
    current_rank,
    current_size,
    endpoint,
    this_host,
    this_proc,
)
from monarch.supervision import Child, Supervisor

# ---------------------------------------------------------------------------------------------------------------------
# 1. What travels. Messages hold ordinary Python values: these small dataclasses are pickled like everything else.
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Progress of one index: what it has read since its last step."""

    files: int
    size_bytes: int


@dataclass(frozen=True)
class Summary:
    """What a shard, or several together, hold."""

    files: int = 0
    words: int = 0  # running words, with repetitions

    def __add__(self, other: Summary) -> Summary:
        return Summary(self.files + other.files, self.words + other.words)


@dataclass(frozen=True, order=True)
class Hit:
    """A file that answers a question."""

    score: float
    path: str
    shard: int  # rank of the index that holds it


# ---------------------------------------------------------------------------------------------------------------------
# 2. The actors. An actor is a class; what others may ask of it is an endpoint. It takes one message at a time.
# ---------------------------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[a-z][a-z0-9]+")


def words_of(text: str) -> list[str]:
    """The words of a text or question; `parse_args` counts as two, so that questions in English find code."""
    return _WORD.findall(text.lower())


class Index(Actor):
    """An inverted index over this process's share of the files."""

    def __init__(self) -> None:
        self.rank = current_rank().rank  # who am I in my mesh? 0, 1, 2, ...
        self.paths: list[str] = []
        self.lengths: list[int] = []  # in words, by position in `paths`
        self.postings: dict[str, list[tuple[int, int]]] = {}  # word -> [(position in `paths`, times)]

    @endpoint
    def build(self, files: Sequence[str], progress: Port[Step]) -> Summary:
        """Read every n-th of the files, and tell the port how far we are. All indexes get the same message: each takes
        its own share by its rank."""
        step_files = step_bytes = 0
        for path in files[current_rank().rank :: math.prod(current_size().values())]:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
            times = Counter(words_of(text))
            for word, count in times.items():
                self.postings.setdefault(word, []).append((len(self.paths), count))
            self.paths.append(path)
            self.lengths.append(times.total())
            step_files, step_bytes = step_files + 1, step_bytes + len(text)
            if step_files == 20:
                progress.send(Step(step_files, step_bytes))
                step_files = step_bytes = 0
        progress.send(Step(step_files, step_bytes))
        return self._summary()

    @endpoint
    def summary(self) -> Summary:
        return self._summary()

    def _summary(self) -> Summary:
        return Summary(len(self.paths), sum(self.lengths))

    @endpoint
    def count(self, words: Sequence[str]) -> Counter[str]:
        """How many files of this shard contain each word."""
        return Counter({word: len(self.postings.get(word, ())) for word in words})

    @endpoint
    def search(self, weights: dict[str, float], mean_words: float, limit: int) -> list[Hit]:
        """The best files of this shard by BM25: rare words count more, repetitions ever less, long files less."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word, weight in weights.items():
            for at, times in self.postings.get(word, ()):
                norm = 1.2 * (0.25 + 0.75 * self.lengths[at] / mean_words)
                scores[at] += weight * times * 2.2 / (times + norm)
        best = heapq.nlargest(limit, scores.items(), key=lambda item: item[1])
        return [Hit(score, self.paths[at], self.rank) for at, score in best]

    @endpoint
    def excerpt(self, path: str, words: Sequence[str]) -> tuple[int, str]:
        """The line of a file with most of the words, as (number, text). A path that cannot be read raises, and the
        caller gets an `ActorError`: see step 5 of `main`."""
        wanted = set(words)
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        number, line = max(enumerate(lines, 1), key=lambda at: (len(wanted & set(words_of(at[1]))), -at[0]))
        return number, line.strip()


class Ranker(Actor):
    """Answers questions with the help of all the indexes, or of those it is told to ask."""

    def __init__(self, index: Index) -> None:
        self.index = index  # a reference to the whole mesh, wherever its processes are
        self.total: Summary | None = None

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def answer(self, question: str, limit: int = 3, where: Index | None = None) -> list[Hit]:
        """The best files for a question, in two rounds over the mesh: how rare is each word, and who has the best."""
        if self.total is None:  # an Accumulator folds the replies of a mesh, in the order in which they come
            self.total = await Accumulator(self.index.summary, Summary(), Summary.__add__).accumulate()
        words = words_of(question)
        counts = await self.index.count.call(words)
        found: Counter[str] = sum(counts.values(), Counter())

        files = self.total.files
        weights = {word: math.log(1 + (files - n + 0.5) / (n + 0.5)) for word, n in found.items()}
        shards = await (where or self.index).search.call(weights, self.total.words / files, limit)
        return heapq.nlargest(limit, (hit for hits in shards.values() for hit in hits))


# ---------------------------------------------------------------------------------------------------------------------
# 3. The driver: an ordinary script.
# ---------------------------------------------------------------------------------------------------------------------

QUESTIONS = ("send an email message", "random numbers from a normal distribution", "thread pool executor")


def main(procs: int | None = None, queries: Sequence[str] | None = None, limit_files: int | None = None) -> None:
    """Search the standard library with `procs` processes, and print what happens."""
    show = Show()
    cpus = len(os.sched_getaffinity(0))
    wanted = procs or min(8, max(4, cpus))
    n = min(wanted, 16 * cpus)  # more would hold up everything else on this machine
    questions = queries or QUESTIONS

    files = find_files()[:limit_files]
    show.title(f"Searching the files of Python {platform.python_version()} with {n} processes")
    if n < wanted:
        show.note(f"{wanted} processes are too many for {cpus} CPUs: {n} it is")

    with show.step("Spawn the processes"):
        # A mesh of processes on this machine, with one dimension that we name "procs" ...
        mesh = this_host().spawn_procs(per_host={"procs": n})
        # ... and an actor mesh of the same shape: one Index in each process.
        index = mesh.spawn("index", Index)
        index.initialized.get()
    show.note(f"{n} processes, each with an actor {Index.__name__!r}")

    with show.step("Build the index"):
        # A channel brings back what does not fit a reply. The port travels in the message; all the indexes send to it.
        port, steps = Channel[Step].open()
        building = index.build.call(files, port)  # sent to all of them now; what comes back is a Future
        with show.progress(len(files)) as advance:
            done = 0
            while done < len(files):
                step = steps.recv().get(timeout=60)
                done += step.files
                advance(step)
        shards = building.get()  # a ValueMesh: one value per index, in the shape of the mesh
    for point, shard in shards.items():
        show.note(f"shard {point['procs']}: {shard.files:,} files, {shard.words:,} words")

    with show.step("Ask the whole mesh"):
        # Here a mesh of actors is handed to other actors. They live in the same processes as the indexes; for each
        # question one of them is chosen.
        rankers = mesh.spawn("ranker", Ranker, index)
        for question in questions:
            asked = time.perf_counter()
            hits = rankers.answer.choose(question).get()
            show.hits(question, "all shards", time.perf_counter() - asked, hits, index)

    with show.step("Ask a slice of the mesh"):
        # A slice is a mesh too. This one has the first half of the indexes, and goes along as an argument.
        half = index.slice(procs=slice(0, max(1, n // 2)))
        asked = time.perf_counter()
        hits = rankers.slice(procs=0).answer.call_one(questions[0], where=half).get()
        show.hits(questions[0], f"{len(half)} of {n} shards", time.perf_counter() - asked, hits, index)

    with show.step("Ask 200 times at once"):
        # Nothing waits here until the end: every call leaves at once, for a ranker chosen at random.
        asked = time.perf_counter()
        pending: list[Future[list[Hit]]] = [rankers.answer.choose(questions[i % len(questions)]) for i in range(200)]
        answers = [future.get() for future in pending]
        rate = len(answers) / (time.perf_counter() - asked)
    show.note(f"{len(answers)} answers, {rate:,.0f} per second; each took {2 * n} messages to the indexes")

    with show.step("Make an endpoint fail"):
        first = index.slice(procs=0)
        try:
            first.excerpt.call_one("/no/such/file.py", ["python"]).get()
        except ActorError as error:
            # What it raised, where it raised it, and the actor lives on: it answers the next call.
            show.error(error)
        alive = first.summary.call_one().get()
    show.note(f"the actor lives on: it still has its {alive.files:,} files")

    with show.step("Kill a process at work"):
        # Whoever spawns an actor hears of its death, and may replace it. A `Supervisor` does just that: this one keeps
        # a ranker in a process of its own. What we hold is the ranker's name; who is behind it may change.
        supervisor = this_proc().spawn("supervisor", Supervisor, [Child("ranker", Ranker, index)])
        ranker: Ranker = supervisor.child("ranker")
        victim = ranker.pid.call_one().get()
        asked_of_it = [(question, ranker.answer.call_one(question)) for question in questions]
        os.kill(victim, signal.SIGKILL)
        lost: dict[str, SupervisionError] = {}
        for question, future in asked_of_it:
            try:
                future.get()
            except SupervisionError as error:
                # It may have been answered or not, nobody can know; so it is for us to say that it can be asked again.
                lost[question] = error
        show.deaths(lost.values())
        for question in lost:
            ranker.answer.call_one(question).get()  # waits until the next ranker is up
        successor = ranker.pid.call_one().get()
        supervisor.stop().get()
    show.note(f"process {victim} was killed with {len(lost)} questions, and process {successor} has answered them")

    with show.step("Stop"):
        mesh.stop().get()
    show.note(f"{n} processes are gone")
    show.times()


def find_files() -> list[str]:
    """The source and documentation files of the standard library, largest first, which makes even shards."""
    found: list[tuple[int, str]] = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages", "__pycache__")]
        for name in names:
            if name.endswith((".py", ".txt", ".rst", ".md", ".html")):
                path = os.path.join(folder, name)
                found.append((os.path.getsize(path), path))
    return [path for _, path in sorted(found, reverse=True)]


# ---------------------------------------------------------------------------------------------------------------------
# 4. Printing. Nothing about actors below this line, but for the excerpts: each is asked of the shard that has the file.
# ---------------------------------------------------------------------------------------------------------------------


class Show:
    """Prints with colours and a live bar on a terminal, and plain lines elsewhere."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal may lack what stands in a file
        self.console = Console(highlight=False, soft_wrap=True)
        self.begun = time.perf_counter()
        self.steps: list[tuple[str, float]] = []

    def title(self, text: str) -> None:
        self.console.print(f"[bold]{text}[/]")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One numbered step; how long it took is kept for the table at the end."""
        self.console.print(f"\n[bold cyan]{len(self.steps) + 1}. {name}[/]")
        begun = time.perf_counter()
        yield
        self.steps.append((name, time.perf_counter() - begun))

    def note(self, text: str) -> None:
        self.console.print(f"   {escape(text)}")

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[Step], None]]:
        """Gives a function that takes each step of the build and shows how far all of it is."""
        done = size_bytes = shown = 0
        bar = Progress(
            TextColumn("  "),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("files, {task.fields[size]:.1f} MB"),
            console=self.console,
            disable=not self.console.is_terminal,
        )

        def advance(step: Step) -> None:
            nonlocal done, size_bytes, shown
            done, size_bytes = done + step.files, size_bytes + step.size_bytes
            bar.update(task, completed=done, size=size_bytes / 1e6)
            if bar.disable and done * 4 // total > shown:
                shown = done * 4 // total
                self.note(f"{done:,} of {total:,} files, {size_bytes / 1e6:.1f} MB")

        with bar:
            task = bar.add_task("", total=total, size=0.0)
            yield advance

    def hits(self, question: str, where: str, took_s: float, hits: Sequence[Hit], index: Index) -> None:
        """A question with its answers, and from each file the line that fits best."""
        self.console.print(f"   [bold]{escape(question)}[/]  [dim]{where}, {took_s * 1e3:.1f} ms[/]")
        home = sysconfig.get_paths()["stdlib"]
        for hit in hits:
            holder = index.slice(procs=hit.shard)
            number, line = holder.excerpt.call_one(hit.path, words_of(question)).get()
            name = f"{os.path.relpath(hit.path, home)}:{number}"
            room = max(20, self.console.width - 54) if self.console.is_terminal else 80
            self.console.print(f"     [yellow]{hit.score:5.1f}[/]  [green]{escape(name):<40}[/] {escape(line[:room])}")
        if not hits:
            self.note("  nothing found")

    def error(self, error: ActorError) -> None:
        self.console.print(f"   the caller gets [red]{type(error).__name__}[/]:")
        for line in str(error).splitlines():
            self.console.print(f"   [red]|[/] [dim]{escape(line)}[/]")

    def deaths(self, errors: Iterable[SupervisionError]) -> None:
        """One line for all calls that failed for the same reason."""
        for what in {
            f"{each.actor_name}: process {each.pid} {each.kind} by signal {each.signal}"
            for each in (error.failure for error in errors)
        }:
            self.console.print(f"   the callers get [red]{SupervisionError.__name__}[/]: [dim]{escape(what)}[/]")

    def times(self) -> None:
        """What took how long."""
        longest = max(took for _, took in self.steps)
        room = max(0, min(30, self.console.width - 42))
        line = "-" if self.console.options.ascii_only else "━"
        self.console.print("\n[bold]Times[/]")
        for name, took in self.steps:
            bar = line * round(room * took / longest)
            self.console.print(f"   {name:<25} {took:7.2f} s" + (f"  [cyan]{bar}[/]" if bar else ""))
        self.console.print(f"   [bold]{'all':<25} {time.perf_counter() - self.begun:7.2f} s[/]")


if __name__ == "__main__":
    main()
