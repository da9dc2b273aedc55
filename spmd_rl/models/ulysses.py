"""Ulysses (arXiv 2309.14509): attention over cut rows by exchanging tokens for heads.

One all-to-all gives every rank all tokens of some heads, the kernel for whole rows attends, another one gives tokens
back. Key-value heads that are fewer than ranks are sent to each rank that needs them. It refuses to know how the
kernel works. Invariant: what a rank sends to another one is only what that one computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.models.attention import Kernel
from spmd_rl.models.packed import Documents

Sent = Callable[[torch.Tensor], None]  # told what went to other ranks


def ulysses_attention(
    q_NHd: torch.Tensor,
    k_NKd: torch.Tensor,
    v_NKd: torch.Tensor,
    documents: Documents,
    sizes: Sequence[int],
    kernel: Kernel,
    group: dist.ProcessGroup,
    sent: Sent,
) -> torch.Tensor:
    """[N, H, d] of this rank's N tokens; `sizes` are those of all ranks, one stretch of the row each.

    Collective, forward and backward. The number of ranks must divide H.
    """
    ranks, heads, kv_heads = len(sizes), q_NHd.shape[1], k_NKd.shape[1]
    copies = lcm(kv_heads, ranks) // kv_heads
    if copies > 1:
        k_NKd, v_NKd = (x_NKd.repeat_interleave(copies, dim=1) for x_NKd in (k_NKd, v_NKd))
    # By rank: its query heads, then its key heads, then its value heads.
    parts = [x.unflatten(1, (ranks, -1)) for x in (q_NHd, k_NKd, v_NKd)]
    x_THd = _Exchange.apply(torch.cat(parts, dim=2), sizes, group, sent, False)
    widths = [heads // ranks, *[kv_heads * copies // ranks] * 2]
    q_THd, k_TKd, v_TKd = (part.contiguous() for part in x_THd.split(widths, dim=1))
    out_THd = kernel(q_THd, k_TKd, v_TKd, documents)
    return _Exchange.apply(out_THd, sizes, group, sent, True).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """[N, R, h, d] → [T, h, d], N tokens of h heads for every rank into all T tokens of my heads; or back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup, sent: Sent, back: bool
    ) -> torch.Tensor:
        ctx.sizes, ctx.group, ctx.sent, ctx.back = sizes, group, sent, back
        return (_to_tokens if back else _to_heads)(x, sizes, group, sent)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        turned = (_to_heads if ctx.back else _to_tokens)(grad, ctx.sizes, ctx.group, ctx.sent)
        return turned, None, None, None, None


def _to_heads(x_NRhd: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup, sent: Sent) -> torch.Tensor:
    ranks, mine = len(sizes), x_NRhd.shape[0]
    outgoing = x_NRhd.transpose(0, 1).contiguous()
    incoming = outgoing.new_empty(sum(sizes), *outgoing.shape[2:])
    dist.all_to_all_single(incoming, outgoing.flatten(0, 1), list(sizes), [mine] * ranks, group=group)
    sent(outgoing[1:])  # all but its own part
    return incoming


def _to_tokens(x_Thd: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup, sent: Sent) -> torch.Tensor:
    ranks, mine = len(sizes), sizes[group.rank()]
    outgoing = x_Thd.contiguous()
    incoming = outgoing.new_empty(ranks * mine, *outgoing.shape[1:])
    dist.all_to_all_single(incoming, outgoing, [mine] * ranks, list(sizes), group=group)
    sent(outgoing[mine:])
    return incoming.unflatten(0, (ranks, mine)).transpose(0, 1).contiguous()
