"""Routing: scores, choice, gates, replay, selection bias, the balance loss and what is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from spmd_rl.models.moe import Arrived, Experts, MoE, Routing, SequenceBalance, given_to, grouped_linear
from tests.models.families import hugging_face, ours, row, wires

T, D, E, K = 30, 16, 5, 2


def layer(normalise: bool = True, shared: int = 0, experts: int = E, hidden: int = 12, seed: int = 0) -> MoE:
    torch.manual_seed(seed)
    moe = MoE(1, D, hidden, experts, K, normalise, torch.float32, shared)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    return moe


def dense(moe: MoE, x_TD: torch.Tensor, choice_TK: torch.Tensor | None = None) -> torch.Tensor:
    """Every expert on every token, most of it thrown away: the formula without any sorting."""
    scores_TE = (x_TD @ moe.gate.weight.T).softmax(-1)
    if choice_TK is None:
        choice_TK = scores_TE.topk(K).indices
    gates_TE = scores_TE * one_hot(choice_TK, scores_TE.shape[1]).sum(1)
    if moe.gate.normalise:
        gates_TE = gates_TE / gates_TE.sum(-1, keepdim=True)
    gate_TEI, up_TEI = torch.einsum("td,ehd->teh", x_TD, moe.experts.gate_up_proj).chunk(2, -1)
    y_TED = torch.einsum("tei,edi->ted", torch.nn.functional.silu(gate_TEI) * up_TEI, moe.experts.down_proj)
    return torch.einsum("te,ted->td", gates_TE, y_TED)


def grads(moe: MoE, y_TD: torch.Tensor) -> dict[str, torch.Tensor]:
    moe.zero_grad()
    (y_TD * torch.linspace(-1, 1, y_TD.numel()).view_as(y_TD)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in moe.named_parameters()}


@settings(max_examples=20, deadline=None)
@given(st.booleans(), st.sampled_from([2, 5, 8]), st.sampled_from([10, 12]), st.integers(1, 30), st.booleans())
def test_a_layer_equals_its_formula(normalise: bool, experts: int, hidden: int, tokens: int, replay: bool) -> None:
    moe, x_TD = layer(normalise, experts=experts, hidden=hidden), torch.randn(tokens, D)
    choice_TLK = torch.stack([torch.randperm(experts)[:K] for _ in range(2 * tokens)]).view(tokens, 2, K)
    routing = Routing(choice_TLK.to(torch.uint8)) if replay else None
    y_TD, expected_TD = moe(x_TD, routing), dense(moe, x_TD, choice_TLK[:, 1] if replay else None)
    torch.testing.assert_close(y_TD, expected_TD, atol=1e-5, rtol=1e-5)
    mine, theirs = grads(moe, y_TD), grads(moe, expected_TD)
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 16, 7])
def test_grouped_products_with_empty_groups(dtype: torch.dtype, width: int) -> None:
    rows_E = torch.tensor([0, 3, 0, 5])
    x_SI, weight_EOI = torch.randn(8, width, dtype=dtype), torch.randn(4, 8, width, dtype=dtype)
    expected_SO = torch.cat([x_SI[:3] @ weight_EOI[1].T, x_SI[3:] @ weight_EOI[3].T])
    assert torch.equal(grouped_linear(x_SI, weight_EOI, rows_E), expected_SO)


def test_experts_without_a_token_have_gradients_of_zero() -> None:
    experts = Experts(D, 12, E, torch.float32)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    nobody_TK = torch.full((3, K), -1)
    y_RD = experts._compute(Arrived(torch.randn(3, D, requires_grad=True), nobody_TK, torch.zeros(3, K), slots=0))
    y_RD.sum().backward()
    assert torch.equal(y_RD, torch.zeros(3, D))
    assert all(torch.equal(parameter.grad, torch.zeros_like(parameter)) for parameter in experts.parameters())


def test_given_to_counts_and_leaves_out_nobody() -> None:
    assert given_to(torch.tensor([2, -1, 0, 2]), 4).tolist() == [1, 0, 2, 0]


def test_replaying_what_the_router_chose_changes_no_bit() -> None:
    hf = hugging_face("qwen3_moe", mlp_only_layers=[])
    model = ours(hf)
    tokens_T, documents = row([9, 3])
    taken: dict[int, torch.Tensor] = {}

    def spy(moe: MoE, args: Any, output: Any) -> None:
        taken[moe] = output[1]

    for moe in model.moe_layers:
        moe.gate.register_forward_hook(lambda gate, args, output, moe=moe: spy(moe, args, output))
    logits_TV = model.logits(tokens_T, documents)
    choice_TLK = torch.stack([taken[moe] for moe in model.moe_layers], 1)
    for dtype in (torch.uint8, torch.int16, torch.int64):
        assert torch.equal(model.logits(tokens_T, documents, Routing(choice_TLK.to(dtype))), logits_TV)
    other_TLK = choice_TLK.clone()
    other_TLK[4, 1] = (other_TLK[4, 1] + 1) % 5
    changed_TV = model.logits(tokens_T, documents, Routing(other_TLK))
    different = (changed_TV != logits_TV).any(-1).nonzero().flatten().tolist()
    assert different == [4]  # in the last layer, so no later token sees it
    other_TLK[4, 1] = -1  # unknown: the router chooses
    assert torch.equal(model.logits(tokens_T, documents, Routing(other_TLK.short())), logits_TV)


def test_counts_speak_of_forwards_with_gradients() -> None:
    moe, x_TD = layer(), torch.randn(T, D)
    own_TK = moe.gate(x_TD, None)[1]
    counts = moe.gate.take_counts()
    assert counts[:E].tolist() == own_TK.flatten().bincount(minlength=E).tolist() and counts[E:].tolist() == [0, 0]
    assert moe.gate.take_counts().tolist() == [0] * (E + 2)
    with torch.no_grad():
        moe(x_TD)
    assert moe.gate.take_counts().sum() == 0
    replayed_TLK = own_TK.flip(1)[:, None].expand(T, 2, K).clone()  # the same set in another order
    replayed_TLK[0, 1] = -1
    missing = next(e for e in range(E) if e not in own_TK[1])
    replayed_TLK[1, 1, 0] = missing
    moe(x_TD, Routing(replayed_TLK))
    moe(x_TD, Routing(replayed_TLK))
    assert moe.gate.take_counts()[E:].tolist() == [2 * (T - 1) * K, 2 * ((T - 1) * K - 1)]


def test_a_selection_bias_moves_the_choice_and_no_gate() -> None:
    moe, x_TD = layer(normalise=False), torch.randn(T, D)
    moe.gate.bias_E = torch.tensor([0.0, 0.0, 0.0, 2.0, 0.0])  # above every score
    scores_TE, choice_TK, gates_TK = moe.gate(x_TD, None)
    assert (choice_TK == 3).any(1).all()
    assert torch.equal(gates_TK, scores_TE.gather(1, choice_TK)) and gates_TK.max() <= 1
    assert [name for name, _ in moe.named_parameters()] == [name for name, _ in layer().named_parameters()]
    assert moe.state_dict().keys() == layer().state_dict().keys()


def test_the_balance_loss_is_its_formula_and_reaches_the_router() -> None:
    moe, lengths, weights = layer(), [9, 1, 20], [0.3, 0.0, 0.1]
    x_TD = torch.randn(T, D)
    expected = torch.zeros(())
    for part_TD, weight in zip(x_TD.split(lengths), weights, strict=True):  # one sequence at a time
        scores_TE = (part_TD @ moe.gate.weight.T).softmax(-1)
        f_E = one_hot(scores_TE.topk(K).indices, E).sum((0, 1)) * E / (K * len(part_TD))
        expected = expected + weight * (f_E * scores_TE.mean(0)).sum()
    document_T = torch.from_numpy(np.repeat(np.arange(3), lengths))
    balance = SequenceBalance(document_T, torch.tensor(lengths).float(), torch.tensor(weights))
    scores_TE, choice_TK, _ = moe.gate(x_TD, None)
    torch.testing.assert_close(balance.loss(scores_TE, choice_TK), expected)

    without = grads(moe, moe(x_TD))
    with_it = grads(moe, moe(x_TD, Routing(balance=balance)))
    (gradient_ED,) = torch.autograd.grad(expected, moe.gate.weight)
    assert gradient_ED.norm() > 0.01
    torch.testing.assert_close(with_it["gate.weight"] - without["gate.weight"], gradient_ED, atol=1e-4, rtol=1e-4)
    assert torch.equal(with_it["experts.down_proj"], without["experts.down_proj"])
    places_N = torch.arange(4, 12)
    part = Routing(torch.arange(T * 2 * K).view(T, 2, K), balance).at(places_N, None)
    assert part.choice_TLK[0, 0, 0] == 4 * 2 * K and part.balance.document_T.tolist() == [0] * 5 + [1] + [2] * 2


WRONG = [
    (torch.zeros(11, 2, 2, dtype=torch.int16), r"have shape \[11, 2, 2\], .* = \[12, 2, 2\]"),
    (torch.zeros(12, 1, 2, dtype=torch.int16), r"have shape \[12, 1, 2\]"),
    (torch.zeros(12, 2, 3, dtype=torch.int16), r"have shape \[12, 2, 3\]"),
    (torch.zeros(12, 2, 2), "must be integers, got torch.float32"),
    (torch.full((12, 2, 2), 5, dtype=torch.uint8), "name expert 5, the model has 5, from 0"),
]


@pytest.mark.parametrize(("choice_TLK", "says"), WRONG, ids=["tokens", "layers", "top_k", "dtype", "range"])
def test_routes_that_do_not_fit_are_refused(choice_TLK: torch.Tensor, says: str) -> None:
    tokens_T, documents = row([9, 3])
    with pytest.raises(ValueError, match=says):
        ours(hugging_face("qwen3_moe")).logits(tokens_T, documents, Routing(choice_TLK))


def test_dense_layers_ignore_what_is_replayed_for_them() -> None:
    model = ours(hugging_face("qwen3_moe", mlp_only_layers=[0]))
    tokens_T, documents = row([9, 3])
    choice_TLK = torch.zeros(12, 2, 2, dtype=torch.int16)
    choice_TLK[..., 1] = 1
    logits_TV = model.logits(tokens_T, documents, Routing(choice_TLK))
    choice_TLK[:, 0] = 99
    assert torch.equal(model.logits(tokens_T, documents, Routing(choice_TLK)), logits_TV)
    with pytest.raises(ValueError, match="routed experts were passed to a dense qwen3, which has none"):
        ours(hugging_face()).logits(tokens_T, documents, Routing(choice_TLK))


def test_names_on_the_wire_are_hugging_faces() -> None:
    names = [
        piece.name for wire in wires(ours(hugging_face("qwen2_moe", mlp_only_layers=[0]))) for piece in wire.pieces
    ]
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.experts.4.down_proj.weight" in names
    assert "model.layers.1.mlp.shared_expert_gate.weight" in names
    assert not [name for name in names if "bias_E" in name or name.endswith(("gate_up_proj", "down_proj"))]
