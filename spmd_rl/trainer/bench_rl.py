"""`main.py rl --bench`: the trainer of a run of RL, without engines and environments.

A batch is what the run's would be if every rollout were one made-up document, its first quarter the prompt, with random
tokens, rewards and behaviour log-probabilities; the algorithm weighs it as it would weigh any other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spmd_rl.algorithms import resolve
from spmd_rl.algorithms.weigh import weigh
from spmd_rl.config.tree import Config
from spmd_rl.observe.logs import RankOutput
from spmd_rl.rollouts.types import Episode, Group, Reward, Sample, Task
from spmd_rl.trainer.bench import Batch, bench
from spmd_rl.trainer.bench_lengths import drawn, limited
from spmd_rl.world.world import World


def run(world: World, output: RankOutput | None = None) -> None:
    """Measure; `output` is the first rank's."""
    bench(world, "rl", batch_of)


def batch_of(config: Config, kind: str, data_ranks: int, vocabulary: int) -> Batch:
    """The minibatches of one batch."""
    o = config.orchestrator
    steps = o.algorithm.minibatches
    wanted = o.groups_per_batch * o.group_size
    lengths = drawn(kind, wanted, config)
    if o.batch_unit == "tokens":  # sampled ones, at least so many
        sampled = (lengths - _prompts(lengths)).cumsum()
        wanted = min(wanted, int(np.searchsorted(sampled, o.batch_size)) + 1)
    lengths = limited(lengths[:wanted], data_ranks * steps, config)
    groups = _groups(config, lengths, _group_count(len(lengths), wanted, o.group_size, steps), vocabulary)
    # An advantage function of one's own may read what a made-up task lacks.
    algorithm = resolve(replace(o.algorithm, advantage=""))
    return Batch(weigh(groups, algorithm, o, {}).minibatches, wanted)


def _groups(config: Config, lengths: np.ndarray, count: int, vocabulary: int) -> list[Group]:
    rng = np.random.default_rng([config.seed, len(lengths)])
    task, temperature = Task("bench", 0, {}), config.orchestrator.sampling.temperature

    def episode(length: int, prompt: int) -> Episode:
        mask = (np.arange(length) >= prompt).astype(np.uint8)
        tokens = rng.integers(0, vocabulary, length).astype(np.int32)
        # As likely as any other token: no ratio is so far from 1 that a loss could be infinite.
        logprobs = np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32)
        temperatures = np.where(mask, temperature, 1.0).astype(np.float32)
        versions = mask.astype(np.int32) - 1
        sample = Sample(tokens, mask, logprobs, versions, temperatures, hint=tokens[:prompt])
        return Episode(task, (sample,), Reward(float(rng.random())))

    parts = np.array_split(np.stack([lengths, _prompts(lengths)], axis=1), count)
    return [Group(i, task, tuple(episode(*pair) for pair in part.tolist()), 0) for i, part in enumerate(parts)]


def _group_count(documents: int, wanted: int, size: int, steps: int) -> int:
    """As in the run; of a batch that was cut short, so many that its optimizer steps are alike."""
    groups = max(steps, -(-documents // size))
    return groups if documents == wanted else min(-(-groups // steps), documents // steps) * steps


def _prompts(lengths: np.ndarray) -> np.ndarray:
    """Tokens of each prompt."""
    return np.maximum(1, lengths // 4)
