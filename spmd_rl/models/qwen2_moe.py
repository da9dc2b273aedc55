"""Qwen2 and Qwen1.5 with experts: plain attention with biases, and a shared expert behind a sigmoid gate."""

from __future__ import annotations

from typing import Any

import torch

from spmd_rl.models.conversion import EXPERTS
from spmd_rl.models.decoder import Family
from spmd_rl.models.layers import Attention, FeedForward, unsupported_layers
from spmd_rl.models.moe import MoE, qwen_feed_forward


def attention(config: Any, backend: str, dtype: torch.dtype) -> Attention:
    """`qkv_bias` speaks of queries, keys and values; the output has none."""
    return Attention(config, backend, dtype, qk_norm=False, qkv_bias=config.qkv_bias, o_bias=False)


def feed_forward(config: Any, layer: int, dtype: torch.dtype) -> FeedForward | MoE:
    """With the shared expert in every layer that has experts."""
    return qwen_feed_forward(config, layer, dtype, shared=config.shared_expert_intermediate_size)


QWEN2_MOE = Family("qwen2_moe", unsupported_layers, attention, feed_forward, EXPERTS)
