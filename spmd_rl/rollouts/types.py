"""The data that travels: task → rollout (episode) → group → batch → packed rows.

Columnar numpy throughout; never a Python object per token, never a torch tensor, never text as the truth. A sample is
one token sequence; an episode holds one or more of them (self-play seats, sub-agents, a compacted history).

Invariants: all per-token columns of a sample have its length T; `mask` is 1 exactly on tokens that the policy
sampled; `logprobs` is 0 and `versions` is -1 wherever `mask` is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Status = Literal["ok", "truncated", "timeout", "failed"]


@dataclass(frozen=True)
class Task:
    """One thing to attempt; plain JSON, made reproducibly from (source, index)."""

    source: str
    index: int
    data: dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One token sequence of an episode, with T tokens."""

    tokens: np.ndarray  # int32[T]
    mask: np.ndarray  # uint8[T]: 1 = sampled by the policy
    logprobs: np.ndarray  # float32[T]: behaviour logprob (processed: with temperature) of sampled tokens
    versions: np.ndarray  # int32[T]: policy version that sampled the token, -1 elsewhere
    temperatures: np.ndarray  # float32[T]: sampling temperature of the token, 1 elsewhere
    advantages: np.ndarray | None = None  # float32[T], filled in by the algorithm


@dataclass(frozen=True)
class Reward:
    """A reward that was computed. `parts` are named components for the logs."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardError:
    """A reward that could not be computed; never counted as a zero."""

    why: str


@dataclass(frozen=True)
class Episode:
    """One attempt at a task."""

    task: Task
    samples: tuple[Sample, ...]
    reward: Reward | RewardError
    status: Status = "ok"
    seconds: float = 0.0

    @property
    def valid(self) -> bool:
        """True when the episode may be trained on."""
        return self.status in ("ok", "truncated") and isinstance(self.reward, Reward)


@dataclass(frozen=True)
class Group:
    """The episodes of one task, complete."""

    id: int
    task: Task
    episodes: tuple[Episode, ...]
    admitted_version: int  # policy version on the engines when the group was opened


@dataclass(frozen=True)
class TrainSample:
    """What the algorithm hands to the packer: one sequence and its per-token weight streams, T tokens.

    Each weight already holds the aggregation and the batch's global denominator: the loss is the sum over tokens
    of weight × term, so that it does not depend on micro-batches, packing or the parallel layout.
    """

    tokens: np.ndarray  # int32[T]
    mask: np.ndarray  # uint8[T]: 1 = sampled by the policy (also where the advantage, and so the weight, is 0)
    logprobs: np.ndarray  # float32[T]: behaviour logprobs; 0 where unused
    temperatures: np.ndarray  # float32[T]
    pg_weight: np.ndarray  # float32[T]: weight of the policy-gradient term of the token
    ce_weight: np.ndarray  # float32[T]: weight of the cross-entropy term of the token


@dataclass(frozen=True)
class Row:
    """One packed row of L tokens: what a micro-batch of one data-parallel rank consumes.

    Columns are aligned to *inputs*: at position t, `targets[t]` is the next token of the same document and the other
    columns speak of that target. The last token of each document has target 0, mask 0 and zero weights.
    """

    tokens: np.ndarray  # int32[L]
    targets: np.ndarray  # int32[L]
    mask: np.ndarray  # uint8[L]: 1 = the target was sampled by the policy
    logprobs: np.ndarray  # float32[L]
    temperatures: np.ndarray  # float32[L]
    pg_weight: np.ndarray  # float32[L]
    ce_weight: np.ndarray  # float32[L]
    cu_seqlens: np.ndarray  # int32[documents + 1]: document i is [cu_seqlens[i], cu_seqlens[i+1])
