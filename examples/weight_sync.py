"""A trainer changes weights, and generators in other processes follow: each fetches all layers at once, when it likes.

The trainer has two sets of layers, and writes to one while the generators read the other. A version number travels as a
message; the weights do not.

python examples/weight_sync.py
"""

from __future__ import annotations

import time

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMAAction, RDMABuffer, empty

LAYER_BYTES = [256 << 10, 1 << 20, 1 << 20, 4096]


class Trainer(Actor):
    """Has two sets of layers in memory that others can read."""

    def __init__(self) -> None:
        self.sets = [[empty(size) for size in LAYER_BYTES] for _ in range(2)]

    @endpoint
    def layers(self) -> list[list[RDMABuffer]]:
        return [[RDMABuffer(layer) for layer in layers] for layers in self.sets]

    @endpoint
    def train(self, version: int) -> None:
        """A step of training: the set that nobody reads now becomes that version."""
        for layer in self.sets[version % 2]:
            layer[:] = bytes([version]) * len(layer)


class Generator(Actor):
    """Has its own copy of the layers."""

    def __init__(self) -> None:
        self.mine = [bytearray(size) for size in LAYER_BYTES]
        self.fetches: list[RDMAAction] = []

    @endpoint
    def follow(self, sets: list[list[RDMABuffer]]) -> None:
        """Prepare a batch for each set; it can be submitted any number of times."""
        for layers in sets:
            fetch = RDMAAction()
            for target, layer in zip(self.mine, layers, strict=True):
                fetch.read_remote(target, layer)
            self.fetches.append(fetch)

    @endpoint
    async def sync(self, version: int) -> float:
        """Fetch a version; milliseconds."""
        begun = time.perf_counter()
        await self.fetches[version % 2].submit()
        took_ms = (time.perf_counter() - begun) * 1e3
        assert all(layer == bytes([version]) * len(layer) for layer in self.mine), "a mixture of versions"
        return took_ms


def main(generators: int = 4, versions: int = 10) -> None:
    trainer = this_host().spawn_procs(name="trainer").spawn("trainer", Trainer)
    procs = this_host().spawn_procs(per_host={"gpus": generators}, name="generators")
    followers = procs.spawn("generators", Generator)
    sets = trainer.layers.call_one().get()
    followers.follow.call(sets).get()

    trainer.train.call_one(1).get()
    for version in range(1, versions + 1):
        syncing = followers.sync.call(version)
        training = trainer.train.call_one(version + 1)  # meanwhile, in the other set
        slowest_ms = max(syncing.get().values())
        training.get()
        print(f"version {version}: {generators} generators have it, the slowest after {slowest_ms:.1f} ms")
    backend = sets[0][0].backend
    print(f"over {backend}: {backend.reason}")


if __name__ == "__main__":
    main()
