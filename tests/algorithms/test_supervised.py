"""Cross-entropy weights of prompts and answers."""

from __future__ import annotations

import numpy as np
import pytest

from spmd_rl.algorithms.supervised import learned, train_samples


def ids(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def test_the_loss_is_the_mean_over_the_batch_s_answer_tokens() -> None:
    one, two = train_samples([(ids(1, 2), ids(3, 4, 5)), (ids(6), ids(7))])
    assert one.tokens.tolist() == [1, 2, 3, 4, 5]
    assert one.ce_weight.tolist() == [0, 0, 0.25, 0.25, 0.25]
    assert two.ce_weight.tolist() == [0, 0.25]
    for s in (one, two):
        assert s.pg_weight == 0 and not s.mask.any() and not s.logprobs.any()
        assert (s.temperatures == 1).all()
        assert (s.tokens.dtype, s.ce_weight.dtype, s.mask.dtype) == (np.int32, np.float32, np.uint8)


def test_empty_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="pair 1 has 2 prompt and 0 answer tokens"):
        train_samples([(ids(1), ids(2)), (ids(1, 2), ids())])
    assert train_samples([]) == []


def test_masks_name_what_is_learned_and_a_first_token_never_is() -> None:
    masks = [np.asarray(m, np.uint8) for m in ([1, 0, 1, 1], [0, 1, 0])]
    one, two = learned([(np.arange(len(m), dtype=np.int32), m) for m in masks])
    assert one.ce_weight.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3])
    assert two.ce_weight.tolist() == pytest.approx([0, 1 / 3, 0])
    with pytest.raises(ValueError, match="none of the 1 sequences has a token to learn"):
        learned([(np.arange(2, dtype=np.int32), np.asarray([1, 0], np.uint8))])
