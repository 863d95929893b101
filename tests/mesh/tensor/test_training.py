"""Parallel training reaches the losses of training in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

from examples.parallel_training import one_forward_one_backward, train, train_alone
from monarch.actor import this_host
from monarch.testing import fresh_client

STEPS = 8


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return train_alone(STEPS)


@pytest.mark.parametrize(
    ("dp", "pp", "tp"),
    [
        pytest.param(4, 1, 1, id="data"),
        pytest.param(1, 1, 2, id="tensor"),
        pytest.param(1, 4, 1, id="pipeline"),
        pytest.param(2, 2, 1, id="data-and-pipeline"),
        pytest.param(2, 2, 2, id="all-three", marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_parallel_training_has_the_losses_of_one_process(alone, dp, pp, tp):
    with fresh_client("inproc", cleanup_timeout="1s"):
        losses = train(this_host().spawn_procs({"dp": dp, "pp": pp, "tp": tp}), STEPS)

    assert losses == pytest.approx(alone, abs=1e-5)
    assert alone[-1] < alone[0] / 2


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stage_holds_no_more_micro_batches_than_there_are_stages_behind_it(stages):
    for stage in range(stages):
        plan = one_forward_one_backward(stage, stages)
        held = [plan[:at].count("forward") - plan[:at].count("backward") for at in range(len(plan) + 1)]
        assert plan.count("forward") == plan.count("backward") == 4
        assert max(held) <= stages - stage and min(held) == 0
