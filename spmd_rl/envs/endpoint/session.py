"""What one key asks of one policy, as the samples of one episode.

A request carries a whole conversation. Where that extends a history of this key, message for message, only what is new
is appended, behind the tokens that were sampled; so an agent that goes on talking makes one sample. Everything else
begins a history of its own: a conversation that was rewritten, a sub-agent, other tools, the same question once more,
a second request while the first is under way. Histories may go on in turn.

How is sampled says the policy: of a client's wishes only a lower `max_tokens`, `n` and stop strings are heeded here.

It refuses to know about HTTP, keys and rewards. Invariants: every token that the policy sampled for a client and that
no stop string cut off is in exactly one sample with mask 1; what a client does wrong is an ApiError and fails nothing;
what the policy raises is kept in `error`, for whoever runs the episode; after `close` nothing is asked of the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.chat_template import TemplateError
from spmd_rl.envs.endpoint.errors import ApiError, over, wrong
from spmd_rl.envs.endpoint.history import Answer, Continuation, History
from spmd_rl.envs.endpoint.requests import ChatRequest, CompletionRequest
from spmd_rl.envs.protocol import Policy
from spmd_rl.rollouts.types import Sample, Status

T = TypeVar("T")

AT_ONCE = 1024  # replies of one key under way
_WORST: list[Status] = ["ok", "truncated", "failed"]
RAN_OUT = ("context_length_exceeded", "insufficient_quota")  # codes


@dataclass(frozen=True)
class Answered:
    """All answers to a request."""

    answers: list[Answer]
    sampling: SamplingConfig  # how they were sampled
    decode: Callable[[list[int]], str]  # the text of tokens


class Session:
    """One key's conversations.

    Args:
        tokenizer: as environments get it.
        policy: whose `sampling` is how is sampled, and how much at most.
        max_replies: of all histories together; 0: no limit. The request behind the last one is refused, and the episode
            is truncated.
    """

    def __init__(self, tokenizer: Any, policy: Policy, *, max_replies: int = 0) -> None:
        self.error: Exception | None = None  # the first one that is no client's fault
        self.ran_out = False  # a request was refused, as there was no room, or no reply left
        self._tokenizer, self._policy, self._max_replies = tokenizer, policy, max_replies
        self._histories: list[History | Continuation] = []
        self._running: set[asyncio.Task[Any]] = set()
        self._replies = self._under_way = 0
        self._status: Status = "ok"
        self._failed = asyncio.Event()
        self._over = False

    @property
    def status(self) -> Status:
        """ok; truncated: a reply hit a limit, or there was no room for one; failed: one was aborted."""
        return max((self._status, *(history.status for history in self._histories)), key=_WORST.index)

    def samples(self) -> tuple[Sample, ...]:
        """One per history in which something was sampled, in the order in which they began."""
        return tuple(sample for history in self._histories for sample in history.samples())

    async def chat(self, request: ChatRequest) -> Answered:
        """`n` answers to a conversation. ApiError, also where the policy raised: see `error`."""
        return await self._guarded(lambda: self._chat(request), request.wishes.n)

    async def complete(self, request: CompletionRequest) -> Answered:
        """`n` answers to each prompt, prompt by prompt. ApiError, also where the policy raised: see `error`."""
        return await self._guarded(lambda: self._complete(request), request.wishes.n * len(request.prompts))

    async def failed(self) -> NoReturn:
        """Raise `error` as soon as there is one."""
        await self._failed.wait()
        assert self.error is not None
        raise self.error

    async def close(self) -> None:
        """Nothing more is asked, and what is under way is given up."""
        self._over = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, list[Answer]]], replies: int) -> Answered:
        self._admit(replies)
        task = asyncio.ensure_future(work())
        self._running.add(task)
        self._under_way += replies
        try:
            return Answered(await task, self._policy.sampling, self._tokenizer.decode)
        except ApiError as error:
            self._note(error)
            raise
        except asyncio.CancelledError:
            if self._over and not asyncio.current_task().cancelling():
                raise over() from None
            raise  # the client has gone
        except Exception as error:
            self.error = self.error or error
            self._failed.set()
            raise ApiError(500, f"the policy can't answer: {type(error).__name__}", code="policy_failed") from error
        finally:
            self._running.discard(task)
            self._under_way -= replies

    def _admit(self, replies: int) -> None:
        if self._over:
            raise over()
        if self._under_way + replies > AT_ONCE:
            raise ApiError(429, f"more than {AT_ONCE} replies at once", code="rate_limit_exceeded", again=True)
        if self._max_replies and self._replies + replies > self._max_replies:
            message = f"this rollout may ask for {self._max_replies} replies and has had {self._replies}"
            error = ApiError(429, message, code="insufficient_quota")
            self._note(error)
            raise error
        self._replies += replies

    def _note(self, error: ApiError) -> None:
        """What a refusal means for the episode."""
        self.ran_out |= error.code in RAN_OUT
        status: Status = "truncated" if error.code in RAN_OUT else "failed" if error.code == "aborted" else "ok"
        self._status = max(self._status, status, key=_WORST.index)

    async def _chat(self, request: ChatRequest) -> list[Answer]:
        try:
            replies = [self._begun(request) for _ in range(request.wishes.n)]
        except TemplateError as error:
            raise wrong("messages", str(error)) from error
        return await _all(replies)

    def _begun(self, request: ChatRequest) -> asyncio.Task[Answer]:
        """A reply of the longest history that the request extends (an empty one, at worst), or of a new one."""
        idle = [h for h in self._histories if isinstance(h, History) and not h.busy and h.is_extended_by(request)]
        history = max(idle, key=len, default=None)
        if history is None:
            history = History(self._tokenizer, self._policy, request.tools)
            self._histories.append(history)
        history.busy = True
        task = asyncio.ensure_future(history.reply(request))
        # A callback, as a task that is cancelled before its first step has no `finally`.
        task.add_done_callback(lambda _: history.free())
        return task

    async def _complete(self, request: CompletionRequest) -> list[Answer]:
        prompts = [self._ids(prompt) for prompt in request.prompts for _ in range(request.wishes.n)]
        begun = [Continuation(self._tokenizer, self._policy, prompt) for prompt in prompts]
        self._histories += begun
        return await _all([asyncio.ensure_future(continuation.reply(request.wishes)) for continuation in begun])

    def _ids(self, prompt: str | tuple[int, ...]) -> np.ndarray:
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt)
        else:
            ids, size = prompt, len(self._tokenizer)
            if max(ids) >= size:  # the engine would refuse it, and that fails a rollout
                raise wrong("prompt", f"holds the token id {max(ids)}, and the vocabulary ends with {size - 1}")
        if not len(ids):
            raise wrong("prompt", "is empty: there is nothing to go on with")
        return np.asarray(ids, np.int32)


async def _all(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """What all of them come to; the first error ends the others."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
