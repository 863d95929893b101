"""Workers learn together through the memory of one server: they read the weights, and write their gradients, without
the server's help. Only "my gradient is there" is a message.

python examples/parameter_server.py
"""

from __future__ import annotations

import random

from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.rdma import RDMABuffer, empty

WEIGHTS = 8
DOUBLES = 8 * WEIGHTS  # their size in bytes


class Server(Actor):
    """Has the weights, and room for the gradient of each worker."""

    def __init__(self, workers: int, rate: float) -> None:
        self.rate = rate
        # Memory from `empty` is mapped by other processes of this host. Any other memory would do.
        self.weights = empty(DOUBLES).cast("d")
        self.gradients = [empty(DOUBLES).cast("d") for _ in range(workers)]

    @endpoint
    def buffers(self, worker: int) -> tuple[RDMABuffer, RDMABuffer]:
        """References to the weights and to one gradient. They are small; the memory stays here."""
        return RDMABuffer(self.weights), RDMABuffer(self.gradients[worker])

    @endpoint
    def step(self, worker: int) -> None:
        """The gradient of that worker has been written: go down along it."""
        for at, slope in enumerate(self.gradients[worker]):
            self.weights[at] -= self.rate * slope


class Worker(Actor):
    """Knows some points of a plane, and looks for the plane."""

    def __init__(self, server: Server, plane: list[float], points: int) -> None:
        self.rank = current_rank().rank
        self.server = server
        draw = random.Random(self.rank)
        self.points = [[draw.uniform(-1, 1) for _ in plane] for _ in range(points)]
        self.heights = [sum(p * x for p, x in zip(plane, point, strict=True)) for point in self.points]
        self.weights = memoryview(bytearray(DOUBLES)).cast("d")
        self.gradient = memoryview(bytearray(DOUBLES)).cast("d")

    @endpoint
    async def learn(self, steps: int) -> float:
        """The error that is left after some steps."""
        weights, gradient = await self.server.buffers.call_one(self.rank)
        left = 0.0
        for _ in range(steps):
            await weights.read_into(self.weights)
            left = self.look()
            await gradient.write_from(self.gradient)
            await self.server.step.call_one(self.rank)
        return left

    def look(self) -> float:
        """Fill the gradient; returns the mean square error."""
        slopes, total = [0.0] * WEIGHTS, 0.0
        for point, height in zip(self.points, self.heights, strict=True):
            error = sum(w * x for w, x in zip(self.weights, point, strict=True)) - height
            total += error * error
            for at, x in enumerate(point):
                slopes[at] += 2 * error * x / len(self.points)
        for at, slope in enumerate(slopes):
            self.gradient[at] = slope
        return total / len(self.points)


def main(workers: int = 3, steps: int = 60) -> None:
    plane = [random.Random(99 + at).uniform(-2, 2) for at in range(WEIGHTS)]
    server = this_host().spawn_procs(name="server").spawn("server", Server, workers, 0.15)
    procs = this_host().spawn_procs(per_host={"workers": workers})
    learners = procs.spawn("workers", Worker, server, plane, 50)

    errors = learners.learn.call(steps).get(timeout=120)
    for point, error in errors.items():
        print(f"worker {point['workers']}: mean square error {error:.6f}")
    weights, _ = server.buffers.call_one(0).get()
    found = memoryview(bytearray(DOUBLES)).cast("d")
    weights.read_into(found).get()
    print("looked for", [round(p, 2) for p in plane])
    print("found     ", [round(w, 2) for w in found])
    print(f"over {weights.backend}: {weights.backend.reason}")
    assert max(abs(p - w) for p, w in zip(plane, found, strict=True)) < 0.05


if __name__ == "__main__":
    main()
