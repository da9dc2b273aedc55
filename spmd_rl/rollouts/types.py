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
Weight = np.ndarray | float  # float32[T], or one number for all tokens with mask 1 (and 0 for the others)


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
    agent: str = ""  # whose tokens these are, where several agents or seats take part
    reward: float | None = None  # of this sample alone; None: the episode's
    hint: np.ndarray | None = None  # int32[H]: a prompt that gives the answer away, for self-distillation
    advantages: Weight | None = None  # float32[T], or one number for every sampled token; the algorithm's
    # int64[pieces, 4]: replica, request, first position, one past the last one whose routed experts it keeps.
    routes: np.ndarray | None = None


@dataclass(frozen=True)
class Reward:
    """A reward that was computed. `parts` are named components for the logs."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardError:
    """A reward that could not be computed; never counted as a zero."""

    why: str
    kind: str = "RewardError"  # what failures are counted by: the name of an exception, or a word of your own


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
    source: int = 0  # which of the config's sources the task is from


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
    pg_weight: Weight = 0.0  # of the policy-gradient term: advantage × share of the batch
    ce_weight: Weight = 0.0  # of the cross-entropy term
    kl_weight: Weight = 0.0  # of the distance to the reference model, or of the distillation from it
    entropy_weight: Weight = 0.0  # of the entropy bonus
    reward: float = 0.0  # what a critic learns from; it arrives with the last sampled token
    hint: np.ndarray | None = None  # int32[H]: what stands in the prompt's place when the policy teaches itself
    routes: np.ndarray | None = None  # as a `Sample` has them


@dataclass(frozen=True)
class Row:
    """One packed row of L tokens: what a micro-batch of one data-parallel rank consumes.

    Columns are aligned to *inputs*: at position t, column values speak of the token at t + 1 of the same document
    (the target). The last token of each document has mask 0 and zero weights. A stream that is zero in the whole row
    is None, and so is never sent.
    """

    tokens: np.ndarray  # int32[L]
    targets: np.ndarray  # int32[L]: the next token of the same document, 0 at its end
    mask: np.ndarray  # uint8[L]: 1 = the target was sampled by the policy
    logprobs: np.ndarray  # float32[L]
    temperatures: np.ndarray  # float32[L]
    cu_seqlens: np.ndarray  # int32[documents + 1]: document i is [cu_seqlens[i], cu_seqlens[i+1])
    pg_weight: np.ndarray | None = None  # float32[L], as all streams
    ce_weight: np.ndarray | None = None
    kl_weight: np.ndarray | None = None
    entropy_weight: np.ndarray | None = None
    rewards: np.ndarray | None = None  # float32[L]: 0 but for the last sampled token of a document
    hinted: np.ndarray | None = None  # int32[M]: the documents with their hints, for self-distillation
    hinted_cu_seqlens: np.ndarray | None = None  # int32[documents + 1]
    # int64[pieces, 5]: as a `Sample` has them, and the row's position of the first one; of all documents, in order.
    routes: np.ndarray | None = None
    # int16[L, layers, top_k]: the experts that the engine took for the token at each position as an input; -1 where
    # that is not known, for all top_k alike.
    routed_experts: np.ndarray | None = None
