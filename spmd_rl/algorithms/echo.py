"""`grpo` on what the policy said, and a little cross-entropy on what the environment answered.

    loss = grpo − (α/N) Σ_observed tokens log p,  α = `observation_weight`

Observed tokens are those that came after the first sampled token and were not sampled: tool outputs, feedback, the next
question. Predicting them is a free lesson about the environment, dense where rewards are sparse. The prompt is
not observed. N counts sampled tokens, as in `grpo`.
"""

from __future__ import annotations

from spmd_rl.algorithms.baselines import by_group, minus_mean
from spmd_rl.algorithms.types import Algorithm

ALGORITHM = Algorithm(advantages=by_group(minus_mean), observations=True)
