"""The parts of torchtitan's models that are put in through its configs in place of its own.

Its attention back ends need a GPU, and so do its experts: they compute in bfloat16 whatever the weights are. Here are
an attention over packed documents, on every device, a router's gate in float32, and experts in the dtype of their
weights. What it refuses to know: families, folders, names of tensors. Invariant: the same function as torchtitan's,
but for rounding.

This module imports torchtitan (the extra `titan`), so it is itself imported only where `trainer.model.impl = titan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

from spmd_rl.models.attention import attend
from spmd_rl.models.moe import grouped_linear
from spmd_rl.models.packed import Documents

QUERIES = 256  # that a chunk of attention with a window or a sink scores at once

OutTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class PackedAttention(Module):
    """Causal attention inside the documents of one packed row, which comes in the place of attention masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        backend: str = "sdpa"  # a result of `resolve_backend`
        window: int | None = None  # a token sees so many, itself included; None: all before it

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.backend, self.window = config.backend, config.window

    def forward(
        self,
        q_BTHd: torch.Tensor,
        k_BTKd: torch.Tensor,
        v_BTKd: torch.Tensor,
        *,
        attention_masks: Documents,
        scale: float | None = None,
        out_transform: OutTransform | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[1, T, H, d of v]. out_transform gets the output and the log of each softmax's denominator, [1, T, H]."""
        q_THd, k_TKd, v_TKd = q_BTHd[0], k_BTKd[0], v_BTKd[0]
        if scale is not None:
            q_THd = q_THd * (scale * q_THd.shape[-1] ** 0.5)  # what follows divides by the root
        if self.window is None and out_transform is None:
            return _attend_unequal(q_THd, k_TKd, v_TKd, attention_masks, self.backend)[None]
        out_THd, lse_TH = _attend_windows(q_THd, k_TKd, v_TKd, attention_masks, self.window)
        return out_THd[None] if out_transform is None else out_transform(out_THd[None], lse_TH[None])


def _attend_unequal(
    q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, documents: Documents, backend: str
) -> torch.Tensor:
    """`attend` for values of another width than keys, as in multi-head latent attention: kernels want them equal."""
    (keys, values), wide = (k_TKd.shape[-1], v_TKd.shape[-1]), max(k_TKd.shape[-1], v_TKd.shape[-1])
    if values < wide:
        v_TKd = F.pad(v_TKd, (0, wide - values))
    if keys < wide:
        q_THd, k_TKd = F.pad(q_THd * (wide / keys) ** 0.5, (0, wide - keys)), F.pad(k_TKd, (0, wide - keys))
    return attend(q_THd, k_TKd, v_TKd, documents, backend)[..., :values]


def _attend_windows(
    q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, documents: Documents, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [T, H, d], log denominators [T, H]), in plain torch: no kernel returns these with a gradient."""
    outputs, denominators = [], []
    parts = (documents.pad(x) for x in (q_THd, k_TKd, v_TKd))
    for q_NLHd, k_NLKd, v_NLKd in zip(*parts, strict=True):
        group = q_NLHd.shape[2] // k_NLKd.shape[2]
        keys, values = (x.repeat_interleave(group, 2) for x in (k_NLKd, v_NLKd))
        chunks = [_chunk(q_NLHd, keys, values, start, window) for start in range(0, q_NLHd.shape[1], QUERIES)]
        outputs.append(torch.cat([out for out, _ in chunks], 1))
        denominators.append(torch.cat([lse for _, lse in chunks], 1)[..., None])
    return documents.unpad(outputs), documents.unpad(denominators)[..., 0]


def _chunk(
    q_NLHd: torch.Tensor, k_NLHd: torch.Tensor, v_NLHd: torch.Tensor, start: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What QUERIES queries from `start` on see: (output [N, l, H, d], log denominators [N, l, H])."""
    end = min(start + QUERIES, q_NLHd.shape[1])
    first = 0 if window is None else max(0, start - window + 1)
    scores_NHLM = torch.einsum("nlhd,nmhd->nhlm", q_NLHd[:, start:end], k_NLHd[:, first:end]).float()
    scores_NHLM = scores_NHLM * q_NLHd.shape[-1] ** -0.5
    back_LM = torch.arange(start, end, device=q_NLHd.device)[:, None] - torch.arange(first, end, device=q_NLHd.device)
    hidden_LM = back_LM < 0 if window is None else (back_LM < 0) | (back_LM >= window)
    scores_NHLM = scores_NHLM.masked_fill(hidden_LM, -torch.inf)
    weights_NHLM = scores_NHLM.softmax(-1).to(v_NLHd.dtype)
    out_NLHd = torch.einsum("nhlm,nmhd->nlhd", weights_NHLM, v_NLHd[:, first:end])
    return out_NLHd, scores_NHLM.logsumexp(-1).transpose(1, 2)


class Gate(Linear):
    """A router's matrix in float32, whatever dtype the rest is computed in."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias)


class Experts(GroupedExperts):
    """SwiGLU experts in the dtype of their weights; torchtitan's would be rounded to bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, rows_E: torch.Tensor) -> torch.Tensor:
        """[R, D]; the first rows_E[0] rows are those of the first expert, and so on."""
        gate_RF = F.silu(grouped_linear(x_RD, self.w1_EFD, rows_E))
        return grouped_linear(gate_RF * grouped_linear(x_RD, self.w3_EFD, rows_E), self.w2_EDF, rows_E)


class ClampedExperts(GroupedExperts):
    """gpt_oss's experts: biases, a clamped and shifted SwiGLU of interleaved halves, in Hugging Face's layout."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        alpha: float = 1.702
        limit: float = 7.0

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # the parameters are others than GroupedExperts's
        experts, width, hidden = config.num_experts, config.dim, config.hidden_dim
        self.num_experts, self.alpha, self.limit = experts, config.alpha, config.limit
        self.gate_up_proj = nn.Parameter(torch.empty(experts, width, 2 * hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, width))

    def forward(self, x_RD: torch.Tensor, rows_E: torch.Tensor) -> torch.Tensor:
        """As `Experts`."""
        expert_R = torch.arange(self.num_experts, device=x_RD.device).repeat_interleave(rows_E, output_size=len(x_RD))
        both_RG = grouped_linear(x_RD, self.gate_up_proj.transpose(1, 2), rows_E) + self.gate_up_proj_bias[expert_R]
        gate_RF, up_RF = both_RG[:, ::2].clamp(max=self.limit), both_RG[:, 1::2].clamp(-self.limit, self.limit)
        hidden_RF = (up_RF + 1) * gate_RF * torch.sigmoid(self.alpha * gate_RF)
        return grouped_linear(hidden_RF, self.down_proj.transpose(1, 2), rows_E) + self.down_proj_bias[expert_R]
