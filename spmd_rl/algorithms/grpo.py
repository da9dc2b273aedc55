"""Group-relative policy optimisation: an episode is compared with the others of its task.

    A = r − mean(r of the group),  loss = −(1/N) Σ_tokens 1[|p − μ| ≤ 0.3] · sg(min(p/μ, 5)) · A · log p

Not divided by the group's standard deviation (Dr. GRPO, arXiv 2503.20783: that over-weights tasks which are nearly
always or nearly never solved); `std = "group"` brings the original of arXiv 2402.03300 back. N counts the sampled
tokens of the whole batch. The mask and the cap make it safe for stale tokens (`trainer/loss.py`).
"""

from __future__ import annotations

from spmd_rl.algorithms.baselines import by_group, minus_mean
from spmd_rl.algorithms.types import Algorithm

ALGORITHM = Algorithm(advantages=by_group(minus_mean))
