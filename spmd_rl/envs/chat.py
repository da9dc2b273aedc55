"""A conversation that grows token by token: messages go in as text, replies come out as they were sampled.

The history is one list of ids that is only ever appended to. Sampled ids are never decoded and encoded again, messages
are rendered once and stand behind them; so the prompt of every reply begins with the ids of all that came before,
and a sample is what the engine saw and sampled. A history that shall be written anew (compaction, another
agent's view) begins a new sample: `restart`.

It refuses to know what is talked about and how it is rewarded. Invariants: the tokens of a reply's prompt begin with
the tokens of the last one and what it was answered with; only what was sampled has mask 1; work and memory are linear
in the tokens; a sample ends with a sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.chat_template import Message, template_of
from spmd_rl.envs.protocol import STATUS_OF, Generation, Policy, PromptTooLong, StopReason
from spmd_rl.envs.tool_calls import THINK, ToolCall, parse
from spmd_rl.rollouts.types import Sample, Status

_ROOM = 512  # tokens that a history has room for at first
_WORST: list[Status] = ["ok", "truncated", "failed"]


@dataclass(frozen=True)
class Reply:
    """What the policy said."""

    text: str  # without the end token
    calls: list[ToolCall]  # in order; malformed ones included, with their error
    stop_reason: StopReason
    generation: Generation


@dataclass
class _History:
    """The tokens of one sample, in an array that doubles when it is full."""

    tokens: np.ndarray = field(default_factory=lambda: np.empty(_ROOM, np.int32))
    length: int = 0
    replies: list[tuple[int, Generation]] = field(default_factory=list)  # (where it begins, what it is)
    ended: bool = False  # the last one, by a token of its own

    def with_more(self, given: np.ndarray) -> np.ndarray:
        """Everything so far and `given` behind it, int32[T], to be read only; nothing is kept yet."""
        end = self._write(self.length, given)
        view = self.tokens[:end]
        view.flags.writeable = False
        return view

    def append(self, given: np.ndarray, reply: Generation) -> None:
        """Keep what was given and what was sampled then."""
        start = self._write(self.length, given)
        self.replies.append((start, reply))
        self.length = self._write(start, reply.tokens)

    def _write(self, at: int, ids: np.ndarray) -> int:
        end = at + len(ids)
        if end > len(self.tokens):
            grown = np.empty(max(end, 2 * len(self.tokens)), np.int32)
            grown[:at] = self.tokens[:at]
            self.tokens = grown
        self.tokens[at:end] = ids
        return end


class Chat:
    """One conversation with a policy.

    Args:
        tokenizer: a Hugging Face tokenizer, or one with encode and decode alone: then it is ChatML.
        policy: None for a chat that only makes prompts.
        tools: schemas that the first prompt shows, {"type": "function", "function": {name, description, parameters}}.
        max_tokens: new tokens of one reply at most; 0: the policy's limit, which holds in any case.
        total_tokens: new tokens of all replies together at most; 0: no limit.
        agent: name of whose samples these are.

    TemplateError (a ValueError) for a tokenizer whose chat template won't do.
    """

    def __init__(
        self,
        tokenizer: Any,
        policy: Policy | None,
        *,
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int = 0,
        total_tokens: int = 0,
        agent: str = "",
    ) -> None:
        if max_tokens < 0 or total_tokens < 0:
            raise ValueError(f"max_tokens = {max_tokens}, total_tokens = {total_tokens}: at least 0, which is no limit")
        self._tokenizer, self._template = tokenizer, template_of(tokenizer)
        self._policy, self._tools, self._agent = policy, list(tools), agent
        self._max_tokens, self._total_tokens, self._sampled = max_tokens, total_tokens, 0
        self._temperature = policy.sampling.temperature if policy else 1.0
        self._histories = [_History()]
        self._messages: list[Message] = []  # said, and not yet part of the history
        self._rendered: np.ndarray | None = None  # int32[n]: these messages and the header of a reply
        self._status: Status = "ok"

    def system(self, text: str | bytes) -> None:
        """Append a system message; markup such as `<tool_call>` may stand in it, as an explanation."""
        self._say({"role": "system", "content": self._template.clean(text, markup=False)})

    def user(self, text: str | bytes) -> None:
        """Append a user's message."""
        self._say({"role": "user", "content": self._template.clean(text)})

    def tool(self, text: str | bytes, name: str = "") -> None:
        """Append a tool's result; `name` is the tool's."""
        # Some templates insist on an id of nine characters.
        message = {"role": "tool", "content": self._template.clean(text), "tool_call_id": "000000000"}
        self._say({**message, "name": self._template.clean(name)} if name else message)

    async def reply(self) -> Reply:
        """What the policy says now.

        When history or `total_tokens` leave no room, a reply of no tokens with stop_reason "length"; but the policy's
        PromptTooLong when nothing was sampled yet. ValueError when nothing was said since the last reply.
        """
        if self._policy is None:
            raise ValueError("this chat was made without a policy: it has prompts, but no replies")
        given = self._given()
        left = self._total_tokens - self._sampled
        if self._total_tokens and left <= 0:
            return self._no_room()
        sampling = self._sampling(self._policy.sampling, left)
        try:
            generation = await self._policy.generate(self._histories[-1].with_more(given), sampling)
        except PromptTooLong:
            if not self._sampled:
                raise
            return self._no_room()
        return self._append(given, generation)

    def restart(self) -> None:
        """Begin a new history: what is said from now on is another sample of the same episode."""
        self._histories.append(_History())
        self._messages, self._rendered = [], None

    def samples(self, reward: float | None = None) -> tuple[Sample, ...]:
        """One per history in which something was sampled; `reward` is theirs alone (None: the episode's)."""
        return tuple(self._sample(h, reward) for h in self._histories if h.length)

    @property
    def status(self) -> Status:
        """ok; truncated: a reply hit a limit; failed: a reply was aborted."""
        return self._status

    def prompt(self) -> np.ndarray:
        """int32[T]: the tokens that a reply would start from now."""
        return self._histories[-1].with_more(self._given()).copy()

    def _say(self, message: Message) -> None:
        self._messages.append(message)
        self._rendered = None

    def _given(self) -> np.ndarray:
        """int32[n]: what is to be appended before the next reply."""
        if self._rendered is None:
            self._rendered = np.asarray(self._render(), np.int32)
        return self._rendered

    def _render(self) -> list[int]:
        if not self._messages:
            raise ValueError("nothing was said since the last reply: call system(), user() or tool() first")
        history = self._histories[-1]
        if not history.length:
            return self._template.first(self._messages, self._tools)
        ids = self._template.behind_reply(self._messages)
        return ids[1:] if history.ended else ids

    def _sampling(self, sampling: SamplingConfig, left: int) -> SamplingConfig:
        limits = [sampling.max_tokens, self._max_tokens or sampling.max_tokens]
        limit = min(*limits, left) if self._total_tokens else min(limits)
        return sampling if limit == sampling.max_tokens else replace(sampling, max_tokens=limit)

    def _append(self, given: np.ndarray, generation: Generation) -> Reply:
        template, history, count = self._template, self._histories[-1], len(generation.tokens)
        ended = template.ended(generation.tokens, generation.stop_reason)
        if count:  # a sample ends with a sampled token
            history.append(given, generation)
            history.ended = ended
            self._messages, self._rendered = [], None
            self._sampled += count
        self._status = max(self._status, STATUS_OF[generation.stop_reason], key=_WORST.index)
        text = self._tokenizer.decode(generation.tokens[: count - ended].tolist())
        calls = parse(THINK + text if template.opens_thought else text)
        return Reply(text, calls, generation.stop_reason, generation)

    def _no_room(self) -> Reply:
        nothing = Generation(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), "length")
        return self._append(nothing.tokens, nothing)

    def _sample(self, history: _History, reward: float | None) -> Sample:
        count = history.length
        mask, logprobs = np.zeros(count, np.uint8), np.zeros(count, np.float32)
        versions, temperatures = np.full(count, -1, np.int32), np.ones(count, np.float32)
        for start, generation in history.replies:
            sampled = slice(start, start + len(generation.tokens))
            mask[sampled] = 1
            logprobs[sampled] = generation.logprobs
            versions[sampled] = generation.versions
            temperatures[sampled] = self._temperature
        tokens = history.tokens[:count].copy()
        return Sample(tokens, mask, logprobs, versions, temperatures, agent=self._agent, reward=reward)
