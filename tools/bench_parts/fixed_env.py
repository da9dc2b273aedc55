"""An environment of known size for benchmarks: random prompts, answers of exactly the configured length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spmd_rl.envs.protocol import Policy, Split, Tokenizer, single_turn
from spmd_rl.rollouts.types import Episode, Reward, Task


class Fixed:
    """Prompts of `prompt` bytes; every rollout has `policy.sampling.max_tokens` new tokens."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 0, prompt: int = 16) -> None:
        self.seed, self.length = seed, prompt

    def task(self, index: int, split: Split) -> Task:
        return Task("fixed", index, {"split": split})

    def prompt(self, task: Task) -> np.ndarray:
        return np.random.default_rng([self.seed, task.index]).integers(0, 256, self.length).astype(np.int32)

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        sampling = replace(policy.sampling, ignore_eos=True)
        prompt = self.prompt(task)
        generation = await policy.generate(prompt, sampling)
        return single_turn(
            task, prompt, generation, sampling.temperature, Reward(float(generation.tokens.mean() / 256))
        )
