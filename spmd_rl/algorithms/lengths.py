"""Rewards shaped by length, before any baseline sees them.

Two shapes, both off by default: the soft overlong penalty of DAPO (arXiv 2503.14476, eq. 13), which begins only near
the limit, and a penalty relative to the group's longest rollout, as a share of its mean reward. Lengths are sampled
tokens. It refuses to know about advantages and tokens' weights.
"""

from __future__ import annotations

import numpy as np

from spmd_rl.rollouts.types import Episode, Group, Reward


def rewards_of(group: Group) -> np.ndarray:
    """Rewards of the group's valid episodes, float64[n]. ValueError for one that is not finite, also as float32."""
    rewards = []
    for episode in group.episodes:
        if not episode.valid:
            continue
        assert isinstance(episode.reward, Reward)
        if not abs(episode.reward.value) <= 1e30:  # beyond, the difference of two overflows float32
            raise ValueError(
                f"group {group.id} ({group.task.source} task {group.task.index}) has a reward of "
                f"{episode.reward.value}; an environment that can't compute a reward must return RewardError(why)"
            )
        rewards.append(episode.reward.value)
    return np.array(rewards, dtype=np.float64)


def sampled_tokens(episode: Episode) -> int:
    """Tokens that the policy sampled, over all samples."""
    return sum(int(np.count_nonzero(sample.mask)) for sample in episode.samples)


def overlong(lengths_E: np.ndarray, limit: int, buffer: int, penalty: float) -> np.ndarray:
    """What is taken off: 0 up to limit − buffer tokens, then rising linearly to `penalty` at the limit."""
    return penalty * np.clip((lengths_E - (limit - buffer)) / buffer, 0.0, 1.0)


def relative(rewards_E: np.ndarray, lengths_E: np.ndarray, share: float) -> np.ndarray:
    """What is taken off: share · mean reward · length / longest length of the group; nothing for a mean below 0."""
    return share * max(0.0, float(rewards_E.mean())) * lengths_E / max(1, lengths_E.max())
