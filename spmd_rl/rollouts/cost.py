"""Floating-point operations of training a document, from the numbers of a model's config.json.

    6 · P · n + 6 · A · n(n + 1)        n tokens, forward and backward

P: weights that a token is multiplied with (of experts those that it takes; not the embedding, which is a look-up). A:
layers × heads × head dimension. A causal token t is compared with t + 1 keys and takes as many values, 2 operations
each; the backward costs twice the forward. Norms, softmax and rotary positions are left out, as is usual.

It refuses to know about hardware and parallelism. Numbers that a config lacks are those that transformers takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TrainingCost:
    """Of one model."""

    weights: int  # P
    attention: int  # A

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TrainingCost:
        """Of a decoder with gated feed-forward layers. KeyError where config.json says its shape in other words."""
        config = config.get("text_config", config)
        if "kv_lora_rank" in config:
            raise KeyError("kv_lora_rank")  # latent attention: the usual words mean something else there
        width, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or width // heads)
        projections = width * head_dim * (2 * heads + 2 * kv_heads)
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        if experts:
            hidden = int(config.get("moe_intermediate_size") or config["intermediate_size"])
            hidden = hidden * int(config["num_experts_per_tok"])
            hidden += int(config.get("shared_expert_intermediate_size") or 0)
        else:
            hidden = int(config["intermediate_size"])
        layer = projections + 3 * width * hidden + width * experts
        return cls(layers * layer + width * int(config["vocab_size"]), layers * heads * head_dim)

    @classmethod
    def known(cls, config: Mapping[str, Any]) -> Callable[[np.ndarray], np.ndarray] | None:
        """`flops` of a model, as packing takes it; None where config.json says it in words of its family's own."""
        try:
            return cls.of(config).flops
        except (KeyError, TypeError):
            return None

    def flops(self, lengths: np.ndarray) -> np.ndarray:
        """float64[n] of documents with these lengths, int[n]."""
        wide = np.asarray(lengths, np.float64)
        return 6.0 * self.weights * wide + 6.0 * self.attention * wide * (wide + 1)
