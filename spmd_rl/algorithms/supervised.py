"""Supervised learning: cross-entropy on answers, or on the tokens that a mask names.

It refuses to know where sequences come from. Invariant: the cross-entropy weights of a batch sum to 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_rl.rollouts.types import TrainSample


def train_samples(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[TrainSample]:
    """One sample for each (prompt int32[T], answer int32[n]), T, n ≥ 1.

    ce_weight = 1 / (answer tokens of the batch) on answer tokens, else 0: the loss Σ ce_weight × cross-entropy is
    their mean. pg_weight = 0. Raises ValueError for an empty prompt or answer.
    """
    for i, (prompt, answer) in enumerate(pairs):
        if len(prompt) == 0 or len(answer) == 0:
            raise ValueError(f"pair {i} has {len(prompt)} prompt and {len(answer)} answer tokens; both need at least 1")
    sequences = [
        (np.concatenate(pair).astype(np.int32), np.repeat([0, 1], [len(pair[0]), len(pair[1])]).astype(np.uint8))
        for pair in pairs
    ]
    return learned(sequences)


def learned(sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[TrainSample]:
    """One sample for each (tokens int32[T], mask uint8[T]), as `train_samples`; first tokens are predicted by nothing.

    Raises ValueError when no token of the batch is learned.
    """
    if not sequences:
        return []
    count = sum(int(np.count_nonzero(mask[1:])) for _, mask in sequences)
    if not count:
        raise ValueError(f"none of the {len(sequences)} sequences has a token to learn")
    samples = []
    for tokens, mask in sequences:
        ce_weight = (mask / count).astype(np.float32)
        ce_weight[0] = 0
        zeros = np.zeros(len(tokens), np.float32)
        samples.append(TrainSample(tokens, np.zeros(len(tokens), np.uint8), zeros, zeros + 1, ce_weight=ce_weight))
    return samples
