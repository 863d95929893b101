"""Commands on the hosts of a job: run by an actor in each process, their output brought here as it comes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from monarch.core.future import Future
from monarch.mesh.actor import Actor
from monarch.mesh.context import current_rank
from monarch.mesh.endpoint import endpoint
from monarch.mesh.host_mesh import HostMesh
from monarch.mesh.port import Channel, Port
from monarch.mesh.shape import Point

Command = str | Sequence[str]
"""A line for the shell, or a program and its arguments."""

Chunk = tuple[int, int, bytes]
"""(rank, 1 for the output or 2 for the errors, what was printed); with no bytes: that stream of that rank is over."""

_CHUNK_BYTES = 64 << 10


class _Runner(Actor):
    @endpoint
    def run(
        self, command: Command, env: Mapping[str, str], workdir: str | None, place: Point | None, output: Port[Chunk]
    ) -> int:
        """The status of the command, as a shell would tell it; 127 where there is no such program. `place` is where the
        process is in its mesh, if it was asked for alone."""
        point = current_rank()
        variables = {**os.environ, **_variables(place or point), **env}
        try:
            process = subprocess.Popen(
                command if isinstance(command, str) else list(command),
                shell=isinstance(command, str),
                env=variables,
                cwd=workdir,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            output.send((point.rank, 2, f"{error}\n".encode()))
            for stream in (1, 2):
                output.send((point.rank, stream, b""))
            return 127
        assert process.stdout is not None and process.stderr is not None
        errors = threading.Thread(
            target=_pass_on, args=(process.stderr, lambda data: output.send((point.rank, 2, data)))
        )
        errors.start()
        _pass_on(process.stdout, lambda data: output.send((point.rank, 1, data)))
        errors.join()
        status = process.wait()
        return status if status >= 0 else 128 - status


def _variables(point: Point) -> dict[str, str]:
    """Where a command runs, for the command: MONARCH_RANK_gpus=3, MONARCH_SIZE_gpus=8."""
    ranks = {f"MONARCH_RANK_{label}": str(at) for label, at in point.items()}
    return ranks | {f"MONARCH_SIZE_{label}": str(size) for label, size in point.extent.items()}


def _pass_on(pipe: IO[bytes], send: Callable[[bytes], None]) -> None:
    """All that comes, and no bytes at the end."""
    with pipe:
        while data := os.read(pipe.fileno(), _CHUNK_BYTES):
            send(data)
    send(b"")


def exec_command(
    host_mesh: HostMesh,
    cmd: Command,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    rank: int | None = None,
    point: Mapping[str, int] | None = None,
    per_host: Mapping[str, int] | None = None,
) -> Future[int]:
    """Run a command in processes of these hosts; the future has the largest of their statuses.

    Args:
        cmd: a line for the shell, or a program and its arguments.
        env: variables on top of those of the workers. Each command also has `MONARCH_RANK_<dim>` and
            `MONARCH_SIZE_<dim>`.
        workdir: where it runs; the workers' directory by default.
        output_dir: a directory for files `RANK.out` and `RANK.err`; else what is printed is printed here.
        rank, point: run it in this process alone.
        per_host: label → number of processes on each host.

    Raises:
        ValueError: there is no such rank or point.
    """
    procs = host_mesh.spawn_procs(per_host, name="exec")
    if rank is not None:
        point = dict(Point(rank, procs.extent))
    chosen = procs if point is None else procs.slice(**point)
    place = next((each for each in procs.extent.points() if dict(each) == point), None)
    runners: Any = chosen.spawn("exec", _Runner)
    port, receiver = Channel[Chunk].open()
    statuses = runners.run.call(cmd, dict(env or {}), workdir, place, port)
    future: Future[int] = Future._pending(None, lambda: "a command on the hosts of a job")

    def collect() -> None:
        try:
            _write(receiver, statuses, len(chosen), output_dir)
            status = max(statuses.get().values())
            procs.stop().get()
        except BaseException as error:
            future._fail(error)
        else:
            future._complete(lambda: status)

    threading.Thread(target=collect, name="monarch-exec", daemon=True).start()
    return future


def _write(receiver: Any, statuses: Future[Any], count: int, folder: str | os.PathLike[str] | None) -> None:
    """What the commands print goes here or into files, until all their streams are over, or one of them is lost."""
    left = {(rank, stream) for rank in range(count) for stream in (1, 2)}
    files: dict[tuple[int, int], IO[bytes]] = {}
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for rank, stream in left:
            files[rank, stream] = (Path(folder) / f"{rank}.{'out' if stream == 1 else 'err'}").open("wb")
    try:
        while left:
            try:
                rank, stream, data = receiver.recv().get(timeout=1.0)
            except TimeoutError:
                if statuses.exception(0) is None or isinstance(statuses.exception(0), TimeoutError):
                    continue
                return
            if not data:
                left.discard((rank, stream))
                continue
            target = files.get((rank, stream)) or (sys.stdout if stream == 1 else sys.stderr).buffer
            target.write(data)
            target.flush()
    finally:
        for file in files.values():
            file.close()
