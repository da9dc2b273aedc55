"""Attention of some queries to some keys, with what is needed to join it with the same queries' attention to others.

A block's result is its output and the log of its softmax's denominator; blocks are merged by these (online softmax,
arXiv 1805.02867). The backward recomputes a block's probabilities from the merged denominators (arXiv 2205.14135). All
in plain torch, chunk of queries by chunk: no tensor of more than [N, H, QUERIES, keys] is ever made.

N is a batch of equal blocks, L queries of H heads, M keys of K heads, H % K == 0; scale 1/sqrt(d). It refuses to know
about rows, documents and ranks. Invariant: merging blocks that divide the keys, in any order, equals attention to all.
"""

from __future__ import annotations

import torch

QUERIES = 256


def block_attention(
    q_NLHd: torch.Tensor, k_NMKd: torch.Tensor, v_NMKd: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [N, L, H, d], log denominators [N, L, H]), both at least float32. causal: query i sees keys 0 .. i."""
    exact = torch.promote_types(q_NLHd.dtype, torch.float32)
    out_NLHd = torch.empty_like(q_NLHd, dtype=exact)
    lse_NLH = q_NLHd.new_empty(q_NLHd.shape[:3], dtype=exact)
    for start, end, seen in _chunks(q_NLHd.shape[1], k_NMKd.shape[1], causal):
        scores = _scores(q_NLHd[:, start:end], k_NMKd[:, :seen], start, causal)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().to(v_NMKd.dtype)
        out = torch.einsum("nkglm,nmkd->nlkgd", weights, v_NMKd[:, :seen])
        out_NLHd[:, start:end] = out.flatten(2, 3).to(exact)
        lse_NLH[:, start:end] = lse.permute(0, 3, 1, 2).flatten(2)
    return out_NLHd, lse_NLH


def merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two blocks' keys together, [..., d] and [...], from each block's own."""
    both = torch.logaddexp(lse, more_lse)
    return out * (lse - both).exp()[..., None] + more * (more_lse - both).exp()[..., None], both


def block_backward(
    grad_NLHd: torch.Tensor,
    q_NLHd: torch.Tensor,
    k_NMKd: torch.Tensor,
    v_NMKd: torch.Tensor,
    lse_NLH: torch.Tensor,
    delta_NLH: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values through this block, at least float32.

    grad: of the merged output; lse: merged; delta: Σ_d grad · merged output. With P = exp(scores − lse):
    dV = Pᵀ grad, dS = P (grad Vᵀ − delta), dQ = dS K, dK = dSᵀ Q.
    """
    exact = lse_NLH.dtype
    dq, dk, dv = (torch.zeros_like(x, dtype=exact) for x in (q_NLHd, k_NMKd, v_NMKd))
    kv_heads, scale = k_NMKd.shape[2], q_NLHd.shape[-1] ** -0.5
    for start, end, seen in _chunks(q_NLHd.shape[1], k_NMKd.shape[1], causal):
        k, v, q = k_NMKd[:, :seen], v_NMKd[:, :seen], q_NLHd[:, start:end]
        grad = grad_NLHd[:, start:end].unflatten(2, (kv_heads, -1))
        lse, delta = (x[:, start:end].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1) for x in (lse_NLH, delta_NLH))
        weights = (_scores(q, k, start, causal) - lse[..., None]).exp()
        half = q.dtype
        dv[:, :seen] += torch.einsum("nkglm,nlkgd->nmkd", weights.to(half), grad.to(half)).to(exact)
        pull = torch.einsum("nlkgd,nmkd->nkglm", grad.to(half), v).to(exact)
        ds = (weights * (pull - delta[..., None]) * scale).to(half)
        dq[:, start:end] = torch.einsum("nkglm,nmkd->nlkgd", ds, k).flatten(2, 3).to(exact)
        dk[:, :seen] += torch.einsum("nkglm,nlkgd->nmkd", ds, q.unflatten(2, (kv_heads, -1))).to(exact)
    return dq, dk, dv


def _chunks(queries: int, keys: int, causal: bool) -> list[tuple[int, int, int]]:
    """(first query, last query + 1, keys that they may see)."""
    ends = [(start, min(start + QUERIES, queries)) for start in range(0, queries, QUERIES)]
    return [(start, end, min(end, keys) if causal else keys) for start, end in ends]


def _scores(q_NLHd: torch.Tensor, k_NMKd: torch.Tensor, start: int, causal: bool) -> torch.Tensor:
    """[N, K, H / K, L, M] in at least float32; -inf where query `start` + l may not see key m."""
    exact = torch.promote_types(q_NLHd.dtype, torch.float32)
    q = q_NLHd.unflatten(2, (k_NMKd.shape[2], -1))
    scores = torch.einsum("nlkgd,nmkd->nkglm", q, k_NMKd).to(exact) * q_NLHd.shape[-1] ** -0.5
    if causal:
        rows = torch.arange(start, start + q_NLHd.shape[1], device=q_NLHd.device)
        hidden_LM = torch.arange(k_NMKd.shape[1], device=q_NLHd.device) > rows[:, None]
        scores.masked_fill_(hidden_LM, -torch.inf)
    return scores
