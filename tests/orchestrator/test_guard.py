"""What counts as a collapse, what does not, and what the loop does about one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import CkptConfig, Config, GuardConfig
from spmd_rl.envs.protocol import Policy
from spmd_rl.orchestrator import first_step
from spmd_rl.orchestrator.guard import Guard
from spmd_rl.orchestrator.loop import Collapsed
from spmd_rl.rollouts.types import Episode, Reward, Task
from spmd_rl.world.messages import Restore, Save, Train
from tests.orchestrator.fake_run import FakeEnvironment, Run, make_config, train

WINDOW = 4
HEALTHY = {"reward/mean": 0.5, "entropy": 1.0, "grad_norm": 1.0, "offpolicy/k3_mean": 1e-3}


def verdicts(steps: list[dict[str, float]], **config) -> list[tuple[int, str]]:
    guard = Guard(GuardConfig(window=WINDOW, **config))
    seen = [guard.watch(i, HEALTHY | metrics) for i, metrics in enumerate(steps, 1)]
    return [(c.step, c.why) for c in seen if c]


def steps(*parts: tuple[int, dict[str, float]]) -> list[dict[str, float]]:
    return [metrics for count, metrics in parts for _ in range(count)]


def test_a_run_that_learns_is_left_alone():
    rising = [
        {"reward/mean": min(0.97, 0.05 * i), "entropy": 2.0 / (1 + i), "grad_norm": 3 / (1 + i)} for i in range(60)
    ]
    assert verdicts(rising) == []


def test_one_bad_batch_means_nothing():
    for bad in ({"reward/mean": 0.0}, {"entropy": 99.0}, {"grad_norm": 1e6}, {"offpolicy/k3_mean": 9.0}):
        assert verdicts(steps((12, {}), (1, bad), (12, {}))) == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"reward/mean": 0.1}, "the reward fell from 0.5 to 0.1"),
        ({"entropy": 12.0}, "the entropy went from 1 to 12 nats, and the reward is no better"),
        ({"entropy": 0.01}, "the entropy went from 1 to 0.01"),
        ({"grad_norm": 50.0}, "the gradient norm is 50, usually 1"),
        ({"offpolicy/k3_mean": 0.5}, "the off-policy KL is 0.5, usually 0.001"),
    ],
)
def test_what_stays_bad_is_a_collapse(bad, says):
    seen = verdicts(steps((12, {}), (8, bad)))
    assert seen and says in seen[0][1] and 13 <= seen[0][0] <= 12 + WINDOW
    assert "steps " in seen[0][1]


def test_entropy_may_fall_while_the_reward_rises():
    assert verdicts(steps((12, {}), (12, {"entropy": 0.01, "reward/mean": 0.9}))) == []


def test_a_small_off_policy_kl_is_no_reason_however_much_it_grew():
    assert verdicts(steps((12, {"offpolicy/k3_mean": 1e-6}), (12, {"offpolicy/k3_mean": 0.05}))) == []


def test_a_weak_start_that_dies_is_a_collapse_too():
    noisy = [{"reward/mean": r} for r in (0.2, 0.05, 0.15, 0.02)] + steps((12, {"reward/mean": 0.0}))
    assert verdicts(noisy)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=7))
def test_nothing_is_said_before_two_windows(rewards):
    assert verdicts([{"reward/mean": r, "entropy": abs(r) + 1e-3} for r in rewards]) == []


def test_going_back_forgets_what_came_later():
    guard = Guard(GuardConfig(window=WINDOW))
    for step in range(1, 13):
        guard.watch(step, HEALTHY)
    for step in range(13, 17):
        seen = guard.watch(step, HEALTHY | {"reward/mean": 0.0})
    assert seen
    guard.forget_after(10)
    assert [guard.watch(step, HEALTHY) for step in range(17, 30)] == [None] * 13


class Falls(FakeEnvironment):
    """Rewards are fine for some attempts, and then nothing for some more."""

    def __init__(self, fine: int, nothing: int) -> None:
        super().__init__()
        self.fine, self.nothing = fine, nothing

    async def attempt(self, task: Task, policy: Policy) -> Episode:
        number = len(self.history)
        episode = await super().attempt(task, policy)
        falls = self.fine < number <= self.fine + self.nothing
        return replace(episode, reward=Reward(0.0 if falls else 1.0 + number % 2))


def config(on_collapse: str, **guard) -> Config:
    made = make_config(max_steps=24, groups=1, group_size=4, max_lag=0, output_dir="somewhere")
    return replace(
        made, guard=GuardConfig(on_collapse=on_collapse, window=2, **guard), ckpt=CkptConfig(interval=2, keep=0)
    )


def orders_of(made: Run, kind: type) -> list:
    return [orders[0] for orders in made.cluster.orders if isinstance(orders[0], kind)]


def test_a_rollback_restores_a_good_checkpoint_as_a_version_of_its_own_and_goes_on():
    made = train(config("rollback"), [Falls(40, 24)])
    restored, *_ = orders_of(made, Restore)
    saved = [Path(order.folder).name for order in orders_of(made, Save)]
    assert saved[:2] == ["step_000000", "step_000002"] and Path(restored.folder).name in saved
    steps_trained = [order.step for order in orders_of(made, Train)]
    skipped = min(set(range(1, 25)) - set(steps_trained))
    assert int(restored.folder[-6:]) <= skipped - 4  # from before the steps it was judged by
    assert f"send {skipped}" in made.cluster.order_names()
    assert made.report.rollbacks[0] == (skipped, restored.folder)
    assert len(steps_trained) + len(made.report.rollbacks) == 24


@pytest.mark.parametrize(("on_collapse", "limit"), [("stop", 2), ("rollback", 0)])
def test_a_stop_names_the_reason_and_the_last_good_checkpoint(on_collapse, limit):
    with pytest.raises(BaseException) as raised:
        train(config(on_collapse, max_rollbacks=limit), [Falls(40, 400)])
    error = raised.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Collapsed)
    assert "the reward fell from" in str(error) and "lower learning rate" in str(error)
    assert "The last good checkpoint is " in str(error) and "step_0000" in str(error)


def test_a_warning_changes_nothing():
    made = train(config("warn"), [Falls(40, 24)])
    assert len(orders_of(made, Train)) == 24 and not orders_of(made, Restore)
    assert any(made.report.collapses.values())


def test_first_batches_that_teach_nothing_are_named():
    class Same(FakeEnvironment):
        async def attempt(self, task, policy):
            return replace(await super().attempt(task, policy), reward=Reward(0.25), status="truncated")

    made = train(make_config(max_steps=1), [Same()])
    batch = made.report.batches[1]
    said = list(first_step.warnings(batch))
    assert "all 4 rewards of the first batch are 0.25" in said[0] and "check_reward.py" in said[0]
    assert "no token of the first batch has a weight" in said[1]
    assert "4 of 4 rollouts of the first batch hit a length limit" in said[2]
    text = first_step.describe(batch, lambda ids: "+".join(map(str, ids)))
    assert "reward 0.25, truncated" in text and "nothing is learned" in text and "[1000+3]" in text
    fine = train(make_config(max_steps=1, groups=4, group_size=4)).report.batches[1]
    assert list(first_step.warnings(fine)) == []


def test_describing_fails_nothing():
    made = train(make_config(max_steps=1, groups=2, group_size=4))
    assert "not decodable" in first_step.describe(made.report.batches[1], lambda ids: 1 / 0)
