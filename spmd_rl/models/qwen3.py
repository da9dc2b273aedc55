"""Dense Qwen3: normalised queries and keys."""

from __future__ import annotations

from typing import Any

import torch

from spmd_rl.models.decoder import Family
from spmd_rl.models.layers import Attention, FeedForward, unsupported_layers


def attention(config: Any, backend: str, dtype: torch.dtype) -> Attention:
    """With norms on queries and keys; `attention_bias` speaks of all four projections."""
    bias = config.attention_bias
    return Attention(config, backend, dtype, qk_norm=True, qkv_bias=bias, o_bias=bias)


def feed_forward(config: Any, layer: int, dtype: torch.dtype) -> FeedForward:
    """The same in every layer."""
    return FeedForward(config.hidden_size, config.intermediate_size, dtype)


QWEN3 = Family("qwen3", unsupported_layers, attention, feed_forward)
