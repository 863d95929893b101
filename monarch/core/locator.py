"""Where processes are: asked of those that keep them, and told of those that this process keeps.

Whoever is asked answers once the process is up, or gone. Its name may be ahead of its launch, so what is for a process
that is still to be launched waits here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch.core.address import best
from monarch.core.envelope import Envelope
from monarch.core.ids import ProcId
from monarch.core.monitor import Down, PeerGone
from monarch.core.peer import Peer, State

if TYPE_CHECKING:
    from monarch.core.proc import Proc


class Locator:
    """Of one process.

    Attributes:
        openings: where the processes that this one keeps listen too, once others ask for them who cannot reach them
            otherwise: (URL, secret).
        unlaunched: by key of a process that this one is to launch, what waits for that.
    """

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._lock = threading.Lock()
        self.openings: list[tuple[str, bytes]] = []
        self._opened: list[tuple[str, bytes]] = []
        self.unlaunched: dict[int, list[Callable[[], object]]] = {}
        proc.handlers["locate"] = self._on_locate
        proc.handlers["join"] = self._on_join
        proc.handlers["open"] = self._on_open

    def launch(self, proc: ProcId) -> None:
        """A process that this one keeps is about to start: what came too early for it goes on, in its order."""
        self._proc.gateway.peers.of(proc)
        with self._lock:
            is_wanted = proc.key in self.unlaunched
        if is_wanted:
            self._proc.gateway.call_later(0.0, lambda: self._launched(proc.key))

    def _launched(self, key: int) -> None:
        with self._lock:
            waiting = self.unlaunched.pop(key, [])
        for then in waiting:
            then()

    def when_known(self, key: int, then: Callable[[], object]) -> None:
        """Call `then` once a process that this one keeps is launched, or gone; at once if it is. Who names it may be
        ahead of who has it launched: by `unborn_limit_s` at most, after which `then` finds no such peer."""
        with self._lock:
            waiting = self.unlaunched.get(key)
            if waiting is not None:
                waiting.append(then)
                return
            if key not in self._proc.gateway.peers and self._proc.monitors.gone((key, 0)) is None:
                self.unlaunched[key] = [then]
                self._proc.gateway.call_later(self._proc.unborn_limit_s, lambda: self._launched(key))
                return
        then()

    def close(self) -> None:
        """This process has closed its links: nothing waits for a launch any more."""
        for key in list(self.unlaunched):
            self._launched(key)

    # ---- where they listen

    def locate(self, proc: ProcId, found: Callable[[str | Down], None]) -> None:
        """Ask the keeper of `proc` where it listens, or our own, who knows more addresses than we do. The answer comes
        when it is up, or gone, or the keeper is."""
        keeper = proc.keeper if proc.keeper is not None else self._proc.proc_id.keeper
        if keeper is None or keeper.key == proc.key:
            found(Down("unreachable", f"process {proc.uid} listens nowhere where this process could reach it"))
            return
        asked = self._proc.request(keeper, "locate", proc, list(self._proc.gateway.ways.secrets))

        def answered() -> None:
            error = asked.exception(0)
            if error is None:
                found(asked.get(0)[1])
            elif isinstance(error, PeerGone):
                found(error.down)
            else:
                found(self._proc.failed(f"no answer from its host: {error}", error))

        asked._on_done(answered)

    def _on_locate(self, envelope: Envelope, proc: ProcId, domains: list[str]) -> None:
        """Another process, which is in these domains, asks for one that we know: answer once it is up, or gone."""
        if self._proc.gateway.peers.keeps(proc):
            self.when_known(proc.key, lambda: self._tell_where(envelope, proc.key, domains))
        else:
            self._tell_where(envelope, proc.key, domains)

    def _tell_where(self, envelope: Envelope, key: int, domains: list[str]) -> None:
        peer = self._proc.gateway.peers.get(key)
        if peer is None:
            unknown = Down("unreachable", "its host does not know this process")
            self._proc.answer(envelope, "gone", self._proc.monitors.gone((key, 0)) or unknown)
            return

        def settled() -> None:
            if peer.down is not None:
                self._proc.answer(envelope, "gone", peer.down)
            elif peer.state is State.UP:
                if self._proc.gateway.peers.keeps(peer.proc) and self.openings and best(peer.address, domains) is None:
                    self._have_opened(envelope, peer)
                else:
                    self._proc.answer(envelope, "at", peer.address)

        self._proc.gateway.peers.when_settled(peer, settled)

    def _have_opened(self, envelope: Envelope, peer: Peer) -> None:
        """Answer with the places of a process once it listens at our openings."""
        asked = self._proc.request(peer.proc, "open", self.openings)

        def answered() -> None:
            if asked.exception(0) is None:
                (peer.address,) = asked.get(0)
            self._proc.answer(envelope, "at", peer.address)

        asked._on_done(answered)

    def _on_open(self, envelope: Envelope, openings: list[tuple[str, bytes]]) -> None:
        for opening in openings:
            if opening not in self._opened:
                self._opened.append(opening)
                self._proc.gateway.open(*opening)
        self._proc.answer(envelope, self._proc.gateway.address)

    def _on_join(self, envelope: Envelope, secrets: dict[str, bytes]) -> None:
        """Our keeper is in these domains, and so are we."""
        self._proc.gateway.ways.secrets.update(secrets)
