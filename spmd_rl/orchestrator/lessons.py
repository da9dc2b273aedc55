"""What the supervised warm-up learns: the answers and demonstrations of the tasks' own teachers.

A lesson is a function of the run's seed and its number. An environment teaches by `teacher` (a prompt and an answer) or
by `solve`, turn by turn through its own rollout (`envs/demonstrate.py`); such a rollout may be slow (sandboxes, games),
so `warmup.lessons` says how many different ones there are, and each is made once.

It refuses to know how lessons are weighed (`algorithms/supervised.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from spmd_rl.config.tree import Config
from spmd_rl.envs.demonstrate import demonstration
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.orchestrator.sources import Source

AT_ONCE = 8  # demonstrations that are made at the same time

Lesson = tuple[np.ndarray, np.ndarray]  # tokens int32[T], mask uint8[T]: 1 = to be learned


class Lessons:
    """The lessons of one run. `tokenizer` is None where no source demonstrates."""

    def __init__(self, config: Config, sources: list[Source], tokenizer: Any) -> None:
        self._config, self._sources, self._tokenizer = config, sources, tokenizer
        self._free = asyncio.Semaphore(AT_ONCE)
        self._made: dict[int, list[Lesson]] = {}  # by number, where there are few different ones

    async def step(self, step: int) -> list[Lesson]:
        """Everything that warm-up step `step` ≥ 1 learns. ValueError for a long one; else what a teacher raises."""
        size, different = self._config.warmup.batch_size, self._config.warmup.lessons
        numbers = range((step - 1) * size, step * size)
        found = await asyncio.gather(*(self._lesson(n % different if different else n) for n in dict.fromkeys(numbers)))
        return [lesson for lessons in found for lesson in lessons]

    async def _lesson(self, number: int) -> list[Lesson]:
        if number not in self._made:
            async with self._free:
                made = await self._make(number)
            if not self._config.warmup.lessons:
                return made
            self._made[number] = made
        return self._made[number]

    async def _make(self, number: int) -> list[Lesson]:
        place, index = number % len(self._sources), number // len(self._sources)
        source = self._sources[place]
        env, task = source.env, source.env.task(index, "train")
        rng = np.random.default_rng(seed_of(self._config.seed, "teacher", number))
        if getattr(env, "teacher", None):
            prompt, answer = env.teacher(task, rng)
            made = [(np.concatenate([prompt, answer]), np.repeat([0, 1], [len(prompt), len(answer)]))]
        else:
            async with asyncio.timeout(source.rollout_s):
                made = await demonstration(self._tokenizer, env, task, rng)
        for tokens, _ in made:
            if len(tokens) > self._config.seq_len:
                raise ValueError(
                    f"the lesson of {source.name} task {index} has {len(tokens)} tokens, and seq_len = "
                    f"{self._config.seq_len}: raise that, or make the tasks shorter"
                )
        return [(tokens.astype(np.int32), mask.astype(np.uint8)) for tokens, mask in made]


def can_teach(env: Any) -> bool:
    """Whether an environment shows answers in one of the two ways."""
    return bool(getattr(env, "teacher", None) or getattr(env, "solve", None))
