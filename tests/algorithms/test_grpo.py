"""Group-relative advantages and the batch's token mean, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algorithms import ALGORITHMS
from spmd_rl.algorithms.grpo import weigh, with_advantages
from spmd_rl.config.tree import AlgorithmConfig
from spmd_rl.rollouts.types import Episode, Group, Reward, RewardError, Sample, Task

TASK = Task("reverse", 7, {})


def sample(mask: list[int]) -> Sample:
    n, sampled = len(mask), np.asarray(mask, np.uint8)
    return Sample(
        tokens=np.arange(n, dtype=np.int32),
        mask=sampled,
        logprobs=(-0.5 * sampled).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        temperatures=np.ones(n, np.float32),
    )


def episode(reward: float | None, *masks: list[int], status: str = "ok") -> Episode:
    outcome = RewardError("broken") if reward is None else Reward(reward)
    return Episode(TASK, tuple(sample(m) for m in masks or ([0, 1],)), outcome, status)


def group(*episodes: Episode, id: int = 0) -> Group:
    return Group(id, TASK, episodes, admitted_version=0)


def advantages(filled: Group) -> list[np.ndarray]:
    return [s.advantages for e in with_advantages(filled).episodes if e.valid for s in e.samples]


def weights(*groups: Group) -> list[list[float]]:
    _, samples, _ = weigh(groups, AlgorithmConfig())
    return [s.pg_weight.tolist() for s in samples]


def test_advantage_is_reward_minus_group_mean_on_sampled_tokens() -> None:
    made = advantages(group(episode(1.0, [0, 1, 1]), episode(0.0, [0, 1, 0, 1]), episode(0.5, [0, 1])))
    assert [a.tolist() for a in made] == [[0, 0.5, 0.5], [0, -0.5, 0, -0.5], [0, 0]]
    assert all(a.dtype == np.float32 for a in made)


def test_the_samples_are_weighed_by_the_advantages_that_the_groups_come_back_with() -> None:
    failed = episode(9.0, [0, 1, 1, 1], status="failed")
    given = [group(episode(1.0, [0, 1], [0, 0, 1]), failed, episode(0.0, [0, 1, 1])), group(episode(None), id=1)]
    groups, samples, _ = weigh(given, AlgorithmConfig())
    trained = [s for g in groups for e in g.episodes if e.valid for s in e.samples]
    assert [(4 * s.pg_weight).tolist() for s in samples] == [s.advantages.tolist() for s in trained]
    assert [(g.id, [(e.reward, e.status) for e in g.episodes]) for g in groups] == [
        (g.id, [(e.reward, e.status) for e in g.episodes]) for g in given
    ]
    assert groups[0].episodes[1] is failed  # what is not trained on has no advantage
    assert groups[1] is given[1]


def test_weights_are_divided_by_the_sampled_tokens_of_the_whole_batch() -> None:
    first = group(episode(1.0, [0, 1, 1]), episode(0.0, [0, 1]))  # 3 sampled tokens
    second = group(episode(3.0, [0, 1, 0, 0]), episode(1.0, [0, 0, 1, 1, 1, 1]), id=1)  # 5
    assert weights(first, second) == [
        [0, 0.5 / 8, 0.5 / 8],
        [0, -0.5 / 8],
        [0, 1 / 8, 0, 0],
        [0, 0, -1 / 8, -1 / 8, -1 / 8, -1 / 8],
    ]


def test_all_samples_of_an_episode_share_its_advantage() -> None:
    assert weights(group(episode(1.0, [0, 1], [0, 0, 1]), episode(0.0, [0, 1, 1]))) == [
        [0, 0.125],
        [0, 0, 0.125],
        [0, -0.125, -0.125],
    ]


@pytest.mark.parametrize("invalid", [episode(None), episode(9.0, status="timeout"), episode(9.0, status="failed")])
def test_invalid_episodes_count_nowhere(invalid: Episode) -> None:
    valid = [episode(1.0, [0, 1]), episode(0.0, [0, 1])]
    assert weights(group(*valid, invalid)) == weights(group(*valid)) == [[0, 0.25], [0, -0.25]]


def test_truncated_episodes_are_trained_on() -> None:
    assert weights(group(episode(1.0), episode(0.0, status="truncated"))) == [[0, 0.25], [0, -0.25]]


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(1, 40))
def test_equal_rewards_give_exactly_zero(reward: float, episodes: int) -> None:
    _, samples, stats = weigh([group(*[episode(reward)] * episodes)], AlgorithmConfig())
    assert len(samples) == episodes
    assert all(not s.pg_weight.any() for s in samples)
    assert stats["groups/zero_variance"] == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=5), st.randoms())
def test_the_order_of_groups_changes_no_weight(rewards: list[list[float]], random) -> None:
    groups = [group(*[episode(r, [0] + [1] * (i + 1)) for r in rs], id=i) for i, rs in enumerate(rewards)]
    shuffled = list(groups)
    random.shuffle(shuffled)
    assert sorted(weights(*groups)) == sorted(weights(*shuffled))
    assert all(math.isclose(sum(a for s in advantages(g) for a in s[1:2]), 0, abs_tol=1e-4) for g in groups)


def test_a_reward_is_never_allowed_to_be_nan() -> None:
    for value in (math.nan, math.inf, -math.inf, 1e300):
        with pytest.raises(ValueError, match=r"group 3 \(reverse task 7\) has a reward of .*RewardError"):
            weigh([group(episode(0.0), episode(value), id=3)], AlgorithmConfig())


def test_statistics() -> None:
    groups = [
        group(episode(1.0, [0, 1, 1]), episode(0.0), episode(None), episode(None, status="timeout")),
        group(episode(1.0), episode(1.0, status="truncated"), episode(0.0, status="failed"), id=1),
    ]
    _, _, stats = weigh(groups, AlgorithmConfig())
    assert stats == {
        "episodes/total": 7,
        "episodes/ok": 3,
        "episodes/truncated": 1,
        "episodes/timeout": 1,
        "episodes/failed": 1,
        "episodes/no_reward": 1,
        "groups/zero_variance": 0.5,
        "reward/mean": 0.75,
        "reward/std": pytest.approx(math.sqrt(3) / 4),
        "batch/samples": 4,
        "batch/sampled_tokens": 5,
    }


def test_a_batch_without_a_valid_episode_is_empty_not_nan() -> None:
    _, samples, stats = weigh([group(episode(None))], AlgorithmConfig())
    assert samples == []
    assert "reward/mean" not in stats
    assert all(math.isfinite(v) for v in stats.values())


def test_found_by_name() -> None:
    assert ALGORITHMS[AlgorithmConfig().type] is weigh
