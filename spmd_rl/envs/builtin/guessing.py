"""The base of games in which the policy has some turns to find a secret, and hears after each how near it was.

A subclass says how a guess is read, what is said about it, and how near it is. They all take:

- `turns`: guesses at most, those that are none included;
- `turn_cost`: what every turn after the first takes off the reward of a hit;
- `wrong`: share of the teacher's guesses that look at nothing it heard;
- `heldout`: share of the secrets kept from training;
- `reward`: `exact` is 1 for a hit (less `turn_cost`), else 0. `dense` gives up to 0.2 for the nearest guess where
  none was a hit;
- `chat`, `rules`, `max_tokens` (of one turn): as in `single_turn.py`.

What is said about a guess repeats it: so the policy finds it next to the verdict, and the teacher needs no memory. A
guess that is none costs a turn; a reply without an end ends the game.

Invariant: whatever the model wrote gets a reward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

import numpy as np

from spmd_rl.envs.builtin.answers import answer_in
from spmd_rl.envs.builtin.arguments import check_choice, check_number, check_share
from spmd_rl.envs.builtin.conversation import Style, ended
from spmd_rl.envs.builtin.splits import Content, Listed
from spmd_rl.envs.protocol import Policy, Split
from spmd_rl.rollouts.types import Episode, Reward, Task

FOR_NEARNESS = 0.2  # of the dense reward, where nothing was a hit
Guess = TypeVar("Guess", int, str)


class Guessing(ABC, Generic[Guess]):
    """A secret, some turns, and a verdict on every guess."""

    SOURCE: ClassVar[str]
    RULES: ClassVar[str]  # what the system message says

    def __init__(self, style: Style, tasks: Listed, turns: int, turn_cost: float, wrong: float, reward: str) -> None:
        """ValueError for arguments that can't work."""
        check_number(self.SOURCE, "turns", turns, 1, 1000)
        most = 1.0 if turns == 1 else (1 - FOR_NEARNESS) / (turns - 1)
        check_number(self.SOURCE, "turn_cost", turn_cost, 0.0, most, why="the last hit must beat the nearest miss")
        check_share(self.SOURCE, "wrong", wrong)
        check_choice(self.SOURCE, "reward", reward, ("exact", "dense"))
        self._style, self._tasks, self._turns, self._turn_cost = style, tasks, turns, turn_cost
        self._wrong, self._dense = wrong, reward == "dense"

    @abstractmethod
    def opening(self, data: Content) -> str:
        """What is said first."""

    @abstractmethod
    def read(self, data: Content, answer: str) -> Guess | None:
        """The guess that an answer is, None where it is none."""

    @abstractmethod
    def verdict(self, data: Content, guess: Guess) -> str:
        """What is said about a guess that was no hit; it repeats the guess."""

    @abstractmethod
    def invalid(self, data: Content) -> str:
        """What is said about an answer that is no guess."""

    @abstractmethod
    def nearness(self, data: Content, guess: Guess) -> float:
        """How near a guess is, in 0..1; 1 for a hit alone."""

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` ≥ 0. ValueError where no task is on that side."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]."""
        chat = self._style.begin()
        chat.user(self.opening(task.data))
        return chat.prompt()

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """Guess by guess, until a hit, a reply without an end, or the last turn."""
        chat = self._style.begin(policy)
        chat.user(self.opening(task.data))
        guesses: list[Guess | None] = []
        near = 0.0
        while near < 1 and len(guesses) < self._turns:
            reply = await chat.reply()
            if reply.stop_reason != "stop":
                guesses.append(None)
                break
            guess = self.read(task.data, answer_in(reply.text))
            guesses.append(guess)
            if guess is not None:
                near = max(near, self.nearness(task.data, guess))
            chat.user(self.invalid(task.data) if guess is None else self.verdict(task.data, guess))
        return ended(task, chat, self.reward(near, guesses))

    def reward(self, near: float, guesses: list[Guess | None]) -> Reward:
        """Of a game: `near` is that of the nearest guess."""
        hit = near == 1
        parts = {"hit": float(hit), "turns": float(len(guesses)), "invalid": float(guesses.count(None))}
        if hit:
            return Reward(1 - self._turn_cost * (len(guesses) - 1), parts)
        return Reward(FOR_NEARNESS * near * self._dense, parts)
