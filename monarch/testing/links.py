"""Faults on the links of a running mesh over `inproc`.

A link is taken by its direction: what one process sends to another. When a link was cut, the processes make a new one,
which is whole; take it again to disturb that.
"""

from __future__ import annotations

import threading
import time

from monarch.core.peer import Peer, State
from monarch.core.proc import Proc
from monarch.testing.events import LIMIT_S
from monarch.transports.faults import Faults
from monarch.transports.inproc import InprocLink


class LinkFaults(Faults):
    """What can go wrong with what one process sends to another: `hold`, `release`, `slow`, `reorder`, `cut`.

    Also the way to wait for the runtime's answer to a cut: `wait_until_replaced`.
    """

    def __init__(self, peer: Peer, link: InprocLink, seed: int = 0) -> None:
        super().__init__(link, seed)
        self._peer = peer

    def wait_until_replaced(self, timeout_s: float = LIMIT_S) -> None:
        """Wait until another link has taken the place of this one.

        Raises:
            TimeoutError: none has within `timeout_s`.
        """
        replaced = threading.Event()
        peer = self._peer
        with peer.lock:
            if peer.link is not None and peer.link is not self._link:
                return
            peer.waiting_for_state.append(replaced.set)
        if not replaced.wait(timeout_s) or peer.state is State.GONE:
            raise TimeoutError(f"no new link to {peer.proc.uid} within {timeout_s:g} s; it is {peer.state.value}")


def faults_between(sender: Proc, receiver: Proc, seed: int = 0, timeout_s: float = LIMIT_S) -> LinkFaults:
    """Faults on what `sender` sends to `receiver`. Waits until there is a link between them.

    Raises:
        LookupError: the receiver is gone.
        TypeError: the link is not one within this process.
        TimeoutError: there is none within `timeout_s`.
    """
    peer = sender.gateway.peers.of(receiver.proc_id)
    deadline_s = time.monotonic() + timeout_s
    while (link := peer.link) is None:
        if peer.down is not None:
            raise LookupError(f"process {receiver.proc_id.uid} is gone: {peer.down}")
        up = threading.Event()
        sender.gateway.peers.when_settled(peer, up.set)
        if not up.wait(deadline_s - time.monotonic()):
            raise TimeoutError(
                f"no link from {sender.proc_id.uid} to {receiver.proc_id.uid} within {timeout_s:g} s; it is made when "
                "the first message is sent"
            )
    if not isinstance(link, InprocLink):
        raise TypeError(f"{link!r} leads out of this process; faults need a mesh over inproc")
    return LinkFaults(peer, link, seed)
