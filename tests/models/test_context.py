"""How rows are cut over ranks, what a block of attention is, what is refused; the exchange is in tests/distributed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.models import blockwise
from spmd_rl.models.blockwise import block_attention, block_backward, merge
from spmd_rl.models.context import bytes_per_layer, context_problem, pieces_of
from spmd_rl.models.ring import RingPlan

STYLES = st.sampled_from(["ulysses", "ring"])


@given(st.integers(1, 300), st.integers(1, 8), STYLES)
def test_every_token_is_on_one_rank_and_ranks_are_even(tokens, size, style):
    pieces = pieces_of(tokens, size, style)
    held = [t for rank in pieces for a, b in rank for t in range(a, b)]
    assert sorted(held) == list(range(tokens)) and len(pieces) == size
    counts = [sum(b - a for a, b in rank) for rank in pieces]
    assert max(counts) - min(counts) <= (1 if style == "ulysses" else 2)


@given(st.integers(1, 8), st.integers(1, 20))
def test_head_and_tail_cost_every_rank_the_same(size, length):
    """Pairs of query and key under a causal mask, when the stretches are equal."""
    pairs = [sum(t + 1 for a, b in rank for t in range(a, b)) for rank in pieces_of(2 * size * length, size, "ring")]
    assert len(set(pairs)) == 1


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 5))
def test_a_ring_plan_holds_every_pair_of_query_and_key_once(lengths, size):
    bounds = np.cumsum([0, *lengths]).tolist()
    tokens = bounds[-1]
    pieces = pieces_of(tokens, size, "ring")
    places = [np.concatenate([np.arange(a, b) for a, b in rank]) for rank in pieces]
    seen_TT = np.zeros((tokens, tokens), int)
    for rank in range(size):
        plan = RingPlan.build(bounds, pieces, rank, torch.device("cpu"))
        for d in plan.diagonals:
            cuts = d.documents.cu_seqlens.tolist()
            for a, b in pairwise(cuts):
                mine = places[rank][d.start + a : d.start + b]
                seen_TT[np.ix_(mine, mine)] += np.tri(len(mine), dtype=int)
        for owner, blocks in enumerate(plan.blocks):
            for b in blocks:
                seen_TT[np.ix_(places[rank][b.start : b.end], places[owner][b.first : b.last])] += 1
    document_T = np.repeat(np.arange(len(lengths)), lengths)
    expected_TT = np.tri(tokens, dtype=int) * (document_T[:, None] == document_T)
    np.testing.assert_array_equal(seen_TT, expected_TT)


def columns(queries: int, keys: int, heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output, two blocks of each."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, queries, heads, 4), *[(2, keys, kv_heads, 4)] * 2, (2, queries, heads, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@given(
    st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.integers(0, 99), st.booleans(), st.integers(1, 5),
)  # fmt: skip
@settings(max_examples=60)
def test_merged_blocks_are_attention_to_all_keys(queries, blocks, heads, seed, causal, chunk):
    keys = queries if causal else sum(blocks)
    q, k, v, grad = columns(queries, keys, *heads, seed)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), is_causal=causal, enable_gqa=heads[0] != heads[1]
    ).transpose(1, 2)
    gradients = torch.autograd.grad(expected, leaves, grad)
    cuts = [0, keys] if causal else np.cumsum([0, *blocks]).tolist()
    parts = [slice(a, b) for a, b in pairwise(cuts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "QUERIES", chunk)
        out, lse = block_attention(q, k[:, parts[0]], v[:, parts[0]], causal)
        for part in parts[1:]:
            out, lse = merge(out, lse, *block_attention(q, k[:, part], v[:, part], False))
        delta = (grad * out).sum(-1)
        back = [block_backward(grad, q, k[:, p], v[:, p], lse, delta, causal) for p in parts]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(sum(dq for dq, _, _ in back), gradients[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([found[i] for found in back], dim=1), gradients[i])


def test_no_tensor_of_all_pairs_is_made(monkeypatch):
    """Scores are made for so many queries at a time, and causal ones for no more keys than these may see."""
    made = []
    scores = blockwise._scores
    monkeypatch.setattr(blockwise, "QUERIES", 8)
    monkeypatch.setattr(blockwise, "_scores", lambda *a: made.append(scores(*a).shape[-2:]) or scores(*a))
    q, k, v, grad = columns(30, 30, 2, 1, 0)
    out, lse = block_attention(q, k, v, True)
    block_backward(grad, q, k, v, lse, (grad * out).sum(-1), True)
    assert [tuple(shape) for shape in made] == [(8, 8), (8, 16), (8, 24), (6, 30)] * 2


def test_what_can_not_be_shared_says_the_way_out():
    config = {"model_type": "qwen3", "num_attention_heads": 12}
    assert context_problem(1, "ulysses", {}, ours=False) == ""
    assert context_problem(4, "ulysses", config, ours=True) == context_problem(5, "ring", config, ours=True) == ""
    assert "cp = 5 does not divide" in (problem := context_problem(5, "ulysses", config, ours=True))
    assert "one of 1, 2, 3, 4, 6, 12, or cp_style = ring" in problem
    assert "impl = custom" in context_problem(2, "ring", config, ours=False)


def test_bytes_of_both_styles():
    """8 ranks, 32 query heads, 8 key-value heads of 128 dimensions, bfloat16; per rank and layer."""
    assert bytes_per_layer("ulysses", 65536, 8, 32, 8, 128, 2) == (8192 * 7 / 8 * 80 * 128 * 2,) * 2
    assert bytes_per_layer("ring", 65536, 8, 32, 8, 128, 2) == (8192 * 7 * 16 * 128 * 2, 8192 * 7 * 16 * 128 * 6)
    assert bytes_per_layer("ulysses", 65536, 16, 32, 8, 128, 2)[0] == 4096 * 15 / 16 * 2 * 48 * 128 * 2
