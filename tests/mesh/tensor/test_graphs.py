"""Batches, compiled functions, and gradients in parts."""

from __future__ import annotations

import math

import pytest
import torch

import monarch
from monarch import coalescing, grad_function, grad_generator, inspect, remote


def test_a_coalesced_block_gives_the_same_and_cannot_fetch(procs):
    with procs.activate():
        with coalescing():
            total = torch.zeros(2)
            for _ in range(300):
                total = total + 1
            with pytest.raises(NotImplementedError, match="after it"):
                inspect(total)
        assert inspect(total).tolist() == [300, 300]


def test_a_compiled_function_runs_its_python_once_for_each_shape(procs):
    runs = []

    @monarch.compile
    def step(x, factor):
        runs.append(x.shape)
        return {"y": (x * factor).sin() + offset, "x": x, "n": factor}

    with procs.activate():
        offset = torch.ones(1)
        for size in (2, 3, 2, 3, 2):
            x = torch.full((size,), float(size))
            made = step(x, 2.0)
            assert inspect(made["y"]).tolist() == pytest.approx([math.sin(2.0 * size) + 1] * size, rel=1e-5)
            assert torch.equal(inspect(made["x"]), inspect(x))
            assert made["n"] == 2.0
        offset.add_(1)
        assert inspect(step(torch.zeros(2), 2.0)["y"]).tolist() == [2, 2]

    assert len(runs) == 2


def test_a_whole_training_step_can_be_compiled(procs):
    def losses(compiled: bool) -> list[float]:
        with procs.slice(hosts=0, gpus=0).activate():
            weight = torch.ones(3, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.1)

            def step(x):
                optimizer.zero_grad()
                loss = ((x * weight - 2) ** 2).sum()
                loss.backward()
                optimizer.step()
                return loss

            run = monarch.compile(step) if compiled else step
            x = torch.arange(3.0)
            return [float(inspect(run(x).detach())) for _ in range(5)]

    assert losses(compiled=True) == losses(compiled=False)


def test_a_failure_inside_of_a_compiled_function_is_found_outside(procs):
    def check(x):
        if int(x[0]):
            raise ValueError("not zero")
        return x

    checked = remote(check, propagate=lambda x: x)
    with procs.activate():
        run = monarch.compile(lambda x: checked(x) + 1)
        assert inspect(run(torch.zeros(1))).tolist() == [1]
        with pytest.raises(monarch.RemoteException, match="not zero"):
            inspect(run(torch.ones(1)))
        assert inspect(run(torch.zeros(1))).tolist() == [1]


def test_compiled_functions_that_are_gone_are_forgotten_by_the_workers(procs):
    with procs.activate():
        x = torch.zeros(1)
        for number in range(50):
            step = monarch.compile(lambda each, number=number: remote(add, propagate=lambda x, _: x)(each, number) + 1)
            x = step(step(x))
        assert inspect(x).tolist() == [2 * (sum(range(50)) + 50)]
        lane = x._ref.place.lane
        assert len(lane.known) < 10 and len(lane.engine._compiled) < 10


def add(x, number):
    return x + number


def test_reductions_can_be_compiled(procs):
    run = monarch.compile(lambda x: x.reduce("gpus") * 2)
    with procs.activate():
        for at in range(3):
            assert int(inspect(run(procs.rank_tensor("gpus") + at))) == 2 + 4 * at


def test_gradients_come_one_by_one_and_equal_those_of_autograd(procs):
    def model(first, second, x):
        hidden = (x @ first).tanh()
        return (hidden @ second + hidden.sum()).sum() * 2

    def made():
        return (
            torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(),
            torch.linspace(1, 2, 8).view(4, 2).requires_grad_(),
            torch.ones(2, 3),
        )

    with procs.activate():
        first, second, x = made()
        unused = torch.ones(1, requires_grad=True)
        gradients = list(grad_generator(model(first, second, x), [second, first, unused]))
        assert gradients[2] is None
        found = inspect(gradients[:2])
    first, second, x = made()
    wanted = torch.autograd.grad(model(first, second, x), [second, first])

    assert all(torch.allclose(*pair) for pair in zip(found, wanted, strict=True))


def test_a_function_that_brings_no_backward_is_refused(procs):
    with procs.activate():
        x = torch.ones(2, requires_grad=True)
        for wrong in (lambda x: x * 1, lambda x: (x * 1, x)):
            with pytest.raises(TypeError, match=r"\(result, backward\) is needed"):
                grad_function(wrong)(x)


def test_a_function_brings_its_own_backward(procs):
    @grad_function
    def total(x, dims):
        def backward(grad):
            return grad * 3

        return x.reduce(dims), backward

    with procs.activate():
        x = (procs.rank_tensor("gpus") + torch.ones(2)).requires_grad_()
        y = total(x * 2, "gpus")
        y.sum().backward()
        assert inspect([y, x.grad])[0].tolist() == [6, 6]
        assert inspect(x.grad).tolist() == [6, 6]
