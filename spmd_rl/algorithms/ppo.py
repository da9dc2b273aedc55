"""Proximal policy optimisation (arXiv 1707.06347) without a critic, with dual clip (arXiv 1912.09729).

    A = r − mean(r of the group)
    loss = −(1/N) Σ_tokens  A ≥ 0: min(ρ A, clip(ρ, 0.8, 1.2) A);  A < 0: max(min(ρ A, clip(ρ, 0.8, 1.2) A), 3 A)

`minibatches` optimizer steps share a batch. ρ is against the policy that sampled; `proximal = true` clips around the
policy at the start of the batch instead and corrects for the rest by sg(min(π_start/μ, ratio_cap)) (decoupled PPO,
arXiv 2110.00641).
"""

from __future__ import annotations

from spmd_rl.algorithms.baselines import by_group, minus_mean
from spmd_rl.algorithms.types import Algorithm, PolicyLoss

ALGORITHM = Algorithm(
    advantages=by_group(minus_mean),
    policy=PolicyLoss(surrogate="clip", clip_low=0.2, clip_high=0.2, dual_clip=3.0),
)
