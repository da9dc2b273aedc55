"""Mixture of experts: a router, the experts, and optionally a shared expert behind a sigmoid gate.

Scores are a float32 softmax over all experts; the k largest are taken, or those that a row brings along (router
replay), and the gates are this router's own scores either way. A selection bias shifts the choice, never a gate
(arXiv 2408.15664). Experts are three-dimensional parameters with Hugging Face's fused names and layout.

What it refuses to know: where routes come from, what is done about an unbalanced load (`trainer/routing.py`), which
rank holds which expert (`experts.exchange`). Invariants: each gate has a gradient; every parameter gets one, be it
zero, so that ranks never disagree about a collective; what a forward without gradients routes is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from spmd_rl.models.layers import FeedForward, linear
from spmd_rl.models.slots import collect, spread


@dataclass(frozen=True)
class SequenceBalance:
    """The sequence-wise balance loss of a row (arXiv 2412.19437, formulas 17 to 20), over its D documents."""

    document_T: torch.Tensor  # int64: index of the token's document
    length_D: torch.Tensor  # float32: tokens of the document
    weight_D: torch.Tensor  # float32: coefficient × the document's share of the batch; 0 where it does not count
    group: dist.ProcessGroup | None = None  # ranks that hold the other tokens of the same documents

    def loss(self, scores_TE: torch.Tensor, choice_TK: torch.Tensor) -> torch.Tensor:
        """Σ weight · Σ_e f_e P_e: f = how often an expert was taken × E / k, P = its mean score, by document.

        Where other ranks hold tokens of the documents, this is the share of this rank's tokens. Collective then.
        """
        experts, documents = scores_TE.shape[1], len(self.length_D)
        taken_TE = torch.zeros_like(scores_TE).scatter_(1, choice_TK, 1.0)
        sums_DE, counts_DE = (
            x_TE.new_zeros(documents, experts).index_add(0, self.document_T, x_TE) for x_TE in (scores_TE, taken_TE)
        )
        if self.group is not None:
            dist.all_reduce(counts_DE, group=self.group)
        f_DE = counts_DE * (experts / choice_TK.shape[1]) / self.length_D[:, None]
        return (self.weight_D * (f_DE * sums_DE / self.length_D[:, None]).sum(1)).sum()


@dataclass(frozen=True)
class Routing:
    """What a row of T tokens brings along for the layers with experts."""

    # [T, layers, k], any integer type, over all layers of the model, dense ones too: the experts to take for the token
    # at t as an input. Where one of the k is negative, the router chooses.
    choice_TLK: torch.Tensor | None = None
    balance: SequenceBalance | None = None
    counted: bool = True  # False for a row that only takes part: nobody's load

    def at(self, places_N: torch.Tensor, group: dist.ProcessGroup | None) -> Routing:
        """For a rank that holds the tokens at `places_N`, int64; the ranks of `group` hold the others."""
        choice_TLK, balance = self.choice_TLK, self.balance
        if choice_TLK is not None:
            choice_TLK = choice_TLK[places_N]
        if balance is not None:
            balance = replace(balance, document_T=balance.document_T[places_N], group=group)
        return Routing(choice_TLK, balance, self.counted)

    def check(self, tokens: int, config: Any, layers: list[int]) -> None:
        """Raises ValueError unless the replayed routes fit `tokens` tokens and the model's `layers` with experts."""
        choice_TLK = self.choice_TLK
        if choice_TLK is None or not tokens:  # a rank that shares a short row may hold nothing of it
            return
        if not layers:
            raise ValueError(f"routed experts were passed to a dense {config.model_type}, which has none")
        expected = (tokens, config.num_hidden_layers, config.num_experts_per_tok)
        if tuple(choice_TLK.shape) != expected:
            raise ValueError(
                f"routed experts have shape {list(choice_TLK.shape)}, the row and the model ask for [tokens, layers, "
                f"top_k] = {list(expected)}"
            )
        if choice_TLK.is_floating_point() or choice_TLK.dtype == torch.bool:
            raise ValueError(f"routed experts must be integers, got {choice_TLK.dtype}")
        largest = int(choice_TLK[:, layers].max())
        if largest >= config.num_experts:
            raise ValueError(f"routed experts name expert {largest}, the model has {config.num_experts}, from 0")


