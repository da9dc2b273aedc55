"""Run rollouts: one environment, one task, one policy, under a deadline; failures become data.

A rollout that raises, times out or returns a reward that is no finite number is a failed episode with a
`RewardError`: never a zero. Failures are counted; past the configured rate the run stops and shows the first ones.
"""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections import Counter, deque
from dataclasses import replace

from spmd_rl.config.tree import Config
from spmd_rl.envs.protocol import Environment, Policy
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Status, Task

RECENT = 64  # rollouts over which the error rate is taken; before that many, over all of them
FEWEST = 8  # rollouts before the rate means anything


class TooManyFailures(RuntimeError):
    """More rollouts failed than the run allows."""


class Rollouts:
    """Runs rollouts and keeps count of how they ended."""

    def __init__(self, config: Config) -> None:
        self._deadline_s = config.deadlines.env_s
        self._max_error_rate = config.orchestrator.max_error_rate
        self._recent: deque[bool] = deque(maxlen=max(RECENT, config.orchestrator.batch_size))
        self._first: list[str] = []
        self.statuses: Counter[Status] = Counter()

    async def run(self, env: Environment, task: Task, policy: Policy) -> Episode:
        """One episode. TooManyFailures when the error rate is above the limit."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_s):
                episode = _checked(await env.rollout(task, policy), task)
        except TimeoutError:
            why = f"no result within deadlines.env_s = {self._deadline_s:g} s"
            episode = Episode(task, (), RewardError(why), status="timeout")
        except Exception as error:
            why = "".join(traceback.format_exception(error))
            episode = Episode(task, (), RewardError(why), status="failed")
        self._count(episode)
        return replace(episode, seconds=time.monotonic() - started)

    def _count(self, episode: Episode) -> None:
        self.statuses[episode.status] += 1
        failed = isinstance(episode.reward, RewardError)
        self._recent.append(failed)
        if not failed:
            return
        if len(self._first) < 3:
            self._first.append(f"task {episode.task.source} #{episode.task.index}: {episode.reward.why}")
        rate = sum(self._recent) / len(self._recent)
        if len(self._recent) >= FEWEST and rate > self._max_error_rate:
            raise TooManyFailures(
                f"{rate:.0%} of the last {len(self._recent)} rollouts failed "
                f"(orchestrator.max_error_rate = {self._max_error_rate:g}). The first ones:\n\n"
                + "\n".join(self._first)
            )


def _checked(episode: Episode, task: Task) -> Episode:
    """What an environment returned, or an error that says what is wrong with it."""
    if not isinstance(episode, Episode):
        raise TypeError(f"the environment returned {type(episode).__name__}, not an Episode")
    reward = episode.reward
    if isinstance(reward, Reward) and not math.isfinite(reward.value):
        return replace(episode, reward=RewardError(f"the reward is {reward.value}"), status="failed")
    if not isinstance(reward, Reward | RewardError):
        raise TypeError(f"the episode's reward is {type(reward).__name__}; return Reward(number) or RewardError(why)")
    return replace(episode, task=task)
