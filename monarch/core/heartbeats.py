"""Whether other hosts are still there, asked of those processes on them that are never busy.

The agent of a host runs no code of users, so it answers at once, and its silence says that the host, or the way to it,
is gone. Nobody else is asked: the interpreter of a process may be held for a minute by a computation. Beats are counted
rather than timed, so that a process which was held itself looks at what has arrived before it judges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from monarch.core.monitor import Down
from monarch.core.peer import Peer, State
from monarch.core.protocol import FrameType

_BEATS: Final = 5
"""An agent that has left so many unanswered is gone, that is after one to 1.2 times the limit."""


class Heartbeats:
    """See the module. All methods run on the driving thread.

    Args:
        limit_s: how long a host may be silent.
        call_later: calls back on the driving thread.
        give_up: hears of those that were silent for so long.
    """

    def __init__(
        self,
        limit_s: float,
        call_later: Callable[[float, Callable[[], None]], object],
        give_up: Callable[[Peer, Down], None],
    ) -> None:
        self._limit_s, self._call_later, self._give_up = limit_s, call_later, give_up
        self._missed: dict[Peer, int] = {}

    def watch(self, peer: Peer) -> None:
        """Ask `peer`, which is up, from now on."""
        if not self._missed:
            self._call_later(self._limit_s / _BEATS, self._beat)
        self._missed[peer] = 0

    def _beat(self) -> None:
        for peer, missed in list(self._missed.items()):
            if peer.down is not None:
                del self._missed[peer]
                continue
            missed = self._missed[peer] = 0 if peer.was_heard() else missed + 1
            if missed >= _BEATS:
                del self._missed[peer]
                where = f" on {peer.host}" if peer.host else ""
                text = f"nothing was heard from {peer.title}{where} for {self._limit_s:g} s (setting host_timeout)"
                self._give_up(peer, Down("unreachable", text, peer.pid, peer.host))
            elif peer.state is State.UP:
                peer.say(FrameType.HEARTBEAT)
        if self._missed:
            self._call_later(self._limit_s / _BEATS, self._beat)
