"""How long the made-up documents of a bench are, and how many there are.

    fixed       seq_len tokens each: every row is full, attention is at its dearest
    variable    lognormal with σ = 0.8, at least 2 tokens and at most seq_len; the median is `bench.median_length`

A batch has as many documents as the run's, or fewer where they would fill more than `bench.rows` rows of seq_len tokens
per data rank and optimizer step: beyond some rows a step only becomes longer. It refuses to know what is in them.
"""

from __future__ import annotations

import numpy as np

from spmd_rl.config.tree import Config

SIGMA = 0.8  # mean / median = 1.38
SHORTEST = 2  # one token that predicts, and one that is predicted


def drawn(kind: str, count: int, config: Config) -> np.ndarray:
    """int64[count], each at most seq_len."""
    if kind == "fixed":
        return np.full(count, config.seq_len, np.int64)
    rng = np.random.default_rng(config.seed)
    return (
        rng.lognormal(np.log(median_of(config)), SIGMA, count).round().astype(np.int64).clip(SHORTEST, config.seq_len)
    )


def limited(lengths: np.ndarray, rows: int, config: Config) -> np.ndarray:
    """The first of them, so many as fill no more than `bench.rows` rows for each of so many; at least one."""
    most = config.bench.rows * config.seq_len * rows
    return lengths[: max(1, int(np.searchsorted(lengths.cumsum(), most, side="right")))] if most else lengths


def median_of(config: Config) -> int:
    """Tokens of the median document of variable length."""
    return config.bench.median_length or max(SHORTEST, config.seq_len // 4)
