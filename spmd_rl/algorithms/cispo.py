"""CISPO (arXiv 2506.13585): the ratio is truncated and carries no gradient, so no token is ever dropped.

    A = (r − mean(r)) / std(r) of the group,  loss = −(1/N) Σ_tokens sg(min(p/μ, 5)) · A · log p

`correction.ratio_cap` is the **absolute** bound on the ratio (as in ScaleRL, arXiv 2510.13786), not 1 + ε.
There is no lower bound.
"""

from __future__ import annotations

from spmd_rl.algorithms.baselines import by_group, minus_mean
from spmd_rl.algorithms.types import Algorithm, PolicyLoss

ALGORITHM = Algorithm(advantages=by_group(minus_mean), std="group", policy=PolicyLoss(ratio_cap=5.0))
