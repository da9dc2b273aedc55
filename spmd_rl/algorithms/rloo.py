"""REINFORCE leave-one-out (arXiv 2402.14740): the baseline of a rollout is the mean of the *other* ones.

    A = r − mean(r of the others) = n / (n − 1) · (r − mean(r)),  loss: importance-weighted, as in `grpo`

The baseline does not depend on the rollout itself, so the gradient is unbiased. The aggregation is the token mean
instead of the paper's sum over a sequence: `aggregation = "sequence"` weighs rollouts alike.
"""

from __future__ import annotations

from spmd_rl.algorithms.baselines import by_group, leave_one_out
from spmd_rl.algorithms.types import Algorithm

ALGORITHM = Algorithm(advantages=by_group(leave_one_out))
