"""The chain of calls that led to a call: what is in it, and that it does not grow for ever."""

from __future__ import annotations

import itertools
from typing import Any

from monarch.core.chain import comes_from, links_of
from monarch.core.envelope import Envelope, Kind
from monarch.core.serving import Served


class FakeProc:
    def __init__(self, key: int) -> None:
        self.key = key


class FakeActor:
    """As much of an Instance as a Served looks at."""

    def __init__(self, proc: int, number: int) -> None:
        self.proc_runtime = FakeProc(proc)
        self.actor_id = self
        self.number = number
        self.member = f"actor{number}"
        self.serving: list[Served] = []
        self._numbers = itertools.count(1)

    def next_served(self) -> int:
        return next(self._numbers)

    def serve(self, chain: bytes = b"", reply_port: int = 9, exclusive: bool = True) -> Served:
        call = Envelope(Kind.CALL, self.proc_runtime.key, self.number, 0, 1, 1, [], reply_port=reply_port, chain=chain)
        fake: Any = self
        served = Served(fake, None, "go", call, exclusive)
        self.serving.append(served)
        return served


def texts(chain: bytes) -> list[str]:
    return [text for _, text in links_of(chain)]


def test_a_chain_has_the_calls_in_order_with_their_texts() -> None:
    a, b = FakeActor(2**64 - 1, 5), FakeActor(7, 6)
    first = a.serve()
    second = b.serve(first.chain())

    assert texts(second.chain()) == ["actor5.go", "actor6.go"]
    assert [key for key, _ in links_of(second.chain())] == [(2**64 - 1, 5, 1), (7, 6, 1)]


def test_where_a_call_comes_from_is_the_last_call_that_the_actor_served() -> None:
    a, b = FakeActor(1, 5), FakeActor(1, 6)
    first = a.serve()
    last = a.serve(b.serve(first.chain()).chain(), exclusive=False)

    assert comes_from(last.chain(), 1, 5) == last.key == (1, 5, 2)
    assert comes_from(first.chain(), 1, 6) is None and comes_from(b"", 1, 5) is None


def test_what_came_before_a_call_to_this_actor_that_is_over_is_cut_off() -> None:
    a, b = FakeActor(1, 5), FakeActor(1, 6)
    chain = b""
    for _ in range(50):  # they hand it to each other, and wait for nothing
        for actor in (a, b):
            served = actor.serve(chain)
            chain = served.chain()
            actor.serving.remove(served)

    assert texts(chain) == ["actor5.go", "actor6.go"]


def test_concurrent_calls_that_go_on_stay_in_the_chain() -> None:
    a = FakeActor(1, 5)
    chain = b""
    for _ in range(3):
        chain = a.serve(chain, exclusive=False).chain()

    assert len(links_of(chain)) == 3


def test_a_very_long_name_is_cut() -> None:
    a = FakeActor(1, 5)
    a.member = "ü" * 100_000

    ((_, text),) = links_of(a.serve().chain())
    assert len(text) <= 500 and text.endswith("ü.go")


def test_the_oldest_of_a_very_long_chain_are_dropped() -> None:
    chain = b""
    for number in range(200):
        chain = FakeActor(1, number).serve(chain).chain()

    assert len(links_of(chain)) == 64 and texts(chain)[-1] == "actor199.go"
