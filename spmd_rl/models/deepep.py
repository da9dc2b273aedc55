"""Expert parallelism by DeepEP 2 (`ElasticBuffer`): fused kernels for NVLink and RDMA in place of all-to-alls.

Written against deep_ep 2.1 and imported lazily; the backward of a dispatch is a combine and the other way round. What
it refuses to know is what `experts_parallel.py` refuses, whose `AllToAll` computes the same. Invariants: one buffer per
group, whatever the number of layers; all ranks of a group make equally many calls with one bound on tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.models.moe import Arrived

WIDTH = 256  # the combine kernel takes hidden sizes that this divides


@dataclass
class DeepEP:
    """Makes exchanges that share a buffer: an `ExchangeMaker`.

    Args:
        max_tokens: tokens that a rank dispatches at once, at most; the same on all ranks.
        chunked: a row is dispatched in pieces of `max_tokens`, so that the buffer may be small.
        sms: multiprocessors that communicate; 0 = as many as deep_ep thinks best.
    """

    max_tokens: int
    chunked: bool = False
    sms: int = 0
    _buffers: dict[dist.ProcessGroup, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            from deep_ep import ElasticBuffer  # noqa: F401
        except (ImportError, OSError) as error:  # a library that it links against may be missing, too
            raise ValueError(
                f"trainer.parallel.ep_comm_backend = deepep needs deep_ep 2.1, which can't be imported ({error}): "
                "install it (docs/dependencies.md), or set ep_comm_backend to torch"
            ) from error

    def __call__(self, group: dist.ProcessGroup, experts: int) -> DeepEPExchange:
        return DeepEPExchange(self, group, experts)

    def buffer(self, group: dist.ProcessGroup, width: int, top_k: int) -> Any:
        """The group's buffer, made at its first use. Collective then."""
        from deep_ep import ElasticBuffer

        if group not in self._buffers:
            self._buffers[group] = ElasticBuffer(
                group, num_max_tokens_per_rank=self.max_tokens, hidden=width, num_topk=top_k
            )
        return self._buffers[group]


@dataclass(frozen=True)
class DeepEPExchange:
    """An `Exchange` of one layer's tokens."""

    maker: DeepEP
    group: dist.ProcessGroup
    experts: int

    def dispatch(self, x_TD: torch.Tensor, choice_TK: torch.Tensor, gates_TK: torch.Tensor) -> Arrived:
        """This rank's tokens to the ranks of their experts. Collective. ValueError for what the kernels don't take."""
        tokens, width = x_TD.shape
        if x_TD.dtype != torch.bfloat16 or width % WIDTH:
            raise ValueError(
                f"ep_comm_backend = deepep moves bfloat16 and hidden sizes that {WIDTH} divides, got {x_TD.dtype} and "
                f"{width}; set trainer.model.dtype to bfloat16, or ep_comm_backend to torch"
            )
        pieces = self._pieces(tokens, x_TD.device)
        arrived, handles = [], []
        for piece in pieces:
            handle: list[Any] = []
            arrived.append(_Dispatch.apply(self, handle, x_TD[piece], choice_TK[piece], gates_TK[piece].float()))
            handles += handle
        x_RD, choice_RK, gates_RK = (torch.cat(parts) for parts in zip(*arrived, strict=True))
        slots = sum(sum(handle.num_recv_tokens_per_expert_list) for handle in handles)
        way_back = [(handle, len(part[0])) for handle, part in zip(handles, arrived, strict=True)]
        return Arrived(x_RD, choice_RK.long(), gates_RK.to(x_TD.dtype), slots, way_back)

    def combine(self, y_RD: torch.Tensor, arrived: Arrived) -> torch.Tensor:
        """Results to the ranks that sent the tokens. Collective."""
        handles, sizes = zip(*arrived.way_back, strict=True)
        parts = y_RD.split(sizes)
        return torch.cat([_Combine.apply(self, handle, part) for handle, part in zip(handles, parts, strict=True)])

    def _pieces(self, tokens: int, device: torch.device) -> list[slice]:
        """How a row is dispatched; as many pieces on every rank, some of which may be empty."""
        most = self.maker.max_tokens
        if not self.maker.chunked:
            if tokens > most:
                raise ValueError(
                    f"a row of {tokens} tokens is longer than the {most} that deep_ep's buffer was made for; set "
                    "trainer.parallel.deepep_token_chunk_size"
                )
            return [slice(0, tokens)]
        longest = torch.tensor(tokens, device=device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.group)
        return [slice(start, start + most) for start in range(0, max(1, int(longest)), most)]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: DeepEPExchange,
        handle: list[Any],
        x_TD: torch.Tensor,
        choice_TK: torch.Tensor,
        gates_TK: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from deep_ep import topk_idx_t

        maker = exchange.maker
        ctx.buffer = maker.buffer(exchange.group, x_TD.shape[1], choice_TK.shape[1])
        x_RD, choice_RK, gates_RK, ctx.handle, _ = ctx.buffer.dispatch(
            x_TD.contiguous(),
            topk_idx=choice_TK.to(topk_idx_t).contiguous(),
            topk_weights=gates_TK.contiguous(),
            num_experts=exchange.experts,
            num_max_tokens_per_rank=maker.max_tokens,
            num_sms=maker.sms,
            do_cpu_sync=True,
            do_expand=False,
        )
        ctx.sms = maker.sms
        handle.append(ctx.handle)
        ctx.mark_non_differentiable(choice_RK)
        return x_RD, choice_RK, gates_RK

    @staticmethod
    def backward(ctx: Any, grad_RD: torch.Tensor, _: Any, grad_gates_RK: torch.Tensor) -> tuple:
        grad_TD, grad_gates_TK, _ = ctx.buffer.combine(
            grad_RD.contiguous(), ctx.handle, topk_weights=grad_gates_RK.contiguous(), num_sms=ctx.sms
        )
        return None, None, grad_TD, None, grad_gates_TK


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: DeepEPExchange, handle: Any, y_RD: torch.Tensor) -> torch.Tensor:
        ctx.buffer = exchange.maker.buffer(exchange.group, y_RD.shape[1], 0)
        ctx.handle, ctx.sms = handle, exchange.maker.sms
        y_TD, _, _ = ctx.buffer.combine(y_RD.contiguous(), handle, num_sms=ctx.sms)
        return y_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple:
        grad_RD, *_ = ctx.buffer.dispatch(grad_TD.contiguous(), handle=ctx.handle, num_sms=ctx.sms)
        return None, None, grad_RD
