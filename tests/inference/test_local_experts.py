"""Experts of their own: what a rank computes with its share, and that all shares make the whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.inference.local_experts import localise
from spmd_rl.world.buckets import expert_taker


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 6), st.data())
def test_shares_of_all_ranks_make_the_whole(experts, ranks, tokens, data):
    """A choice has its weight on the rank that holds the expert, at the expert's place there, and none elsewhere."""
    k = data.draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(0)
    choice_TK = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k].to(torch.int32)
    weights_TK = torch.rand(tokens, k, generator=generator)
    total_TE = torch.zeros(tokens, experts)
    for rank in range(ranks):
        held = [expert for expert in range(experts) if expert_taker(expert, experts, ranks) == rank]
        if not held:
            continue
        place_E = torch.full((experts,), -1, dtype=torch.int32)
        place_E[held] = torch.arange(len(held), dtype=torch.int32)
        mine_TK, local_TK = localise(weights_TK, choice_TK, place_E)
        assert local_TK.dtype == choice_TK.dtype
        assert bool(((local_TK >= 0) & (local_TK < len(held))).all())
        total_TE.scatter_add_(1, torch.tensor(held)[local_TK.long()], mine_TK)
    expected_TE = torch.zeros(tokens, experts).scatter_add_(1, choice_TK.long(), weights_TK)
    assert torch.equal(total_TE, expected_TE)


@given(st.integers(1, 300), st.integers(2, 40))
def test_experts_go_where_vllm_holds_them(experts, ranks):
    from vllm.model_executor.model_loader.ep_weight_filter import compute_local_expert_ids

    for rank in range(ranks):
        mine = {expert for expert in range(experts) if expert_taker(expert, experts, ranks) == rank}
        assert mine == compute_local_expert_ids(experts, ranks, rank)
