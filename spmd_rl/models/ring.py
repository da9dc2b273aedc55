"""Ring attention (arXiv 2310.01889) over packed rows: keys and values go around, queries stay.

A rank holds two stretches of the row, from head and tail. A stretch of queries attends to itself, causally within each
of its documents; and to an earlier stretch of keys, from which only one document can reach it: that is one block
without a mask. What was computed is merged as it comes (`blockwise.py`). In the backward keys and values go around once
more, and their gradients with them, until they are home.

It refuses to know who shares rows and why. Invariant: while a block is computed the next one is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.models.blockwise import block_attention, block_backward, merge
from spmd_rl.models.packed import Documents

Sent = Callable[[torch.Tensor], None]  # told what went to other ranks


@dataclass(frozen=True)
class Diagonal:
    """Queries and keys [start, end) of this rank's tokens, with their parts of documents."""

    start: int
    end: int
    documents: Documents
    real_S: torch.Tensor | None  # bool: slots of `documents` that are no padding; None: all


@dataclass(frozen=True)
class Block:
    """Queries [start, end) of this rank see all keys [first, last) of a chunk."""

    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True)
class RingPlan:
    """What this rank computes of one row."""

    diagonals: tuple[Diagonal, ...]
    blocks: tuple[tuple[Block, ...], ...]  # by the rank whose keys they are of
    sizes: tuple[int, ...]  # tokens of every rank

    @staticmethod
    def build(
        bounds: Sequence[int], pieces: Sequence[Sequence[tuple[int, int]]], rank: int, device: torch.device
    ) -> RingPlan:
        """bounds: of documents, [0, …, T]. pieces: by rank, its stretches of the row in ascending order."""
        starts = np.asarray(bounds)
        mine = _offsets(pieces[rank])
        diagonals = tuple(_diagonal(starts, a, b, at, device) for (a, b), at in mine if a < b)
        blocks = []
        for owner in pieces:
            pairs = [(q, k) for q in mine for k in _offsets(owner) if k[0][1] <= q[0][0]]
            found = [_block(starts, *q, *k) for q, k in pairs]
            blocks.append(tuple(block for block in found if block is not None))
        return RingPlan(diagonals, tuple(blocks), tuple(sum(b - a for a, b in owner) for owner in pieces))


