"""From groups to a batch: advantages for people and for the trainer, lags, and the control of shuffled rewards."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algorithms import resolve
from spmd_rl.config.tree import OrchestratorConfig
from spmd_rl.orchestrator.batch import Batch, make_batch, shuffle_rewards
from spmd_rl.rollouts.types import Episode, Group, Reward, RewardError, Sample, Task

TASK = Task("fake", 3, {})


def sample(versions: list[int]) -> Sample:
    """A sample of a prompt token and one sampled token per version; -1 = a token that was given."""
    columns = np.asarray([-1, *versions], np.int32)
    mask = (columns >= 0).astype(np.uint8)
    zero = np.zeros(len(columns), np.float32)
    return Sample(np.arange(len(columns), dtype=np.int32), mask, zero - mask, columns, zero + 1)


def episode(reward: float | None, *versions: list[int]) -> Episode:
    outcome = RewardError("broken") if reward is None else Reward(reward)
    return Episode(TASK, tuple(sample(v) for v in versions or ([0],)), outcome)


def group(id: int, *episodes: Episode) -> Group:
    return Group(id, TASK, episodes, admitted_version=0)


def rewards(groups: list[Group]) -> list[list[float | None]]:
    return [[e.reward.value if e.valid else None for e in g.episodes] for g in groups]


def batch_of(groups: list[Group], dropped: list[Group] | None = None, **orchestrator) -> Batch:
    config = OrchestratorConfig(**orchestrator)
    return make_batch(groups, dropped or [], config, resolve(config.algorithm), {}, 1)


def test_lags_count_from_the_version_a_step_starts_with_over_sampled_tokens_of_valid_episodes() -> None:
    groups = [
        group(0, episode(1.0, [4, 4, -1, 5]), episode(0.0, [3], [5, 5])),
        group(1, episode(None, [0, 0, 0]), episode(0.0, [2])),
    ]
    lags = batch_of(groups).lags(step=6)
    assert sorted(lags.tolist()) == [0, 0, 0, 1, 1, 2, 3]


def test_the_batch_holds_the_advantages_that_its_weights_are_made_of() -> None:
    groups = [group(0, episode(1.0, [0, 0]), episode(0.0, [0, -1])), group(1, episode(None), episode(5.0))]
    batch = batch_of(groups)
    trained = [s for e in batch.episodes if e.valid for s in e.samples]
    assert [s.advantages for s in trained] == [0.5, -0.5, 0]
    for train_sample, kept in zip(batch.minibatches[0], trained, strict=True):
        assert 4 * train_sample.pg_weight == kept.advantages  # 4 sampled tokens
    assert [e.reward for e in batch.episodes] == [e.reward for g in groups for e in g.episodes]


many = st.lists(st.lists(st.none() | st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(many, st.integers(0, 2**63 - 1))
def test_shuffled_rewards_are_the_same_ones_within_the_batch(values: list[list[int | None]], seed: int) -> None:
    groups = [group(i, *map(episode, row)) for i, row in enumerate(values)]
    shuffled = shuffle_rewards(groups, seed)
    before, after = rewards(groups), rewards(shuffled)
    assert Counter(chain(*before)) == Counter(chain(*after))
    assert [[v is None for v in row] for row in before] == [[v is None for v in row] for row in after]
    assert rewards(shuffle_rewards(groups, seed)) == after
    for old, new in zip(groups, shuffled, strict=True):
        assert (old.id, old.task, [e.samples for e in old.episodes]) == (
            new.id,
            new.task,
            [e.samples for e in new.episodes],
        )


def test_shuffling_crosses_groups_and_depends_on_the_seed() -> None:
    groups = [group(i, *(episode(float(10 * i + j)) for j in range(4))) for i in range(4)]
    shuffled = [rewards(shuffle_rewards(groups, seed)) for seed in range(5)]
    assert len({str(s) for s in shuffled}) == 5
    assert all(any(int(v) // 10 != i for i, row in enumerate(s) for v in row) for s in shuffled)


def test_the_control_trains_on_shuffled_rewards_and_says_so_in_its_batch() -> None:
    groups = [group(i, *(episode(float(10 * i + j)) for j in range(4))) for i in range(4)]
    control = batch_of(groups, shuffle_rewards=True)
    assert rewards(control.groups) == rewards(shuffle_rewards(groups, 1))
    honest = batch_of(groups)
    assert rewards(honest.groups) == rewards(groups)
    assert [s.pg_weight for s in control.minibatches[0]] != [s.pg_weight for s in honest.minibatches[0]]
    assert control.stats["reward/mean"] == honest.stats["reward/mean"]
    for group_ in control.groups:  # advantages belong to the shuffled rewards
        values = [e.reward.value for e in group_.episodes]
        advantages = [e.samples[0].advantages for e in group_.episodes]
        assert np.allclose(advantages, np.asarray(values) - np.mean(values))


def test_dropped_groups_count_in_the_statistics_of_rewards_alone() -> None:
    undecided, solved = group(0, episode(1.0), episode(0.0)), group(1, episode(1.0), episode(1.0))
    batch = batch_of([undecided], [solved, solved])
    assert batch.stats["reward/mean"] == 5 / 6
    assert batch.stats["groups/zero_variance"] == 2 / 3
    assert batch.stats["groups/refilled"] == 2
    assert len(batch.episodes) == batch.stats["episodes/total"] == len(batch.minibatches[0]) == 2
