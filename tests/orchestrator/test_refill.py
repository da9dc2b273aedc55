"""Groups that teach nothing are replaced by others, and batches may be counted in groups or tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import AlgorithmConfig, Config
from spmd_rl.envs.protocol import Policy
from spmd_rl.orchestrator.book import group_tokens, refill_limit
from spmd_rl.rollouts.types import Episode, Reward, Task
from tests.orchestrator.fake_cluster import Delays
from tests.orchestrator.fake_run import FakeEnvironment, Run, make_config, train


class Decided(FakeEnvironment):
    """Of every three tasks two are decided: all attempts have the same reward, 1 or 0."""

    async def attempt(self, task: Task, policy: Policy) -> Episode:
        attempts = sum(other.index == task.index for other in self.history)
        episode = await super().attempt(task, policy)
        decided = {0: None, 1: 1.0, 2: 0.0}[task.index % 3]
        return replace(episode, reward=Reward(float(attempts % 2) if decided is None else decided))


def config(algorithm: AlgorithmConfig, **options) -> Config:
    made = make_config(**options)
    return replace(made, orchestrator=replace(made.orchestrator, algorithm=algorithm))


def trained_tasks(made: Run) -> list[list[int]]:
    """Tasks of every step's groups."""
    return [[group.task.index for group in batch.groups] for batch in made.report.batches.values()]


def test_decided_groups_are_replaced_and_stay_in_the_statistics():
    made = train(config(AlgorithmConfig(max_refill=100.0), groups=3, group_size=4), [Decided()])
    assert all(task % 3 == 0 for tasks in trained_tasks(made) for task in tasks)
    batches = list(made.report.batches.values())
    dropped = sum(batch.stats["groups/refilled"] for batch in batches)
    assert dropped >= 2 * (3 * 3 - 1)  # nine undecided tasks were trained on; two decided ones lie between any two
    for batch in batches:
        share = batch.stats["groups/refilled"] / (3 + batch.stats["groups/refilled"])
        assert batch.stats["groups/zero_variance"] == pytest.approx(share)
        assert len(batch.groups) == 3


def test_at_most_so_many_are_replaced_per_batch():
    class Solved(FakeEnvironment):
        async def attempt(self, task, policy):
            return replace(await super().attempt(task, policy), reward=Reward(1.0))

    made = train(config(AlgorithmConfig(max_refill=1.5), groups=2, group_size=4, max_steps=4), [Solved()])
    for batch in made.report.batches.values():
        assert batch.stats["groups/refilled"] <= 3
        assert batch.stats["groups/zero_variance"] == 1.0 and batch.stats["reward/mean"] == 1.0
    assert sum(batch.stats["groups/refilled"] for batch in made.report.batches.values()) > 0


@pytest.mark.parametrize(
    "algorithm",
    [AlgorithmConfig(zero_variance="keep"), AlgorithmConfig(type="reinforce_pp"), AlgorithmConfig(max_refill=0.0)],
    ids=["keep", "another baseline", "none allowed"],
)
def test_nothing_is_replaced_where_it_is_not_wanted(algorithm):
    made = train(config(algorithm, groups=3, group_size=4), [Decided()])
    assert sorted(task for tasks in trained_tasks(made) for task in tasks) == list(range(9))
    assert refill_limit(made.config.orchestrator) == 0


def test_batches_in_groups():
    made = train(config(AlgorithmConfig(zero_variance="keep"), groups=3, group_size=2), [FakeEnvironment()])
    settings_ = replace(made.config.orchestrator, batch_unit="groups", batch_size=3)
    same = train(replace(made.config, orchestrator=settings_), [FakeEnvironment()])
    assert trained_tasks(same) == trained_tasks(made)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 60),
    limit=st.integers(2, 9),
    max_lag=st.integers(0, 2),
    turns=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_batches_in_tokens_hold_enough_and_not_a_group_more(tokens, limit, max_lag, turns, seed):
    made = config(AlgorithmConfig(zero_variance="keep"), max_lag=max_lag, max_steps=4)
    unit = {"batch_unit": "tokens", "batch_size": tokens, "max_batch_groups": limit}
    made = replace(made, orchestrator=replace(made.orchestrator, **unit))
    done = train(made, [FakeEnvironment(turns)], delays=Delays(seed=seed))
    assert len(done.report.batches) == 4
    for batch in done.report.batches.values():
        sizes = [group_tokens(group) for group in batch.groups]
        assert sum(sizes) >= tokens or len(sizes) == limit
        assert sum(sizes[:-1]) < tokens


def test_batches_in_tokens_stay_fresh():
    """Groups are admitted for the batches they will fill, not for the largest batches there may be."""
    made = config(AlgorithmConfig(zero_variance="keep"), max_lag=1, max_steps=20, max_tokens=4)
    unit = {"batch_unit": "tokens", "batch_size": 16, "max_batch_groups": 50}
    made = replace(made, orchestrator=replace(made.orchestrator, **unit))
    done = train(made, [FakeEnvironment()], delays=Delays(seed=3))
    lags = [done.report.batches[step].lags(step).max() for step in done.report.batches]
    assert np.max(lags) <= 4


def test_groups_outside_of_the_gate_are_replaced():
    class Graded(FakeEnvironment):
        async def attempt(self, task, policy):
            attempts = sum(other.index == task.index for other in self.history)
            return replace(await super().attempt(task, policy), reward=Reward(task.index % 4 + 0.1 * (attempts % 2)))

    gated = make_config(groups=2, group_size=2, reward_gate=(0.9, 2.1), max_steps=4)
    algorithm = replace(gated.orchestrator.algorithm, max_refill=100.0)  # and zero_variance = keep
    gated = replace(gated, orchestrator=replace(gated.orchestrator, algorithm=algorithm))
    made = train(gated, [Graded()])
    assert {task % 4 for tasks in trained_tasks(made) for task in tasks} == {1, 2}
    assert sum(batch.stats["groups/refilled"] for batch in made.report.batches.values()) >= 4
