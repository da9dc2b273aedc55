"""The policy as a rollout in a worker sees it: the real one lives beside the event loop of the pool's owner.

It refuses to know how messages travel. Invariants: every `generate` ends with its answer, the policy's error or the
rollout's own cancellation; once the rollout is over nothing is asked in its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import cast

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.pool.messages import Answer, Generate, Message, Refusal, Withdrawn
from spmd_rl.envs.protocol import Generation, PromptTooLong, StopReason


class PolicyError(RuntimeError):
    """The policy raised; `number` is that of the generation that was asked for."""

    def __init__(self, number: int, kind: str, text: str) -> None:
        super().__init__(f"the policy raised {kind}: {text}")
        self.number = number


class PolicyValueError(PolicyError, ValueError):
    """The same, where what it raised is a ValueError."""


class NoRoom(PolicyValueError, PromptTooLong):
    """The same, where it has no room for a new token."""


class RemotePolicy:
    """Generates for one rollout, job number `job`."""

    def __init__(self, job: int, sampling: SamplingConfig, send: Callable[[Message], None]) -> None:
        self.sampling = sampling
        self._job, self._send = job, send
        self._asked = 0
        self._waiting: dict[int, asyncio.Future[Generation]] = {}
        self._over = False

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        """Sample a continuation of `tokens` (int32[T]). PolicyError, a ValueError where the policy raised one."""
        if self._over:
            raise RuntimeError("this rollout is over: a generation was asked for by something that it left running")
        number, self._asked = self._asked, self._asked + 1
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Generate(self._job, number, np.asarray(tokens, dtype=np.int32), asdict(sampling)))
            return await answer
        except asyncio.CancelledError:
            if not self._over:
                self._send(Withdrawn(self._job, number))
            raise
        finally:
            del self._waiting[number]

    def heard(self, message: Answer | Refusal) -> None:
        """The policy answered, or raised."""
        answer = self._waiting.get(message.number)
        if answer is None or answer.done():  # it was withdrawn meanwhile
            return
        if isinstance(message, Refusal):
            error = PolicyValueError if message.is_value_error else PolicyError
            error = NoRoom if message.kind == PromptTooLong.__name__ else error
            answer.set_exception(error(message.number, message.kind, message.text))
        else:
            reason = cast(StopReason, message.stop_reason)
            answer.set_result(Generation(message.tokens, message.logprobs, message.versions, reason))

    def close(self) -> None:
        """The rollout is over: what it left waiting is cancelled."""
        self._over = True
        for answer in self._waiting.values():
            answer.cancel()
