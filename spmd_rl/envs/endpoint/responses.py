"""What a client gets: bodies of responses and chunks of streams, in OpenAI's form.

A stream is the whole answer in one chunk per choice, then one with why it ended: tokens come from the engine in one
piece. `logprobs` are those of the sampled tokens, with the temperature applied; there are no alternatives to them. What
a model thought is `reasoning_content`.

It refuses to know how answers come about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from spmd_rl.envs.endpoint.history import Answer
from spmd_rl.envs.endpoint.messages import Message
from spmd_rl.envs.endpoint.requests import ChatRequest, CompletionRequest

Body = dict[str, Any]


@dataclass(frozen=True)
class Response:
    """The answers to one request, and how to write them down."""

    request: ChatRequest | CompletionRequest
    answers: Sequence[Answer]
    model: str
    decode: Callable[[list[int]], str]

    def body(self) -> Body:
        """All of it."""
        choices = [self._choice(place, answer) for place, answer in enumerate(self.answers)]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def chunks(self) -> Iterator[Body]:
        """The same as a stream."""
        head = self._head("chat.completion.chunk")
        for place, answer in enumerate(self.answers):
            for part in self._parts(place, answer):
                yield {**head, "choices": [part]}
        if self.request.wishes.usage:
            yield {**head, "choices": [], "usage": self._usage()}

    @property
    def _is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def _head(self, kind: str) -> Body:
        prefix, kind = ("chatcmpl", kind) if self._is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.model}

    def _usage(self) -> Body:
        prompts = sum(answer.prompt for answer in self.answers[:: self.request.wishes.n])  # each prompt counts once
        sampled = sum(len(answer.tokens) for answer in self.answers)
        return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}

    def _choice(self, place: int, answer: Answer) -> Body:
        said = _message(answer.said) if self._is_chat else answer.said.content
        name = "message" if self._is_chat else "text"
        return {"index": place, name: said, "logprobs": self._logprobs(answer), "finish_reason": answer.finish}

    def _parts(self, place: int, answer: Answer) -> Iterator[Body]:
        """A choice in two pieces: all that was said, and why it ended."""
        whole = self._choice(place, answer) | {"finish_reason": None}
        last: Body = {"index": place, "logprobs": None, "finish_reason": answer.finish}
        if not self._is_chat:
            yield whole
            yield last | {"text": ""}
            return
        delta = whole.pop("message")
        for number, call in enumerate(delta.get("tool_calls", [])):
            call["index"] = number
        yield whole | {"delta": delta}
        yield last | {"delta": {}}

    def _logprobs(self, answer: Answer) -> Body | None:
        if not self.request.wishes.logprobs:
            return None
        texts = [self.decode([id]) for id in answer.tokens.tolist()]
        logprobs = answer.logprobs.tolist()
        if self._is_chat:
            return {"content": [_token(text, logprob) for text, logprob in zip(texts, logprobs, strict=True)]}
        starts = [0]
        for text in texts:
            starts.append(starts[-1] + len(text))
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": starts[:-1]}


def models(name: str) -> Body:
    """The one model there is, as a list."""
    return {"object": "list", "data": [model(name)]}


def model(name: str) -> Body:
    """The one model there is."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "spmd_rl"}


def _message(said: Message) -> Body:
    message: Body = {"role": "assistant", "content": said.content, "refusal": None}
    if said.thought:
        message["reasoning_content"] = said.thought
    if said.calls:
        message["content"] = said.content if said.content.strip() else None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    return message


def _token(text: str, logprob: float) -> Body:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
