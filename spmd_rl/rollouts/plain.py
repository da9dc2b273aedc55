"""Episodes and groups as plain data (dicts, lists, numbers, text, numpy columns) and back, for a journal or a snapshot.

A task is left out: whoever reads knows how it is made, and what it holds need not be plain. Columns that mostly repeat
themselves (mask, versions, temperatures) are kept as runs, so that a token costs the eight bytes of its id and its
logprob. Wall-clock seconds are left out too: what is written is the same in two equal runs. So are routes, which lead
to processes that are gone when it is read.
Invariant: `episode_from(plain_episode(e), e.task)` equals e but for `seconds`, `routes` and `advantages`, which nobody
has set.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from spmd_rl.rollouts.types import Episode, Group, Reward, RewardError, Sample, Task

RUNS = ("mask", "versions", "temperatures")


def plain_episode(episode: Episode) -> dict[str, Any]:
    """One episode."""
    reward = episode.reward
    return {
        "samples": [_plain_sample(sample) for sample in episode.samples],
        "reward": asdict(reward),
        "status": episode.status,
    }


def episode_from(plain: dict[str, Any], task: Task) -> Episode:
    """The episode that was written, of its task."""
    reward = plain["reward"]
    return Episode(
        task=task,
        samples=tuple(_sample_from(sample) for sample in plain["samples"]),
        reward=RewardError(**reward) if "why" in reward else Reward(**reward),
        status=plain["status"],
    )


def plain_group(group: Group) -> dict[str, Any]:
    """One group with its episodes."""
    episodes = [plain_episode(episode) for episode in group.episodes]
    return {
        "id": group.id,
        "episodes": episodes,
        "admitted_version": group.admitted_version,
        "source": group.source,
    }


def group_from(plain: dict[str, Any], task: Task) -> Group:
    """The group that was written, of its task."""
    episodes = tuple(episode_from(episode, task) for episode in plain["episodes"])
    return Group(plain["id"], task, episodes, plain["admitted_version"], plain["source"])


def _plain_sample(sample: Sample) -> dict[str, Any]:
    plain: dict[str, Any] = {"tokens": sample.tokens, "logprobs": sample.logprobs}
    plain |= {name: _runs(getattr(sample, name)) for name in RUNS}
    if sample.agent:
        plain["agent"] = sample.agent
    if sample.reward is not None:
        plain["reward"] = sample.reward
    if sample.hint is not None:
        plain["hint"] = sample.hint
    return plain


def _sample_from(plain: dict[str, Any]) -> Sample:
    return Sample(**(plain | {name: np.repeat(*plain[name]) for name in RUNS}))


def _runs(column_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(value of each run, its length)."""
    starts = np.flatnonzero(np.diff(column_T, prepend=column_T[:1] + 1)) if len(column_T) else np.zeros(0, np.int64)
    return column_T[starts], np.diff(starts, append=len(column_T)).astype(np.int32)
