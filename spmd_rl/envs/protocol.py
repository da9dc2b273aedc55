"""What an environment is, and the policy and the tokenizer it is given.

Token ids go in and token ids come out: an environment never gets its own samples back as text, so nothing is ever
tokenised twice. This file refuses to know about engines, replicas, groups and advantages.

Invariant: the samples an environment returns are what the engine really saw and sampled, token for token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Sample, Status, Task

Split = Literal["train", "heldout"]
StopReason = Literal["stop", "length", "aborted"]

STATUS_OF: dict[StopReason, Status] = {"stop": "ok", "length": "truncated", "aborted": "failed"}


class PromptTooLong(ValueError):
    """No room is left for a single new token."""


@dataclass(frozen=True)
class Generation:
    """What the engine sampled for one request, n tokens (the end token included when it was sampled)."""

    tokens: np.ndarray  # int32[n]
    logprobs: np.ndarray  # float32[n]: with the temperature applied
    versions: np.ndarray  # int32[n]: policy version that sampled the token
    stop_reason: StopReason  # length: max_tokens or the engine's longest sequence was reached


class Tokenizer(Protocol):
    """The two methods an environment may count on."""

    def encode(self, text: str) -> list[int]:
        """Exactly this text: special tokens are recognised by name, and none is added."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """The text of the ids, special tokens included."""
        ...


class Policy(Protocol):
    """The model as an environment sees it."""

    sampling: SamplingConfig  # what the run asks for (greedy in an evaluation); an environment may lower max_tokens

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        """Sample a continuation of `tokens` (int32[T]: everything so far, from the first token on).

        PromptTooLong when there is no room for a new token.
        """
        ...


class Environment(Protocol):
    """Tasks, and how one attempt at a task goes. Its class is called as `Class(tokenizer, seed, **args)`.

    One instance serves many rollouts at once: whatever belongs to one attempt lives in `rollout`'s local variables.
    """

    def task(self, index: int, split: Split) -> Task:
        """The task number `index` ≥ 0: the same for the same seed; there is one for every index (repeating is fine)."""
        ...

    def prompt(self, task: Task) -> np.ndarray:
        """The tokens an attempt starts with, int32[T], T ≥ 1."""
        ...

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One attempt. A reward that can't be computed is a `RewardError`, never a zero.

        The caller owns the deadline and fills in `Episode.seconds`: an environment reads no clock.
        """
        ...


class Teacher(Protocol):
    """An environment that can also show answers, for the supervised warm-up."""

    def teacher(self, task: Task, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(prompt int32[T], answer int32[n] with its end token); `rng` is the only source of chance."""
        ...


class Hinted(Protocol):
    """An environment that can also give the answer away, for self-distillation (`algorithm.type = "opsd"`)."""

    def hint(self, task: Task) -> np.ndarray:
        """int32[H]: a prompt for the same attempt, from which the right answer is plain."""
        ...


def single_turn(
    task: Task,
    prompt: np.ndarray,
    generation: Generation,
    temperature: float,
    reward: Reward | RewardError,
) -> Episode:
    """The episode of one prompt (int32[T]) and one generation, as one sample of T + n tokens."""
    return Episode(
        task=task,
        samples=(turns_to_sample([(prompt, generation)], temperature),),
        reward=reward,
        status=STATUS_OF[generation.stop_reason],
    )


def turns_to_sample(turns: list[tuple[np.ndarray, Generation]], temperature: float) -> Sample:
    """One sample from turns of (tokens that were *added* before the turn, what was then sampled).

    Columns of the given tokens hold mask 0, logprob 0, version -1 and temperature 1.
    """
    columns: dict[str, list[Any]] = {"tokens": [], "mask": [], "logprobs": [], "versions": [], "temperatures": []}
    for given, sampled in turns:
        columns["tokens"] += [given, sampled.tokens]
        columns["mask"] += [np.zeros(len(given)), np.ones(len(sampled.tokens))]
        columns["logprobs"] += [np.zeros(len(given)), sampled.logprobs]
        columns["versions"] += [np.full(len(given), -1), sampled.versions]
        columns["temperatures"] += [np.ones(len(given)), np.full(len(sampled.tokens), temperature)]
    return Sample(
        tokens=np.concatenate(columns["tokens"]).astype(np.int32),
        mask=np.concatenate(columns["mask"]).astype(np.uint8),
        logprobs=np.concatenate(columns["logprobs"]).astype(np.float32),
        versions=np.concatenate(columns["versions"]).astype(np.int32),
        temperatures=np.concatenate(columns["temperatures"]).astype(np.float32),
    )
