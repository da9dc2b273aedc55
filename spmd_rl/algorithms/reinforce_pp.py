"""REINFORCE++ (arXiv 2501.03262): no groups, no critic; advantages are normalised over the whole batch.

    A = (r − mean(r of the batch)) / std(r of the batch),  loss = −(1/N) Σ_tokens min(ρ A, clip(ρ, 0.8, 1.2) A)

Works with `group_size = 1`. The paper's token-level KL penalty is `kl.place = "reward"`.
"""

from __future__ import annotations

from spmd_rl.algorithms.baselines import by_group, plain
from spmd_rl.algorithms.types import Algorithm, PolicyLoss

ALGORITHM = Algorithm(
    advantages=by_group(plain),
    std="batch",
    baseline="batch",
    policy=PolicyLoss(surrogate="clip", clip_low=0.2, clip_high=0.2),
)
