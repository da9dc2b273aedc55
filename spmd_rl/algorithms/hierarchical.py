"""Two levels of comparison, for episodes in which one agent sets the task of another (proposer and solvers).

    A = r − mean(r of the peers);  loss as in `grpo`

Peers of a sample of `episode_agent`: the samples of that agent in the *same episode*, which worked on the same problem.
Peers of any other agent: its samples in the whole group.

Neither different problems nor different roles are compared with each other. A sample without peers has advantage 0.
An episode of one sample without a named agent is compared within the group, as in `grpo`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from spmd_rl.algorithms.baselines import minus_mean
from spmd_rl.algorithms.types import Algorithm, GroupAdvantages, Memory
from spmd_rl.config.tree import AlgorithmConfig
from spmd_rl.rollouts.types import Group


def advantages(
    groups: Sequence[Group], rewards: Sequence[np.ndarray], config: AlgorithmConfig, memory: Memory
) -> list[GroupAdvantages]:
    """Each sample against its peers."""
    del memory
    return [_of_group(group, r, config.episode_agent) for group, r in zip(groups, rewards, strict=True)]


def _of_group(group: Group, rewards_E: np.ndarray, episode_agent: str) -> GroupAdvantages:
    valid = [episode for episode in group.episodes if episode.valid]
    credits: GroupAdvantages = [[0.0] * len(episode.samples) for episode in valid]
    peers: dict[tuple[str, int], list[tuple[int, int, float]]] = defaultdict(list)
    for e, (episode, episode_reward) in enumerate(zip(valid, rewards_E.tolist(), strict=True)):
        for s, sample in enumerate(episode.samples):
            reward = episode_reward if sample.reward is None else sample.reward
            peers[sample.agent, e if sample.agent == episode_agent else -1].append((e, s, reward))
    for members in peers.values():
        compared = minus_mean(np.array([reward for _, _, reward in members]))
        for (e, s, _), advantage in zip(members, compared.tolist(), strict=True):
            credits[e][s] = advantage
    return credits


ALGORITHM = Algorithm(advantages=advantages)
