"""What the policy is asked first, where only a rollout can tell: one is begun, and given up at its first question.

It refuses to know about environments. Invariant: it works wherever it is called from, inside of a running event loop
too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.protocol import Generation, Policy
from spmd_rl.rollouts.types import Episode, RewardError, Task

PROMPT_S = 60.0  # deadline of what an environment does before its first question
GRACE_S = 5.0  # for it to notice


def first_prompt(task: Task, rollout: Callable[[Policy], Awaitable[Episode]]) -> np.ndarray:
    """int32[T]. ValueError when nothing is asked, TimeoutError when that takes longer than PROMPT_S seconds."""
    listener = _Listener()

    async def begin() -> Episode:
        async with asyncio.timeout(PROMPT_S):
            return await rollout(listener)

    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(asyncio.run(begin()))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="first prompt", daemon=True)
    thread.start()
    thread.join(PROMPT_S + GRACE_S)
    if listener.prompt is not None:
        return listener.prompt
    if not outcome:
        raise TimeoutError(f"task {task.source} #{task.index} asks nothing of the policy, and blocks")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    reward = outcome[0].reward
    why = reward.why if isinstance(reward, RewardError) else "it just ended"
    raise ValueError(f"task {task.source} #{task.index} asks nothing of the policy: {why}")


class _Listener:
    """A policy that remembers its first prompt and gives up."""

    def __init__(self) -> None:
        self.sampling = SamplingConfig()
        self.prompt: np.ndarray | None = None

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        if self.prompt is None:
            self.prompt = tokens
        return Generation(tokens[:0], np.empty(0, np.float32), tokens[:0], "aborted")
