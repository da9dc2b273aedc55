"""The policy as an agent of verifiers talks to it: messages go in, replies come out, tokens are kept.

Tokens are only appended. Where the model's format can't go on from what was sampled (a renderer that drops earlier
thoughts), the conversation is rendered anew and begins another history: another sample, of which only what is sampled
from then on is the policy's.

It refuses to know about tasks, tools and traces. Invariant: a sample is what the engine saw and sampled, token for
token, with the engine's own logprobs and versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmd_rl.envs.adapters.verifiers_rendering import Heard, Message, Rendering, Tool
from spmd_rl.envs.protocol import Generation, Policy, PromptTooLong, turns_to_sample
from spmd_rl.rollouts.types import Sample, Status


class NoRoom(RuntimeError):
    """The conversation is as long as engine and trainer hold; the policy's own words are in it."""


class Aborted(RuntimeError):
    """The engine gave a reply up."""


@dataclass(frozen=True)
class Turn:
    """One reply and the tokens that were added before it."""

    given: np.ndarray  # int32[n]
    before: int  # tokens before the reply, these among them
    generation: Generation
    heard: Heard
    afresh: bool  # `given` begins a history: it holds everything that was said before


class Conversation:
    """One agent's tokens. `max_tokens`: of one reply at most; 0: the policy's limit, which holds in any case."""

    def __init__(self, rendering: Rendering, policy: Policy, max_tokens: int = 0) -> None:
        limit = min(max_tokens or policy.sampling.max_tokens, policy.sampling.max_tokens)
        self._rendering, self._policy = rendering, policy
        self._sampling = replace(policy.sampling, max_tokens=limit)
        self._histories: list[list[Turn]] = []
        self._prompt = np.empty(0, np.int32)  # of the last reply
        self._held = 0  # messages that the current history holds, the last reply among them
        self.status: Status = "ok"  # truncated: a reply hit its limit, or there was no room for one

    async def turn(self, messages: Sequence[Message], tools: list[Tool]) -> Turn:
        """What the policy says to the conversation so far, which begins with what it was before.

        Raises NoRoom, Aborted, and what the policy raises (PromptTooLong where nothing was sampled yet).
        """
        given, last = None, self._histories[-1][-1].generation if self._held else None
        if last is not None:
            given = self._rendering.behind(self._prompt, last, list(messages[self._held :]), tools)
        afresh = given is None
        ids = np.asarray(self._rendering.first(list(messages), tools) if given is None else given, np.int32)
        prompt = ids if afresh else np.concatenate([self._prompt, last.tokens, ids])
        generation = await self._generate(prompt)
        if generation.stop_reason == "aborted":
            raise Aborted("the engine aborted a reply")
        if generation.stop_reason == "length":
            self.status = "truncated"
        turn = Turn(ids, len(prompt), generation, self._rendering.hear(prompt, generation, tools), afresh)
        if afresh:
            self._histories.append([])
        self._histories[-1].append(turn)
        self._prompt, self._held = prompt, len(messages) + 1
        return turn

    def restart(self) -> None:
        """The next turn's conversation is another one: it begins another sample."""
        self._held = 0

    def samples(self, agent: str = "", reward: float | None = None) -> tuple[Sample, ...]:
        """One per history; `reward` is theirs alone (None: the episode's)."""
        temperature = self._sampling.temperature
        made = [turns_to_sample([(t.given, t.generation) for t in turns], temperature) for turns in self._histories]
        return tuple(replace(sample, agent=agent, reward=reward) for sample in made)

    async def _generate(self, prompt: np.ndarray) -> Generation:
        try:
            return await self._policy.generate(prompt, self._sampling)
        except PromptTooLong as error:
            if not self._histories:
                raise
            self.status = "truncated"
            raise NoRoom(str(error)) from error
