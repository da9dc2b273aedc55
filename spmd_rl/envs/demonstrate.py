"""Demonstrations: an environment's own rollout, with its teacher in the policy's place.

The teacher speaks text, turn by turn, and hears what the environment appended in between; so whatever an environment
does between turns (tools, feedback, several histories) is in the demonstration exactly as in an attempt.

It refuses to know what is taught. Invariants: the tokens and masks of a demonstration are those of an attempt that says
the same; a teacher's turn is whole or an error, never cut; the same `rng` gives the same demonstration.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.chat_template import template_of
from spmd_rl.envs.protocol import Environment, Generation
from spmd_rl.rollouts.types import RewardError, Task

ROOMY = 2**20  # new tokens per turn, where the environment sets no limit of its own


class DemonstrationError(RuntimeError):
    """The teacher, or the environment it was to teach in, failed."""


class Solver(Environment, Protocol):
    """An environment whose teacher speaks turn by turn."""

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        """The teacher's next turn, without the end token.

        heard[i] is the text that was added before turn i (heard[0]: the whole prompt); `rng` is the only source of
        chance.
        """
        ...


class Demonstrator:
    """A policy that answers with `env.solve`. For one rollout; its histories may take turns (self-play)."""

    def __init__(self, tokenizer: Any, env: Solver, task: Task, rng: np.random.Generator) -> None:
        self.sampling = SamplingConfig(max_tokens=ROOMY)
        self._tokenizer, self._env, self._task, self._rng = tokenizer, env, task, rng
        self._template = template_of(tokenizer)
        self._histories: list[tuple[np.ndarray, list[str]]] = []  # (int32[T] with the teacher's turns, what it heard)

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        """The teacher's turn and the end token. DemonstrationError for one that does not fit into max_tokens."""
        heard = self._hear(tokens)
        text = self._env.solve(self._task, list(heard), self._rng)
        if not isinstance(text, str):
            raise DemonstrationError(f"solve returned {type(text).__name__} in turn {len(heard)}; return a string")
        answer = np.asarray([*self._template.said(text), self._template.end_id], np.int32)
        if len(answer) > sampling.max_tokens:
            raise DemonstrationError(
                f"the teacher's turn {len(heard)} has {len(answer)} tokens with its end, and a reply of this "
                f"environment max_tokens = {sampling.max_tokens}: raise that, or teach shorter answers"
            )
        self._histories.append((np.concatenate([tokens, answer]), heard))
        count = len(answer)
        return Generation(answer, np.zeros(count, np.float32), np.zeros(count, np.int32), "stop")

    def _hear(self, tokens: np.ndarray) -> list[str]:
        """What was heard in the history that the prompt goes on with, and what is new in it."""
        going_on = (h for h in self._histories if np.array_equal(h[0], tokens[: len(h[0])]))
        new: tuple[np.ndarray, list[str]] = (np.empty(0, np.int32), [])
        known = next(going_on, new)
        self._histories = [h for h in self._histories if h is not known]  # it goes on under another length
        return [*known[1], self._tokenizer.decode(tokens[len(known[0]) :].tolist())]


async def demonstration(
    tokenizer: Any, env: Solver, task: Task, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens int32[T], mask uint8[T]) of each sample of one demonstration; mask 1: the teacher's.

    DemonstrationError when the rollout has no reward or no sample. The caller owns the deadline.
    """
    where = f"the demonstration of task {task.source} #{task.index}"
    episode = await env.rollout(task, Demonstrator(tokenizer, env, task, rng))
    if isinstance(episode.reward, RewardError):
        raise DemonstrationError(f"{where} has no reward: {episode.reward.why}")
    if episode.status != "ok":
        raise DemonstrationError(f"{where} ended with the status {episode.status}, not ok")
    if not episode.samples:
        raise DemonstrationError(f"{where} has no samples: the rollout did not ask its policy for anything")
    return [(sample.tokens, sample.mask) for sample in episode.samples]
