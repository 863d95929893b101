"""How a process takes leave of others: what was sent arrives, each is told that this is the end, then links close."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from monarch.core.driver import Driver, Signal
from monarch.core.peer import Peer
from monarch.core.protocol import FrameType
from monarch.transports.base import Link

_LIMIT_S: Final = 1.0
_LEAST_S: Final = 0.05
_AGAIN_S: Final = 0.02
"""Not all that is waited for is told of: that a link has broken is not."""


def settle(
    peers: Iterable[Peer],
    driver: Driver,
    call_later: Callable[[float, Callable[[], None]], object],
    deadline_s: float,
) -> None:
    """Say goodbye to all, and wait until they have what was sent to them."""
    signal = Signal()
    told: set[Link] = set()

    def settled() -> bool:
        left = False
        signal.clear()
        for peer in peers:
            with peer.lock:
                peer.hear_of_room(signal.notify)  # of acknowledgements
            link = peer.link
            if link is None:
                left = left or bool(peer.session.unacked and peer.dialing is not None and not peer.said_goodbye)
                continue
            if link not in told:
                told.add(link)
                peer.say(FrameType.GOODBYE)
            left = left or bool(peer.session.unacked or peer.outbox)
        return not left

    while time.monotonic() < deadline_s and not settled():
        call_later(_AGAIN_S, signal.notify)
        driver.wait(signal, deadline_s - time.monotonic())


def part(peer: Peer, deadline_s: float | None) -> None:
    """Close the link to `peer` (at once, without a word, where there is no deadline), and let go who waits for it."""
    with peer.lock:
        link = peer.drop_link()
        waiting = peer.waiters()
    if link is not None and not link.blocked and deadline_s is not None:
        link.close(min(max(deadline_s - time.monotonic(), _LEAST_S), _LIMIT_S))  # an abort could overtake the goodbye
    for notify in waiting:
        notify()
