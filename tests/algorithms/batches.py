"""Groups of made-up episodes, and what an algorithm makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from spmd_rl.algorithms import resolve
from spmd_rl.algorithms.types import Memory
from spmd_rl.algorithms.weigh import Weighed, weigh
from spmd_rl.config.tree import AlgorithmConfig, OrchestratorConfig, SamplingConfig
from spmd_rl.rollouts.types import Episode, Group, Reward, RewardError, Sample, Task, TrainSample

TASK = Task("reverse", 7, {})
MAX_TOKENS = 10


def sample(mask: list[int], **fields: Any) -> Sample:
    n, sampled = len(mask), np.asarray(mask, np.uint8)
    return Sample(
        tokens=np.arange(n, dtype=np.int32),
        mask=sampled,
        logprobs=(-0.5 * sampled).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        temperatures=np.ones(n, np.float32),
        **fields,
    )


def episode(reward: float | None, *masks: list[int], status: str = "ok") -> Episode:
    outcome = RewardError("broken") if reward is None else Reward(reward)
    return Episode(TASK, tuple(sample(m) for m in masks or ([0, 1],)), outcome, status)


def seats(*parts: tuple[str, float | None], reward: float = 0.0) -> Episode:
    """An episode with a sample of one sampled token for every (agent, own reward)."""
    samples = tuple(sample([0, 1], agent=agent, reward=own) for agent, own in parts)
    return Episode(TASK, samples, Reward(reward))


def group(*episodes: Episode, id: int = 0) -> Group:
    return Group(id, TASK, episodes, admitted_version=0)


def rewarded(*rewards: float, id: int = 0) -> Group:
    """A group of episodes with one sampled token each."""
    return group(*map(episode, rewards), id=id)


def run(*groups: Group, memory: Memory | None = None, **algorithm: Any) -> Weighed:
    """The batch as the algorithm weighs it; keywords are those of AlgorithmConfig."""
    config = OrchestratorConfig(
        algorithm=AlgorithmConfig(**algorithm), sampling=SamplingConfig(max_tokens=MAX_TOKENS), group_size=2
    )
    return weigh(groups, resolve(config.algorithm), config, {} if memory is None else memory)


def samples(weighed: Weighed) -> list[TrainSample]:
    return [sample for minibatch in weighed.minibatches for sample in minibatch]


def stream(sample: TrainSample, name: str) -> list[float]:
    """A weight stream as numbers per token."""
    weight = getattr(sample, name)
    return (weight if isinstance(weight, np.ndarray) else weight * sample.mask.astype(np.float64)).tolist()


def weights(*groups: Group, name: str = "pg_weight", **algorithm: Any) -> list[list[float]]:
    """A weight stream of every sample of the batch."""
    return [stream(s, name) for s in samples(run(*groups, **algorithm))]


def advantages(*groups: Group, memory: Memory | None = None, **algorithm: Any) -> list[list[float]]:
    """[group][sample of a valid episode]."""
    weighed = run(*groups, memory=memory, **algorithm)
    return [[s.advantages for e in g.episodes if e.valid for s in e.samples] for g in weighed.groups]


def with_status(made: Episode, status: str) -> Episode:
    return replace(made, status=status)
