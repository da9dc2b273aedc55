"""Qwen3 with experts: as dense Qwen3, with a mixture in place of the feed-forward of most layers."""

from __future__ import annotations

from typing import Any

import torch

from spmd_rl.models.conversion import EXPERTS
from spmd_rl.models.decoder import Family
from spmd_rl.models.layers import FeedForward, unsupported_layers
from spmd_rl.models.moe import MoE, is_sparse
from spmd_rl.models.qwen3 import attention


def feed_forward(config: Any, layer: int, dtype: torch.dtype) -> FeedForward | MoE:
    """Experts where `decoder_sparse_step` and `mlp_only_layers` say so, else dense."""
    if not is_sparse(config, layer):
        return FeedForward(config.hidden_size, config.intermediate_size, dtype)
    return MoE(
        layer,
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        dtype,
    )


QWEN3_MOE = Family("qwen3_moe", unsupported_layers, attention, feed_forward, EXPERTS)
