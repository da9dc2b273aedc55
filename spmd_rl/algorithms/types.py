"""What an algorithm is: a rule for advantages on rank 0, and the shape of the policy loss on the trainer.

Both halves are data, so that a run can print them, a trainer rank can read its half from the config, and pieces can be
exchanged one by one. This file refuses to know any particular algorithm, and about torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spmd_rl.config.tree import AlgorithmConfig
from spmd_rl.rollouts.types import Group

Aggregation = Literal["token", "sequence", "prompt", "constant"]
Std = Literal["none", "group", "batch"]
Memory = dict[str, float]  # what an algorithm remembers from batch to batch; plain, so that it can be saved

# Advantages of a group's valid episodes: [episode][sample].
GroupAdvantages = list[list[float]]
# Groups with the rewards of their valid episodes, float64[episodes] each, shaped already (lengths) → advantages.
AdvantageRule = Callable[[Sequence[Group], Sequence[np.ndarray], AlgorithmConfig, Memory], list[GroupAdvantages]]


@dataclass(frozen=True)
class PolicyLoss:
    """The policy term of the loss. With ρ = p / μ, A the advantage, w = A × share, sg = no gradient:

    - importance: −w · sg(ρ̂) · log p, with ρ̂ the ratio after truncation (`ratio_cap`, `sequence_cap`)
    - clip:       −min(w · ρ, w · clip(ρ, 1 − clip_low, 1 + clip_high)), and for A < 0 not below `dual_clip` · w

    `ratio = "sequence"` takes the geometric mean of a sequence's ratios for ρ (GSPO). Masks drop tokens or sequences
    from either form; denominators were counted before. 0 turns a number off.
    """

    surrogate: Literal["importance", "clip", "none"] = "importance"
    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = 0.0
    clip_high: float = 0.0
    dual_clip: float = 0.0
    proximal: bool = False
    ratio_cap: float = 0.0
    sequence_cap: float = 0.0
    ipo: float = 0.0
    dppo_tv: float = 0.0
    dppo_kl: float = 0.0
    fallen: float = 0.0
    icepop_low: float = 0.0
    icepop_high: float = 0.0
    geometric_low: float = 0.0
    geometric_high: float = 0.0
    negative_sequence: float = 0.0


# The mask and the cap that asynchronous training needs and that most algorithms here share.
ASYNC = PolicyLoss(ipo=0.3, ratio_cap=5.0)


@dataclass(frozen=True)
class Algorithm:
    """One algorithm, complete.

    Args:
        advantages: the rule on rank 0; None for algorithms that need no advantage.
        policy: the loss on the trainer.
        baseline: "group" compares the rollouts of a task, so a group needs two of them at least, and a group of equal
            rewards teaches nothing.
        learns: which stream carries the algorithm: the policy gradient, the distance to a teacher, cross-entropy
            on what was sampled.
        teacher: where the distribution comes from that `learns = "teacher"` moves to: the frozen reference, or the
            policy itself with a hint.
    """

    policy: PolicyLoss = ASYNC
    advantages: AdvantageRule | None = None
    aggregation: Aggregation = "token"
    std: Std = "none"
    baseline: Literal["group", "batch", "none"] = "group"
    learns: Literal["advantages", "teacher", "answers"] = "advantages"
    teacher: Literal["none", "reference", "hint"] = "none"
    critic: bool = False
    observations: bool = False  # cross-entropy on what the environment said
    overlong_share: float = 0.0  # of the token limit, over which the penalty for length grows
