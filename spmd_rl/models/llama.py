"""Llama 2 and 3: plain attention, biases where the config asks for them."""

from __future__ import annotations

from typing import Any

import torch

from spmd_rl.models.decoder import Family
from spmd_rl.models.layers import Attention, FeedForward, unsupported_layers


def unsupported(config: Any) -> str | None:
    """Beside what no layer computes: matrices cut in pieces by `pretraining_tp`."""
    if (config.pretraining_tp or 1) != 1:
        return f"pretraining_tp {config.pretraining_tp}"
    return unsupported_layers(config)


def attention(config: Any, backend: str, dtype: torch.dtype) -> Attention:
    """`attention_bias` speaks of all four projections."""
    bias = config.attention_bias
    return Attention(config, backend, dtype, qk_norm=False, qkv_bias=bias, o_bias=bias)


def feed_forward(config: Any, layer: int, dtype: torch.dtype) -> FeedForward:
    """The same in every layer."""
    return FeedForward(config.hidden_size, config.intermediate_size, dtype, bias=config.mlp_bias)


LLAMA = Family("llama", unsupported, attention, feed_forward)
