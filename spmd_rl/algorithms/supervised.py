"""Supervised learning on prompts and answers: cross-entropy on the answers, for the warm-up.

It refuses to know where the answers come from. Invariant: the cross-entropy weights of a batch sum to 1.
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
    answer_tokens = sum(len(answer) for _, answer in pairs)
    return [_sample(prompt, answer, answer_tokens) for prompt, answer in pairs]


def _sample(prompt: np.ndarray, answer: np.ndarray, answer_tokens: int) -> TrainSample:
    tokens = np.concatenate([prompt, answer]).astype(np.int32)
    mask = (np.arange(len(tokens)) >= len(prompt)).astype(np.uint8)
    return TrainSample(
        tokens=tokens,
        mask=np.zeros_like(mask),  # no policy sampled these tokens
        logprobs=np.zeros(len(tokens), np.float32),
        temperatures=np.ones(len(tokens), np.float32),
        pg_weight=np.zeros(len(tokens), np.float32),
        ce_weight=(mask / answer_tokens).astype(np.float32),
    )
