"""The plan of a packed row: every token in one place, little padding, few calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.models.packed import AREA_PER_CALL, MAX_PADDING, Documents


def bounds(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
def test_every_token_has_one_slot_inside_its_own_document(lengths: list[int]) -> None:
    documents = Documents.build(bounds(lengths))
    owner_T = np.repeat(np.arange(len(lengths)), lengths)
    assert documents.tokens == sum(lengths)
    assert documents.max_length == max(lengths)
    np.testing.assert_array_equal(documents.positions_T, np.concatenate([np.arange(n) for n in lengths]))

    token_T = torch.arange(sum(lengths)).view(-1, 1, 1)
    parts = documents.pad(token_T)
    assert torch.equal(documents.unpad(parts), token_T)
    seen = []
    for part in parts:
        for row in part.flatten(1).numpy():
            document = owner_T[row[0]]
            length = lengths[document]
            # A bucket's row is one document from its first token on; what follows is padding with its own tokens.
            np.testing.assert_array_equal(row[:length], bounds(lengths)[document] + np.arange(length))
            assert (owner_T[row] == document).all()
            seen.append(document)
    assert sorted(seen) == list(range(len(lengths)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_padding_stays_small(lengths: list[int]) -> None:
    documents = Documents.build(bounds(lengths))
    padded = sum(bucket.documents * bucket.length**2 for bucket in documents.buckets)
    real = sum(length**2 for length in lengths)
    assert padded <= real * (1 + MAX_PADDING) + AREA_PER_CALL * len(documents.buckets)


def test_equal_documents_are_one_call_on_views() -> None:
    documents = Documents.build(bounds([8] * 100))
    x_THd = torch.randn(800, 2, 4)
    (part,) = documents.pad(x_THd)
    assert part.shape == (100, 8, 2, 4)
    assert part.data_ptr() == x_THd.data_ptr()
    assert documents.unpad([part]).data_ptr() == x_THd.data_ptr()


def test_lone_documents_in_row_order_are_views() -> None:
    documents = Documents.build(bounds([100, 400, 50, 200]))
    assert [bucket.length for bucket in documents.buckets] == [100, 400, 50, 200]
    assert documents.token_of_slot_S is None


def test_many_tiny_documents_need_few_calls() -> None:
    lengths = np.random.default_rng(0).integers(2, 17, size=200).tolist()
    assert len(Documents.build(bounds(lengths)).buckets) <= 12


@pytest.mark.parametrize("cu_seqlens", [[0], [1, 3], [0, 2, 2], [0, 3, 1], []])
def test_bad_bounds_are_refused(cu_seqlens: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must start at 0"):
        Documents.build(np.array(cu_seqlens, dtype=np.int32))
