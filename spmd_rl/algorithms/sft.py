"""Supervised fine-tuning on a teacher's rollouts: the teacher samples, the policy imitates.

    loss = −(1/N) Σ_sampled tokens log p

The engines of the training rollouts serve `algorithm.reference` and are never given new weights. All rollouts are
imitated; an environment that wants only good ones returns `RewardError` for the others.
"""

from __future__ import annotations

from spmd_rl.algorithms.types import Algorithm, PolicyLoss

ALGORITHM = Algorithm(baseline="none", learns="answers", policy=PolicyLoss(surrogate="none"))
