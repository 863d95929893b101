"""Data, tensor and pipeline parallel training, and all three together, in one program.

A small network learns to read handwritten digits. It runs on a mesh {"dp", "pp", "tp"}:

- along "dp" each process has a part of every batch, and gradients are averaged as soon as each is there, while the
  workers go on with the backward pass;
- along "pp" each stage has some of the blocks; micro-batches go through them one forward, one backward (1F1B);
- along "tp" each process has some of the hidden units of every block.

One controller, this process, writes down what all of them do, in ordinary torch. Beside it the same network is trained
in this process alone, and both must have the same losses.

    pip install 'monarch-actors[examples]'
    python examples/parallel_training.py --dp 2 --pp 2 --tp 1  # all together, with tp 2 on eight processes
    python examples/parallel_training.py --dp 4 --pp 1         # or one at a time
    python examples/parallel_training.py --dp 1 --pp 4
    python examples/parallel_training.py --dp 1 --pp 1 --tp 2
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from attrs import define
from sklearn.datasets import load_digits
from torch.nn import functional as F

from monarch import fetch_shard, grad_function, grad_generator, remote
from monarch.actor import ProcMesh, this_host

PIXELS, HIDDEN, CLASSES, BLOCKS = 64, 96, 10, 4
BATCH, MICRO_BATCHES, RATE = 128, 4, 0.1
SPLIT = {"in": 1, "bias": 0, "out": 0}
"""The dimension in which "tp" splits a weight: that of the hidden units. All have the whole of "head"."""


def initial_weights() -> list[dict[str, torch.Tensor]]:
    """Of each block, which computes `x + relu(x @ in + bias) @ out`; the last one has the head, too."""
    torch.manual_seed(0)
    blocks = [
        {
            "in": torch.randn(PIXELS, HIDDEN) * PIXELS**-0.5,
            "bias": torch.zeros(HIDDEN),
            "out": torch.randn(HIDDEN, PIXELS) * 0.3 * HIDDEN**-0.5,
        }
        for _ in range(BLOCKS)
    ]
    blocks[-1]["head"] = torch.randn(PIXELS, CLASSES) * PIXELS**-0.5
    return blocks


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(images, digits)"""
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (BATCH,), generator=order)
        yield images[chosen], labels[chosen]


# ---- in this process