class Exchange(Protocol):
    """Takes tokens to the ranks that hold their experts, and results back (`experts_parallel.py`)."""

    def dispatch(self, x_TD: torch.Tensor, choice_TK: torch.Tensor, gates_TK: torch.Tensor) -> Arrived: ...

    def combine(self, y_RD: torch.Tensor, arrived: Arrived) -> torch.Tensor:
        """[T, D]: for every token the sum of what its ranks computed."""


@dataclass(frozen=True)
class Arrived:
    """R tokens that this rank's experts work on."""

    x_RD: torch.Tensor
    choice_RK: torch.Tensor  # int64: index among this rank's experts, -1 for one of another rank
    gates_RK: torch.Tensor  # 0 where the choice is -1
    slots: int  # how many choices are not -1
    way_back: Any = None  # the exchange's own


class Router(nn.Module):
    """Scores, choice and gates; and how much every expert was given since the last `take_counts`."""

    def __init__(self, width: int, experts: int, top_k: int, normalise: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width, dtype=dtype))
        self.top_k, self.normalise = top_k, normalise
        self.bias_E: torch.Tensor | None = None  # shifts the choice; not a parameter and not on the wire
        self._counts: torch.Tensor | None = None  # int64[E + 2]: given to each expert; replayed; of these agreed

    def forward(
        self, x_TD: torch.Tensor, replayed_TK: torch.Tensor | None = None, counted: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scores float32[T, E], choice int64[T, k], gates [T, k] in the type of x)."""
        scores_TE = F.linear(x_TD, self.weight).softmax(-1, dtype=torch.float32)
        preference_TE = scores_TE.detach() if self.bias_E is None else scores_TE.detach() + self.bias_E
        own_TK = preference_TE.topk(self.top_k, dim=-1).indices
        choice_TK = own_TK
        if replayed_TK is not None:
            forced_T1 = (replayed_TK >= 0).all(-1, keepdim=True)
            choice_TK = torch.where(forced_T1, replayed_TK.long(), own_TK)
        if counted and torch.is_grad_enabled():
            self._count(choice_TK, own_TK, None if replayed_TK is None else forced_T1)
        gates_TK = scores_TE.gather(1, choice_TK)
        if self.normalise:
            gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True)
        return scores_TE, choice_TK, gates_TK.to(x_TD.dtype)

    def take_counts(self) -> torch.Tensor:
        """int64[E + 2] since the last call: choices of each expert, replayed ones, those the router would have made."""
        counts, self._counts = self._counts, None
        return self.weight.new_zeros(len(self.weight) + 2, dtype=torch.int64) if counts is None else counts

    @torch.no_grad()
    def _count(self, choice_TK: torch.Tensor, own_TK: torch.Tensor, forced_T1: torch.Tensor | None) -> None:
        experts = len(self.weight)
        counts = choice_TK.new_zeros(experts + 2)
        counts[:experts] = given_to(choice_TK.flatten(), experts)
        if forced_T1 is not None:
            agreed_TK = (choice_TK[:, :, None] == own_TK[:, None, :]).any(-1) & forced_T1
            counts[experts] = forced_T1.sum() * self.top_k
            counts[experts + 1] = agreed_TK.sum()
        self._counts = counts if self._counts is None else self._counts + counts


class Experts(nn.Module):
    """SwiGLU experts as stacked matrices, E of them; under expert parallelism this rank's share."""

    def __init__(self, width: int, hidden: int, experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, width, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden, dtype=dtype))
        self.exchange: Exchange | None = None  # None: every expert is here

    def forward(self, x_TD: torch.Tensor, choice_TK: torch.Tensor, gates_TK: torch.Tensor) -> torch.Tensor:
        """[T, D]: Σ_k gate · expert(x)."""
        if self.exchange is None:
            return self._compute(Arrived(x_TD, choice_TK, gates_TK, choice_TK.numel()))
        arrived = self.exchange.dispatch(x_TD, choice_TK, gates_TK)
        return self.exchange.combine(self._compute(arrived), arrived)

    def _compute(self, arrived: Arrived) -> torch.Tensor:
        """[R, D]: for every token the gated sum over its experts of this rank."""
        gate_up_EHD, down_EDI = here(self.gate_up_proj), here(self.down_proj)
        (tokens, top_k), choice_N = arrived.choice_RK.shape, arrived.choice_RK.flatten()
        slot_S = choice_N.argsort(stable=True)[len(choice_N) - arrived.slots :]  # by expert; -1 sorts first
        tokens_E = given_to(choice_N, len(gate_up_EHD))
        gate_SI, up_SI = grouped_linear(spread(arrived.x_RD, slot_S, top_k), gate_up_EHD, tokens_E).chunk(2, -1)
        y_SD = grouped_linear(F.silu(gate_SI) * up_SI, down_EDI, tokens_E)
        y_SD = y_SD * arrived.gates_RK.flatten().index_select(0, slot_S)[:, None]
        return collect(y_SD, slot_S, tokens, top_k)


