"""Your own advantage and your own policy loss, by import path:

    --orchestrator.algorithm.advantage configs/own_loss.py:ranks
    --orchestrator.algorithm.loss configs/own_loss.py:tanh_ratio

`python tools/check_loss.py configs/own_loss.py:tanh_ratio` says whether a loss keeps the house's invariants.
"""

import numpy as np


def ranks(rewards, group):
    """A rollout's place among the others of its task instead of its reward: −1 for the worst, 1 for the best."""
    below = (rewards[:, None] > rewards[None, :]).sum(1)
    above = (rewards[:, None] < rewards[None, :]).sum(1)
    return (below - above) / np.maximum(1, len(rewards) - 1)


def tanh_ratio(inputs):
    """−A · (1 + tanh(log ρ)): the slope of the ratio at 1, and bounded on both sides without a corner."""
    return -inputs.pg_weight_T * (1 + inputs.log_ratio_T.tanh())
