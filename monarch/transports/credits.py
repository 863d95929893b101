"""How many messages a sender may have on its way, sans-IO: one for each receive that the other side has posted.

A sender owns as many credits as the other side has slots, less `RESERVED`, which are left for messages that only hand
credits back. A receiver hands credits back in whatever it sends anyway, and in a message of its own once it owes half
of a ring. It can owe that again only after the sender has taken the last ones in; so never more than the reserved slots
are needed, and no message ever meets a receiver that is not ready.
"""

from __future__ import annotations

from typing import Final

from attrs import define, field

from monarch.errors import RemoteProtocolError

RESERVED: Final = 2


@define
class Credits:
    """Both directions of one link, with rings of `depth` slots on either side.

    Attributes:
        available: how many messages may be sent now.
        owed: how many slots were posted again, of which the other side has not heard.
    """

    depth: int
    available: int = field(init=False)
    owed: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.available = self.depth - RESERVED

    def spend(self) -> int:
        """A message goes out; returns what it hands back with it."""
        assert self.available > 0, "a message without a credit"
        self.available -= 1
        owed, self.owed = self.owed, 0
        return owed

    def hand_back(self) -> int:
        """A message goes out that needs no credit; returns what it hands back."""
        owed, self.owed = self.owed, 0
        return owed

    def granted(self, count: int) -> None:
        """The other side hands credits back.

        Raises:
            RemoteProtocolError: more than it ever got.
        """
        if self.available + count > self.depth - RESERVED:
            raise RemoteProtocolError(f"the peer hands back {count} credits, and {self.available} are there already")
        self.available += count

    @property
    def is_deep_in_debt(self) -> bool:
        """Whether it is time for a message that only hands credits back."""
        return self.owed >= self.depth // 2
