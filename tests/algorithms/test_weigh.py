"""The path from rewards to weights that all algorithms share, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algorithms import ALGORITHMS
from spmd_rl.algorithms.weigh import reward_stats
from spmd_rl.rollouts.types import Episode, Reward
from tests.algorithms.batches import (
    MAX_TOKENS,
    TASK,
    advantages,
    episode,
    group,
    rewarded,
    run,
    sample,
    samples,
    stream,
    weights,
)

COMPARING = [name for name, a in ALGORITHMS.items() if a.baseline == "group" and a.learns == "advantages"]


def test_the_samples_are_weighed_by_the_advantages_that_the_groups_come_back_with() -> None:
    failed = episode(9.0, [0, 1, 1, 1], status="failed")
    given = [group(episode(1.0, [0, 1], [0, 0, 1]), failed, episode(0.0, [0, 1, 1])), group(episode(None), id=1)]
    weighed = run(*given)
    trained = [s for g in weighed.groups for e in g.episodes if e.valid for s in e.samples]
    assert [4 * s.pg_weight for s in samples(weighed)] == [s.advantages for s in trained] == [0.5, 0.5, -0.5]
    assert [(g.id, [(e.reward, e.status) for e in g.episodes]) for g in weighed.groups] == [
        (g.id, [(e.reward, e.status) for e in g.episodes]) for g in given
    ]
    assert weighed.groups[0].episodes[1] is failed  # what is not trained on has no advantage


def test_token_mean_divides_by_the_sampled_tokens_of_the_whole_batch() -> None:
    first = group(episode(1.0, [0, 1, 1]), episode(0.0, [0, 1]))  # 3 sampled tokens
    second = group(episode(3.0, [0, 1, 0, 0]), episode(1.0, [0, 0, 1, 1, 1, 1]), id=1)  # 5
    assert weights(first, second) == [
        [0, 0.5 / 8, 0.5 / 8],
        [0, -0.5 / 8],
        [0, 1 / 8, 0, 0],
        [0, 0, -1 / 8, -1 / 8, -1 / 8, -1 / 8],
    ]


@pytest.mark.parametrize(
    ("aggregation", "shares"),
    [
        ("token", [1 / 8, 1 / 8, 1 / 8, 1 / 8]),
        ("sequence", [1 / (4 * 2), 1 / (4 * 1), 1 / (4 * 1), 1 / (4 * 4)]),
        ("prompt", [1 / (2 * 3), 1 / (2 * 3), 1 / (2 * 5), 1 / (2 * 5)]),
        ("constant", [1 / (4 * MAX_TOKENS)] * 4),
    ],
)
def test_shares_of_a_sampled_token(aggregation: str, shares: list[float]) -> None:
    first = group(episode(1.0, [0, 1, 1]), episode(0.0, [0, 1]))
    second = group(episode(2.0, [0, 1, 0, 0]), episode(1.0, [0, 0, 1, 1, 1, 1]), id=1)
    signs = [0.5, -0.5, 0.5, -0.5]
    made = [max(row, key=abs) for row in weights(first, second, aggregation=aggregation)]
    assert made == pytest.approx([a * share for a, share in zip(signs, shares, strict=True)])


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt"])
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_shares_of_a_batch_add_up_to_one(aggregation: str, lengths: list[list[int]]) -> None:
    groups = [group(*[episode(1.0, [0] + [1] * n) for n in ns], id=i) for i, ns in enumerate(lengths)]
    streams = weights(*groups, name="entropy_weight", aggregation=aggregation, entropy_bonus=1.0)
    assert sum(map(sum, streams)) == pytest.approx(1)


@pytest.mark.parametrize("invalid", [episode(None), episode(9.0, status="timeout"), episode(9.0, status="failed")])
def test_invalid_episodes_count_nowhere(invalid: Episode) -> None:
    valid = [episode(1.0, [0, 1]), episode(0.0, [0, 1])]
    assert weights(group(*valid, invalid)) == weights(group(*valid)) == [[0, 0.25], [0, -0.25]]


def test_truncated_episodes_are_trained_on_unless_masked_and_always_counted() -> None:
    made = group(episode(1.0), episode(0.0, status="truncated"))
    assert weights(made) == [[0, 0.25], [0, -0.25]]
    assert weights(made, mask_truncated=True) == [[0, 0.25], [0, 0]]
    assert weights(made, name="kl_weight", mask_truncated=True) == [[0, 0], [0, 0]]


def test_minibatches_have_denominators_of_their_own_and_advantages_of_the_batch() -> None:
    groups = [group(episode(1.0, [0, 1, 1]), episode(0.0, [0, 1])), group(episode(0.0), episode(2.0), id=1)]
    weighed = run(*groups, minibatches=2)
    assert [[stream(s, "pg_weight") for s in part] for part in weighed.minibatches] == [
        [[0, 0.5 / 3, 0.5 / 3], [0, -0.5 / 3]],
        [[0, -0.5], [0, 0.5]],
    ]
    whole, halves = run(*groups, std="batch"), run(*groups, std="batch", minibatches=2)
    assert [[s.advantages for e in g.episodes for s in e.samples] for g in whole.groups] == [
        [s.advantages for e in g.episodes for s in e.samples] for g in halves.groups
    ]


@pytest.mark.parametrize("name", COMPARING)
@settings(max_examples=25, deadline=None)
@given(reward=st.floats(-1e6, 1e6), episodes=st.integers(1, 20))
def test_equal_rewards_give_exactly_zero(name: str, reward: float, episodes: int) -> None:
    weighed = run(rewarded(*[reward] * episodes), type=name, overlong_buffer=0)
    made = samples(weighed)
    assert len(made) == episodes
    assert all(not np.any(s.pg_weight) for s in made)
    assert reward_stats(weighed.groups)["groups/zero_variance"] == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=5), st.randoms())
def test_the_order_of_groups_changes_no_weight(rewards: list[list[float]], random) -> None:
    groups = [group(*[episode(r, [0] + [1] * (i + 1)) for r in rs], id=i) for i, rs in enumerate(rewards)]
    shuffled = list(groups)
    random.shuffle(shuffled)
    assert sorted(weights(*groups)) == sorted(weights(*shuffled))
    assert all(math.isclose(sum(row), 0, abs_tol=1e-9) for row in advantages(*groups))


@pytest.mark.parametrize("name", list(ALGORITHMS))
@settings(max_examples=25, deadline=None)
@given(rewards=st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=6))
def test_no_weight_is_ever_nan_or_infinite(name: str, rewards: list[float]) -> None:
    given_ = [rewarded(*rewards), group(episode(None), id=1), rewarded(0.0, 1.0, id=2)]
    for made in samples(run(*given_, type=name)):
        for stream_name in ("pg_weight", "ce_weight", "kl_weight", "entropy_weight"):
            assert np.isfinite(stream(made, stream_name)).all()


def test_a_reward_is_never_allowed_to_be_nan() -> None:
    for value in (math.nan, math.inf, -math.inf, 1e300):
        with pytest.raises(ValueError, match=r"group 3 \(reverse task 7\) has a reward of .*RewardError"):
            run(group(episode(0.0), episode(value), id=3))


def test_statistics() -> None:
    groups = [
        group(episode(1.0, [0, 1, 1]), episode(0.0), episode(None), episode(None, status="timeout")),
        group(episode(1.0), episode(1.0, status="truncated"), episode(0.0, status="failed"), id=1),
    ]
    assert run(*groups).stats | reward_stats(groups) == {
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
    groups = [group(episode(None))]
    weighed = run(*groups)
    assert samples(weighed) == []
    assert reward_stats(groups) == {"groups/zero_variance": 1.0} and reward_stats([]) == {}
    assert all(math.isfinite(v) for v in weighed.stats.values())


def test_named_parts_of_rewards_have_their_means() -> None:
    parted = [Episode(TASK, (sample([0, 1]),), Reward(v, {"format": v / 2, "right": v})) for v in (0.0, 1.0)]
    stats = reward_stats([group(*parted, episode(None)), group(episode(3.0))])
    assert (stats["reward/format"], stats["reward/right"]) == (0.25, 0.5)
