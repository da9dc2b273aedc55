"""DAPO (arXiv 2503.14476): clip higher, dynamic sampling, token mean, soft penalty for overlong rollouts.

    A = (r − mean(r)) / std(r) of the group,  loss = −(1/N) Σ_tokens min(ρ A, clip(ρ, 0.8, 1.28) A)

Dynamic sampling is `zero_variance = "refill"`. The penalty grows linearly from 0 to `overlong_penalty` over the last
`overlong_buffer` tokens before the limit (`orchestrator.sampling.max_tokens`); here the buffer is a quarter of the
limit by default, the paper's is 4,096 of 20,480.
"""

from __future__ import annotations

from spmd_rl.algorithms.baselines import by_group, minus_mean
from spmd_rl.algorithms.types import Algorithm, PolicyLoss

ALGORITHM = Algorithm(
    advantages=by_group(minus_mean),
    std="group",
    overlong_share=0.25,
    policy=PolicyLoss(surrogate="clip", clip_low=0.2, clip_high=0.28),
)
