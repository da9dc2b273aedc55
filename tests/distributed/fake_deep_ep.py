"""The part of deep_ep 2.1 that is used here, on any back end: it moves tokens, and has no gradients of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

topk_idx_t = torch.int64


@dataclass
class Handle:
    """How tokens went."""

    tokens: int
    token_P: torch.Tensor
    sent: list[int]
    received: list[int]
    num_recv_tokens_per_expert_list: list[int]


class ElasticBuffer:
    """As deep_ep's, with these arguments alone."""

    made = 0  # so that a test can count

    def __init__(self, group: dist.ProcessGroup, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> None:
        assert hidden % 256 == 0
        self.group, self.most = group, num_max_tokens_per_rank
        ElasticBuffer.made += 1

    def move(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self.group)
        return arrived

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_experts: int = 0,
        num_max_tokens_per_rank: int = 0,
        num_sms: int = 0,
        do_cpu_sync: bool = False,
        do_expand: bool = True,
        handle: Handle | None = None,
    ) -> tuple[torch.Tensor, Any, Any, Handle, None]:
        if handle is not None:
            return self.move(x[handle.token_P], handle.sent, handle.received), None, None, handle, None
        assert x.dtype == torch.bfloat16 and topk_weights.dtype == torch.float32 and do_cpu_sync and not do_expand
        assert len(x) <= self.most == num_max_tokens_per_rank
        ranks = self.group.size()
        each = num_experts // ranks
        pairs = [(r, t) for r in range(ranks) for t in range(len(x)) if (topk_idx[t] // each == r).any()]
        rank_P, token_P = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
        sent = rank_P.bincount(minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        mine = topk_idx[token_P] // each == rank_P[:, None]
        index = torch.where(mine, topk_idx[token_P] - rank_P[:, None] * each, -1)
        weights = torch.where(mine, topk_weights[token_P], 0.0)
        sizes = (sent.tolist(), received.tolist())
        index = self.move(index, *sizes)
        counts = [int((index == e).sum()) for e in range(each)]
        arrived = (self.move(x[token_P], *sizes), index, self.move(weights, *sizes))
        return *arrived, Handle(len(x), token_P, *sizes, counts), None

    def combine(
        self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None, num_sms: int = 0
    ) -> tuple[torch.Tensor, Any, None]:
        def back(rows: torch.Tensor) -> torch.Tensor:
            home = self.move(rows, handle.received, handle.sent)
            return home.new_zeros(handle.tokens, rows.shape[1]).index_add(0, handle.token_P, home)

        return back(x), None if topk_weights is None else back(topk_weights), None
