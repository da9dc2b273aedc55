"""Your own task in one class: spell a number's last digit. Used by configs/own_env.toml."""

from dataclasses import replace

import numpy as np

from spmd_rl.envs.protocol import single_turn
from spmd_rl.rollouts.types import Reward, Task

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class LastDigit:
    """`<|im_start|>4711` + newline → `one`; one tenth of all numbers is held out."""

    def __init__(self, tokenizer, seed=0):
        self.tokenizer, self.seed = tokenizer, seed

    def task(self, index, split):
        number = int(np.random.default_rng([self.seed, index]).integers(1000)) * 10 + index % 10
        held_out = number // 10 % 10 == 0
        if held_out != (split == "heldout"):
            number += 10 if split == "train" else -(number // 10 % 10) * 10
        return Task("last_digit", index, {"number": number})

    def prompt(self, task):
        return np.asarray(self.tokenizer.encode(f"<|im_start|>{task.data['number']}\n"), dtype=np.int32)

    async def rollout(self, task, policy):
        prompt = self.prompt(task)
        answer = await policy.generate(prompt, replace(policy.sampling, max_tokens=8))
        text = self.tokenizer.decode(answer.tokens.tolist()).removesuffix("<|im_end|>")
        reward = Reward(float(text == DIGITS[task.data["number"] % 10]))
        return single_turn(task, prompt, answer, policy.sampling.temperature, reward)

    def hint(self, task):
        """For self-distillation: the prompt, with the answer in front."""
        digit = DIGITS[task.data["number"] % 10]
        return np.asarray(self.tokenizer.encode(f"<|im_start|>{digit} {task.data['number']}\n"), dtype=np.int32)

    def teacher(self, task, rng):
        """For the warm-up; right three times out of ten."""
        digit = task.data["number"] % 10 if rng.random() < 0.3 else int(rng.integers(10))
        return self.prompt(task), np.asarray(self.tokenizer.encode(DIGITS[digit] + "<|im_end|>"), dtype=np.int32)
