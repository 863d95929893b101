"""Training that goes on when a process is killed. `monarch demo train` runs it.

Replicas of a network, each an actor in a process of its own under one supervisor, learn to read handwritten digits. A
loader hands out batches; each replica computes the gradients of its share, and all take the same averaged step. An
evaluator fetches the weights of a replica by one-sided transfer. Halfway a replica is killed with SIGKILL: the
supervisor starts another one, which fetches weights and momentum from a survivor, and the step is done again.

    pip install 'monarch-actors[examples]'
    python examples/fault_tolerant_training.py
"""

from __future__ import annotations

import math
import os
import signal
import struct
import time
import zlib
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from monarch.actor import Actor, SupervisionError, endpoint, this_host, this_proc
from monarch.config import configure
from monarch.rdma import RDMABuffer
from monarch.supervision import Child, Supervisor

SHAPES = [(64, 128), (128,), (128, 10), (10,)]
WEIGHTS = sum(math.prod(shape) for shape in SHAPES)
RATE, MOMENTUM, BATCH, HELD_OUT = 0.5, 0.9, 256, 360


def parameters(flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of one vector."""
    parts = torch.split_with_sizes(flat, [math.prod(shape) for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def outputs(flat: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    first, first_bias, second, second_bias = parameters(flat)
    return (images @ first + first_bias).relu() @ second + second_bias


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images and what they show, in random but fixed order."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(1))
    return torch.tensor(data.data / 8, dtype=torch.float32)[order], torch.tensor(data.target)[order]


class Loader(Actor):
    """Has the images that are for training."""

    def __init__(self) -> None:
        self.images, self.labels = (each[HELD_OUT:] for each in digits())

    @endpoint
    def batch(self, step: int, shares: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The batch of a step, in shares: the same, however often it is asked for."""
        chosen = torch.randint(len(self.labels), (BATCH,), generator=torch.Generator().manual_seed(step))
        return list(zip(self.images[chosen].chunk(shares), self.labels[chosen].chunk(shares), strict=True))


class Replica(Actor):
    """One copy of the network: weights and momentum, as one vector that others can read."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # the replicas share the cores
        self.state = torch.zeros(2 * WEIGHTS)
        self.weights, self.momentum = self.state[:WEIGHTS], self.state[WEIGHTS:]
        torch.manual_seed(0)
        for part in parameters(self.weights):
            if part.dim() == 2:
                part.copy_(torch.randn(part.shape) * part.shape[0] ** -0.5)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def share(self) -> RDMABuffer:
        return RDMABuffer(self.state)

    @endpoint
    async def restore(self, survivor: RDMABuffer) -> None:
        await survivor.read_into(self.state)

    @endpoint
    def gradient(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, torch.Tensor]:
        """The loss, and its gradient by weight."""
        flat = self.weights.clone().requires_grad_()
        loss = F.cross_entropy(outputs(flat, images), labels)
        (gradient,) = torch.autograd.grad(loss, flat)
        return loss.item(), gradient

    @endpoint
    def update(self, gradient: torch.Tensor) -> None:
        self.momentum.mul_(MOMENTUM).add_(gradient)
        self.weights.sub_(self.momentum, alpha=RATE * (1 - MOMENTUM))


class Evaluator(Actor):
    """Has the images that nobody trains with, and weights that it fetches."""

    def __init__(self) -> None:
        self.images, self.labels = (each[:HELD_OUT] for each in digits())
        self.state = torch.zeros(2 * WEIGHTS)

    @endpoint
    async def accuracy(self, replica: RDMABuffer) -> float:
        await replica.read_into(self.state)
        guesses = outputs(self.state[:WEIGHTS], self.images).argmax(1)
        return float((guesses == self.labels).float().mean())


def draw(losses: list[float], killed_at: int, path: Path, width: int = 640, height: int = 360) -> None:
    """The losses as a curve, with a red line where a replica was killed, as a PNG. Needs no other package."""
    rows = [bytearray(b"\xff" * (3 * width)) for _ in range(height)]

    def dot(x: int, y: int, color: bytes) -> None:
        rows[max(0, min(height - 1, y))][3 * x : 3 * x + 3] = color

    for y in range(height):
        dot(round(killed_at / (len(losses) - 1) * (width - 1)), y, b"\xd0\x30\x30")
    at = 0
    for x in range(width):
        place = x / (width - 1) * (len(losses) - 1)
        left = min(int(place), len(losses) - 2)
        loss = losses[left] + (losses[left + 1] - losses[left]) * (place - left)
        y = round((1 - loss / max(losses)) * (height - 8)) + 4
        for between in range(min(at or y, y), max(at or y, y) + 2):
            dot(x, between, b"\x20\x50\xa0")
        at = y
    raw = zlib.compress(b"".join(b"\0" + row for row in rows))

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", raw) + chunk(b"IEND", b""))


def main(replicas: int = 2, steps: int = 300, plot: str = "losses.png") -> float:
    """Train; returns the accuracy at the end."""
    begun_s = time.perf_counter()
    configure(rdma_path="shm")  # all processes are on this host
    loader = this_host().spawn_procs(name="loader").spawn("loader", Loader)
    evaluator = this_host().spawn_procs(name="evaluator").spawn("evaluator", Evaluator)
    specs = [Child(f"replica{at}", Replica) for at in range(replicas)]
    supervisor = this_proc().spawn("trainers", Supervisor, specs, max_restarts=10, within_s=60.0)
    trainers = [supervisor.child(spec) for spec in specs]

    def revive(dead: list[int]) -> float:
        """Give the successors of dead replicas what the others know. Returns how long it took, in seconds."""
        lost_s = time.perf_counter()
        alive = next(at for at in range(replicas) if at not in dead)
        for at in dead:
            state = trainers[alive].share.call_one().get(60)
            trainers[at].restore.call_one(state).get(60)  # waits for the successor
        return time.perf_counter() - lost_s

    losses: list[float] = []
    kill_at, victim = steps // 2, replicas - 1
    recovery_s = 0.0
    for step in range(steps):
        shares = loader.batch.call_one(step, replicas).get(60)
        pid = trainers[victim].pid.call_one().get(60) if step == kill_at else 0
        asked = [trainer.gradient.call_one(*share) for trainer, share in zip(trainers, shares, strict=True)]
        if pid:
            os.kill(pid, signal.SIGKILL)
            print(f"step {step:4}: replica {victim} is killed with SIGKILL", flush=True)
        dead = [at for at, answer in enumerate(asked) if isinstance(answer.exception(60), SupervisionError)]
        if dead:
            recovery_s += revive(dead)
            for at in dead:
                asked[at] = trainers[at].gradient.call_one(*shares[at])
        answers = [answer.get(60) for answer in asked]
        mean = torch.stack([gradient for _, gradient in answers]).mean(0)
        updates = [trainer.update.call_one(mean) for trainer in trainers]
        late = [at for at, update in enumerate(updates) if isinstance(update.exception(60), SupervisionError)]
        if late:
            recovery_s += revive(late)  # the others have taken this step already
        if dead or late:
            print(f"step {step:4}: its successor has the weights of a survivor, after {recovery_s:.2f} s", flush=True)
        losses.append(sum(loss for loss, _ in answers) / replicas)
        if step % (steps // 6) == 0 or step == steps - 1:
            accuracy = evaluator.accuracy.call_one(trainers[0].share.call_one().get(60)).get(60)
            print(f"step {step:4}: loss {losses[-1]:.3f}, accuracy {accuracy:.3f}", flush=True)
    draw(losses, kill_at, Path(plot))
    restarts = sum(child.restarts for child in supervisor.children.call_one().get(60))
    supervisor.stop().get(60)
    print(
        f"\n{steps} steps with {replicas} replicas in {time.perf_counter() - begun_s:.1f} s; "
        f"{restarts} restart{'' if restarts == 1 else 's'}, "
        f"{recovery_s:.2f} s to recover; accuracy {accuracy:.3f} on {HELD_OUT} images that nobody trained with; "
        f"losses in {plot}"
    )
    return float(accuracy)


if __name__ == "__main__":
    assert main() > 0.95
