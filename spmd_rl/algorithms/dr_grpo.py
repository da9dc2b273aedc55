"""Dr. GRPO (arXiv 2503.20783): no division by the standard deviation, none by a rollout's length.

    A = r − mean(r of the group),  loss = −1/(rollouts · max_tokens) Σ_tokens min(ρ A, clip(ρ, 0.8, 1.2) A)

The constant is the configured `orchestrator.sampling.max_tokens`, never the padded or the longest length, so that a
token weighs the same in every batch.
"""

from __future__ import annotations

from spmd_rl.algorithms.baselines import by_group, minus_mean
from spmd_rl.algorithms.types import Algorithm, PolicyLoss

ALGORITHM = Algorithm(
    advantages=by_group(minus_mean),
    aggregation="constant",
    policy=PolicyLoss(surrogate="clip", clip_low=0.2, clip_high=0.2),
)
