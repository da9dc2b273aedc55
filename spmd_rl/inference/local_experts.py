"""Experts of their own on the ranks of a replica, also on the CPU.

With expert parallelism a rank of vLLM's engine holds some experts only, and its kernels are given a map from experts to
places. The CPU's kernel takes no map: it would read behind the end of its weights. Here experts that are elsewhere
become the first one of this rank with weight 0, which adds nothing.

Patch list (checked on vLLM 0.30.0): `CPUUnquantizedExperts.apply`, where it is given a map.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch


def localise(
    weights_TK: torch.Tensor, experts_TK: torch.Tensor, place_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices in this rank's own numbers, those of other ranks without weight. place_E: -1 where an expert is not."""
    places_TK = place_E.to(experts_TK.device)[experts_TK.long()]
    here_TK = places_TK >= 0
    return weights_TK * here_TK, places_TK.clamp(min=0).to(experts_TK.dtype)


def install() -> None:
    """Teach the CPU's kernel, in this process; once is enough."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    plain = CPUUnquantizedExperts.apply
    if hasattr(plain, "__wrapped__"):
        return

    @wraps(plain)
    def apply(self: Any, *arguments: Any, **named: Any) -> None:
        if named.get("expert_map") is not None:
            weights, experts = localise(named["topk_weights"], named["topk_ids"], named["expert_map"])
            named |= {"topk_weights": weights, "topk_ids": experts, "expert_map": None}
        plain(self, *arguments, **named)

    CPUUnquantizedExperts.apply = apply
