"""Rules that turn the rewards of one group into advantages, and what lifts them to batches.

A rule sees rewards float64[n] of a group's valid episodes and gives advantages float64[n]. It refuses to know about
tokens, samples and aggregation. Invariant: equal rewards give exactly 0 wherever the baseline is the group's own,
whatever their value (the first reward is taken off before averaging, so nothing rounds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from spmd_rl.algorithms.types import AdvantageRule, GroupAdvantages, Memory
from spmd_rl.config.imports import load_object
from spmd_rl.config.tree import AlgorithmConfig
from spmd_rl.rollouts.types import Group

GroupRule = Callable[[np.ndarray], np.ndarray]


def minus_mean(rewards_E: np.ndarray) -> np.ndarray:
    """r − mean(r)."""
    from_first_E = rewards_E - rewards_E[0]
    return np.asarray(from_first_E - from_first_E.mean())


def leave_one_out(rewards_E: np.ndarray) -> np.ndarray:
    """r − mean of the others = n / (n − 1) · (r − mean(r)); a group of one has no others, and advantage 0."""
    count = len(rewards_E)
    return minus_mean(rewards_E) * (count / max(1, count - 1))


def over_mean(rewards_E: np.ndarray) -> np.ndarray:
    """(r − mean(r)) / mean(r), and 0 where the mean is not positive."""
    mean = rewards_E.mean()
    return minus_mean(rewards_E) / mean if mean > 0 else np.zeros_like(rewards_E)


def plain(rewards_E: np.ndarray) -> np.ndarray:
    """r itself: the baseline comes later, or from a critic."""
    return rewards_E


def by_group(rule: GroupRule) -> AdvantageRule:
    """`rule` on every group; all samples of an episode share its advantage."""

    def advantages(
        groups: Sequence[Group], rewards: Sequence[np.ndarray], config: AlgorithmConfig, memory: Memory
    ) -> list[GroupAdvantages]:
        del config, memory
        return [spread(group, rule(rewards_E)) for group, rewards_E in zip(groups, rewards, strict=True)]

    return advantages


def spread(group: Group, advantages_E: np.ndarray) -> GroupAdvantages:
    """One advantage per valid episode, given to each of its samples."""
    valid = [episode for episode in group.episodes if episode.valid]
    return [[a] * len(e.samples) for e, a in zip(valid, advantages_E.tolist(), strict=True)]


def own_rule(path: str) -> AdvantageRule:
    """A user's function `fn(rewards float64[n], group) -> advantages float64[n]` as a rule.

    It sees the rewards of the group's valid episodes, and the group with these episodes alone. Raises what
    `load_object` raises; the rule raises ValueError when it does not return n finite numbers.
    """
    function = load_object(path, "orchestrator.algorithm.advantage")

    def advantages(
        groups: Sequence[Group], rewards: Sequence[np.ndarray], config: AlgorithmConfig, memory: Memory
    ) -> list[GroupAdvantages]:
        del config, memory
        result = []
        for group, rewards_E in zip(groups, rewards, strict=True):
            valid = replace(group, episodes=tuple(e for e in group.episodes if e.valid))
            values_E = np.asarray(function(rewards_E.copy(), valid), dtype=np.float64)
            if values_E.shape != rewards_E.shape or not np.isfinite(values_E.astype(np.float32)).all():
                raise ValueError(
                    f"orchestrator.algorithm.advantage = {path}: for {len(rewards_E)} rewards it returned {values_E}; "
                    "it must return as many finite numbers"
                )
            result.append(spread(group, values_E))
        return result

    return advantages
