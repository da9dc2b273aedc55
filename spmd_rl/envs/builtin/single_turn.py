"""The base of tasks with one question and one right answer, both short texts.

A subclass says how a task is drawn, what is asked, what is right, and what its teacher gets wrong. They all take:

- `wrong`: share of the teacher's answers that are wrong, so that a warm-up leaves a policy right only as often;
- `heldout`: share of all tasks kept from training;
- `reward`: `exact` is 1 for the right answer before the end token, else 0 (also when no end came). `dense` is
  0.8 × the share of places with the right character (of the longer of the two texts) + 0.2 × exact: what a model that
  begins from nothing can climb;
- `chat`: the tokenizer's chat template, or the short form (`conversation.py`);
- `rules`: say in a system message what the task is, for models that can read;
- `max_tokens`: new tokens per answer at most; 0: one per character and two more. A model that thinks needs more.

Invariant: whatever the model wrote gets a reward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from spmd_rl.envs.builtin.answers import answer_in, nearness
from spmd_rl.envs.builtin.arguments import check_choice, check_share
from spmd_rl.envs.builtin.conversation import Style, ended
from spmd_rl.envs.builtin.splits import Content, Drawn
from spmd_rl.envs.protocol import Policy, Split
from spmd_rl.rollouts.types import Episode, Reward, Task

FOR_PLACES = 0.8  # of the dense reward


class SingleTurn(ABC):
    """One question, one answer."""

    SOURCE: ClassVar[str]
    RULES: ClassVar[str]  # what the system message says

    def __init__(self, style: Style, tasks: Drawn, wrong: float, reward: str) -> None:
        """ValueError for arguments that can't work."""
        check_share(self.SOURCE, "wrong", wrong)
        check_choice(self.SOURCE, "reward", reward, ("exact", "dense"))
        self._style, self._tasks, self._wrong, self._dense = style, tasks, wrong, reward == "dense"

    @abstractmethod
    def question(self, data: Content) -> str:
        """What is asked."""

    @abstractmethod
    def answer(self, data: Content) -> str:
        """The right answer."""

    @abstractmethod
    def mistake(self, data: Content, rng: np.random.Generator) -> str:
        """A wrong answer."""

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` ≥ 0. ValueError where no task is on that side."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]."""
        chat = self._style.begin()
        chat.user(self.question(task.data))
        return chat.prompt()

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One question, one answer."""
        chat = self._style.begin(policy)
        chat.user(self.question(task.data))
        reply = await chat.reply()
        return ended(task, chat, self.reward(task, reply.text, reply.stop_reason == "stop"))

    def reward(self, task: Task, text: str, complete: bool) -> Reward:
        """Of a reply; `complete`: its end token came."""
        given, right = answer_in(text), self.answer(task.data)
        exact = float(complete and given == right)
        if not self._dense:
            return Reward(exact)
        places = nearness(given, right)
        return Reward(FOR_PLACES * places + (1 - FOR_PLACES) * exact, {"exact": exact, "places": places})

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        """The teacher's answer: a mistake with probability `wrong`. It needs nothing of what was `heard`."""
        return self.mistake(task.data, rng) if rng.random() < self._wrong else self.answer(task.data)
