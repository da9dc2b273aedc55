"""Run rollouts: one environment, one task, one policy, under a deadline; failures become data.

A rollout that raises, times out, or returns what could not be trained on is a failed episode with a `RewardError`:
never a zero, and never the end of the run. Failures are counted; past the configured rate the run stops and shows the
first ones.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import numpy as np

from spmd_rl.config.tree import Config
from spmd_rl.envs.pool.errors import Raised
from spmd_rl.envs.protocol import Environment, Policy
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Sample, Status, Task

RECENT = 64  # rollouts over which the error rate is taken; before that many, over all of them
FEWEST = 8  # rollouts before the rate means anything


class TooManyFailures(RuntimeError):
    """More rollouts failed than the run allows."""


class Rollouts:
    """Runs rollouts and keeps count of how they ended."""

    def __init__(self, config: Config) -> None:
        self._seq_len = config.seq_len
        self._max_error_rate = config.orchestrator.max_error_rate
        self._recent: deque[bool] = deque(maxlen=max(RECENT, config.orchestrator.batch_size))
        self._first: list[str] = []
        self.statuses: Counter[Status] = Counter()
        self._errors: Counter[str] = Counter()  # by kind, since they were last asked for

    async def run(self, env: Environment, task: Task, policy: Policy, deadline_s: float) -> Episode:
        """One episode. TooManyFailures when the error rate is above the limit."""
        clock = asyncio.get_running_loop()
        started = clock.time()
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                episode = _checked(await env.rollout(task, policy), task, self._seq_len)
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():
                raise  # the run ends
            episode = _failed(task, error)  # something inside the environment was cancelled
        except TimeoutError as error:
            late = RewardError(f"no result within {deadline_s:g} s (deadlines.env_s, source.rollout_s)", "deadline")
            episode = Episode(task, (), late, status="timeout") if deadline.expired() else _failed(task, error)
        except Exception as error:
            episode = _failed(task, error)
        self._count(episode)
        return replace(episode, seconds=clock.time() - started)

    def state(self) -> dict[str, Any]:
        """Counts and errors so far, for a snapshot."""
        return {
            "recent": list(self._recent),
            "first": self._first,
            "statuses": dict(self.statuses),
            "errors": dict(self._errors),
        }

    def errors(self) -> dict[str, float]:
        """Rollouts that failed since the last call, by kind, as metrics."""
        errors, self._errors = self._errors, Counter()
        return {f"errors/{kind}": float(count) for kind, count in sorted(errors.items())}

    def restore(self, state: dict[str, Any]) -> None:
        """Count on from a snapshot."""
        self._recent.extend(state["recent"])
        self._first, self.statuses = list(state["first"]), Counter(state["statuses"])
        self._errors = Counter(state["errors"])

    def _count(self, episode: Episode) -> None:
        self.statuses[episode.status] += 1
        self._recent.append(not episode.valid)
        if episode.valid:
            return
        error = isinstance(episode.reward, RewardError)
        self._errors[episode.reward.kind if error else episode.status] += 1
        if len(self._first) < 3:
            why = episode.reward.why if error else f"the environment gave it the status {episode.status}"
            self._first.append(f"task {episode.task.source} #{episode.task.index}: {why}")
        failed, count = sum(self._recent), len(self._recent)
        if count >= FEWEST and failed > self._max_error_rate * count:
            raise TooManyFailures(
                f"{failed} of the last {count} rollouts failed, more than orchestrator.max_error_rate = "
                f"{self._max_error_rate:g} allows. The first ones:\n\n" + "\n".join(self._first)
            )


def _failed(task: Task, error: BaseException) -> Episode:
    kind = error.kind if isinstance(error, Raised) else type(error).__name__
    why = RewardError("".join(traceback.format_exception(error)), kind)
    return Episode(task, (), why, status="failed")


def _checked(episode: Episode, task: Task, seq_len: int) -> Episode:
    """What an environment returned, or an error that says what is wrong with it."""
    if not isinstance(episode, Episode):
        raise TypeError(f"the environment returned {type(episode).__name__}, not an Episode")
    reward = episode.reward
    if isinstance(reward, Reward) and not math.isfinite(reward.value):
        return replace(episode, reward=RewardError(f"the reward is {reward.value}", "not_finite"), status="failed")
    if not isinstance(reward, Reward | RewardError):
        raise TypeError(f"the episode's reward is {type(reward).__name__}; return Reward(number) or RewardError(why)")
    for sample in episode.samples:
        _check_sample(sample, seq_len)
    if episode.valid and not any(sample.mask.any() for sample in episode.samples):
        raise ValueError(
            "the episode has a reward, but no sampled token: return RewardError(why) when nothing was done"
        )
    return replace(episode, task=task)


def _check_sample(sample: Sample, seq_len: int) -> None:
    """ValueError or TypeError unless the sample keeps the invariants of `Sample` and fits into a row."""
    if not isinstance(sample, Sample):
        raise TypeError(f"the episode's samples hold a {type(sample).__name__}, not a Sample")
    count = len(sample.tokens)
    columns = ("mask", "logprobs", "versions", "temperatures")
    if wrong := {name: len(getattr(sample, name)) for name in columns if len(getattr(sample, name)) != count}:
        raise ValueError(f"a sample of {count} tokens has columns of other lengths: {wrong}")
    if not 1 <= count <= seq_len:
        raise ValueError(f"a sample has {count} tokens; it needs 1 to seq_len = {seq_len}: raise that, or end earlier")
    if sample.mask[0]:
        raise ValueError("the first token of a sample can't be a sampled one: start with the prompt")
    if not np.isfinite(sample.logprobs).all():
        raise ValueError("a sample has logprobs that are not finite; hand over the engine's as they are")
