"""Maximum-likelihood RL (arXiv 2602.02710): advantages over the mean reward, so that rare successes count for more.

    A = (r − mean(r)) / mean(r) of the group, 0 where the mean is not positive;  loss: importance-weighted, as in `grpo`

For rewards in {0, 1} its expectation is the gradient of the log-likelihood of success, expanded to the order of the
group's size; a task solved once in n weighs about n times as much as under `grpo`.
"""

from __future__ import annotations

from spmd_rl.algorithms.baselines import by_group, over_mean
from spmd_rl.algorithms.types import Algorithm

ALGORITHM = Algorithm(advantages=by_group(over_mean))
