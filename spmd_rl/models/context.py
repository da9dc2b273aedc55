"""Context parallelism: the tokens of one row cut over ranks, which attend to each other's keys and values.

Every rank of a group is given the whole row, computes blocks and LM head on its own tokens, and gathers the results of
all, so that losses see whole rows and need not know. `ulysses.py` and `ring.py` are two ways of attending.

What it refuses to know: models (they call it at two places: `share` before the blocks, `attend` inside), losses, how
weights are sharded. Invariants: every token is on exactly one rank, without padding, so chunks may differ by a token
or two and be empty; the backward of gathering takes this rank's part of the gradient, because all ranks compute the
same loss: gradients of weights are parts that add up to the whole over the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.models.attention import Kernel
from spmd_rl.models.packed import Documents
from spmd_rl.models.ring import RingPlan, ring_attention
from spmd_rl.models.ulysses import ulysses_attention

Style = Literal["ulysses", "ring"]


@dataclass
class ContextParallel:
    """The ranks that share rows.

    Args:
        group: these ranks, used by one thread.
    """

    group: dist.ProcessGroup
    style: Style
    sent_bytes: int = 0  # by this rank's attention so far, forward and backward

    @property
    def size(self) -> int:
        """cp."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank()

    def share(self, documents: Documents) -> Share:
        """This rank's part of a row."""
        bounds = documents.cu_seqlens.tolist()
        pieces = pieces_of(bounds[-1], self.size, self.style)
        device = documents.positions_T.device
        order = np.concatenate([np.arange(a, b) for rank in pieces for a, b in rank])
        sizes = [sum(b - a for a, b in rank) for rank in pieces]
        mine = np.concatenate([np.arange(a, b) for a, b in pieces[self.rank]])
        places_N = torch.from_numpy(mine).to(device)
        return Share(
            context=self,
            documents=documents,
            places_N=places_N,
            positions_T=documents.positions_T[places_N],
            sizes=sizes,
            order_T=None if self.style == "ulysses" else torch.from_numpy(np.argsort(order)).to(device),
            plan=RingPlan.build(bounds, pieces, self.rank, device) if self.style == "ring" else None,
        )

    def sent(self, tensor: torch.Tensor) -> None:
        """Count what this rank has sent to others."""
        self.sent_bytes += tensor.numel() * tensor.itemsize


@dataclass(frozen=True)
class Share:
    """N tokens of a row of T; in layers it stands in the place of the row's `Documents`."""

    context: ContextParallel
    documents: Documents  # of the whole row
    places_N: torch.Tensor  # int64: where in the row this rank's tokens are
    positions_T: torch.Tensor  # int64[N]; the name is that of `Documents`
    sizes: Sequence[int] = field(repr=False)  # tokens of every rank
    order_T: torch.Tensor | None = field(repr=False)  # int64: where each token is among all chunks; None: in its place
    plan: RingPlan | None = field(repr=False)

    @property
    def tokens(self) -> int:
        """N."""
        return self.sizes[self.context.rank]

    def attend(self, q_NHd: torch.Tensor, k_NKd: torch.Tensor, v_NKd: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        """Causal attention of this rank's queries within their documents, [N, H, d]. Collective.

        kernel: for whole rows, as ulysses computes them.
        """
        context = self.context
        if self.plan is not None:
            return ring_attention(q_NHd, k_NKd, v_NKd, self.plan, context.group, context.sent)
        return ulysses_attention(q_NHd, k_NKd, v_NKd, self.documents, self.sizes, kernel, context.group, context.sent)

    def gather(self, *columns_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The whole row's columns, [T] each, from all ranks' [N]. Collective; the backward is not."""
        return _Gather.apply(self, *columns_N)


class _Gather(torch.autograd.Function):
    """Columns of one dtype, in one collective."""

    @staticmethod
    def forward(ctx: Any, share: Share, *columns_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.places_N = share.places_N
        ctx.set_materialize_grads(False)
        longest, stacked_CN = max(share.sizes), torch.stack(columns_N)
        padded_CL = torch.nn.functional.pad(stacked_CN, (0, longest - share.tokens)).contiguous()
        all_RCL = padded_CL.new_empty(len(share.sizes), *padded_CL.shape)
        dist.all_gather_single(all_RCL.flatten(), padded_CL.flatten(), group=share.context.group)
        whole_CT = torch.cat([part_CL[:, :size] for part_CL, size in zip(all_RCL, share.sizes, strict=True)], dim=1)
        if share.order_T is not None:
            whole_CT = whole_CT[:, share.order_T]
        return tuple(column_T.contiguous() for column_T in whole_CT)

    @staticmethod
    def backward(ctx: Any, *grads_T: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *(None if grad_T is None else grad_T[ctx.places_N] for grad_T in grads_T)


def pieces_of(tokens: int, size: int, style: Style) -> list[list[tuple[int, int]]]:
    """Where each rank's tokens are: stretches [start, end) of the row, by rank.

    ulysses: one stretch. ring: one from the row's head and one from its tail, because under a causal mask a token costs
    as much as lies before it: the two together cost every rank the same.
    """
    count = size if style == "ulysses" else 2 * size
    cuts = [tokens * i // count for i in range(count + 1)]
    stretches = list(pairwise(cuts))
    if style == "ulysses":
        return [[stretch] for stretch in stretches]
    return [[stretches[rank], stretches[count - 1 - rank]] for rank in range(size)]


def bytes_per_layer(
    style: Style, tokens: int, size: int, heads: int, kv_heads: int, head_dim: int, itemsize: int
) -> tuple[float, float]:
    """(forward, backward) bytes that one layer's attention sends from one of `size` ranks, which divide `tokens`.

    docs/parallelism.md derives them. With other numbers of tokens they are the mean over ranks.
    """
    share = tokens / size * head_dim * (size - 1)
    if style == "ulysses":
        one_way = share / size * 2 * (heads + lcm(kv_heads, size)) * itemsize
        return one_way, one_way
    return share * 2 * kv_heads * itemsize, share * 2 * kv_heads * (itemsize + max(itemsize, 4))


def context_problem(size: int, style: Style, config: dict[str, Any], ours: bool) -> str:
    """Why rows of a model can't be shared by `size` ranks, with the way out; empty when they can.

    config: the model's config.json. ours: it is computed by our own definitions.
    """
    if size == 1:
        return ""
    if not ours:
        return (
            f"trainer.parallel.cp = {size} needs a model of our own definitions (trainer.model.impl = custom): "
            f"transformers' {config.get('model_type')} can't cut a row; set cp = 1"
        )
    heads = int(config.get("num_attention_heads", 0))
    if style == "ulysses" and heads % size:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        return (
            f"trainer.parallel.cp = {size} does not divide the model's {heads} attention heads, which cp_style = "
            f"ulysses divides among ranks: set cp to one of {fitting}, or cp_style = ring"
        )
    return ""
