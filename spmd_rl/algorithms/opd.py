"""On-policy distillation: the policy samples, a frozen teacher says how likely each of its tokens should have been.

    A_t = log p_teacher − log p,  loss = −(1/N) Σ_tokens 1[μ − p ≤ 0.2] · sg(min(p/μ, 5)) · sg(A_t) · log p

The gradient of the reverse KL divergence KL(p || teacher), token by token (arXiv 2306.13649). p is the trainer's
*current* policy, not the one that sampled. The teacher is `algorithm.reference`, held by the trainer ranks. Rewards are
logged and not used, so one rollout per task is enough.
"""

from __future__ import annotations

from spmd_rl.algorithms.types import Algorithm, PolicyLoss

ALGORITHM = Algorithm(
    baseline="none", learns="teacher", teacher="reference", policy=PolicyLoss(fallen=0.2, ratio_cap=5.0)
)