def train_alone(steps: int) -> list[float]:
    """The loss of each step."""
    blocks = [{name: each.requires_grad_() for name, each in block.items()} for block in initial_weights()]
    optimizer = torch.optim.SGD([each for block in blocks for each in block.values()], RATE, momentum=0.9)
    losses = []
    for x, labels in batches(steps):
        for block in blocks:
            x = x + (x @ block["in"] + block["bias"]).relu() @ block["out"]
        loss = F.cross_entropy(x @ blocks[-1]["head"], labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- on a mesh


def part(whole: torch.Tensor, rank: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    return whole.chunk(count, dim)[int(rank)].clone()


def like_part(whole: torch.Tensor, rank: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    return torch.empty_like(whole.chunk(count, dim)[0])


take_part: Any = remote(part, propagate=like_part)
"""Of a tensor of the controller, which is sent to all, each worker keeps its part. `rank` is a distributed tensor: on
each worker its own."""
take_whole: Any = remote(torch.clone, propagate=torch.empty_like)


@grad_function
def shared(x: Any) -> Any:
    """What every process of "tp" uses: its gradient is the sum of theirs."""
    return x.clone(), lambda grad: grad.reduce("tp")


@grad_function
def summed(x: Any) -> Any:
    """The sum over "tp"; all of them get its gradient."""
    return x.reduce("tp"), lambda grad: grad


@define(eq=False)
class Saved:
    """What a stage keeps of a micro-batch between forward and backward."""

    x: Any
    y: Any


class Stage:
    """Some blocks, on the processes of one coordinate of "pp"."""

    def __init__(self, mesh: ProcMesh, blocks: list[dict[str, torch.Tensor]]) -> None:
        self.mesh = mesh
        with mesh.activate():
            rank, count = mesh.rank_tensor("tp"), mesh.size("tp")
            self.blocks = [
                {
                    name: take_part(each, rank, count, SPLIT[name]) if name in SPLIT else take_whole(each)
                    for name, each in block.items()
                }
                for block in blocks
            ]
            self.weights = [each.requires_grad_() for block in self.blocks for each in block.values()]
            self.optimizer = torch.optim.SGD(self.weights, RATE, momentum=0.9)
        self.saved: dict[int, Saved] = {}
        self.done = 0

    def forward(self, micro: int, x: Any, labels: Any) -> Any:
        """The activations for the next stage, or the loss, if it is the last."""
        with self.mesh.activate():
            x = x.detach().requires_grad_()  # autograd ends here; `backward` hands on its gradient
            y = x
            for block in self.blocks:
                y = y + summed((shared(y) @ block["in"] + block["bias"]).relu() @ block["out"])
            if "head" in self.blocks[-1]:
                y = F.cross_entropy(y @ self.blocks[-1]["head"], labels) / MICRO_BATCHES
        self.saved[micro] = Saved(x, y)
        return y.detach()

    def backward(self, micro: int, grad: Any) -> Any:
        """The gradient for the stage before. Those of the last micro-batch are averaged over "dp", each as it comes."""
        saved = self.saved.pop(micro)
        self.done += 1
        latest_first = self.weights[::-1]
        with self.mesh.activate():
            grads = grad_generator(saved.y, [*latest_first, saved.x], None if grad is None else [grad])
            for weight in latest_first:
                own: Any = next(grads)
                weight.grad = own if weight.grad is None else weight.grad + own
                if self.done == MICRO_BATCHES:
                    weight.grad = weight.grad.reduce("dp", "avg")
            return next(grads)

    def step(self) -> None:
        with self.mesh.activate():
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.done = 0


def one_forward_one_backward(stage: int, stages: int) -> list[str]:
    """What a stage does, in order: as many forwards as fill the stages behind it, then one of each."""
    ahead = min(stages - 1 - stage, MICRO_BATCHES)
    return ["forward"] * ahead + ["forward", "backward"] * (MICRO_BATCHES - ahead) + ["backward"] * ahead


def run_batch(stages: list[Stage], xs: list[Any], labels: list[Any]) -> Any:
    """One batch through all stages and back. Returns the loss of each micro-batch, on the last stage."""
    last = len(stages) - 1
    plans = [one_forward_one_backward(at, len(stages)) for at in range(len(stages))]
    inputs: dict[tuple[int, int], Any] = {(0, micro): x for micro, x in enumerate(xs)}  # by stage and micro-batch
    grads: dict[tuple[int, int], Any] = {}
    counts = {(at, kind): 0 for at in range(len(stages)) for kind in ("forward", "backward")}
    losses = []
    while any(plans):
        for at, stage in enumerate(stages):
            if not plans[at]:
                continue
            kind = plans[at][0]
            key = at, counts[at, kind]
            if key not in (inputs if kind == "forward" else grads):
                continue  # another stage must come first
            plans[at].pop(0)
            counts[at, kind] += 1
            _, micro = key
            if kind == "forward":
                y = stage.forward(micro, inputs.pop(key), labels[micro])
                if at == last:
                    losses.append(y)
                    grads[key] = None
                else:
                    inputs[at + 1, micro] = y.to_mesh(stages[at + 1].mesh)
            else:
                grad = stage.backward(micro, grads.pop(key))
                if at:
                    grads[at - 1, micro] = grad.to_mesh(stages[at - 1].mesh)
    return losses


def train(mesh: ProcMesh, steps: int) -> list[float]:
    """The loss of each step."""
    count = mesh.size("pp")
    blocks = initial_weights()
    size = BLOCKS // count  # blocks of a stage
    stages = [Stage(mesh.slice(pp=at), blocks[at * size : (at + 1) * size]) for at in range(count)]
    first, last = stages[0].mesh, stages[-1].mesh
    futures = []
    for x, labels in batches(steps):
        with first.activate():
            xs = [take_part(each, first.rank_tensor("dp"), first.size("dp"), 0) for each in x.chunk(MICRO_BATCHES)]
        with last.activate():
            ys = [take_part(each, last.rank_tensor("dp"), last.size("dp"), 0) for each in labels.chunk(MICRO_BATCHES)]
        losses = run_batch(stages, xs, ys)
        with last.activate():
            total: Any = torch.stack(losses).sum()
            futures.append(fetch_shard(total.reduce("dp", "avg")))
        for stage in stages:
            stage.step()
    return [float(future.get()) for future in futures]


def main() -> None:
    parser = argparse.ArgumentParser(description="Parallel training on a mesh of processes.")
    for name, default in (("dp", 2), ("pp", 2), ("tp", 1), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    for name, whole in (("dp", BATCH // MICRO_BATCHES), ("pp", BLOCKS), ("tp", HIDDEN)):
        if whole % getattr(given, name):
            parser.error(f"--{name} must divide {whole}")
    mesh = this_host().spawn_procs({"dp": given.dp, "pp": given.pp, "tp": given.tp})
    losses, alone = train(mesh, given.steps), train_alone(given.steps)
    for step in range(0, given.steps, 5):
        print(f"step {step:3}: loss {losses[step]:.6f} on the mesh, {alone[step]:.6f} alone")
    furthest = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    print(f"the losses differ by {furthest:.1e} at most")
    assert furthest < 1e-3
    mesh.stop().get()


if __name__ == "__main__":
    main()
