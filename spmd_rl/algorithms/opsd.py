"""On-policy self-distillation: the teacher is the policy itself, which was given a hint.

    A_t = log p(token | hint) − log p(token),  loss as in `opd`

The environment offers a prompt with a hint (`envs.protocol.Hinted`); it stands where the tokens before the first
sampled one stood. Both probabilities are those of the trainer's *current* weights; the hinted one carries no gradient.
"""

from __future__ import annotations

from spmd_rl.algorithms.opd import ALGORITHM as OPD
from spmd_rl.algorithms.types import Algorithm

ALGORITHM = Algorithm(baseline="none", learns="teacher", teacher="hint", policy=OPD.policy)
