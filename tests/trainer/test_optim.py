"""Learning-rate schedules against their closed forms; AdamW and clipping against hand-written arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from spmd_rl.config.tree import OptimConfig, SchedulerConfig
from spmd_rl.trainer.optim import clip_gradients, gradient_norm, learning_rate, make_optimizer

LR, MIN = 1e-3, 1e-4


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (SchedulerConfig(), {0: LR, 1: LR, 99: LR, 10_000: LR}),
        (SchedulerConfig(warmup_steps=4), {0: LR / 4, 1: LR / 2, 3: LR, 4: LR, 99: LR}),
        (SchedulerConfig("linear", 0, 0, 0.0), {0: LR, 50: LR / 2, 75: LR / 4, 100: 0.0, 101: 0.0}),
        (SchedulerConfig("linear", 10, 10, MIN), {9: LR, 10: LR, 15: (LR + MIN) / 2, 20: MIN, 99: MIN}),
        (SchedulerConfig("cosine", 0, 0, 0.0), {0: LR, 50: LR / 2, 100: 0.0}),
        (SchedulerConfig("cosine", 20, 40, MIN), {0: LR / 20, 20: LR, 40: (LR + MIN) / 2, 60: MIN, 99: MIN}),
        (SchedulerConfig("cosine", 20, 0, MIN), {60: (LR + MIN) / 2, 40: MIN + (LR - MIN) * (1 + math.sqrt(0.5)) / 2}),
        (SchedulerConfig("linear", 200), {99: LR / 2, 200: LR}),  # warm-up longer than the run
    ],
)
def test_learning_rate_table(scheduler, expected):
    rates = {step: learning_rate(step, OptimConfig(lr=LR), scheduler, max_steps=100) for step in expected}
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_learning_rate_refuses_nonsense():
    with pytest.raises(ValueError, match="from 0"):
        learning_rate(-1, OptimConfig(), SchedulerConfig(), 10)
    with pytest.raises(ValueError, match=r"unknown scheduler\.type 'sawtooth'"):
        learning_rate(0, OptimConfig(), SchedulerConfig(type="sawtooth"), 10)


def test_adamw_decays_and_steps_as_in_the_paper():
    optim = OptimConfig(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    parameter = torch.nn.Parameter(torch.tensor([2.0, -3.0]))
    optimizer = make_optimizer([parameter], optim)
    expected, m, v = parameter.detach().clone().double(), 0.0, 0.0
    for step, gradient in enumerate([torch.tensor([0.3, -0.2]), torch.tensor([-0.1, 0.4])], start=1):
        parameter.grad = gradient.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient.double(), 0.95 * v + 0.05 * gradient.double() ** 2
        expected = expected * (1 - 0.1 * 0.5)
        expected -= 0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("max_norm", "scale"), [(1.0, 1 / 13), (26.0, 1.0), (0.0, 1.0)])
def test_clipping_by_the_norm_of_all_gradients(max_norm, scale):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for parameter, gradient in zip(parameters, [3.0, 4.0, 12.0], strict=True):
        parameter.grad = torch.tensor([gradient])
    norm = gradient_norm(parameters)
    clip_gradients(parameters, norm, max_norm)
    assert norm.item() == pytest.approx(13.0)
    assert [p.grad.item() for p in parameters] == pytest.approx([3 * scale, 4 * scale, 12 * scale], rel=1e-5)
