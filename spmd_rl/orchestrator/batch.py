"""From finished groups to what one optimizer step consumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmd_rl.algorithms.types import Algorithm, Memory
from spmd_rl.algorithms.weigh import reward_stats, weigh
from spmd_rl.config.tree import OrchestratorConfig
from spmd_rl.rollouts.types import Episode, Group, TrainSample


@dataclass(frozen=True)
class Batch:
    """One batch: its groups, what the trainer sees of them, and the algorithm's figures."""

    groups: list[Group]  # as they were weighed: with advantages, and with the rewards that these come from
    minibatches: list[list[TrainSample]]  # one optimizer step each
    stats: dict[str, float]

    @property
    def tokens(self) -> int:
        """All tokens that are trained on or attended to, prompts included."""
        return sum(len(sample.tokens) for minibatch in self.minibatches for sample in minibatch)

    @property
    def episodes(self) -> list[Episode]:
        """All episodes, group by group."""
        return [episode for group in self.groups for episode in group.episodes]

    def lags(self, step: int) -> np.ndarray:
        """int[tokens]: per sampled token, the optimizer steps between its policy version and this step's start.

        Tokens of a frozen teacher (version -1) have none.
        """
        sampled = np.concatenate([s.versions[s.mask == 1] for e in self.episodes if e.valid for s in e.samples])
        return step - 1 - sampled[sampled >= 0]


def make_batch(
    groups: list[Group],
    dropped: list[Group],
    config: OrchestratorConfig,
    algorithm: Algorithm,
    memory: Memory,
    seed: int,
    oldest: int = 0,
    of_sources: Mapping[int, Algorithm] | None = None,
) -> Batch:
    """Let the algorithm weigh the groups, each minibatch with denominators of its own.

    `dropped` are the groups of equal rewards that others took the place of: they are in the statistics of rewards,
    which would speak of the undecided tasks alone without them. With `shuffle_rewards` (a control) rewards change
    places first; `seed` is that of the shuffle. Tokens of policy versions below `oldest` are not trained on. Sources in
    `of_sources` have rules of their own.
    """
    rewarded = shuffle_rewards(groups, seed) if config.shuffle_rewards else groups
    weighed = weigh(rewarded, algorithm, config, memory, oldest, of_sources)
    stats = weighed.stats | reward_stats([*groups, *dropped]) | {"groups/refilled": float(len(dropped))}
    batch = Batch(weighed.groups, weighed.minibatches, stats)
    if config.max_token_lag:
        versions = np.concatenate([s.versions[s.mask == 1] for e in batch.episodes if e.valid for s in e.samples])
        batch.stats["lag/masked"] = float(np.mean((versions >= 0) & (versions < oldest))) if len(versions) else 0.0
    return batch


def shuffle_rewards(groups: Sequence[Group], seed: int) -> list[Group]:
    """The same groups with the valid episodes' rewards permuted across the whole batch."""
    rewards = [episode.reward for group in groups for episode in group.episodes if episode.valid]
    order = iter(np.random.default_rng(seed).permutation(len(rewards)))
    return [
        replace(
            group,
            episodes=tuple(replace(e, reward=rewards[next(order)]) if e.valid else e for e in group.episodes),
        )
        for group in groups
    ]
