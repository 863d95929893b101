"""How long a thread looks before it sleeps."""

from __future__ import annotations

import pytest

from monarch.core.spin import Spin

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
        self.spin._short_left = self.spin._short_wanted = 0  # it is not new

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        assert timeout_s == 0
        self.looks += 1
        self.now_s += self.round_s
        return EVENT if self.now_s >= self.event_at_s else []

    def wait(self, event_in_s: float = float("inf")) -> bool:
        """Whether one wait found the event by looking."""
        self.event_at_s = self.now_s + event_in_s
        return self.spin.look(self.poll) == EVENT

    def sleep(self, for_s: float) -> bool:
        """One wait: whether it slept, for so long, and did not look."""
        if self.spin.pays():
            return False
        self.spin.slept(for_s)
        return True

    def short_sleeps(self) -> int:
        """How many there are before the next look."""
        return sum(1 for _ in iter(lambda: self.sleep(LOOK_S / 2), False))


@pytest.fixture
def world() -> World:
    return World()


def test_what_comes_soon_is_found_each_time(world: World) -> None:
    assert all(world.wait(50e-6) for _ in range(1000))


def test_a_look_ends(world: World) -> None:
    assert not world.wait(2 * LOOK_S)
    assert world.now_s == pytest.approx(1.0 + LOOK_S, abs=3 * ROUND_S)


def test_after_a_look_in_vain_one_short_sleep_makes_it_look_again(world: World) -> None:
    world.wait()
    assert world.sleep(2 * LOOK_S)
    assert world.short_sleeps() == 1


def test_what_waits_long_looks_once(world: World) -> None:
    world.wait()
    assert all(world.sleep(2 * LOOK_S) for _ in range(1000))


def test_after_more_looks_in_vain_more_sleeps_must_be_short(world: World) -> None:
    wanted = []
    for _ in range(6):
        world.wait()
        wanted.append(world.short_sleeps())
    assert wanted == [1, 2, 4, 8, 16, 16]


def test_they_must_be_short_in_a_row(world: World) -> None:
    for _ in range(2):
        world.wait()
        world.short_sleeps()
    world.wait()
    assert all(world.sleep(LOOK_S / 2) and world.sleep(2 * LOOK_S) for _ in range(100))


def test_a_find_forgives_the_looks_in_vain(world: World) -> None:
    for _ in range(5):
        world.wait()
        world.short_sleeps()
    assert world.wait(50e-6)
    world.wait()
    assert world.short_sleeps() == 1


def test_one_who_is_interrupted_while_it_looks_leaves_the_cpu_to_others(world: World) -> None:
    world.round_s = 300e-6
    slept = []
    for _ in range(8):
        assert world.wait(70e-6)
        slept.append(world.short_sleeps())
    assert slept == [8, 16, 32, 64, 128, 256, 512, 512]


def test_a_find_without_interruption_ends_that(world: World) -> None:
    world.round_s = 300e-6
    for _ in range(3):
        world.wait(70e-6)
        world.short_sleeps()
    world.round_s = ROUND_S
    assert world.wait(50e-6)
    world.round_s = 300e-6
    world.wait(70e-6)
    assert world.short_sleeps() == 8


def test_one_that_is_new_looks_after_short_sleeps_in_a_row(world: World) -> None:
    world.spin = Spin(LOOK_S, lambda: world.now_s)

    assert all(world.sleep(2 * LOOK_S) for _ in range(100))
    assert world.sleep(LOOK_S / 2)
    assert world.sleep(2 * LOOK_S)
    assert world.short_sleeps() == 3


def test_without_time_it_looks_once() -> None:
    world = World(0.0)
    world.wait()
    assert all(world.sleep(1e-6) for _ in range(100))
