"""The dining philosophers, as actors: who may eat is decided by one actor, so nobody needs a lock.

    python examples/dining_philosophers.py

Five philosophers sit round a table with a chopstick between each two. Each needs both chopsticks beside her to eat. If
all took the left one first, all would wait for the right one for ever. Here they ask a `Waiter`, who hands out both or
none. The waiter never blocks: she keeps a request that cannot be met yet, together with the port that answers it.
"""

from __future__ import annotations

import random
import time
from collections import Counter

from monarch.actor import Actor, Port, current_rank, current_size, endpoint, get_or_spawn_controller, this_host


class Waiter(Actor):
    """Owns the chopsticks; number i lies between the philosophers i and i + 1."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.free = set(range(seats))
        self.waiting: list[tuple[int, Port[None]]] = []
        self.meals: Counter[int] = Counter()

    def _pair(self, seat: int) -> set[int]:
        return {seat, (seat - 1) % self.seats}

    @endpoint(explicit_response_port=True)
    def take(self, reply: Port[None], seat: int) -> None:
        """Answer when both chopsticks are there. With an explicit port, that may be long after the method returned."""
        self.waiting.append((seat, reply))
        self._serve()

    @endpoint
    def put_back(self, seat: int) -> None:
        self.free |= self._pair(seat)
        self.meals[seat] += 1
        self._serve()

    def _serve(self) -> None:
        """Serve whoever can be served, in the order in which they asked."""
        for request in list(self.waiting):
            seat, reply = request
            if self._pair(seat) <= self.free:
                self.free -= self._pair(seat)
                self.waiting.remove(request)
                reply.send(None)

    @endpoint
    def bill(self) -> dict[int, int]:
        """Meals per seat."""
        return dict(self.meals)


class Philosopher(Actor):
    """Thinks, is hungry, eats; one in every process of the mesh."""

    def __init__(self) -> None:
        self.seat = current_rank().rank
        # A controller is an actor that exists once for the whole program: the first who asks for it spawns it.
        self.waiter = get_or_spawn_controller("waiter", Waiter, current_size()["seat"]).get()
        self.dice = random.Random(self.seat)

    @endpoint
    def dine(self, courses: int) -> float:
        """Eat `courses` times; returns the seconds spent waiting for chopsticks."""
        waited_s = 0.0
        for _ in range(courses):
            time.sleep(self.dice.uniform(0, 0.02))  # think
            hungry_s = time.perf_counter()
            self.waiter.take.call_one(self.seat).get(timeout=60)
            waited_s += time.perf_counter() - hungry_s
            time.sleep(self.dice.uniform(0, 0.02))  # eat
            self.waiter.put_back.call_one(self.seat).get()
        return waited_s


def main(seats: int = 5, courses: int = 10) -> None:
    table = this_host().spawn_procs(per_host={"seat": seats})
    philosophers = table.spawn("philosopher", Philosopher)

    waited = philosophers.dine.call(courses).get()
    bill = get_or_spawn_controller("waiter", Waiter, seats).get().bill.call_one().get()
    for point, waited_s in waited.items():
        seat = point["seat"]
        print(f"philosopher {seat} ate {bill[seat]} times and waited {waited_s:.2f} s for chopsticks")
    print(f"{sum(bill.values())} meals served")

    table.stop().get()


if __name__ == "__main__":
    main()
