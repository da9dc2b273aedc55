"""Group-relative policy optimisation: an episode is compared with the others of its task.

The advantage is reward − mean reward of the group's valid episodes, not divided by their standard deviation (Dr. GRPO,
Liu et al. 2025: the division over-weights tasks that are nearly always or nearly never solved). The aggregation is the
token mean over the whole batch. Ratios, caps and masks belong to the loss, which this file refuses to know.

Invariants: equal rewards in a group give weights of exactly 0; an episode without a reward never counts as one with
reward 0; the order of groups changes no weight; no weight is ever NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spmd_rl.config.tree import AlgorithmConfig
from spmd_rl.rollouts.types import Episode, Group, Reward, Sample, TrainSample


def with_advantages(group: Group) -> Group:
    """The group with `advantages` float32[T] filled into the samples of its valid episodes (0 where mask is 0).

    Every sample of an episode gets the episode's advantage. Raises ValueError for a reward that is not finite.
    """
    rewards = [_reward(group, episode) for episode in group.episodes if episode.valid]
    if not rewards:
        return group
    # The first reward is taken off before averaging, so that equal rewards give exactly 0 whatever their value.
    mean = math.fsum(reward - rewards[0] for reward in rewards) / len(rewards)
    episodes = [
        _filled(episode, _reward(group, episode) - rewards[0] - mean) if episode.valid else episode
        for episode in group.episodes
    ]
    return replace(group, episodes=tuple(episodes))


def weigh(groups: Sequence[Group], config: AlgorithmConfig) -> tuple[list[Group], list[TrainSample], dict[str, float]]:
    """The groups with their advantages, the samples of their valid episodes with weights made of them, and statistics.

    pg_weight = advantage · mask / N, with N the sampled tokens (mask 1) of all valid episodes of the batch, counted
    before anything is masked; ce_weight = 0. The loss that is minimised is −Σ pg_weight × its policy term.
    """
    del config  # the bounds of the loss: nothing here depends on them
    filled = [with_advantages(group) for group in groups]
    samples = [sample for group in filled for episode in group.episodes if episode.valid for sample in episode.samples]
    sampled_tokens = sum(int(sample.mask.sum()) for sample in samples)
    weighted = [_weighted(sample, sampled_tokens) for sample in samples]
    stats = {**_stats(groups), "batch/samples": len(samples), "batch/sampled_tokens": sampled_tokens}
    return filled, weighted, stats


def _filled(episode: Episode, advantage: float) -> Episode:
    samples = [replace(sample, advantages=(advantage * sample.mask).astype(np.float32)) for sample in episode.samples]
    return replace(episode, samples=tuple(samples))


def _weighted(sample: Sample, denominator: int) -> TrainSample:
    assert sample.advantages is not None
    return TrainSample(
        tokens=sample.tokens,
        mask=sample.mask,
        logprobs=sample.logprobs,
        temperatures=sample.temperatures,
        pg_weight=(sample.advantages / max(1, denominator)).astype(np.float32),
        ce_weight=np.zeros(len(sample.tokens), np.float32),
    )


def _reward(group: Group, episode: Episode) -> float:
    """The reward of a valid episode, finite also as float32."""
    assert isinstance(episode.reward, Reward)
    if not abs(episode.reward.value) <= 1e30:  # beyond, the difference of two overflows float32
        raise ValueError(
            f"group {group.id} ({group.task.source} task {group.task.index}) has a reward of {episode.reward.value}; "
            "an environment that can't compute a reward must return RewardError(why)"
        )
    return episode.reward.value


def _stats(groups: Sequence[Group]) -> dict[str, float]:
    """Means over valid episodes (absent when there is none), and counts by status."""
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = [[_reward(g, e) for e in g.episodes if e.valid] for g in groups]
    counts = {f"episodes/{status}": 0.0 for status in ("ok", "truncated", "timeout", "failed", "no_reward")}
    for episode in episodes:
        has_reward = episode.valid or episode.status in ("timeout", "failed")
        counts[f"episodes/{episode.status if has_reward else 'no_reward'}"] += 1
    stats = {"episodes/total": float(len(episodes)), **counts}
    if groups:
        stats["groups/zero_variance"] = sum(len(set(r)) < 2 for r in rewards) / len(groups)
    if flat := [reward for group in rewards for reward in group]:
        stats |= {"reward/mean": float(np.mean(flat)), "reward/std": float(np.std(flat))}
    return stats