def _offsets(pieces: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    """Each stretch of the row, and where it begins in the chunk."""
    ends = np.cumsum([0, *(b - a for a, b in pieces)]).tolist()
    return list(zip(pieces, ends[:-1], strict=True))


def _diagonal(bounds: np.ndarray, a: int, b: int, at: int, device: torch.device) -> Diagonal:
    documents = Documents.build(np.unique(np.clip(bounds, a, b)) - a, device)
    real_S = None
    if documents.token_of_slot_S is not None and documents.slot_of_token_T is not None:
        slots_S = torch.arange(len(documents.token_of_slot_S), device=device)
        real_S = documents.slot_of_token_T[documents.token_of_slot_S] == slots_S
    return Diagonal(at, at + b - a, documents, real_S)


def _block(bounds: np.ndarray, q: tuple[int, int], q_at: int, k: tuple[int, int], k_at: int) -> Block | None:
    """The document that reaches from the keys' stretch to the later one of the queries, if there is one."""
    if k[0] == k[1] or q[0] == q[1]:
        return None
    document = int(np.searchsorted(bounds, k[1] - 1, side="right"))
    begin, end = int(bounds[document - 1]), int(bounds[document])
    if end <= q[0]:
        return None
    return Block(q_at, q_at + min(q[1], end) - q[0], k_at + max(k[0], begin) - k[0], k_at + k[1] - k[0])


def ring_attention(
    q_NHd: torch.Tensor, k_NKd: torch.Tensor, v_NKd: torch.Tensor, plan: RingPlan, group: dist.ProcessGroup, sent: Sent
) -> torch.Tensor:
    """[N, H, d] of this rank's N tokens. Collective, forward and backward."""
    return _Ring.apply(q_NHd, k_NKd, v_NKd, plan, group, sent)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_NHd: torch.Tensor,
        k_NKd: torch.Tensor,
        v_NKd: torch.Tensor,
        plan: RingPlan,
        group: dist.ProcessGroup,
        sent: Sent,
    ) -> torch.Tensor:
        ctx.plan, ctx.group, ctx.sent = plan, group, sent
        kv_2NKd = torch.stack((k_NKd, v_NKd))
        exact = torch.promote_types(q_NHd.dtype, torch.float32)
        out_NHd = torch.empty_like(q_NHd, dtype=exact)
        lse_NH = q_NHd.new_empty(q_NHd.shape[:2], dtype=exact)
        for d in plan.diagonals:
            part = slice(d.start, d.end)
            out_NHd[part], lse_NH[part] = _attend_itself(q_NHd[part], k_NKd[part], v_NKd[part], d.documents)
        for owner, (k_MKd, v_MKd) in _around(kv_2NKd, plan.sizes, group, sent):
            for b in plan.blocks[owner]:
                part, keys = slice(b.start, b.end), slice(b.first, b.last)
                more, more_lse = block_attention(q_NHd[None, part], k_MKd[None, keys], v_MKd[None, keys], False)
                out_NHd[part], lse_NH[part] = merge(out_NHd[part], lse_NH[part], more[0], more_lse[0])
        ctx.save_for_backward(q_NHd, kv_2NKd, out_NHd, lse_NH)
        return out_NHd.to(q_NHd.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NHd: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_NHd, kv_2NKd, out_NHd, lse_NH = ctx.saved_tensors
        plan, group, sent = ctx.plan, ctx.group, ctx.sent
        delta_NH = (grad_NHd.to(lse_NH.dtype) * out_NHd).sum(-1)
        dq_NHd = torch.zeros_like(q_NHd, dtype=lse_NH.dtype)
        home_2NKd = torch.zeros_like(kv_2NKd, dtype=lse_NH.dtype)
        for d in plan.diagonals:
            part = slice(d.start, d.end)
            columns = (grad_NHd[part], q_NHd[part], *kv_2NKd[:, part], lse_NH[part], delta_NH[part])
            dq_NHd[part], home_2NKd[0, part], home_2NKd[1, part] = _itself_backward(d, *columns)
        travelling = None
        for owner, kv_2MKd in _around(kv_2NKd, plan.sizes, group, sent):
            own = owner == group.rank()
            dkv_2MKd = home_2NKd if own else torch.zeros_like(kv_2MKd, dtype=lse_NH.dtype)
            for b in plan.blocks[owner]:
                part, keys = slice(b.start, b.end), slice(b.first, b.last)
                columns = (grad_NHd[None, part], q_NHd[None, part], *kv_2MKd[:, None, keys])
                dq, dk, dv = block_backward(*columns, lse_NH[None, part], delta_NH[None, part], False)
                dq_NHd[part] += dq[0]
                dkv_2MKd[0, keys] += dk[0]
                dkv_2MKd[1, keys] += dv[0]
            if own:
                continue
            if travelling is not None:
                dkv_2MKd += travelling
            # Gradients follow their keys: what arrives belongs to the chunk that this rank computes with next.
            travelling = _Hop(dkv_2MKd, plan.sizes[owner - 1], group, sent, tag=1).wait()
        if travelling is not None:
            home_2NKd += travelling
        return dq_NHd.to(q_NHd.dtype), *home_2NKd.to(q_NHd.dtype), None, None, None


def _around(kv_2NKd: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup, sent: Sent) -> Any:
    """(owner, its keys and values) of every rank, this one's first, then as they come around."""
    ranks, rank = len(sizes), group.rank()
    for step in range(ranks):
        owner = (rank - step) % ranks
        hop = _Hop(kv_2NKd, sizes[owner - 1], group, sent) if step + 1 < ranks else None
        yield owner, kv_2NKd
        if hop is not None:
            kv_2NKd = hop.wait()


class _Hop:
    """Something for the next rank, under way, and the same kind of thing from the one before.

    Nothing is sent as one row of zeros, so that all ranks call the group equally often.
    """

    def __init__(
        self, outgoing_2NKd: torch.Tensor, size: int, group: dist.ProcessGroup, sent: Sent, tag: int = 0
    ) -> None:
        self._size, rest = size, outgoing_2NKd.shape[2:]
        self._outgoing = outgoing_2NKd.contiguous() if outgoing_2NKd.numel() else outgoing_2NKd.new_zeros(2, 1, *rest)
        self._incoming = outgoing_2NKd.new_empty(2, max(size, 1), *rest)
        ranks, rank = group.size(), group.rank()
        peers = ((dist.isend, self._outgoing, (rank + 1) % ranks), (dist.irecv, self._incoming, (rank - 1) % ranks))
        hops = [dist.P2POp(op, x, group=group, group_peer=peer, tag=tag) for op, x, peer in peers]
        self._works = dist.batch_isend_irecv(hops)
        sent(outgoing_2NKd)

    def wait(self) -> torch.Tensor:
        """What came."""
        for work in self._works:
            work.wait()
        return self._incoming[:, : self._size]


def _attend_itself(
    q_LHd: torch.Tensor, k_LKd: torch.Tensor, v_LKd: torch.Tensor, documents: Documents
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [L, H, d], log denominators [L, H]) of a stretch, causal within its parts of documents."""
    padded = zip(documents.pad(q_LHd), documents.pad(k_LKd), documents.pad(v_LKd), strict=True)
    parts = [block_attention(q, k, v, True) for q, k, v in padded]
    out_LHd = documents.unpad([out for out, _ in parts])
    return out_LHd, documents.unpad([lse[..., None] for _, lse in parts])[..., 0]


def _itself_backward(d: Diagonal, *columns_L: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of queries, keys and values of a stretch."""
    grad_LHd, q_LHd, k_LKd, v_LKd, lse_LH, delta_LH = columns_L
    pad = d.documents.pad
    real = [None] * len(d.documents.buckets)
    if d.real_S is not None:
        real = list(d.real_S.split([bucket.slots for bucket in d.documents.buckets]))
    gradients = []
    for grad, q, k, v, lse, delta, real_S in zip(
        pad(grad_LHd), pad(q_LHd), pad(k_LKd), pad(v_LKd), pad(lse_LH[..., None]), pad(delta_LH[..., None]), real,
        strict=True,
    ):  # fmt: skip
        if real_S is not None:  # a padded slot repeats a token, whose gradient would count twice
            grad = grad * real_S.view(*grad.shape[:2], 1, 1)
            delta = delta * real_S.view(*delta.shape[:2], 1, 1)
        gradients.append(block_backward(grad, q, k, v, lse[..., 0], delta[..., 0], True))
    return [d.documents.unpad([parts[i] for parts in gradients]) for i in range(3)]
