"""Runs in which nothing may be learned. What rises here would be a leak, or an error of the measurement."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.runner import QUICKSTART, Run, run

STEPS = 20
START = ["--config", QUICKSTART, "--max-steps", str(STEPS), "--trainer.scheduler.type", "constant"]

pytestmark = pytest.mark.slow


def control(model: str, folder, *flags: str) -> tuple[Run, np.ndarray]:
    """The quickstart with its whole warm-up, and its mean reward per step."""
    done = run(folder / "run", [*START, "--model.name", model, *flags], timeout_s=400)
    assert done.returncode == 0, done.output[-4000:]
    rewards = np.array([record["reward/mean"] for record in done.phase("rl")])
    assert len(rewards) == STEPS
    assert 0.05 < rewards[:3].mean() < 0.35  # the warm-up worked: there was something to learn from
    return done, rewards


def test_learning_rate_zero_learns_nothing(model, tmp_path):
    """With lag 1: nobody sampled from other weights, so nothing is off-policy either."""
    done, rewards = control(model, tmp_path, "--trainer.optim.lr", "0")
    blocks = rewards.reshape(-1, 5).mean(axis=1)
    assert np.ptp(blocks) < 0.1, blocks  # 1280 rollouts of 80 tasks each: the standard error is about 0.02
    start, end = done.phase("eval")
    assert start["eval/greedy"] == end["eval/greedy"]
    for record in done.phase("rl"):
        assert record["offpolicy/k3_mean"] <= 1e-8 and record["mismatch/k3_mean"] <= 1e-8
        assert record["grad_norm"] > 0
    assert np.mean([record["lag/mean"] for record in done.phase("rl")]) > 0.5


def test_shuffled_rewards_teach_nothing(model, tmp_path):
    done, rewards = control(model, tmp_path, "--orchestrator.shuffle-rewards")
    # Weights pushed about at random drift, up as well as down: 0.07 was seen. A leak would show: honest rewards
    # have risen by about 0.65 by then.
    assert rewards[-5:].mean() < rewards[:3].mean() + 0.2
    assert done.phase("eval")[1]["eval/reward"] < done.phase("eval")[0]["eval/reward"] + 0.2
    assert any(record["offpolicy/k3_mean"] > 1e-8 for record in done.phase("rl"))  # the weights did move
