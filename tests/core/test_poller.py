"""How long a thread looks before it sleeps."""

from __future__ import annotations

import pytest

from monarch.core.poller import Spin

LOOK_S = 100e-6
ROUND_S = 2e-6
EVENT = [(3, 1)]


class World:
    """A clock that each look moves on, and an event at some time from now."""

    def __init__(self, spin_s: float = LOOK_S) -> None:
        self.now_s = 1.0
        self.looks = 0
        self.event_at_s = float("inf")
        self.round_s = ROUND_S
        self.spin = Spin(spin_s, lambda: self.now_s)

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        assert timeout_s == 0
        self.looks += 1
        self.now_s += self.round_s
        return EVENT if self.now_s >= self.event_at_s else []

    def wait(self, event_in_s: float = float("inf")) -> bool:
        """Whether one wait found the event by looking."""
        self.event_at_s = self.now_s + event_in_s
        return self.spin.look(self.poll) == EVENT

    def waits_until_it_looks(self) -> int:
        looks, waits = self.looks, 0
        while self.looks == looks:
            self.wait()
            waits += 1
        return waits


@pytest.fixture
def world() -> World:
    return World()


def test_what_comes_soon_is_found_each_time(world: World) -> None:
    assert all(world.wait(50e-6) for _ in range(1000))


def test_a_look_ends(world: World) -> None:
    assert not world.wait(2 * LOOK_S)
    assert world.now_s == pytest.approx(1.0 + LOOK_S, abs=3 * ROUND_S)


def test_after_looks_in_vain_ever_more_waits_sleep_at_once(world: World) -> None:
    assert [world.waits_until_it_looks() for _ in range(9)] == [1, 9, 17, 33, 65, 129, 257, 513, 513]


def test_a_find_makes_the_next_waits_look_again(world: World) -> None:
    for _ in range(5):
        world.waits_until_it_looks()
    while not world.wait(50e-6):
        pass
    assert world.wait(50e-6)
    world.wait()
    assert world.waits_until_it_looks() == 9


def test_one_who_is_interrupted_while_it_looks_leaves_the_cpu_to_others(world: World) -> None:
    world.round_s = 300e-6
    assert world.wait(70e-6)
    assert world.waits_until_it_looks() == 9


def test_without_time_it_looks_once_and_then_hardly_ever() -> None:
    world = World(0.0)
    for _ in range(10_000):
        world.wait()
    assert world.looks < 40
