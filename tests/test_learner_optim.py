"""The optimizer of either model: its rate is the schedule's times a scale, its steps are counted over the whole run."""

from __future__ import annotations

import pytest
import torch

from async_rl.algorithms.schedules import lr_at
from async_rl.learner.update.optim import Optimizer, num_optimizer_steps

from .learner_cases import make_config


def make(lr: float = 0.1) -> tuple[torch.nn.Parameter, Optimizer]:
    parameter = torch.nn.Parameter(torch.zeros(3))
    return parameter, Optimizer([("w", parameter)], make_config().learner, lr, total_steps=20)


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0])
def test_the_rate_is_the_schedules_times_the_scale(scale):
    c = make_config().learner
    for step in (0, 5, 19):
        parameter, optimizer = make()
        parameter.grad = torch.ones(3)
        expected = scale * lr_at(step, 20, 0.1, c.warmup_fraction, c.hold_fraction, c.min_lr_ratio)
        assert optimizer.step(step, scale) == expected
        torch.testing.assert_close(parameter.detach(), torch.full((3,), -expected))  # Adam's first step is the rate itself
        assert parameter.grad is None


def test_a_run_has_an_optimizer_step_for_each_mini_batch_of_each_pass():
    assert num_optimizer_steps(make_config({"num_minibatches": 3, "num_epochs": 2})) == 20 * 6


def test_a_checkpoint_finds_parameters_and_moments_under_the_names_it_gives():
    parameter, optimizer = make()
    tensors = optimizer.tensors("a", "b")
    assert set(tensors) == {"a.w", "b.w.step", "b.w.exp_avg", "b.w.exp_avg_sq"}
    tensors["a.w"].fill_(2.0)
    assert parameter.tolist() == [2.0, 2.0, 2.0]
