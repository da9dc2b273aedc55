"""A moving baseline for every agent (role-conditioned advantage estimation of SPIRAL, arXiv 2506.24119).

    A = r − b[source, agent],  then  b ← d · b + (1 − d) · r  with d = `baseline_decay`;  loss as in `grpo`

For self-play, where the mean of a group says nothing: in a zero-sum game it is 0 whatever the policy does, and the seat
that moves first may win more often for no merit. Rewards are those of the samples (each seat has its own). A sample is
compared before it moves the baseline. Baselines begin at 0. Works with `group_size = 1`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_rl.algorithms.types import Algorithm, GroupAdvantages, Memory
from spmd_rl.config.tree import AlgorithmConfig
from spmd_rl.rollouts.types import Group


def advantages(
    groups: Sequence[Group], rewards: Sequence[np.ndarray], config: AlgorithmConfig, memory: Memory
) -> list[GroupAdvantages]:
    """Walks over the batch in its order; `memory` holds the baselines under `baseline/<source>/<agent>`."""
    result = []
    for group, rewards_E in zip(groups, rewards, strict=True):
        valid = [episode for episode in group.episodes if episode.valid]
        credits: GroupAdvantages = []
        for episode, episode_reward in zip(valid, rewards_E.tolist(), strict=True):
            credits.append([])
            for sample in episode.samples:
                reward = episode_reward if sample.reward is None else sample.reward
                name = f"baseline/{group.task.source}/{sample.agent}"
                baseline = memory.get(name, 0.0)
                credits[-1].append(reward - baseline)
                memory[name] = config.baseline_decay * baseline + (1 - config.baseline_decay) * reward
        result.append(credits)
    return result


ALGORITHM = Algorithm(advantages=advantages, baseline="none")
