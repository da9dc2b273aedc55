"""Proximal policy optimisation with a critic: advantages per token, from learned values (arXiv 1707.06347).

    δ_t = r_t + γ V_{t+1} − V_t,  A_t = Σ_l (γλ)^l δ_{t+l}  (GAE, arXiv 1506.02438) over sampled tokens
    policy loss as in `ppo`;  critic loss = (1/N) Σ_tokens ½ (V_t − (A_t + V_t old))²

The reward arrives with the last sampled token. Values are known to the trainer alone, so advantages are made there
(`trainer/critic.py`), normalised over the batch (`std = "batch"`) or not; rank 0 sends rewards and shares. Works with
`group_size = 1`.
"""

from __future__ import annotations

from spmd_rl.algorithms.types import Algorithm, PolicyLoss

ALGORITHM = Algorithm(
    std="batch",
    baseline="none",
    critic=True,
    policy=PolicyLoss(surrogate="clip", clip_low=0.2, clip_high=0.2, dual_clip=3.0),
)
