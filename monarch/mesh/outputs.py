"""Which processes of a host have their output forwarded, and which lines of other hosts are shown here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from attrs import evolve

from monarch.launch.launcher import Exit
from monarch.launch.wire import explain
from monarch.log import get_logger
from monarch.mesh.forwarding import Forwarder, Pipes
from monarch.mesh.lines import Origin, Parcel

log = get_logger("monarch.output")

_LAST_LINES_S: Final = 1.0


class Outputs:
    """By process. Its forwarder is made at first use, for the settings may change until then. Thread-safe."""

    def __init__(self, make: Callable[[], Forwarder]) -> None:
        self._make = make
        self._made: Forwarder | None = None
        self._lock = threading.Lock()
        self._pipes: dict[int, Pipes] = {}

    def _forwarder(self) -> Forwarder:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def open(self, key: int, origin: Origin) -> tuple[int, int] | None:
        """Where a new process is to write; whoever starts it owns the descriptors. None: nothing can be forwarded."""
        try:
            pipes = self._pipes[key] = self._forwarder().open(origin, key)
        except OSError as error:
            reason = explain(error, "cannot make pipes")
            log.warning("output.not_forwarded", proc=f"{origin.name}[{origin.rank}]", reason=reason)
            return None
        return pipes.write_ends

    def ended(self, key: int, report: Callable[[Exit], None], exit: Exit) -> None:
        """What a process has printed comes before the `report` of its end, and its last lines are part of that."""
        pipes = self._pipes.pop(key, None)
        if pipes is None:
            report(exit)
            return
        tail = pipes.source.tail
        self._forwarder().finish(pipes, lambda: report(evolve(exit, stderr_tail=tail.text() or exit.stderr_tail)))

    def forwarded(self, keys: Sequence[int], then: Callable[[list[int]], None]) -> None:
        """Call `then` with those of these processes of this host whose output is forwarded, once what they have printed
        by now is shown: what is said of their lines next is for later ones."""
        found = [key for key in keys if key in self._pipes]
        if found:
            self._forwarder().settle(lambda: then(found))
        else:
            then(found)

    def configure(self, origins: Mapping[int, Origin], show: bool, window_s: float | None) -> None:
        """How the lines of these processes are shown from now on, whatever host they are on."""
        display = self._forwarder().display
        ours = {key: pipes.source for key, pipes in self._pipes.items()}
        sources = [ours.get(key) or display.guest(key, origin) for key, origin in origins.items()]
        display.configure(sources, show=show, window_s=window_s)

    def receive(self, parcels: Sequence[Parcel], then: Callable[[], None]) -> None:
        """Show lines of processes of other hosts, then call `then`."""
        self._forwarder().display.receive(parcels, then)

    def forget(self, key: int) -> None:
        """A process is gone, of whatever host."""
        if self._made is not None:
            self._made.display.forget(key)

    def close(self) -> None:
        """Show what is left."""
        if self._made is not None:
            self._made.close(_LAST_LINES_S)
