"""One conversation of a client with the policy, or one plain prompt: what becomes a sample.

The tokens are `Chat`'s business. What is added here: which messages a history holds, in the client's words; limits that
are one request's; stop strings. The engine knows no stop strings, so a reply is cut behind the token that completes the
first one, as an engine that knows them does. Whether a token is kept depends on the tokens up to it alone, so what is
kept is sampled from the policy and may be trained on; what the engine sampled behind it is part of nothing.

It refuses to know about HTTP and about other histories. Invariants: a request that is refused, fails or is cancelled
leaves a history as it was; every token that is kept has mask 1 in exactly one sample.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.chat import Chat
from spmd_rl.envs.chat_template import TemplateError, template_of
from spmd_rl.envs.endpoint.errors import ApiError, no_room, wrong
from spmd_rl.envs.endpoint.messages import Message, say_the_same, tool_names
from spmd_rl.envs.endpoint.replies import as_message, before_stop
from spmd_rl.envs.endpoint.requests import ChatRequest, Wishes
from spmd_rl.envs.protocol import STATUS_OF, Generation, Policy, PromptTooLong, turns_to_sample
from spmd_rl.rollouts.types import Sample, Status

Finish = Literal["stop", "length", "tool_calls"]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Answer:
    """One choice of a response."""

    said: Message
    finish: Finish
    prompt: int  # tokens
    tokens: np.ndarray  # int32[n], the end token included
    logprobs: np.ndarray  # float32[n]: with the temperature applied


class History:
    """A conversation: the messages that it holds, and a chat with their tokens.

    TemplateError for a tokenizer whose chat template won't do.
    """

    def __init__(self, tokenizer: Any, policy: Policy, tools: Sequence[dict[str, Any]]) -> None:
        self.busy = False  # a request is under way
        self._voice = _Voice(policy, tokenizer.decode)
        self._chat = _Chat(tokenizer, self._voice, tools=tools)
        self._in_thought = template_of(tokenizer).opens_thought
        self._tools = tuple(tools)
        self._messages: tuple[Message, ...] = ()  # said by the client and by the policy

    def __len__(self) -> int:
        """Messages."""
        return len(self._messages)

    def is_extended_by(self, request: ChatRequest) -> bool:
        """Whether the request's messages are those held here, and more."""
        theirs = request.messages[: len(self)]
        return (
            len(self) < len(request.messages)
            and self._tools == request.tools
            and all(map(say_the_same, self._messages, theirs))
        )

    def free(self) -> None:
        """The request is over."""
        self.busy = False

    async def reply(self, request: ChatRequest) -> Answer:
        """What the policy says to messages that extend the history. ApiError, or what the policy raises."""
        try:
            self._hear(request)
            self._voice.heed(request.wishes)
            reply = await self._chat.reply()
        except TemplateError as error:
            raise wrong("messages", str(error)) from error
        except PromptTooLong as error:
            raise no_room(str(error)) from error
        finally:
            self._chat.unsay()
        made = reply.generation
        _check(made)
        text = before_stop(reply.text, request.wishes.stop)
        said = as_message(text, in_thought=self._in_thought, calls=request.calls, one_call=request.one_call)
        self._messages = (*request.messages, said)
        finish: Finish = "tool_calls" if said.calls and made.stop_reason == "stop" else _finish(made)
        return Answer(said, finish, self._voice.prompt, made.tokens, made.logprobs)

    def samples(self) -> tuple[Sample, ...]:
        """One; none where nothing was sampled."""
        return self._chat.samples()

    @property
    def status(self) -> Status:
        """Of the replies so far."""
        return self._chat.status

    def _hear(self, request: ChatRequest) -> None:
        new = list(zip(request.messages, tool_names(request.messages), strict=True))[len(self) :]
        for message, tool in new:
            match message.role:
                case "system":
                    self._chat.system(message.content)
                case "user":
                    self._chat.user(message.content)
                case "tool":
                    self._chat.tool(message.content, tool)
                case "assistant":
                    self._chat.assistant(message.as_said)


class Continuation:
    """A plain prompt, int32[T], and what the policy makes of it."""

    def __init__(self, tokenizer: Any, policy: Policy, prompt: np.ndarray) -> None:
        self.status: Status = "ok"
        self._decode, self._prompt = tokenizer.decode, prompt
        self._voice = _Voice(policy, tokenizer.decode)
        self._made: Generation | None = None

    async def reply(self, wishes: Wishes) -> Answer:
        """The text behind the prompt. ApiError, or what the policy raises."""
        self._voice.heed(wishes)
        try:
            made = await self._voice.generate(self._prompt, self._voice.sampling)
        except PromptTooLong as error:
            raise no_room(str(error)) from error
        self.status = STATUS_OF[made.stop_reason]
        _check(made)
        self._made = made
        ended = made.stop_reason == "stop" and not self._voice.cut
        text = before_stop(self._decode(made.tokens[: len(made.tokens) - ended].tolist()), wishes.stop)
        return Answer(Message("assistant", text), _finish(made), len(self._prompt), made.tokens, made.logprobs)

    def samples(self) -> tuple[Sample, ...]:
        """One; none where nothing was sampled."""
        temperature = self._voice.sampling.temperature
        return (turns_to_sample([(self._prompt, self._made)], temperature),) if self._made else ()


class _Chat(Chat):
    """A chat whose client may have written the assistant's turns anew, and may take back what it said."""

    def assistant(self, text: str) -> None:
        """Append a turn of the assistant that was not sampled here; markup in it is markup."""
        self._say({"role": "assistant", "content": self._template.clean(text, markup=False)})

    def unsay(self) -> None:
        """Forget what was said since the last reply."""
        self._messages, self._rendered, self._full = [], None, False


class _Voice:
    """The policy as one history hears it: with the limits of the request under way."""

    def __init__(self, policy: Policy, decode: Decode) -> None:
        self.sampling, self.prompt, self.cut = policy.sampling, 0, False
        self._policy, self._decode = policy, decode
        self._stops: tuple[str, ...] = ()

    def heed(self, wishes: Wishes) -> None:
        """The next generation is for a request with these wishes."""
        most = self._policy.sampling.max_tokens
        self.sampling = replace(self._policy.sampling, max_tokens=min(most, wishes.max_tokens or most))
        self._stops = wishes.stop

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        """The policy's continuation of `tokens` (int32[T]), up to the first stop string."""
        self.prompt = len(tokens)
        sampled = await self._policy.generate(tokens, sampling)
        made = cut_at_stop(sampled, self._stops, self._decode)
        self.cut = made is not sampled
        return made


def cut_at_stop(made: Generation, stops: Sequence[str], decode: Decode) -> Generation:
    """The generation up to the token that completes a stop string; itself where none is in its text."""

    def stopped(tokens: int) -> bool:
        text = decode(made.tokens[:tokens].tolist())
        return any(stop in text for stop in stops)

    if not stops or not stopped(len(made.tokens)):
        return made
    count = bisect_left(range(len(made.tokens)), True, key=stopped)
    return Generation(made.tokens[:count], made.logprobs[:count], made.versions[:count], "stop")


def _check(made: Generation) -> None:
    if made.stop_reason == "aborted":
        raise ApiError(503, "the engine gave the reply up", code="aborted", again=True)
    if not len(made.tokens):
        raise no_room("not a single new token has room")


def _finish(made: Generation) -> Finish:
    return "length" if made.stop_reason == "length" else "stop"
