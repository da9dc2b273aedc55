"""The layers that decoder families share: norm, attention with rotary positions, gated feed-forward.

Parameter names are Hugging Face's. What it refuses to know: families, experts, how a row is cut over ranks. Invariants:
no layer has buffers; only attention looks at documents; parameters are made uninitialised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spmd_rl.models.attention import attend
from spmd_rl.models.packed import Documents

ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # those whose frequencies do not depend on the sequence


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of a row's positions, [T, 1, head_dim / 2] each."""

    cos_T1h: torch.Tensor
    sin_T1h: torch.Tensor

    @staticmethod
    def build(positions_T: torch.Tensor, inv_freq_h: torch.Tensor, scale: float, dtype: torch.dtype) -> Rotary:
        """`scale` multiplies both; angles are computed in float32."""
        angles_Th = positions_T[:, None].float() * inv_freq_h.to(positions_T.device)
        return Rotary((angles_Th.cos() * scale).to(dtype)[:, None], (angles_Th.sin() * scale).to(dtype)[:, None])

    def __call__(self, x_THd: torch.Tensor) -> torch.Tensor:
        """Rotary position embedding (arXiv 2104.09864) on halves: (a, b) -> (a cos - b sin, b cos + a sin)."""
        a_THh, b_THh = x_THd.chunk(2, dim=-1)
        cos_T1h, sin_T1h = self.cos_T1h, self.sin_T1h
        return torch.cat((a_THh * cos_T1h - b_THh * sin_T1h, b_THh * cos_T1h + a_THh * sin_T1h), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; biases and normalised queries and keys where a family has them."""

    def __init__(
        self, config: Any, backend: str, dtype: torch.dtype, *, qk_norm: bool, qkv_bias: bool, o_bias: bool
    ) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        self.backend = backend
        width = config.hidden_size
        q_width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = linear(width, q_width, qkv_bias, dtype)
        self.k_proj = linear(width, kv_width, qkv_bias, dtype)
        self.v_proj = linear(width, kv_width, qkv_bias, dtype)
        self.o_proj = linear(q_width, width, o_bias, dtype)
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.qk_norm = qk_norm

    def forward(self, x_TD: torch.Tensor, rotary: Rotary, documents: Documents) -> torch.Tensor:
        q_THd, k_TKd, v_TKd = (
            proj(x_TD).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q_THd, k_TKd = self.q_norm(q_THd), self.k_norm(k_TKd)
        return self.o_proj(attend(rotary(q_THd), rotary(k_TKd), v_TKd, documents, self.backend).flatten(1))


class FeedForward(nn.Module):
    """SwiGLU of `hidden` units."""

    def __init__(self, width: int, hidden: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = linear(width, hidden, bias, dtype)
        self.up_proj = linear(width, hidden, bias, dtype)
        self.down_proj = linear(hidden, width, bias, dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32, rounded before the weight is applied."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    """An uninitialised linear layer: weights always come from a folder, random numbers for them would be wasted."""
    return nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, dtype=dtype, device=torch.get_default_device())


def head_dim(config: Any) -> int:
    """Width of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_frequencies(config: Any) -> tuple[torch.Tensor, float]:
    """(inverse frequencies float32[head_dim / 2], factor on cos and sin) of the config's rope parameters."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    width = head_dim(config)
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width)), 1.0


def unsupported_layers(config: Any) -> str | None:
    """What of a config none of these layers computes, or None."""
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r}"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or getattr(config, "sliding_window", None):
        return "sliding-window attention"
    if config.attention_dropout:
        return "attention dropout"
    if config.rope_parameters["rope_type"] not in ROPE_TYPES:
        return f"rope type {config.rope_parameters['rope_type']!r}"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial rotary embeddings"
    return None
