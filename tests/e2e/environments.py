"""Environments for tests, loaded by `environments.py:Class` as users load theirs."""

from __future__ import annotations

import numpy as np

from spmd_rl.envs.protocol import Generation, Policy, Split, Tokenizer, turns_to_sample
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Sample, Task


class Talk:
    """Several turns about nothing; the reward is chance, so that there are gradients, and nothing to learn."""

    def __init__(self, tokenizer: Tokenizer, seed: int, turns: int = 3, added: int = 20) -> None:
        self.seed, self.turns, self.added = seed, turns, added

    def task(self, index: int, split: Split) -> Task:
        return Task(source="talk", index=index, data={"split": split})

    def prompt(self, task: Task) -> np.ndarray:
        return np.random.default_rng([self.seed, task.index]).integers(0, 256, 40).astype(np.int32)

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        given, turns = self.prompt(task), []
        tokens = given
        for turn in range(self.turns):
            generation = await policy.generate(tokens, policy.sampling)
            turns.append((given, generation))
            given = np.full(self.added, turn, dtype=np.int32)
            tokens = np.concatenate([tokens, generation.tokens, given])
        sample = turns_to_sample(turns, policy.sampling.temperature)
        return Episode(task, (sample,), self.reward(sample, turns))

    def reward(self, sample: Sample, turns: list[tuple[np.ndarray, Generation]]) -> Reward | RewardError:
        return Reward(float(sample.tokens.sum() % 2))


class NoReward(Talk):
    """What goes wrong in rewards: it raises in some rollouts, and is no number in others."""

    def reward(self, sample: Sample, turns: list[tuple[np.ndarray, Generation]]) -> Reward | RewardError:
        if sample.tokens.sum() % 2:
            raise ZeroDivisionError("the judge divided by zero")
        return Reward(float("nan"))


class NoTask(Talk):
    """Its tasks raise."""

    def task(self, index: int, split: Split) -> Task:
        raise LookupError("the data set ends before this task")
