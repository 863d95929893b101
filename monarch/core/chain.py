"""The chain of calls that a call comes from, as it travels in its message. Sans-IO.

A chain is bytes: for each call, the oldest first, who serves it, and a text for people.
"""

from __future__ import annotations

from collections.abc import Container
from struct import Struct
from typing import Final

_LINK: Final = Struct("<QQQH")  # process, actor, number of the call that it serves; then the size of the text
_LINKS: Final = 64  # of longer chains, the end is kept
_TEXT_BYTES: Final = 500
_ACTOR: Final = Struct("<QQ")  # `may_come_from` in _compiled.c looks for it, too

ServedKey = tuple[int, int, int]
"""(process, actor, number) of a call that an actor serves. The numbers are the actor's own, from 1."""


def link(key: ServedKey, text: str) -> bytes:
    """A chain of one call, to be put behind another."""
    encoded = text.encode()[-_TEXT_BYTES:]
    return _LINK.pack(*key, len(encoded)) + encoded


def comes_from(chain: bytes, proc: int, actor: int) -> ServedKey | None:
    """The last call of a chain that this actor served; None, quickly, when there is none."""
    if _ACTOR.pack(proc, actor) not in chain:
        return None
    return next((key for key, _ in reversed(links_of(chain)) if key[:2] == (proc, actor)), None)


def links_of(chain: bytes) -> list[tuple[ServedKey, str]]:
    """The calls of a chain, with their texts: `module.Class name{'gpus': 1/2}.endpoint`."""
    links: list[tuple[ServedKey, str]] = []
    at = 0
    while at < len(chain):
        proc, actor, number, size = _LINK.unpack_from(chain, at)
        at += _LINK.size
        links.append(((proc, actor, number), chain[at : at + size].decode(errors="replace")))
        at += size
    return links


def pruned(chain: bytes, own: ServedKey, running: Container[int]) -> bytes:
    """Without what came before a call to the actor of `own` that is over, so that endless rounds do not grow it, and
    with room for one more. `running` are the numbers of the calls that the actor serves."""
    links = links_of(chain)
    begin = 0
    for position, (key, _) in enumerate(links):
        if key[:2] == own[:2] and key[2] not in running:
            begin = position + 1
    kept = links[max(begin, len(links) + 1 - _LINKS) :]
    return b"".join(link(key, text) for key, text in kept)
