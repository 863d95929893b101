"""Where a message goes next, as a table."""

from __future__ import annotations

import pytest

from monarch.core.envelope import MESSAGE_TTL, Envelope, Kind
from monarch.core.router import Bounce, Deliver, Forward, route

_OWN, _KNOWN, _UNKNOWN = 1, 2, 3
_LOOP = Bounce("its hop limit was reached: the routes of this job form a loop")
_NOBODY = Bounce("no gateway on its way knows the destination process")


@pytest.mark.parametrize(
    ("destination", "ttl", "step"),
    [
        (_OWN, MESSAGE_TTL, Deliver()),
        (_OWN, 1, Deliver()),
        (_OWN, 0, Deliver()),
        (_KNOWN, MESSAGE_TTL, Forward(_KNOWN)),
        (_KNOWN, 2, Forward(_KNOWN)),
        (_KNOWN, 1, _LOOP),
        (_KNOWN, 0, _LOOP),
        (_UNKNOWN, MESSAGE_TTL, _NOBODY),
        (_UNKNOWN, 1, _LOOP),
    ],
)
@pytest.mark.parametrize("kind", range(Kind.CALL, Kind.TAKEN + 1))
def test_a_message_is_delivered_forwarded_or_bounced_by_its_head_alone(
    kind: int, destination: int, ttl: int, step: object
) -> None:
    envelope = Envelope(kind, destination, 0, 0, 9, 9, [], ttl=ttl)

    assert route(_OWN, {_KNOWN: object()}, envelope) == step
    assert envelope.ttl == ttl  # it only decides