class MoE(nn.Module):
    """A feed-forward layer of experts; `layer` is its index among all layers of the model."""

    def __init__(
        self,
        layer: int,
        width: int,
        hidden: int,
        experts: int,
        top_k: int,
        normalise: bool,
        dtype: torch.dtype,
        shared: int = 0,
    ) -> None:
        """`shared`: hidden units of the shared expert; 0 = there is none."""
        super().__init__()
        self.layer = layer
        self.gate = Router(width, experts, top_k, normalise, dtype)
        self.experts = Experts(width, hidden, experts, dtype)
        if shared:
            self.shared_expert = FeedForward(width, shared, dtype)
            self.shared_expert_gate = linear(width, 1, False, dtype)
        self.shared = bool(shared)

    def forward(self, x_TD: torch.Tensor, routing: Routing | None = None) -> torch.Tensor:
        routing = routing or Routing()
        replayed_TK = None if routing.choice_TLK is None else routing.choice_TLK[:, self.layer]
        scores_TE, choice_TK, gates_TK = self.gate(x_TD, replayed_TK, routing.counted)
        y_TD = self.experts(x_TD, choice_TK, gates_TK)
        if self.shared:
            y_TD = y_TD + self.shared_expert_gate(x_TD).sigmoid() * self.shared_expert(x_TD)
        if routing.balance is not None and torch.is_grad_enabled():
            y_TD = _WithLoss.apply(y_TD, routing.balance.loss(scores_TE, choice_TK))
        return y_TD


class _WithLoss(torch.autograd.Function):
    """Hands y through, and in backward gives `loss` the gradient 1, as if it had been added to the training loss.

    So the loss needs no way out of the layer, where a sharded module would have given its weights back by then.
    """

    @staticmethod
    def forward(ctx: Any, y_TD: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad_TD, torch.ones((), dtype=torch.float32, device=grad_TD.device)


def qwen_feed_forward(config: Any, layer: int, dtype: torch.dtype, shared: int = 0) -> FeedForward | MoE:
    """Of a layer of a Qwen model: experts where `decoder_sparse_step` and `mlp_only_layers` say so, else dense.

    `shared`: as of `MoE`.
    """
    on_step = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
    if not on_step or layer in (config.mlp_only_layers or ()):
        return FeedForward(config.hidden_size, config.intermediate_size, dtype)
    return MoE(
        layer,
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        dtype,
        shared,
    )


def given_to(choice_N: torch.Tensor, experts: int) -> torch.Tensor:
    """int64[experts]: how often each one is chosen; -1 is nobody. Without waiting for the device."""
    counts = choice_N.new_zeros(experts + 1)
    return counts.scatter_add_(0, choice_N + 1, torch.ones_like(choice_N))[1:]


def grouped_linear(x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows_E: torch.Tensor) -> torch.Tensor:
    """[S, O]: the first rows_E[0] rows times weight[0] transposed, the next ones times weight[1], and so on."""
    widths = (x_SI.shape[1] * x_SI.itemsize, weight_EOI.shape[1] * x_SI.itemsize)
    if x_SI.dtype == torch.float64 or any(width % 16 for width in widths):  # what the grouped kernel does not take
        parts = x_SI.split(rows_E.tolist())
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weight_EOI, strict=True)])
    return F.grouped_mm(x_SI, weight_EOI.transpose(1, 2), offs=rows_E.cumsum(0).to(torch.int32))


def here(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's experts."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
