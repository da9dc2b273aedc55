"""Group sequence policy optimisation (arXiv 2507.18071): one ratio for a whole sequence.

    s = exp(mean over sampled tokens of log(p / μ)),  A = (r − mean(r)) / std(r) of the group,
    loss = −mean over sequences of min(s A, clip(s, 1 − ε_low, 1 + ε_high) A)

The mean runs over sampled tokens alone: what the environment said has no ratio. The bounds are far wider than the
paper's (3e-4 and 4e-4, for several minibatches of one batch): rollouts here were sampled by older policies, and such
bounds would clip nearly all of them.
"""

from __future__ import annotations

from spmd_rl.algorithms.baselines import by_group, minus_mean
from spmd_rl.algorithms.types import Algorithm, PolicyLoss

ALGORITHM = Algorithm(
    advantages=by_group(minus_mean),
    std="group",
    aggregation="sequence",
    policy=PolicyLoss(surrogate="clip", ratio="sequence", clip_low=0.2, clip_high=0.2),
)
