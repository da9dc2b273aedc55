"""Guess a number, and hear whether it is higher or lower: the smallest task of several turns."""

from __future__ import annotations

import re

import numpy as np

from spmd_rl.envs.builtin.answers import whole_number
from spmd_rl.envs.builtin.arguments import check_number
from spmd_rl.envs.builtin.conversation import Style
from spmd_rl.envs.builtin.guessing import Guessing
from spmd_rl.envs.builtin.splits import Content, Listed, canonical
from spmd_rl.envs.protocol import Tokenizer
from spmd_rl.rollouts.types import Task

MOST_TASKS = 100_000


class Guess(Guessing[int]):
    """`1-7` → `4`, `higher than 4` → `6`, `lower than 6` → `5`.

    Whole ranges are held out: of a range with a secret held out, a policy would learn that it is never that one.
    """

    SOURCE = "guess"
    RULES = "Find the secret number in the range. Answer with one number, and nothing else, until you have found it."

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        numbers: int = 7,
        ranges: int = 20,
        turns: int = 3,
        turn_cost: float = 0.0,
        wrong: float = 0.0,
        heldout: float = 0.1,
        reward: str = "exact",
        chat: bool = True,
        rules: bool = False,
        max_tokens: int = 0,
    ) -> None:
        """Ranges of so many `numbers`, which begin at 1 to `ranges`. The rest: `guessing.py`, but `heldout` is a share
        of the ranges."""
        check_number(self.SOURCE, "numbers", numbers, 2, MOST_TASKS)
        check_number(self.SOURCE, "ranges", ranges, 1, MOST_TASKS // numbers, why=f"at most {MOST_TASKS} tasks")
        style = Style(tokenizer, chat, self.RULES if rules else "", max_tokens or len(str(ranges + numbers)) + 2)
        contents: list[Content] = [
            {"low": low, "high": low + numbers - 1, "secret": secret}
            for low in range(1, ranges + 1)
            for secret in range(low, low + numbers)
        ]
        tasks = Listed(self.SOURCE, seed, heldout, contents, key=_range if ranges > 1 else canonical)
        super().__init__(style, tasks, turns, turn_cost, wrong, reward)

    def opening(self, data: Content) -> str:
        """The range, both ends included."""
        return f"{data['low']}-{data['high']}"

    def read(self, data: Content, answer: str) -> int | None:
        """A number in the range."""
        number = whole_number(answer)
        return number if number is not None and data["low"] <= number <= data["high"] else None

    def verdict(self, data: Content, guess: int) -> str:
        """On which side the secret is."""
        return f"{'higher' if data['secret'] > guess else 'lower'} than {guess}"

    def invalid(self, data: Content) -> str:
        """The range again."""
        return self.opening(data)

    def nearness(self, data: Content, guess: int) -> float:
        """How small the distance is, as a share of the numbers."""
        return 1 - abs(data["secret"] - guess) / (data["high"] - data["low"] + 1)

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        """The middle of what is left; any number of the range with probability `wrong`."""
        low, high = task.data["low"], task.data["high"]
        if rng.random() < self._wrong:
            return str(rng.integers(low, high + 1))
        for side, number in re.findall(r"(higher|lower) than ([0-9]+)", "\n".join(heard)):
            low, high = (max(low, int(number) + 1), high) if side == "higher" else (low, min(high, int(number) - 1))
        return str((low + high) // 2)


def _range(content: Content) -> str:
    return f"{content['low']}-{content['high']}"
