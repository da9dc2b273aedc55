"""Cross-entropy weights of prompts and answers."""

from __future__ import annotations

import numpy as np
import pytest

from spmd_rl.algorithms.supervised import train_samples


def ids(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def test_the_loss_is_the_mean_over_the_batch_s_answer_tokens() -> None:
    one, two = train_samples([(ids(1, 2), ids(3, 4, 5)), (ids(6), ids(7))])
    assert one.tokens.tolist() == [1, 2, 3, 4, 5]
    assert one.ce_weight.tolist() == [0, 0, 0.25, 0.25, 0.25]
    assert two.ce_weight.tolist() == [0, 0.25]
    for s in (one, two):
        assert not s.pg_weight.any() and not s.mask.any() and not s.logprobs.any()
        assert (s.temperatures == 1).all()
        assert (s.tokens.dtype, s.ce_weight.dtype, s.mask.dtype) == (np.int32, np.float32, np.uint8)


def test_empty_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="pair 1 has 2 prompt and 0 answer tokens"):
        train_samples([(ids(1), ids(2)), (ids(1, 2), ids())])
    assert train_samples([]) == []
