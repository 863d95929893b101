"""Where a message goes next, sans-IO: (who I am, whom I know, envelope) -> Deliver | Forward | Bounce."""

from __future__ import annotations

from collections.abc import Container

from attrs import define

from monarch.core.envelope import Envelope


@define(frozen=True)
class Deliver:
    """It is for this process."""


@define(frozen=True)
class Forward:
    """It goes on to the process `key`, one hop older."""

    key: int


@define(frozen=True)
class Bounce:
    """It cannot go on; `reason` goes back to its sender."""

    reason: str


DELIVER = Deliver()


def route(own_key: int, known: Container[int], envelope: Envelope) -> Deliver | Forward | Bounce:
    """Decide by the head alone."""
    if envelope.dst_proc == own_key:
        return DELIVER
    if envelope.ttl <= 1:
        return Bounce("its hop limit was reached: the routes of this job form a loop")
    if envelope.dst_proc in known:
        return Forward(envelope.dst_proc)
    return Bounce("no gateway on its way knows the destination process")
